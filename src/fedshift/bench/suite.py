"""A suite makes one table or figure of a paper: what it is asked for, what it returns, and how it is described."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, Literal, TypeVar

from fedshift.bench.jobs import Row
from fedshift.bench.records import Record
from fedshift.bench.run import FailedJob, Launcher, OnProgress, Processes, silent
from fedshift.bench.tables import Sheet, Table
from fedshift.errors import FedshiftError, InputError, nearest
from fedshift.federation import codec

Scale = Literal["mini", "paper"]


@dataclass(frozen=True)
class SuiteRequest:
    """What a call asks of a suite. Tables and pictures are written to `out`, trainings to `work`, which suites may
    share. None for `seeds` or `methods` means the suite's own; `settings` are `key=value`, as for `train`."""

    scale: Scale
    out: Path
    work: Path
    data_dir: Path | None = None
    seeds: tuple[int, ...] | None = None
    methods: tuple[str, ...] | None = None
    settings: tuple[str, ...] = ()
    jobs: int = 1
    progress: OnProgress = silent
    launcher: Launcher = field(default_factory=Processes)


@dataclass(frozen=True)
class SuiteResult:
    """What a suite returns. `tables` hold scores over seeds, `sheets` other numbers, `files` are pictures in `out`."""

    tables: tuple[Table, ...] = ()
    sheets: tuple[Sheet, ...] = ()
    files: tuple[Path, ...] = ()
    records: tuple[Record, ...] = ()
    failures: tuple[FailedJob, ...] = ()
    broken_lines: int = 0
    notes: tuple[str, ...] = ()
    """Sentences that a reader of the tables has to know, such as which data they were measured on."""
    out: Path = Path()
    """Where the tables were written."""


Drawn = tuple[Sequence[Sheet], Sequence[Path]]
Draw = Callable[[Sequence[Record], SuiteRequest], Drawn]
"""Makes sheets and pictures from the records of a grid."""


@dataclass(frozen=True)
class Suite:
    """`needs` says what has to be there at each scale."""

    name: str
    paper: str
    question: str
    needs: Mapping[Scale, str]
    estimate: Callable[[], Mapping[Scale, str]] = field(repr=False)
    """Makes `cost`."""
    run: Callable[[SuiteRequest], SuiteResult] = field(repr=False)
    rows: tuple[Row, ...] = ()
    """What `--methods` chooses from."""
    seeds: Mapping[Scale, tuple[int, ...]] = field(default_factory=dict)
    """The suite's own seeds; empty if nothing depends on a seed."""

    @cached_property
    def cost(self) -> Mapping[Scale, str]:
        """How long the suite takes at each scale. Estimated on request: that configures all of its trainings."""
        return self.estimate()


Options = TypeVar("Options")


def options_of(section: str, defaults: Options, values: Mapping[str, Any]) -> tuple[Options, dict[str, Any]]:
    """`defaults` updated with the keys under `section` of `values`, and the configuration keys that remain."""
    kept = {key: value for key, value in values.items() if key != section}
    kind: Any = type(defaults)
    known = [field.name for field in dataclasses.fields(kind)]
    given = values.get(section) or {}
    for key in given:
        if key not in known:
            raise InputError("config-key", f"unknown key {section}.{key}. {nearest(key, known)}")
    try:
        return codec.restore(kind, {**codec.plain(defaults), **given}, section), kept
    except FedshiftError as error:
        raise InputError("config-value", error.message) from error


def only_seed(request: SuiteRequest, suite: str, repeats: str) -> int:
    """The seed of a suite that draws one picture. `repeats` is the option that repeats the study within it."""
    seeds = sorted(set(request.seeds or (0,)))
    if len(seeds) > 1:
        given = ",".join(map(str, seeds))
        raise InputError(
            "config-value",
            f"--seeds {given}: {suite} is a picture of one seed. Call it once per seed, or raise"
            f" --set {repeats}=NUMBER for more repetitions with one seed",
        )
    return seeds[0]


def with_time_left(progress: OnProgress) -> Callable[[str, int, int], None]:
    """`progress` that estimates the seconds left from the time so far."""
    started = time.monotonic()

    def report(what: str, done: int, total: int) -> None:
        progress(what, done, total, (time.monotonic() - started) / done * (total - done))

    return report
