"""`fedshift.benchmark`: a suite as a function call."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from fedshift.bench.changes import changes_of, check_sections, folder_of
from fedshift.bench.publish import write_tables
from fedshift.bench.records import read
from fedshift.bench.rules import EXPERIMENT, split
from fedshift.bench.runner import Tell, silent
from fedshift.bench.selection import rules_compared
from fedshift.bench.suite import Found, Order, Scale
from fedshift.bench.suites import find_suite
from fedshift.errors import InputError

WORK = Path("runs/bench")
"""Where trainings go without `out`: suites that need the same ones share them."""


def benchmark(
    suite: str,
    *,
    scale: Scale = "mini",
    methods: Sequence[str] | None = None,
    seeds: Sequence[int] | None = None,
    data_dir: Path | str | None = None,
    out: Path | str | None = None,
    jobs: int | None = None,
    settings: Sequence[str] | Mapping[str, Any] = (),
    records: Sequence[Path | str] = (),
    tell: Tell = silent,
) -> Found:
    """Runs what is missing of a suite and writes table.{txt,md,csv,tex,json} into `out`. By default that is
    runs/bench/SUITE, and for other data, scales, rows, seeds or settings than the suite's own a folder in it.
    Of `methods` and `seeds`, None is the suite's own choice; `settings` are `key=value` or a dictionary; `jobs`
    trainings go side by side, by default one a core. With `records` (of `selection` alone) nothing is trained: these
    files are read."""
    found_suite = find_suite(suite)
    if scale not in ("mini", "paper"):
        raise InputError("config-value", f"scale: {scale!r} is neither mini nor paper")
    if jobs is not None and jobs < 1:
        raise InputError("config-value", f"--jobs {jobs}: 1 is least")
    order = Order(
        scale=scale,
        out=Path(out) if out is not None else WORK / found_suite.name,
        work=Path(out) if out is not None else WORK,
        data_dir=Path(data_dir) if data_dir is not None else None,
        seeds=tuple(seeds) if seeds is not None else None,
        methods=tuple(methods) if methods is not None else None,
        settings=as_words(settings),
        jobs=jobs or cores(),
        tell=tell,
    )
    files = [Path(path) for path in records]
    if files and found_suite.name != EXPERIMENT.name:
        raise InputError("config-value", f"records are for the suite {EXPERIMENT.name!r}, not for {suite!r}")
    if files and (settings or methods is not None or seeds is not None):
        raise InputError("config-value", "with records nothing is trained: methods, seeds and settings change nothing")
    check_sections(found_suite, order)
    changes = changes_of(found_suite, order)
    if out is None:
        order = replace(order, out=WORK / folder_of(found_suite, order, files))
    found = from_records(files) if files else found_suite.run(order)
    found = replace(found, out=order.out, notes=(*changes.notes, *found.notes))
    write_tables(found_suite, order, found)
    return found


def from_records(paths: Sequence[Path]) -> Found:
    """The comparison of selection rules on records that are there already, a table for each file."""
    tables, notes, kept, broken = [], [], [], 0
    for path in paths:
        if not path.is_file():
            raise InputError("data-missing", f"there is no record file {path}")
        records, cut = read([path])
        broken += cut
        main, inner = split(records)
        if main:
            tables.append(rules_compared(main, inner, path.name))
            kept += records
    if not tables:
        raise InputError("data-empty", f"no record in {', '.join(str(path) for path in paths)}")
    if any(len(record.rounds) < 3 for record in kept):
        notes.append("Some runs were scored in two rounds or fewer: there was not much to choose from.")
    return Found(tables=tuple(tables), records=tuple(kept), broken_lines=broken, notes=tuple(notes))


def as_words(settings: Sequence[str] | Mapping[str, Any]) -> tuple[str, ...]:
    """`key=value` for each, as on the command line."""
    if isinstance(settings, Mapping):
        return tuple(f"{key}={json.dumps(value)}" for key, value in settings.items())
    return tuple(settings)


def cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
