"""What the domains of a data set agree on before any of them is read: task, classes, size, columns.

Sites must number the classes alike even where one has no sample of some class, so the class list belongs to the data
set and not to a folder. It is the union of what the labelled domains have (or `classes.txt`, one name a line), in
alphabetical order, or in the order of the numbers where all names are numbers.
"""

from __future__ import annotations

import unicodedata
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from fedshift.data.domain import VOID, Dataset, Domain, Task
from fedshift.data.imagefiles import ImageFiles
from fedshift.data.images import DEFAULT_SIZE, MaskCode, common_size, fit_of
from fedshift.data.listing import plain_name
from fedshift.data.raw import Plan, Problem, Progress, RawDomain, printable, refuse_many_skipped
from fedshift.errors import InputError, nearest

CLASS_FILE = "classes.txt"
VOID_NAME = "void"


@dataclass(frozen=True)
class Survey:
    """All that can be known of a data set without reading it. With problems, it cannot be opened. `shown_in` is as in
    `Dataset`."""

    name: str
    task: Task
    plan: Plan
    domains: tuple[RawDomain, ...]
    input_shape: tuple[int, ...]
    problems: tuple[Problem, ...]
    warnings: tuple[str, ...]
    columns: tuple[str, ...] = ()
    shown_in: Mapping[str, Mapping[str, str]] = field(default_factory=dict)


@dataclass(frozen=True)
class Agreed:
    """What others know of data that have no labels themselves: the sites of a federation agreed on it."""

    task: Task
    classes: tuple[str, ...]


def survey_images(
    name: str,
    domains: Sequence[RawDomain],
    wanted_size: int | None,
    classes: tuple[str, ...] | None = None,
    code: MaskCode | None = None,
    problems: Sequence[Problem] = (),
    warnings: Sequence[str] = (),
    agreed: Agreed | None = None,
) -> Survey:
    """Domains of images, with classes or masks. `classes` (for masks, with `code`) fixes the class list; where no
    domain has labels, what is `agreed` does."""
    found = [*problems, *(problem for domain in domains for problem in domain.problems)]
    remarks = [*warnings, *(warning for domain in domains for warning in domain.warnings)]
    tasks = {domain.task for domain in domains} - {None}
    task: Task = "segmentation" if "segmentation" in tasks else "classification"
    if agreed is not None and not tasks:
        task, classes, code = agreed.task, agreed.classes, MaskCode({})
    if len(tasks) == 2:
        found.append(Problem("data-layout", f"{name} mixes domains with class folders and domains with masks."))
    if domains and not tasks and agreed is None:
        found.append(
            Problem("data-layout", f"No domain of {name} has labels: there are neither class folders nor masks.")
        )
    shown_in: dict[str, dict[str, str]] = {}
    if task == "classification":
        classes = agree_on_classes(name, domains, classes, found, remarks)
    elif code is None or classes is None:
        classes, code, shown_in = _classes_of_masks(name, domains, found)
    fit = fit_of(task)
    sizes = [domain.sizes() for domain in domains]
    if any(sizes):
        size = common_size(sizes, wanted_size, fit)
    else:
        size = (DEFAULT_SIZE, DEFAULT_SIZE)
        if domains and not found:
            found.append(Problem("data-unreadable", f"No image of {name} can be read."))
    plan = Plan(classes, size, fit, code if task == "segmentation" else None)
    return Survey(name, task, plan, tuple(domains), (3, *size), tuple(found), tuple(remarks), shown_in=shown_in)


def survey_tables(
    name: str,
    domains: Sequence[RawDomain],
    columns: Sequence[str],
    problems: Sequence[Problem] = (),
    warnings: Sequence[str] = (),
) -> Survey:
    """Domains of rows that share their columns."""
    found = [*problems, *(problem for domain in domains for problem in domain.problems)]
    remarks = list(warnings)
    classes = agree_on_classes(name, domains, None, found, remarks)
    shape, names = (len(columns),), tuple(columns)
    return Survey(name, "classification", Plan(classes), tuple(domains), shape, tuple(found), tuple(remarks), names)


def open_survey(survey: Survey, progress: Progress | None = None) -> Dataset:
    """The data set, or an error with the first of the survey's problems."""
    if survey.problems:
        first, more = survey.problems[0], len(survey.problems) - 1
        hint = f" ({more} more: `fedshift check-data` lists them.)" if more else ""
        raise InputError(first.code, first.message + hint)
    domains = {domain.name: domain for domain in survey.domains}

    def load(name: str) -> Domain:
        if name not in domains:
            raise InputError("unknown-name", f"{survey.name} has no domain {name!r}. {nearest(name, domains)}")
        domain = domains[name].read(survey.plan, progress)
        refuse_many_skipped(domain)
        return domain

    return Dataset(
        survey.name,
        survey.task,
        survey.plan.classes,
        tuple(domains),
        survey.input_shape,
        load,
        survey.warnings,
        survey.columns,
        survey.shown_in,
        survey.plan.code.ids_of(len(survey.plan.classes)) if survey.plan.code else (),
    )


