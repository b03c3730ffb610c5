"""Bytes and accuracy by the key `compress`.

python benchmarks/compression.py [DIR [TARGET]] [KEY=VALUE ...] trains FedAvg, COPA and KD3A with three seeds on
built-in digits, or on the data in DIR, once for each value of `compress`. `KEY=VALUE` changes a key of every run;
`methods=fedavg,kd3a`, `compress=none,int4` and `seeds=0,1` choose what is run. Prints a JSON line for each run, and
then one with means: how many times fewer bytes go up and down than with `none`, and how many points of accuracy are
lost on the target after the last round.

python benchmarks/compression.py --show ROWS.jsonl [PICTURE.svg] reads such rows and compares runs that differ in
`compress` only: same method, seed, target and images. It prints, for each method, the mean of their differences with
its 95 % interval, and draws accuracy against bytes.
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
from scipy import stats

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
    whole = {row["method"] for row in rows if row["compress"] == "none"}
    for method, compress in dict.fromkeys((row["method"], row["compress"]) for row in rows if row["method"] in whole):
        line: dict[str, Any] = {"method": method, "compress": compress}
        for name in ("accuracy", "source_val"):
            line[name] = round(mean(method, compress, name), 2)
            line[f"{name} lost"] = round(mean(method, "none", name) - mean(method, compress, name), 2)
        for name in ("up", "down"):
            line[f"{name} times fewer"] = round(mean(method, "none", name) / mean(method, compress, name), 2)
        found.append(line)
    return found


def paired(rows: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """For each method and way to compress: points lost against the same runs without, and their 95 % interval."""
    plain = {(row["method"], row["target"], row["seed"]): row for row in rows if row["compress"] == "none"}
    found = []
    for method, compress in dict.fromkeys(
        (row["method"], row["compress"]) for row in rows if row["compress"] != "none"
    ):
        pairs = [
            (plain[method, row["target"], row["seed"]], row)
            for row in rows
            if (row["method"], row["compress"]) == (method, compress)
        ]
        line: dict[str, Any] = {"method": method, "compress": compress, "pairs": len(pairs)}
        for name in ("up", "down"):
            line[f"{name} times fewer"] = round(statistics.mean(one[name] / other[name] for one, other in pairs), 2)
        for name in ("accuracy", "source_val"):
            lost = [one[name] - other[name] for one, other in pairs]
            half = stats.t.ppf(0.975, len(lost) - 1) * statistics.stdev(lost) / len(lost) ** 0.5
            line[f"{name} lost"] = f"{statistics.mean(lost):.1f} +- {half:.1f}"
        found.append(line)
    return found


def draw(rows: Sequence[Mapping[str, Any]], picture: Path) -> None:
    """Each run as a point; runs that differ in `compress` only are joined by a line, and targets have colours."""
    import matplotlib

    matplotlib.use("svg")
    matplotlib.rcParams.update({"svg.hashsalt": "fedshift", "svg.fonttype": "none"})
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(6, 3.6))
    for number, target in enumerate(sorted({row["target"] for row in rows})):
        colour = f"C{number}"
        for method, seed in sorted({(row["method"], row["seed"]) for row in rows if row["target"] == target}):
            line = sorted(
                ((row["up"] + row["down"]) / 1e6, row["accuracy"])
                for row in rows
                if (row["target"], row["method"], row["seed"]) == (target, method, seed)
            )
            axes.plot(*zip(*line, strict=True), color=colour, marker="o", markersize=4, linewidth=1)
        axes.plot([], [], color=colour, marker="o", label=target)
    axes.set_xscale("log")
    axes.set_xticks([5, 10, 20, 30], ["5", "10", "20", "30"])
    axes.minorticks_off()
    axes.set_xlabel("MB sent up and down in a run, scoring left out")
    axes.set_ylabel("percent right on the target")
    axes.legend(title="target", fontsize=8)
    figure.tight_layout()
    figure.savefig(picture, metadata={"Date": None})


def main() -> None:
    words = sys.argv[1:]
    if words[:1] == ["--show"]:
        read = [json.loads(line) for line in Path(words[1]).read_text().splitlines()]
        print(json.dumps({"benchmark": "compression --show", "paired": paired(read)}))
        for picture in words[2:]:
            draw(read, Path(picture))
        return
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
