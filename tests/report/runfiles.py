"""Run directories written by hand, as a run leaves them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import yaml

SOURCES = ("chalk", "street")


def write_run(
    path: Path,
    method: str = "fedavg",
    target: str = "photo",
    curve: tuple[float, ...] = (0.3, 0.55, 0.5),
    *,
    seed: int = 0,
    val: float = 0.9,
    finished: bool = True,
    sources: tuple[str, ...] = SOURCES,
    classes: tuple[str, ...] = ("cat", "dog"),
    confusion: list[list[int]] | None = None,
    notes: dict[str, float] | None = None,
    config: dict[str, Any] | None = None,
    results: dict[str, Any] | None = None,
) -> Path:
    """A run directory as a run leaves it: `curve` is the test score by round, validation rises to `val`."""
    path.mkdir(parents=True)
    settings = {"method": method, "setting": "generalize", "seed": seed, "dataset": "digits", "sources": list(sources)}
    settings |= {"target": target, "rounds": len(curve) if finished else 20, "lr": 0.1, method: {}}
    (path / "config.yaml").write_text(yaml.safe_dump(settings | (config or {}), sort_keys=False))
    (path / "env.json").write_text(json.dumps({"fedshift": "0.1.0", "python": "3.11"}))
    rows: list[dict[str, Any]] = []
    for number, score in enumerate(curve, start=1):
        row = {"round": number}
        rows += [row | {"phase": "train", "site": s, "name": "train_loss", "value": 2.0 / number} for s in sources]
        rows += [
            row | {"phase": "train", "site": s, "name": n, "value": v}
            for n, v in (notes or {}).items()
            for s in sources
        ]
        rows += [
            row | {"phase": "val", "site": s, "name": "accuracy", "value": val * number / len(curve)} for s in sources
        ]
        rows += [row | {"phase": "test", "site": target, "name": "accuracy", "value": score}]
        totals = {"bytes_up": 1000 * number, "bytes_down": 2000 * number, "seconds": 1.5 * number}
        rows += [row | {"phase": "round", "site": "", "name": n, "value": v} for n, v in totals.items()]
    (path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    write_ledger(path, sources[0], [("averaging.train", "model", "weights", 250, 1000)] * len(curve))
    if finished:
        scores = {"last": curve[-1], "source_val": curve[-1], "oracle": max(curve)}
        written = {
            **{"method": method, "setting": "generalize", "task": "classification", "dataset": "digits"},
            **{"sources": list(sources), "target": target, "home": None, "seed": seed, "rounds": len(curve)},
            **{"classes": list(classes), "accuracy": scores, "per_target": {target: scores}},
            **{"source_val": dict.fromkeys(sources, val), "chosen_round": len(curve)},
            "confusion": {target: confusion or [[8, 2], [1, 9]]},
            "samples": {site: {"train": 812, "val": 101, "test": 204} for site in (*sources, target)},
            "bytes": {"up": 1_500_000, "down": 3_000_000, "scoring_up": 900, "scoring_down": 4_000_000},
            "flops_client": None,
            "seconds": {"total": 41.0, "sites": 30.5, "coordinator": 10.5},
            **{"counters": {}, "model_sha256": "ab" * 32},
        }
        (path / "results.json").write_text(json.dumps(written | (results or {})))
        (path / "done").touch()
    return path


def write_ledger(path: Path, site: str, fields: list[tuple[str, str, str, int, int]]) -> None:
    folder = path / "sites" / site
    folder.mkdir(parents=True)
    keys = ("round", "step", "field", "kind", "values", "bytes")
    lines = [dict(zip(keys, (number, *field), strict=True)) for number, field in enumerate(fields, start=1)]
    (folder / "ledger.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