def read_class_file(root: Path) -> tuple[str, ...] | None:
    """The lines of `<root>/classes.txt`, where there is one."""
    path = root / CLASS_FILE
    if not path.is_file():
        return None
    text = unicodedata.normalize("NFC", path.read_text(encoding="utf-8-sig", errors="replace"))
    return tuple(line.strip() for line in text.splitlines() if line.strip())


def mask_code(lines: Sequence[str]) -> tuple[tuple[str, ...], MaskCode]:
    """Classes and mask ids from a class file: a line's number is its id, and `void` is no class."""
    classes: list[str] = []
    ids: dict[int, int] = {}
    for mask_id, line in enumerate(lines):
        if line.lower() == VOID_NAME:
            ids[mask_id] = VOID
        else:
            ids[mask_id] = len(classes)
            classes.append(line)
    return tuple(classes), MaskCode(ids)


def check_ids(domains: Sequence[RawDomain], code: MaskCode) -> None:
    """Ids in masks that the class file does not list are a problem of their domain."""
    for domain in domains:
        if not isinstance(domain, ImageFiles):
            continue
        beyond = {mask_id: mask for mask_id, mask in domain.mask_ids().items() if mask_id not in code.ids}
        if beyond:
            message = (
                f"Masks of {printable(domain.name)} hold {tell_ids(beyond)}, beyond the {len(code.ids)} lines of "
                f"{CLASS_FILE}, the first of which is id 0. Add the lines that are missing, `{VOID_NAME}` where an id "
                f"is no class, or give such pixels the value {VOID}."
            )
            domain.refuse(Problem("data-labels", message))


def tell_ids(shown: Mapping[int, str] | Mapping[str, str], limit: int = 8) -> str:
    """Ids, and the first mask that shows the first of them."""
    ids = ", ".join(str(mask_id) for mask_id in list(shown)[:limit])
    more = f" and {len(shown) - limit} more" if len(shown) > limit else ""
    return f"{'ids' if len(shown) > 1 else 'the id'} {ids}{more} (first in {next(iter(shown.values()))})"


def agree_on_classes(
    name: str,
    domains: Sequence[RawDomain],
    given: tuple[str, ...] | None,
    problems: list[Problem],
    warnings: list[str],
) -> tuple[str, ...]:
    """The class list of labelled domains; what they disagree on is added to the problems and warnings."""
    counts = {domain.name: found for domain in domains if (found := domain.class_counts()) is not None}
    total: Counter[str] = Counter()
    for found in counts.values():
        total.update(found)
    classes = given if given is not None else _sorted_names(total)
    unknown = [label for label in total if label not in classes]
    if unknown:
        problems.append(
            Problem("data-classes", f"{name} has samples of {_quoted(unknown)}, which are not in its list of classes.")
        )
    for spellings in _alike(classes):
        where = "; ".join(
            f"{printable(spelling)!r} at {', '.join(site for site, found in counts.items() if spelling in found)}"
            for spelling in spellings
        )
        problems.append(Problem("data-classes", f"Class names that differ only in spelling: {where}. Rename one."))
    nowhere = [label for label in classes if given is None and total[label] == 0]
    if nowhere:
        problems.append(Problem("data-empty", f"No domain of {name} has an image of {_quoted(nowhere)}."))
    if counts and len(classes) < 2:
        problems.append(Problem("data-classes", f"{name} has {len(classes)} class; there must be two or more."))
    for site, found in counts.items():
        missing = [label for label in classes if found[label] == 0 and label not in nowhere]
        if missing:
            warnings.append(f"{site} has no sample of {_quoted(missing)}.")
    return classes


def _classes_of_masks(
    name: str, domains: Sequence[RawDomain], problems: list[Problem]
) -> tuple[tuple[str, ...], MaskCode, dict[str, dict[str, str]]]:
    """Classes and mask ids as they are found, and as `Dataset.shown_in` where."""
    found = {domain.name: domain.mask_ids() for domain in domains if isinstance(domain, ImageFiles)}
    ids = sorted({mask_id for shown in found.values() for mask_id in shown})
    if len(ids) < 2:
        problems.append(
            Problem("data-labels", f"The masks of {name} hold {len(ids)} ids; there must be two classes or more.")
        )
    shown_in = {name: {str(mask_id): mask for mask_id, mask in shown.items()} for name, shown in found.items()}
    return tuple(map(str, ids)), MaskCode({mask_id: i for i, mask_id in enumerate(ids)}), shown_in


def _sorted_names(names: Counter[str]) -> tuple[str, ...]:
    numbers = all(label.isascii() and label.isdigit() for label in names)
    return tuple(sorted(names, key=int) if numbers else sorted(names))


def _alike(classes: Sequence[str]) -> list[list[str]]:
    """Groups of classes that only a computer would tell apart."""
    groups: dict[str, list[str]] = {}
    for label in classes:
        groups.setdefault(plain_name(label.casefold()), []).append(label)
    return [group for group in groups.values() if len(group) > 1]


def _quoted(labels: Sequence[str], limit: int = 8) -> str:
    shown = ", ".join(repr(printable(label)) for label in labels[:limit])
    return shown if len(labels) <= limit else f"{shown} and {len(labels) - limit} more"
