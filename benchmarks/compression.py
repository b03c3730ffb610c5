"""Bytes and accuracy by the key `compress`.

python benchmarks/compression.py [DIR [TARGET]] [KEY=VALUE ...] trains FedAvg, COPA and KD3A with three seeds on
built-in digits, or on the data in DIR, once for each value of `compress`. `KEY=VALUE` changes a key of every run;
`methods=fedavg,kd3a`, `compress=none,int4` and `seeds=0,1` choose what is run. Prints a JSON line for each run, and
then one with means: how many times fewer bytes go up and down than with `none`, and how many points of accuracy are
lost on the target after the last round.
"""

from __future__ import annotations

import json
import statistics
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from fedshift.runs.config import make_config
from fedshift.runs.execute import run

METHODS, COMPRESS, SEEDS = ("fedavg", "copa", "kd3a"), ("none", "bf16", "int8", "int4", "topk"), (0, 1, 2)
KEYS: Mapping[str, Any] = {
    "dataset": "digits",
    "target": "photo",
    "arch": "digits-copa",
    "train_per_site": 600,
    "rounds": 10,
    "batch_size": 32,
    "evaluate_every": 5,
    "workers": 0,
}


def measured(keys: Mapping[str, Any], method: str, compress: str, seed: int) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        setting = "adapt" if method == "kd3a" else "generalize"
        values = {**keys, "method": method, "setting": setting, "compress": compress, "seed": seed}
        results = run(make_config(values), Path(folder))
    ((target, accuracy),) = results["per_target"].items()
    sent = results["bytes"]
    return {
        "arch": values["arch"],
        "target": target,
        "method": method,
        "compress": compress,
        "seed": seed,
        "accuracy": round(100 * accuracy["last"], 2),
        "source_val": round(100 * statistics.mean(results["source_val"].values()), 2),
        "up": sent["up"],
        "down": sent["down"],
        "scoring_down": sent["scoring_down"],
        "seconds": round(results["seconds"]["total"], 1),
    }


def means(rows: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    def mean(method: str, compress: str, name: str) -> float:
        return statistics.mean(row[name] for row in rows if row["method"] == method and row["compress"] == compress)

    found = []
    for method, compress in dict.fromkeys((row["method"], row["compress"]) for row in rows):
        line: dict[str, Any] = {"method": method, "compress": compress}
        for name in ("accuracy", "source_val"):
            line[name] = round(mean(method, compress, name), 2)
            line[f"{name} lost"] = round(mean(method, "none", name) - mean(method, compress, name), 2)
        for name in ("up", "down"):
            line[f"{name} times fewer"] = round(mean(method, "none", name) / mean(method, compress, name), 2)
        found.append(line)
    return found


def main() -> None:
    words = sys.argv[1:]
    given = dict(word.split("=", 1) for word in words if "=" in word)
    places = [word for word in words if "=" not in word]
    chosen = {
        name: tuple(given.pop(name).split(",")) if name in given else usual
        for name, usual in (("methods", METHODS), ("compress", COMPRESS), ("seeds", tuple(map(str, SEEDS))))
    }
    keys = {**KEYS, **{key: yaml.safe_load(value) for key, value in given.items()}}
    if places:
        keys = {**keys, "dataset": None, "data_dir": places[0], "target": places[1] if len(places) > 1 else None}
    rows = []
    for seed in chosen["seeds"]:
        for method in chosen["methods"]:
            for compress in chosen["compress"]:
                rows.append(measured(keys, method, compress, int(seed)))
                print(json.dumps(rows[-1]), flush=True)
    print(json.dumps({"benchmark": "compression", "keys": keys, "means": means(rows)}))


if __name__ == "__main__":
    main()
