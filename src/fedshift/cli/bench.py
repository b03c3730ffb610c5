"""What `fedshift bench` shows: every job as it ends and the time left, then tables, pictures and what failed."""

from __future__ import annotations

import sys

from rich.console import Console

from fedshift.bench.publish import caption
from fedshift.bench.runner import Failure
from fedshift.bench.suite import Found
from fedshift.bench.tables import text


def told(what: str, done: int, total: int, left: float) -> None:
    print(f"{done}/{total}  {what}{f'; {duration(left)} left' if left >= 1 else ''}", file=sys.stderr, flush=True)


def duration(seconds: float) -> str:
    """`45 s`, `12 min`, `3 h 20 min`."""
    if seconds < 90:
        return f"{seconds:.0f} s"
    hours, minutes = divmod(round(seconds / 60), 60)
    return f"{hours} h {minutes} min" if hours else f"{minutes} min"


def show_found(found: Found) -> None:
    console = Console(highlight=False, markup=False, soft_wrap=True)
    for note in found.notes:
        console.print(note)
    for table in found.tables:
        console.print(f"\n{caption(table)}\n{text(table)}", end="")
    for sheet in found.sheets:
        console.print(f"\n{sheet.title}\n{text(sheet)}", end="")
    for path in found.files:
        console.print(f"picture: {path}")
    if found.broken_lines:
        lines = "line" if found.broken_lines == 1 else "lines"
        console.print(f"{found.broken_lines} half-written {lines} in the records left out")
    console.print(f"\ntables: {found.out / 'table'}.txt, .md, .csv, .tex, .json")
    if found.failures:
        console.print(f"{len(found.failures)} trainings failed; all others are in the table:")
    alike: dict[str, list[Failure]] = {}
    for failure in found.failures:
        alike.setdefault(failure.words, []).append(failure)
    for words, failures in alike.items():
        job = failures[0].job
        console.print(f"  {job.row}, {job.column}, seed {job.config.seed}: {words} (log: {failures[0].log})")
        if len(failures) > 1:
            console.print(f"    and {len(failures) - 1} more in the same words (logs beside it)")
