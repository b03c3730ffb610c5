"""Records of runs to tables. `collect RUN... ` appends finished runs to a record file; `show` prints Markdown.

python results/tables.py collect results/digits.jsonl runs/digits/*
python results/tables.py show results/digits.jsonl
"""

from __future__ import annotations

import json
import statistics
import sys
from pathlib import Path
from typing import Any

KEPT = ("method", "setting", "dataset", "sources", "target", "home", "seed", "rounds", "arch", "per_target")
SETTINGS = ("train_per_site", "image_size", "batch_size", "local_epochs", "lr", "weights")


def collect(record: Path, runs: list[Path]) -> None:
    """Appends runs that the record does not have yet, by the SHA-256 of their models."""
    known = {row["model_sha256"] for row in read(record)} if record.exists() else set()
    with record.open("a") as file:
        for run in sorted(runs):
            if not (run / "done").exists():
                continue
            results = json.loads((run / "results.json").read_text())
            if results["model_sha256"] in known:
                continue
            row = {key: results[key] for key in KEPT}
            row["dataset"] = Path(str(row["dataset"])).name
            row |= {
                "settings": _settings(run),
                "bytes_up": results["bytes"]["up"],
                "seconds": results["seconds"]["sites"],
            }
            file.write(json.dumps(row | {"model_sha256": results["model_sha256"]}) + "\n")


def _settings(run: Path) -> dict[str, Any]:
    import yaml

    config = yaml.safe_load((run / "config.yaml").read_text())
    return {key: config[key] for key in SETTINGS if config.get(key) is not None} | {"own": config[config["method"]]}


def read(record: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in record.read_text().splitlines()]


def show(record: Path, rule: str) -> str:
    """Methods x targets and their average, mean and standard deviation over seeds, in per cent."""
    rows = read(record)
    methods = list(dict.fromkeys(row["method"] for row in rows))
    targets = sorted({target for row in rows for target in row["per_target"]})
    lines = ["| method | " + " | ".join(targets) + " | average |", "|---" * (len(targets) + 2) + "|"]
    for method in methods:
        own = [row for row in rows if row["method"] == method]
        cells = [_cell([row["per_target"][t][rule] for row in own if t in row["per_target"]]) for t in targets]
        # A seed that lacks a target would be averaged over easier or harder ones.
        seeds = [s for s in sorted({r["seed"] for r in own}) if _targets(own, s) == set(targets)]
        means = [
            statistics.mean(row["per_target"][t][rule] for row in own if row["seed"] == s for t in row["per_target"])
            for s in seeds
        ]
        lines.append(f"| {method} | " + " | ".join(cells) + f" | {_cell(means)} |")
    return "\n".join(lines)


def _targets(rows: list[dict[str, Any]], seed: int) -> set[str]:
    return {target for row in rows if row["seed"] == seed for target in row["per_target"]}


def _cell(values: list[float]) -> str:
    if not values:
        return "-"
    spread = f" ± {100 * statistics.stdev(values):.1f}" if len(values) > 1 else ""
    return f"{100 * statistics.mean(values):.1f}{spread}"


if __name__ == "__main__":
    command, record, *rest = sys.argv[1:]
    if command == "collect":
        collect(Path(record), [Path(name) for name in rest])
    else:
        for rule in rest or ["last", "source_val"]:
            print(f"{rule}:\n\n{show(Path(record), rule)}\n")
