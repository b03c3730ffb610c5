"""Checks a user's data before a run: reports everything that is wrong, not just the first problem."""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from fedshift.data.decoding import Size
from fedshift.data.domain import MIN_SAMPLES, DataSource, Domain, Skipped, Split, Task
from fedshift.data.formats.base import (
    CLASS_FILE,
    TOLERATED,
    InputFormat,
    Problem,
    Progress,
    RawDomain,
    Sample,
    Unread,
    printable,
)
from fedshift.data.formats.images import ImageFiles
from fedshift.data.formats.masks import VOID_NAME, tell_ids
from fedshift.data.index.survey import Survey
from fedshift.data.registry import survey
from fedshift.data.splits import SPLITS, SplitName
from fedshift.errors import InputError


@dataclass(frozen=True)
class DomainReport:
    """One domain. `classes` counts samples by class and split (for masks: images that show the class); it is None
    without labels. `sizes` counts images by (height, width) before resizing. `unread`: files that are no samples."""

    name: str
    splits: dict[SplitName, int]
    classes: dict[str, dict[SplitName, int]] | None
    sizes: dict[Size, int]
    skipped: tuple[Skipped, ...]
    unread: tuple[Unread, ...] = ()


@dataclass(frozen=True)
class Duplicate:
    """Two samples with the same content, which makes results look better than they are."""

    first: str
    second: str
    across: Literal["domains", "splits"]


@dataclass(frozen=True)
class DataReport:
    """What a check found. Problems keep a run from starting; warnings are for the user to judge."""

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

    def as_json(self) -> dict[str, Any]:
        """Everything, as what JSON can say; a size is `HEIGHTxWIDTH`."""
        values = {"ok": self.ok, **asdict(self)}
        for domain in values["domains"]:
            domain["sizes"] = {f"{height}x{width}": count for (height, width), count in domain["sizes"].items()}
        return values


def check_data(source: DataSource, progress: Progress | None = None) -> DataReport:
    """Reads everything and reports problems instead of raising. Decoded images stay cached for the next run."""
    try:
        found = survey(source)
    except InputError as error:
        name = source.name or str(source.data_dir)
        return DataReport(name, "classification", (), (), (), (), (Problem(error.code, error.message),), ())
    problems, warnings = list(found.problems), [*found.warnings, *_about_lone_ids(found)]
    form = _form_for_all(found)
    reports = []
    for raw in found.domains:
        try:
            domain = raw.read(form, progress)
        except InputError as error:
            problems.append(Problem(error.code, error.message))
            continue
        report = _report(raw, domain, form)
        reports.append(report)
        if domain.dark:
            warnings.append(_about_dark(domain))
        if domain.frames:
            warnings.append(about_frames(domain))
        if not raw.problems:
            _judge(report, found.task, problems, warnings)
    duplicates = _find_duplicates({raw.name: raw.samples() for raw in found.domains})
    for across in ("domains", "splits"):
        count = sum(duplicate.across == across for duplicate in duplicates)
        if count:
            warnings.append(f"{count} samples occur again, byte for byte, across {across}.")
    return DataReport(
        found.name,
        found.task,
        found.form.classes,
        found.input_shape,
        tuple(reports),
        duplicates,
        tuple(problems),
        tuple(warnings),
    )


def _form_for_all(found: Survey) -> InputFormat:
    """The form with all labels that occur, so that data with wrong classes can still be read."""
    found_labels = {label for domain in found.domains for label in domain.class_counts() or ()}
    unknown = found_labels - set(found.form.classes)
    return replace(found.form, classes=found.form.classes + tuple(sorted(unknown)))


def _report(raw: RawDomain, domain: Domain, form: InputFormat) -> DomainReport:
    splits = _splits_of(domain)
    classes: dict[str, dict[SplitName, int]] | None = None
    if any(split.labels is not None for split in splits.values()):
        counts = {
            name: _count_classes(split.labels, len(form.classes))
            for name, split in splits.items()
            if split.labels is not None
        }
        classes = {
            label: {name: int(count[number]) for name, count in counts.items()}
            for number, label in enumerate(form.classes)
        }
    sizes = {name: len(split) for name, split in splits.items()}
    unread = raw.unread if isinstance(raw, ImageFiles) else ()
    return DomainReport(domain.name, sizes, classes, dict(raw.sizes()), domain.skipped, unread)


