"""One self-contained HTML page about runs: it loads nothing and runs no script."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from fedshift.errors import InputError

__all__ = ["write_report"]


MANY = 8
"""From so many runs on, maps and samples that are not made yet are left out unless asked for."""


def write_report(
    runs: Sequence[Path],
    out: Path,
    *,
    features: bool | None = None,
    points: int | None = None,
    say: Callable[[str], None] = lambda text: None,
) -> None:
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
    galleries = [Gallery() for _ in records]
    if features is not False:
        make, shared = features or len(records) < MANY, Flattened()
        galleries = [gallery_of(r, make=make, points=points or POINTS, shared=shared, say=say) for r in records]
    write_atomically(out, render(records, galleries).encode())
    if any(gallery.strips for gallery in galleries):
        say(f"{out} shows samples of the data: to share it with others, write it with --no-features")
