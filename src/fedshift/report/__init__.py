"""One self-contained HTML page about runs: it loads nothing and runs no script."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from fedshift.errors import InputError

__all__ = ["write_report"]


def write_report(runs: Sequence[Path], out: Path) -> None:
    """Writes the page on `runs` (run directories, finished or not, each told once) to the file `out`."""
    if not runs:
        raise InputError("run-missing", "name at least one run directory to report on")
    from fedshift.files import write_atomically
    from fedshift.report.page import render
    from fedshift.report.reading import read_run

    once: dict[Path, Path] = {}
    for path in runs:
        once.setdefault(path.resolve(), path)
    write_atomically(out, render([read_run(path) for path in once.values()]).encode())
