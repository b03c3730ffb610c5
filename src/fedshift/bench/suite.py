"""What a suite is: one table or figure of a paper, by name, and a function that makes it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from fedshift.bench.jobs import Row
from fedshift.bench.launch import Launcher, Processes
from fedshift.bench.records import Record
from fedshift.bench.runner import Failure, Tell, silent
from fedshift.bench.sheets import Sheet
from fedshift.bench.tables import Table

Scale = Literal["mini", "paper"]


@dataclass(frozen=True)
class Order:
    """What is asked of a suite. Tables and pictures go to `out`, trainings to `work`, where suites may share them.
    Of `seeds` and `methods`, None is the suite's own choice; `settings` are `key=value`, as for `train`."""

    scale: Scale
    out: Path
    work: Path
    data_dir: Path | None = None
    seeds: tuple[int, ...] | None = None
    methods: tuple[str, ...] | None = None
    settings: tuple[str, ...] = ()
    jobs: int = 1
    tell: Tell = silent
    launcher: Launcher = field(default_factory=Processes)


@dataclass(frozen=True)
class Found:
    """What came out. `tables` are scores over seeds, `sheets` any other numbers, `files` pictures below `out`."""

    tables: tuple[Table, ...] = ()
    sheets: tuple[Sheet, ...] = ()
    files: tuple[Path, ...] = ()
    records: tuple[Record, ...] = ()
    failures: tuple[Failure, ...] = ()
    broken_lines: int = 0
    notes: tuple[str, ...] = ()
    """Sentences that a reader of the tables has to know: what they were measured on."""
    out: Path = Path()
    """Where the tables were written."""


@dataclass(frozen=True)
class Suite:
    """`needs` and `cost` say, for each scale, what has to be there and how long it takes."""

    name: str
    paper: str
    question: str
    needs: Mapping[Scale, str]
    cost: Mapping[Scale, str]
    run: Callable[[Order], Found] = field(repr=False)
    rows: tuple[Row, ...] = ()
    """What `--methods` chooses from."""
    seeds: Mapping[Scale, tuple[int, ...]] = field(default_factory=dict)
    """Its own; none where nothing depends on a seed."""
