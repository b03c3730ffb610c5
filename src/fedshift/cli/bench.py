"""What `fedshift bench` shows: every job as it ends and the time left, then tables, pictures and what failed."""

from __future__ import annotations

import sys

from rich.console import Console

from fedshift.bench.publish import caption
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
        console.print(f"{found.broken_lines} half-written lines in the records were left out")
    console.print(f"\ntables: {found.out / 'table'}.txt, .md, .csv, .tex, .json")
    if found.failures:
        console.print(f"{len(found.failures)} trainings failed; all others are in the table:")
    for failure in found.failures:
        job = failure.job
        console.print(f"  {job.row}, {job.column}, seed {job.config.seed}: {failure.words} (log: {failure.log})")
