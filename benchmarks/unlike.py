"""How often `predict` says of a folder that it looks unlike every source's data: of folders drawn from each source's
test images (false alarms), from all sources mixed, and from sites that the run did not learn from (detection).

Run: python benchmarks/unlike.py RUN... [--sizes 20,50,100,300] [--draws 100]
"""

from __future__ import annotations

import argparse
import dataclasses
import math
from pathlib import Path

import numpy as np
import torch

import fedshift
from fedshift.functional.calibration import TEMPERATURES, confidence_counts
from fedshift.methods.calibration import Calibration, Sureness, calibrate
from fedshift.nn.distance import can_tell_distance, distance_counts, total_distance, watching_distances
from fedshift.runs.api import as_inputs
from fedshift.runs.config import make_config, read_config
from fedshift.runs.files.model import SavedModel, with_distances
from fedshift.runs.planning import prepare


def known(saved: SavedModel, parts: dict[str, tuple[torch.Tensor, torch.Tensor]]) -> Calibration:
    """What the sources count on validation at the end of a run, counted here."""
    net, found = saved.uncalibrated(), {}
    for site, (x, y) in parts.items():
        with torch.inference_mode(), watching_distances(net) as seen:
            scores = net(x)
        far = distance_counts(total_distance(seen)) if can_tell_distance(net) else torch.zeros(256, dtype=torch.int64)
        found[site] = Sureness(confidence=confidence_counts(scores, y), shares=torch.zeros(0, 2), distances=far)
    return calibrate(found)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", nargs="+", type=Path)
    parser.add_argument("--sizes", default="20,50,100,300")
    parser.add_argument("--draws", type=int, default=100)
    given = parser.parse_args()
    sizes = [int(size) for size in given.sizes.split(",")]
    print(f"{'run':<14}{'folder of':<18}{'single':>8}" + "".join(f"{size:>7}" for size in sizes), "  (% called unlike)")
    for path in given.runs:
        run = fedshift.Run(path)
        dataset = prepare(make_config(read_config(run.directory.config))).dataset
        saved, sources = run.model(), run.results["sources"]

        def split(site: str, name: str) -> tuple[torch.Tensor, torch.Tensor]:
            part = getattr(dataset.load(site), name)  # noqa: B023
            return as_inputs(np.array(part.inputs), dataset.input_shape), torch.from_numpy(np.array(part.labels))  # noqa: B023

        made = known(saved, {site: split(site, "val") for site in sources})
        header = dataclasses.replace(saved.header, temperature=made.temperature, far=made.far, usual=made.usual)
        assert made.usual is not None and made.temperature in TEMPERATURES
        net = SavedModel(header, saved.models).network()
        answers = {}
        for site in dataset.domains:
            shares, distances = with_distances(net, header, split(site, "test")[0])
            answers[site] = shares.amax(1), distances
        answers["sources, mixed"] = tuple(  # type: ignore[assignment]
            torch.cat([answers[site][k] for site in sources]) for k in range(2)
        )
        draw = np.random.default_rng(0)
        for site, (sure, distances) in answers.items():
            far = math.nan if header.far is None else 100 * float((distances > header.far).double().mean())
            line = f"{path.name:<14}{site + ('' if site in sources or ',' in site else ' (new)'):<18}{far:>8.1f}"
            for size in sizes:
                if size > len(sure):
                    line += f"{'-':>7}"
                    continue
                found = 0
                for _ in range(given.draws):
                    chosen = torch.from_numpy(draw.permutation(len(sure))[:size])
                    found += made.usual.is_unlike(sure[chosen], None if header.far is None else distances[chosen])
                line += f"{100 * found / given.draws:>7.0f}"
            print(line, flush=True)


if __name__ == "__main__":
    main()