def _count_classes(labels: NDArray[Any], classes: int) -> NDArray[np.int64]:
    """Samples of each class; for masks `(n, h, w)`, images that show it."""
    if labels.ndim == 1:
        return np.bincount(labels, minlength=classes)
    return np.array([(labels == number).any(axis=(1, 2)).sum() for number in range(classes)], dtype=np.int64)


def _judge(report: DomainReport, task: Task, problems: list[Problem], warnings: list[str]) -> None:
    """Adds what is wrong with the content of one domain."""
    skipped, usable = len(report.skipped), sum(report.splits.values())
    if skipped:
        first = report.skipped[0]
        message = (
            f"{skipped} of {skipped + usable} samples of {report.name} cannot be used; the first is {first.file}: "
            f"{first.reason}."
        )
        if skipped > TOLERATED * (skipped + usable):
            problems.append(Problem(first.code, message))
        else:
            warnings.append(message)
    if not report.splits["train"]:
        problems.append(Problem("data-empty", f"{report.name} has nothing to train on."))
    elif report.splits["train"] < MIN_SAMPLES:
        warnings.append(
            f"{report.name} has {report.splits['train']} training samples, and policy.min_samples asks for "
            f"{MIN_SAMPLES} unless it is lowered: as a source or client it would be skipped in every round."
        )
    if not any("train" in counts for counts in (report.classes or {}).values()):
        what = "masks" if task == "segmentation" else "labels"
        warnings.append(
            f"{report.name} has no {what} to train on: it can only be a target or client, no source or home."
        )
    for name in ("val", "test"):
        if not report.splits[name]:
            warnings.append(f"{report.name} has no samples in {name}.")
    for label, counts in (report.classes or {}).items():
        total = sum(counts.values())
        if total and counts.get("train") == 0:
            warnings.append(f"{report.name} has samples of {printable(label)!r}, but none to train on.")
        if not total and task == "segmentation":
            warnings.append(f"No mask of {report.name} shows {printable(label)!r}.")


def _about_lone_ids(found: Survey) -> list[str]:
    """Warnings of mask ids in one domain only. The roles are not known here; a run may refuse such ids."""
    masked = {domain: shown for domain, shown in found.shown_in.items() if shown}
    warnings = []
    for domain, shown in masked.items():
        others = {label for other in masked if other != domain for label in masked[other]}
        alone = {label: mask for label, mask in shown.items() if label not in others}
        if alone and others:
            warnings.append(
                f"Only masks of {printable(domain)} hold {tell_ids(alone)}. Where it is a target or client, a run "
                f"refuses that, unless {CLASS_FILE} lists the classes (`{VOID_NAME}` for an id that is none)."
            )
    return warnings


def _about_dark(domain: Domain) -> str:
    return (
        f"{len(domain.dark)} images of {domain.name} have 16 bits per value but none above 4095, so they are nearly "
        f"black; the first is {domain.dark[0]}. If they come from a camera or scanner of 10 to 12 bits, multiply their "
        "values (12 bits: by 16) or save them with 8 bits, in the same way at all sites."
    )


def about_frames(domain: Domain) -> str:
    """A warning of images of which only a part is used."""
    return (
        f"{len(domain.frames)} images of {domain.name} have several frames or pages, of which only the first is read; "
        f"the first such image is {domain.frames[0]}."
    )


def _find_duplicates(samples: dict[str, list[Sample]]) -> tuple[Duplicate, ...]:
    """Samples whose content was found before in another domain or split."""
    first: dict[str, tuple[str, Sample]] = {}
    duplicates = []
    for domain, own in samples.items():
        for sample in own:
            if not sample.digest:
                continue
            met_in, met = first.setdefault(sample.digest, (domain, sample))
            if met_in != domain:
                duplicates.append(Duplicate(met.name, sample.name, "domains"))
            elif met.split != sample.split:
                duplicates.append(Duplicate(met.name, sample.name, "splits"))
    return tuple(duplicates)


def _splits_of(domain: Domain) -> dict[SplitName, Split]:
    return dict(zip(SPLITS, (domain.train, domain.val, domain.test), strict=True))
