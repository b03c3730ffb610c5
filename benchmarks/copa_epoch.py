"""Time of an epoch at a site relative to FedAvg's: COPA (RandAugment, two passes, hybrid norms, frozen classifiers) and
FedLooks (images and random looks of them).

All train the same site with the same net and batches, in turn, so that other load affects all alike.
Run: python benchmarks/copa_epoch.py [--arch digits-copa] [--samples 600] [--repeats 7] [--side 32]
     [--batch 30]
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from fedshift.federation.federation import Federation
from fedshift.methods import averaging, find_method
from fedshift.methods.copa import copa
from fedshift.methods.fedlooks import source as fedlooks
from fedshift.runs import planning
from fedshift.runs.config import make_config


def open_federation(
    method: str, arch: str, samples: int, side: int, batch: int, folder: Path
) -> tuple[Any, Federation]:
    """The state of `method` before round 1, and its federation."""
    config = make_config(
        {
            "method": method,
            "dataset": "digits",
            "target": "photo",
            "arch": arch,
            "batch_size": batch,
            "train_per_site": samples,
            "image_size": side,
            "workers": 0,
            "rounds": 100,
        }
    )
    prepared = planning.prepare(config)
    fed = planning.open_federation(prepared, folder, debug=True)
    implementation = find_method(method)
    state = implementation(implementation.hyper_type()).init(planning.base_network(prepared)[0], fed)
    return state, fed


def seconds(work: Callable[[], object]) -> float:
    """Processor time of this process: other processes do not count."""
    started = time.process_time()
    work()
    return time.process_time() - started


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--arch", default="digits-copa")
    parser.add_argument("--samples", type=int, default=600)
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--side", type=int, default=32)
    parser.add_argument("--batch", type=int, default=30)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        states, feds = {}, {}
        for name in ("fedavg", "copa", "fedlooks"):
            given = (options.arch, options.samples, options.side, options.batch, Path(folder) / name)
            states[name], feds[name] = open_federation(name, *given)
        first = states["copa"].first_head
        site, *others = sorted(states["copa"].heads)
        own = {site: {"head": first, "frozen": dict.fromkeys(others, first)}}
        epochs: dict[str, Callable[[], object]] = {
            "fedavg": lambda: feds["fedavg"].ask((site,), averaging.train, model=states["fedavg"].model),
            "copa": lambda: feds["copa"].ask((site,), copa.train, extractor=states["copa"].extractor, each=own),
            "fedlooks": lambda: feds["fedlooks"].ask((site,), fedlooks.train, model=states["fedlooks"].model),
        }
        times: dict[str, list[float]] = {name: [] for name in epochs}
        for turn in range(options.repeats + 1):
            for name, epoch in epochs.items():
                feds[name].begin(turn + 1)
                found = seconds(epoch)
                if turn:  # The first epoch sets up the kernels.
                    times[name].append(found)
        for fed in feds.values():
            fed.engine.close()
    ratios = {
        name: statistics.median(own / plain for own, plain in zip(found, times["fedavg"], strict=True))
        for name, found in times.items()
    }
    line = {
        "benchmark": "copa_epoch",
        "arch": options.arch,
        "side": options.side,
        "batch": options.batch,
        "images": options.samples,
        "seconds": {name: round(statistics.median(found), 3) for name, found in times.items()},
        "times as long as fedavg": {name: round(ratio, 2) for name, ratio in ratios.items()},
    }
    print(json.dumps(line))


if __name__ == "__main__":
    main()
