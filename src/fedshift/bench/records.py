"""The record of a finished job: one line of JSON, small enough to be committed beside the tables made from it."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from fedshift.errors import InputError
from fedshift.runs.config import read_config
from fedshift.runs.record import read_record

Curves = dict[str, list[float | None]]
"""By site, one value per scored round."""

NOTED = ("attack", "target", "train")
"""Phases of a run's metrics in which the method, the target it adapts to, and attacks have numbers."""


@dataclass(frozen=True)
class Record:
    """`scores` are per target and rule (last, source_val, oracle). `val` and `test` have every scored round, so that
    other rules can be tried later. `notes` are the numbers that the method logged in these rounds, by name and site."""

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
    val: Curves
    test: Curves
    notes: dict[str, Curves]
    settings: dict[str, Any]
    bytes: dict[str, int]
    seconds: float
    counters: dict[str, int]
    model_sha256: str


def read_run(folder: Path, job: str, row: str, column: str) -> Record:
    """The record of the finished run in `folder`, for the cell of a table at `row` and `column`."""
    run = read_record(folder)
    results = run.results
    if results is None:
        raise InputError("run-missing", f"{folder} is not a finished run")
    rows = [line.model_dump() for line in run.rows]
    rounds = sorted({line.round for line in run.rows if line.phase in ("val", "test")})
    return Record(
        job=job,
        row=row,
        column=column,
        method=results.method,
        setting=results.setting,
        dataset=Path(results.dataset).name,
        sources=results.sources,
        target=results.target,
        home=results.home,
        seed=results.seed,
        scores={target: scores.model_dump() for target, scores in results.per_target.items()},
        rounds=rounds,
        val=_curves(rows, "val", rounds),
        test=_curves(rows, "test", rounds),
        notes={
            name: _curves([line for line in rows if line["name"] == name], phase, rounds)
            for phase, name in sorted({(line.phase, line.name) for line in run.rows if line.phase in NOTED})
        },
        settings=_settings(folder / "config.yaml"),
        bytes=results.bytes,
        seconds=results.seconds["total"] or 0.0,
        counters=results.counters,
        model_sha256=results.model_sha256,
    )


def _curves(rows: Sequence[dict[str, Any]], phase: str, rounds: Sequence[int]) -> Curves:
    found: dict[str, dict[int, float | None]] = {}
    for row in rows:
        if row["phase"] == phase:
            found.setdefault(row["site"], {})[row["round"]] = row["value"]
    return {site: [values.get(number) for number in rounds] for site, values in sorted(found.items())}


def _settings(config: Path) -> dict[str, Any]:
    """The configuration without keys that name the machine or the path of the data."""
    values = read_config(config, "run-corrupt")
    unwanted = {"data_dir", "workers", "engine", "device", "method", "setting", "seed", "policy", "deadline"}
    return {key: value for key, value in values.items() if key not in unwanted and value not in (None, [], {})}


def append(path: Path, record: Record) -> None:
    """Appends a line. Several processes may do so at once: a line is one write, under a lock if the system has them."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("ab") as file:
        with suppress(ImportError):  # Windows has no fcntl.
            import fcntl

            fcntl.flock(file, fcntl.LOCK_EX)
        # If a killed process left half a line, this one has to start a new line.
        start = b"\n" if _ends_within_a_line(path) else b""
        file.write(start + json.dumps(asdict(record)).encode() + b"\n")


def _ends_within_a_line(path: Path) -> bool:
    with path.open("rb") as file:
        if file.seek(0, 2) == 0:
            return False
        file.seek(-1, 2)
        return file.read() != b"\n"


def read(paths: Iterable[Path]) -> tuple[list[Record], int]:
    """The records of several files, and the number of broken lines. Of equal jobs in equal cells the last is kept."""
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
