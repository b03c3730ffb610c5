"""Accuracy against epsilon on the built-in digits, for both levels of a site's budget.

    python benchmarks/privacy.py [--seeds 0 1 2] [--rounds 20] [--rows fedavg/site copa/site fedavg/record]

Every run trains a small network with GroupNorm on four sites and is scored on the fifth, photo. Scores are exact
(policy.scores=exact): they measure the model and are no part of the promise. A line of JSON per run, then a table.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import sys
import tempfile
from pathlib import Path
from typing import Any

from torch import nn

import fedshift
from fedshift.functional.accountant import Mechanism, noise_for
from fedshift.methods.private import sampling

EPSILONS = (1.0, 2.0, 4.0, 8.0, math.inf)
DELTA, SAMPLES, CLIP = 1e-5, 800, 1.0
RATES = {"site": 0.05, "record": 0.1, "none": 0.05}
"""Learning rates, which were not tuned: `--lr` tries others."""


class SmallNet(nn.Module):
    def __init__(self, input_shape: tuple[int, ...], classes: int) -> None:
        super().__init__()
        self.features = nn.Sequential(
            *(nn.Conv2d(3, 16, 5, 2, 2), nn.GroupNorm(4, 16), nn.ReLU()),
            *(nn.Conv2d(16, 32, 3, 2, 1), nn.GroupNorm(8, 32), nn.ReLU()),
            *(nn.Conv2d(32, 32, 3, 2, 1), nn.GroupNorm(8, 32), nn.ReLU(), nn.Flatten()),
        )
        self.head = nn.Linear(32 * math.ceil(input_shape[1] / 8) ** 2, classes)

    def forward(self, x: Any) -> Any:
        return self.head(self.features(x))


def keys_of(row: str, epsilon: float, rounds: int, lr: float | None) -> dict[str, Any]:
    method, level = row.split("/")
    batch = 128 if level == "record" else 64
    keys: dict[str, Any] = {"method": method, "rounds": rounds, "batch_size": batch, "evaluate_every": rounds}
    keys["lr"] = lr or RATES[level if math.isfinite(epsilon) else "none"]
    if math.isfinite(epsilon) and level == "site":
        noise = 2 * CLIP * noise_for(epsilon, DELTA, Mechanism(1, times=rounds))
        keys["policy"] = {"epsilon": epsilon, "delta": DELTA, "clip_norm": CLIP, "noise": noise, "scores": "exact"}
    elif math.isfinite(epsilon):
        rate, steps = sampling(SAMPLES, batch, 1.0)
        noise = noise_for(epsilon, DELTA, Mechanism(1, rate, steps * rounds)) * (1 + 1e-6)
        keys["policy"] = {"record_epsilon": epsilon, "delta": DELTA, "dp_noise": noise, "scores": "exact"}
    return keys


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--epsilons", type=float, nargs="+", default=list(EPSILONS))
    parser.add_argument("--rows", nargs="+", default=["fedavg/site", "copa/site", "fedavg/record"])
    parser.add_argument("--lr", type=float)
    given = parser.parse_args()
    found: dict[tuple[str, float], list[float]] = {}
    for seed in given.seeds:
        for row in given.rows:
            for epsilon in given.epsilons:
                keys = keys_of(row, epsilon, given.rounds, given.lr)
                with tempfile.TemporaryDirectory() as folder:
                    out = Path(folder) / "run"
                    where: dict[str, Any] = {"dataset": "digits", "target": "photo", "out": out, "workers": 0}
                    fedshift.fit(**keys, **where, net=SmallNet, seed=seed)
                    results = json.loads((out / "results.json").read_text())
                accuracy = results["accuracy"]["last"]
                spent = {one["spent"] for one in results.get("privacy", {}).values()} - {None}
                found.setdefault((row, epsilon), []).append(100 * accuracy)
                told = {"row": row, "epsilon": str(epsilon), "seed": seed, "accuracy": accuracy, "spent": sorted(spent)}
                print(json.dumps(told | {"policy": keys.get("policy"), "lr": keys["lr"]}), flush=True)
    for (row, epsilon), values in found.items():
        spread = statistics.stdev(values) if len(values) > 1 else 0.0
        print(f"{row} epsilon {epsilon:g}: {statistics.fmean(values):.1f} +- {spread:.1f}", file=sys.stderr)


if __name__ == "__main__":
    main()
