"""Look a user's data over before a run does: everything that is wrong with it, not just the first thing."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from fedshift.data.domain import VOID, DataSource, Domain, Skipped, Task
from fedshift.data.images import Size
from fedshift.data.raw import TOLERATED, Plan, Problem, Progress, RawDomain, Sample
from fedshift.data.registry import open_dataset, survey
from fedshift.data.splits import SPLITS, SplitName
from fedshift.data.survey import Survey
from fedshift.errors import InputError

DUPLICATES_SHOWN = 20


@dataclass(frozen=True)
class DomainReport:
    """One domain. `classes` counts samples by class and split (for masks: images that show the class), and is None
    without labels; `sizes` counts images by (height, width) before resizing."""

    name: str
    splits: dict[SplitName, int]
    classes: dict[str, dict[SplitName, int]] | None
    sizes: dict[Size, int]
    skipped: tuple[Skipped, ...]


@dataclass(frozen=True)
class Duplicate:
    """The same content in two places where it makes results look better than they are."""

    first: str
    second: str
    across: str
    """`domains` or `splits`."""


@dataclass(frozen=True)
class DataReport:
    """What a check found. With problems a run could not start; warnings are for the user to judge."""

    name: str
    task: Task
    classes: tuple[str, ...]
    input_shape: tuple[int, ...]
    domains: tuple[DomainReport, ...]
    duplicates: tuple[Duplicate, ...]
    problems: tuple[Problem, ...]
    warnings: tuple[str, ...]

    @property
    def ok(self) -> bool:
        return not self.problems


def check_data(source: DataSource, progress: Progress | None = None) -> DataReport:
    """Read everything, and report instead of raising. What is decoded stays cached for the run that follows."""
    try:
        found = survey(source)
    except InputError as error:
        name = source.name or str(source.data_dir)
        return DataReport(name, "classification", (), (), (), (), (Problem(error.code, error.message),), ())
    problems, warnings = list(found.problems), list(found.warnings)
    reports = []
    for raw in found.domains:
        if raw.problems and not raw.sizes() and not raw.class_counts():
            continue
        try:
            domain = raw.read(found.plan, progress)
        except InputError as error:
            problems.append(Problem(error.code, error.message))
            continue
        reports.append(_report(raw, domain, found))
        _judge(reports[-1], problems, warnings)
    duplicates = _find_duplicates({raw.name: raw.samples() for raw in found.domains}, warnings)
    return DataReport(
        found.name,
        found.task,
        found.plan.classes,
        found.input_shape,
        tuple(reports),
        duplicates,
        tuple(problems),
        tuple(warnings),
    )
