"""A self-contained HTML page about runs. It loads nothing and runs no script."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from fedshift.errors import InputError

__all__ = ["write_report"]


MANY = 8
"""From this many runs on, maps and samples that are not made yet are made only on request."""


def write_report(
    runs: Sequence[Path],
    out: Path,
    *,
    features: bool | None = None,
    points: int | None = None,
    say: Callable[[str], None] = lambda text: None,
) -> None:
    """Writes the page about `runs` to the file `out`. Runs are directories, finished or not; each is shown once.

    `features` says whether to show what needs the data: samples with predictions, and maps of `points` features. They
    are made if the run's data can be opened on this machine, and kept in the run directory. By default they are made
    for fewer than 8 runs. `say` gets progress messages."""
    if not runs:
        raise InputError("run-missing", "name at least one run directory to report on")
    from fedshift.files import write_atomically
    from fedshift.report.page import render
    from fedshift.report.samples import POINTS, DataView, UntrainedMaps, data_view
    from fedshift.runs.directory import RunDirectory
    from fedshift.runs.record import read_record

    once: dict[Path, Path] = {}
    for path in runs:
        once.setdefault(path.resolve(), path)
    records = [read_record(path) for path in once.values()]
    for record in records:
        directory = RunDirectory(record.path)
        if directory.is_card_changed:
            say(f"{directory.card} is not as the run wrote it")
    views = [DataView() for _ in records]
    if features is not False:
        make, shared = features or len(records) < MANY, UntrainedMaps()
        views = [data_view(r, make=make, points=points or POINTS, shared=shared, say=say) for r in records]
    # Half of a pair of characters, in a file from elsewhere, is none in any encoding.
    write_atomically(out, render(records, views).encode(errors="replace"))
    if any(view.samples for view in views):
        say(f"{out} shows samples of the data: before you share it, write it with --no-features")
