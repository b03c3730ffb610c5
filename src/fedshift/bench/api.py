"""`fedshift.benchmark`: runs a suite from Python."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from fedshift.bench.overrides import check_sections, folder_of, overrides_of
from fedshift.bench.papers import find_suite
from fedshift.bench.papers.selection import EXPERIMENT, split
from fedshift.bench.publish import write_tables
from fedshift.bench.records import read
from fedshift.bench.run import OnProgress, silent
from fedshift.bench.selection import rules_compared
from fedshift.bench.suite import Scale, SuiteRequest, SuiteResult
from fedshift.errors import InputError

WORK = Path("runs/bench")
"""The folder of trainings if `out` is not given: all suites share it."""


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
    progress: OnProgress = silent,
) -> SuiteResult:
    """Runs what is missing of a suite and writes table.{txt,md,csv,tex,json} into `out`. The default of `out` is
    runs/bench/SUITE, or a folder inside it if data, scale, rows, seeds or settings are not the suite's own.

    None for `methods` or `seeds` means the suite's own. `settings` are `key=value` strings or a dictionary. `jobs`
    trainings run side by side, by default one per core. With `records`, which only the suite `selection` takes, nothing
    is trained: these files are read. `progress` is called after every training."""
    found_suite = find_suite(suite)
    if scale not in ("mini", "paper"):
        raise InputError("config-value", f"scale: {scale!r} is neither mini nor paper")
    if jobs is not None and jobs < 1:
        raise InputError("config-value", f"--jobs {jobs}: must be 1 or more")
    request = SuiteRequest(
        scale=scale,
        out=Path(out) if out is not None else WORK / found_suite.name,
        work=Path(out) if out is not None else WORK,
        data_dir=Path(data_dir) if data_dir is not None else None,
        seeds=tuple(seeds) if seeds is not None else None,
        methods=tuple(methods) if methods is not None else None,
        settings=as_strings(settings),
        jobs=jobs or cores(),
        progress=progress,
    )
    files = [Path(path) for path in records]
    if files and found_suite.name != EXPERIMENT.name:
        raise InputError("config-value", f"records are for the suite {EXPERIMENT.name!r}, not for {suite!r}")
    if files and (settings or methods is not None or seeds is not None):
        raise InputError("config-value", "with records nothing is trained: methods, seeds and settings change nothing")
    check_sections(found_suite, request)
    overrides = overrides_of(found_suite, request)
    if out is None:
        request = replace(request, out=WORK / folder_of(found_suite, request, files))
    result = compare_rules(files) if files else found_suite.run(request)
    result = replace(result, out=request.out, notes=(*overrides.notes, *result.notes))
    write_tables(found_suite, request, result)
    return result


def compare_rules(paths: Sequence[Path]) -> SuiteResult:
    """Compares the selection rules on existing record files, one table per file."""
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
        notes.append("Some runs were scored in two rounds or fewer: the rules had little to choose from.")
    return SuiteResult(tables=tuple(tables), records=tuple(kept), broken_lines=broken, notes=tuple(notes))


def as_strings(settings: Sequence[str] | Mapping[str, Any]) -> tuple[str, ...]:
    """Each setting as `key=value`, as on the command line."""
    if isinstance(settings, Mapping):
        return tuple(f"{key}={json.dumps(value)}" for key, value in settings.items())
    return tuple(settings)


def cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
