"""Accuracy against epsilon: for single samples (DP-SGD), and for whole sites against the number of sites.

    python benchmarks/privacy.py record [--methods fedavg copa fedlooks] [--epsilons 1 2 4 8 inf] [--seeds 0 1 2]
    python benchmarks/privacy.py record --data-dir DIGITS --target mnist_m --records results/privacy-real-digits.jsonl
    python benchmarks/privacy.py site [--sites 4 10000 1000000]

Every run trains a small network with GroupNorm and is scored on a domain that is held out. Scores are exact
(policy.scores=exact): they measure the model and are no part of the promise. With `--records`, runs are kept there as
`results/tables.py` reads them, and those that it has are not run again.

`site`: four sites are played, with the noise that the mean of so many sites would have: of each site, the deviation
that epsilon 8 takes, times the root of 4 / sites. It shows what would be learned, and protects nobody.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from torch import nn

import fedshift
from fedshift.bench.records import append, read, read_run
from fedshift.functional.accountant import Mechanism, noise_for
from fedshift.methods.private import sampling

EPSILONS, SITES = (1.0, 2.0, 4.0, 8.0, math.inf), (4, 100, 10_000, 100_000, 1_000_000)
DELTA, SITE_EPSILON, PLAYED = 1e-5, 8.0, 4
ROWS = {"fedavg": "FedAvg", "copa": "COPA", "fedlooks": "FedLooks"}
PRIVATE = {"batch_size": 256, "lr": 1.0}
PLAIN = {"batch_size": 64, "lr": 0.1}
"""Chosen by FedAvg's mean accuracy on validation splits of the sources, built-in digits, seed 0, target photo; with
DP-SGD at epsilon 8, of 17 combinations. Used for every method and data set."""
KEYS: dict[str, dict[str, Any]] = {"copa": {"copa": {"norm": "bn", "norm_where": "all"}}}
"""COPA's hybrid layers learn statistics of batches: here all methods have the same network."""


class SmallNet(nn.Module):
    """Few numbers, because noise is on each; no norm that mixes samples."""

    def __init__(self, input_shape: tuple[int, ...], classes: int) -> None:
        super().__init__()
        self.features = nn.Sequential(
            *(nn.Conv2d(3, 8, 5, 2, 2), nn.GroupNorm(4, 8), nn.ReLU()),
            *(nn.Conv2d(8, 16, 3, 2, 1), nn.GroupNorm(4, 16), nn.ReLU()),
            *(nn.Conv2d(16, 16, 3, 2, 1), nn.GroupNorm(4, 16), nn.ReLU(), nn.Flatten()),
        )
        self.head = nn.Linear(16 * math.ceil(input_shape[1] / 8) ** 2, classes)

    def forward(self, x: Any) -> Any:
        return self.head(self.features(x))


def record_jobs(given: argparse.Namespace) -> Iterator[tuple[str, str, dict[str, Any]]]:
    """Row, column and keys of every run."""
    for method in given.methods:
        for epsilon in given.epsilons:
            keys = {"method": method, **KEYS.get(method, {}), **(PRIVATE if math.isfinite(epsilon) else PLAIN)}
            if math.isfinite(epsilon):
                rate, steps = sampling(given.samples, keys["batch_size"], 1.0)
                noise = noise_for(epsilon, DELTA, Mechanism(1, rate, steps * given.rounds)) * (1 + 1e-6)
                keys["policy"] = {"record_epsilon": epsilon, "delta": DELTA, "dp_noise": noise, "scores": "exact"}
            yield ROWS[method], f"epsilon {epsilon:g}" if math.isfinite(epsilon) else "no budget", keys


def site_jobs(given: argparse.Namespace) -> Iterator[tuple[str, str, dict[str, Any]]]:
    one = 2 * given.clip * noise_for(SITE_EPSILON, DELTA, Mechanism(1, times=given.rounds))
    for method in given.methods:
        for sites in given.sites:
            noise = one * math.sqrt(PLAYED / sites)
            keys = {"method": method, **KEYS.get(method, {}), **PLAIN}
            keys["policy"] = {"clip_norm": given.clip, "noise": noise, "scores": "exact"}
            yield ROWS[method], f"{sites:,} sites", keys


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("level", choices=["record", "site"])
    parser.add_argument("--methods", nargs="+", default=list(ROWS), choices=list(ROWS))
    parser.add_argument("--epsilons", type=float, nargs="+", default=list(EPSILONS))
    parser.add_argument("--sites", type=int, nargs="+", default=list(SITES))
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--samples", type=int, default=800, help="training samples per site")
    parser.add_argument("--clip", type=float, default=1.0, help="longest update of a site")
    parser.add_argument("--target", default="photo")
    parser.add_argument("--data-dir", type=Path, help="your own data instead of the built-in digits")
    parser.add_argument("--image-size", type=int)
    parser.add_argument("--records", type=Path)
    given = parser.parse_args()
    data: dict[str, Any] = {"data_dir": given.data_dir} if given.data_dir else {"dataset": "digits"}
    data |= {"image_size": given.image_size} if given.image_size else {}
    data |= {"target": given.target, "train_per_site": given.samples, "rounds": given.rounds, "schedule": "constant"}
    known = {record.job for record in read([given.records])[0]} if given.records and given.records.exists() else set()
    found: dict[tuple[str, str], list[float]] = {}
    for seed in given.seeds:
        for row, column, keys in record_jobs(given) if given.level == "record" else site_jobs(given):
            job = f"{given.level}/{row}/{column}/{given.target}/{given.rounds}/{given.samples}/{seed}"
            if job in known:
                continue
            with tempfile.TemporaryDirectory() as folder:
                out = Path(folder) / "run"
                how: dict[str, Any] = {"workers": 0, "evaluate_every": given.rounds, "momentum": 0.9, **data, **keys}
                fedshift.fit(**how, out=out, net=SmallNet, seed=seed)
                if given.records:
                    append(given.records, read_run(out, job, row, column))
                results = json.loads((out / "results.json").read_text())
            spent = sorted({one["spent"] for one in results.get("privacy", {}).values()} - {None})
            found.setdefault((row, column), []).append(100 * results["accuracy"]["last"])
            told = {"row": row, "column": column, "seed": seed, "accuracy": results["accuracy"]["last"], "spent": spent}
            print(json.dumps(told | {"policy": keys.get("policy")}), flush=True)
    for (row, column), values in found.items():
        spread = statistics.stdev(values) if len(values) > 1 else 0.0
        print(f"{row}, {column}: {statistics.fmean(values):.1f} +- {spread:.1f}")


if __name__ == "__main__":
    main()
