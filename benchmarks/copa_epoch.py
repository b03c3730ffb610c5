"""Time of an epoch of COPA at a site (RandAugment, two passes, hybrid norms, frozen classifiers) relative to FedAvg.

Both train the same site with the same net and batches, in turn, so that other load affects both alike.
Run: python benchmarks/copa_epoch.py [--arch digits-copa] [--samples 600] [--repeats 7]
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from fedshift.federation.federation import Federation
from fedshift.methods import averaging, find_method
from fedshift.methods.copa import copa
from fedshift.runs import planning
from fedshift.runs.config import make_config


def open_federation(method: str, arch: str, samples: int, folder: Path) -> tuple[Any, Federation]:
    """The state of `method` before round 1, and its federation."""
    config = make_config(
        {
            "method": method,
            "dataset": "digits",
            "target": "photo",
            "arch": arch,
            "batch_size": 30,
            "train_per_site": samples,
            "workers": 0,
        }
    )
    prepared = planning.prepare(config)
    fed = planning.open_federation(prepared, folder, debug=True)
    fed.begin(1)
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
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        plain, plain_fed = open_federation("fedavg", options.arch, options.samples, Path(folder) / "fedavg")
        state, fed = open_federation("copa", options.arch, options.samples, Path(folder) / "copa")
        site, *others = sorted(state.heads)
        frozen = dict.fromkeys(others, state.first_head)

        def fedavg_epoch() -> object:
            return plain_fed.ask((site,), averaging.train, model=plain.model)

        def copa_epoch() -> object:
            own = {site: {"head": state.first_head, "frozen": frozen}}
            return fed.ask((site,), copa.train, extractor=state.extractor, each=own)

        fedavg_epoch()
        copa_epoch()
        pairs = [(seconds(fedavg_epoch), seconds(copa_epoch)) for _ in range(options.repeats)]
        plain_fed.engine.close()
        fed.engine.close()
    fedavg_seconds, copa_seconds = (statistics.median(times) for times in zip(*pairs, strict=True))
    ratio = statistics.median(copa / fedavg for fedavg, copa in pairs)
    print(f"{options.arch}, {options.samples} images, {len(others)} frozen classifiers")
    print(f"FedAvg {fedavg_seconds:.2f} s, COPA {copa_seconds:.2f} s of processor time per epoch; ratio {ratio:.2f}")


if __name__ == "__main__":
    main()
