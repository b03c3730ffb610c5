"""What is kept of a finished job: one line of JSON, small enough to be committed beside the table made from it."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import yaml

from fedshift.runs.directory import RunDirectory, read_metrics

Curve = dict[str, list[float | None]]
"""By site, one value a scored round."""


NOTED = ("target", "train")
"""Phases of a run's metrics in which methods, and the target that they adapt to, note numbers of their own."""


@dataclass(frozen=True)
class Record:
    """`scores` are per target and rule (last, source_val, oracle); `val` and `test` every scored round, so that other
    rules can be tried later; `notes` what the method noted in the same rounds, by name and site."""

    job: str
    row: str
    column: str
    method: str
    setting: str
    dataset: str
    sources: list[str]
    target: str | None
    home: str | None
    seed: int
    scores: dict[str, dict[str, float]]
    rounds: list[int]
    val: Curve
    test: Curve
    notes: dict[str, Curve]
    settings: dict[str, Any]
    bytes: dict[str, int]
    seconds: float
    counters: dict[str, int]
    model_sha256: str


def read_run(folder: Path, job: str, row: str, column: str) -> Record:
    """The record of a finished run, for a place in a table."""
    directory = RunDirectory(folder)
    results = json.loads(directory.results.read_text())
    rows = read_metrics(directory.metrics)[0]
    rounds = sorted({row["round"] for row in rows if row["phase"] in ("val", "test")})
    return Record(
        job=job,
        row=row,
        column=column,
        method=results["method"],
        setting=results["setting"],
        dataset=Path(str(results["dataset"])).name,
        sources=results["sources"],
        target=results["target"],
        home=results["home"],
        seed=results["seed"],
        scores=results["per_target"],
        rounds=rounds,
        val=_curves(rows, "val", rounds),
        test=_curves(rows, "test", rounds),
        notes={
            name: _curves([r for r in rows if r["name"] == name], phase, rounds)
            for phase, name in sorted({(row["phase"], row["name"]) for row in rows if row["phase"] in NOTED})
        },
        settings=_settings(directory.config),
        bytes=results["bytes"],
        seconds=results["seconds"]["total"],
        counters=results["counters"],
        model_sha256=results["model_sha256"],
    )


def _curves(rows: Sequence[dict[str, Any]], phase: str, rounds: Sequence[int]) -> Curve:
    found: dict[str, dict[int, float | None]] = {}
    for row in rows:
        if row["phase"] == phase:
            found.setdefault(row["site"], {})[row["round"]] = row["value"]
    return {site: [values.get(number) for number in rounds] for site, values in sorted(found.items())}


def _settings(config: Path) -> dict[str, Any]:
    """The configuration without what names the machine or the place of the data."""
    values: dict[str, Any] = yaml.safe_load(config.read_text())
    unwanted = {"data_dir", "workers", "engine", "device", "method", "setting", "seed", "policy", "deadline"}
    return {key: value for key, value in values.items() if key not in unwanted and value not in (None, [], {})}


def append(path: Path, record: Record) -> None:
    """Adds a line. Several processes may do so at once: a line is one write, under a lock where there are locks."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("ab") as file:
        with suppress(ImportError):  # Windows has no fcntl.
            import fcntl

            fcntl.flock(file, fcntl.LOCK_EX)
        # A line that a killed process left half-written must not swallow this one.
        start = b"\n" if _ends_within_a_line(path) else b""
        file.write(start + json.dumps(asdict(record)).encode() + b"\n")


def _ends_within_a_line(path: Path) -> bool:
    with path.open("rb") as file:
        if file.seek(0, 2) == 0:
            return False
        file.seek(-1, 2)
        return file.read() != b"\n"


def read(paths: Iterable[Path]) -> tuple[list[Record], int]:
    """The records of several files, the last of equal jobs in equal places, and how many lines were not whole."""
    found: dict[tuple[str, str, str], Record] = {}
    broken = 0
    for path in paths:
        for line in path.read_text(errors="replace").splitlines() if path.exists() else ():
            try:
                record = Record(**json.loads(line))
            except (ValueError, TypeError):
                broken += bool(line.strip())
                continue
            found[record.job, record.row, record.column] = record
    return list(found.values()), broken
