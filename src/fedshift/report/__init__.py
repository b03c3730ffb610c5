"""One self-contained HTML page about runs: it loads nothing and runs no script."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from fedshift.errors import InputError

__all__ = ["write_report"]


MANY = 8
"""From so many runs on, maps and samples that are not made yet are left out unless asked for."""


def write_report(runs: Sequence[Path], out: Path, *, features: bool | None = None, points: int | None = None) -> None:
    """Writes the page on `runs` (run directories, finished or not, each told once) to the file `out`.

    `features` asks for what needs the data, or not: maps of `points` features and samples with predictions. They are
    made where the run's data can be opened on this machine, and kept in the run directory."""
    if not runs:
        raise InputError("run-missing", "name at least one run directory to report on")
    from fedshift.files import write_atomically
    from fedshift.report.gallery import POINTS, Flattened, Gallery, gallery_of
    from fedshift.report.page import render
    from fedshift.report.reading import read_run

    once: dict[Path, Path] = {}
    for path in runs:
        once.setdefault(path.resolve(), path)
    records = [read_run(path) for path in once.values()]
    shared: Flattened = {}
    make = len(records) < MANY if features is None else features
    galleries = [
        Gallery() if features is False else gallery_of(record, make=make, points=points or POINTS, shared=shared)
        for record in records
    ]
    write_atomically(out, render(records, galleries).encode())
