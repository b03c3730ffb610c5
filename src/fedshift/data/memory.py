"""Data that are in memory already: arrays, tensors or a map-style torch `Dataset` per site.

A site's data are one of

    (x, y)                      samples and labels
    x                           samples without labels
    {"train": ..., "test": ...} splits, each `(x, y)` or `x`; `val` is optional
    a data set                  anything with `__len__` and `__getitem__` that gives `(x, y)` or `x`; read once

where `x` is one of

    images  uint8 `(n, h, w)`, `(n, h, w, 3)` or channels first; floats in [0, 1] `(n, 3, h, w)` or `(n, 1, h, w)`
    tables  numbers `(n, columns)`; NaN is a missing value

and `y` holds classes `(n,)` as numbers from 0 or as names, or masks `(n, h, w)` of class numbers with 255 for void.
Arrays are not copied unless they must be converted: do not change them during a run.
"""

from __future__ import annotations

import hashlib
import json
import unicodedata
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fedshift.data.domain import VOID, Dataset, Domain, Split, Task
from fedshift.data.formats.base import Problem
from fedshift.data.formats.in_memory import LabelKind, Part, SiteData, read_part
from fedshift.data.index.survey import agree_on_classes
from fedshift.data.splits import SPLITS, SplitName, complete_splits
from fedshift.errors import InputError, nearest

_Parts = Mapping[SplitName | None, Part]
"""The parts of a site by split; None: no splits were given."""


def dataset_from(
    data: Mapping[str, SiteData], *, name: str = "memory", classes: Sequence[str] | None = None
) -> Dataset:
    """A data set with one domain for each site in `data`.

    `classes` names the classes in the order of their numbers. Without it they are the names found, sorted, or the
    numbers "0", "1", ... up to the highest. Without given splits, the hash of a sample's index decides: about 80 %
    train, 10 % val, 10 % test of each class.
    """
    if not isinstance(data, Mapping) or not data:
        raise InputError(
            "data-empty", "data must be a mapping from the name of each site to its data, with one site at least."
        )
    for site in data:
        _check_name(site)
    sites: dict[str, _Parts] = {site: _read_site(site, data[site]) for site in sorted(data)}
    shape = _common_shape(sites)
    kind = _common_kind(sites)
    warnings: list[str] = []
    names = _class_names(name, sites, kind, _given_classes(classes), warnings)
    loaded = {site: _to_domain(site, parts, names, kind) for site, parts in sites.items()}

    def load(domain: str) -> Domain:
        if domain not in loaded:
            raise InputError("unknown-name", f"{name} has no domain {domain!r}. {nearest(domain, loaded)}")
        return loaded[domain]

    is_image = len(shape) == 3
    task: Task = "segmentation" if kind == "masks" else "classification"
    return Dataset(
        name,
        task,
        names,
        tuple(sites),
        (3, *shape[:2]) if is_image else shape,
        load,
        tuple(warnings),
        () if is_image else tuple(f"x{i}" for i in range(shape[0])),
        _shown_in(sites) if kind == "masks" and classes is None else {},
        tuple(range(len(names))) if kind == "masks" else (),
    )


def digest_of(dataset: Dataset) -> str:
    """A SHA-256 of all that the domains of a data set hold: names, splits, shapes, types and bytes. The same data give
    the same digest in every process."""
    digest = hashlib.sha256(json.dumps([dataset.task, dataset.classes]).encode())
    for name in dataset.domains:
        domain = dataset.load(name)
        digest.update(json.dumps([name, domain.test_given]).encode())
        for split, part in zip(SPLITS, (domain.train, domain.val, domain.test), strict=True):
            for values in (part.inputs, part.labels):
                about = None if values is None else [values.shape, values.dtype.name]
                digest.update(json.dumps([split, about]).encode())
                if values is not None:
                    digest.update(np.ascontiguousarray(values).data)
    return digest.hexdigest()


def _check_name(site: object) -> None:
    if not isinstance(site, str) or not site or not site.isprintable():
        raise InputError("config-value", f"{site!r} cannot name a site: names are printable text.")
    if site.startswith(".") or "/" in site or "\\" in site:
        raise InputError("config-value", f"{site!r} cannot name a site: it must be usable as the name of a folder.")


def _given_classes(classes: Sequence[str] | None) -> tuple[str, ...] | None:
    if classes is None:
        return None
    if isinstance(classes, str) or not all(isinstance(label, str) and label for label in classes):
        raise InputError("config-value", "classes must be a list of names.")
    twice = [label for label, count in Counter(classes).items() if count > 1]
    if twice:
        raise InputError("data-classes", f"classes has {twice[0]!r} more than once.")
    return tuple(unicodedata.normalize("NFC", label) for label in classes)


# One site -----------------------------------------------------------------------------------------------------------


def _read_site(site: str, data: Any) -> _Parts:
    given: dict[SplitName | None, Any] = {None: data}
    if isinstance(data, Mapping):
        for split in data:
            if split not in SPLITS:
                message = f"site {site!r} has no split {split!r}: splits are called train, val and test."
                raise InputError("config-value", message)
        if "train" not in data:
            message = f"site {site!r} has no split 'train'. It may be empty, as an array of shape (0, ...)."
            raise InputError("data-empty", message)
        given = {split: data[split] for split in SPLITS if split in data}
    parts = {split: read_part(_where(site, split), some) for split, some in given.items()}
    if not any(len(part.inputs) for part in parts.values()):
        raise InputError("data-empty", f"site {site!r} has no samples.")
    trains_with_labels = "train" in parts and parts["train"].labels is not None
    for split, part in parts.items():
        if trains_with_labels and part.labels is None:
            raise InputError("data-labels", f"{_where(site, split)} has no labels, but train has.")
    return parts


def _where(site: str, split: SplitName | None) -> str:
    return f"site {site!r}" if split is None else f"site {site!r}, {split}"


# All sites ----------------------------------------------------------------------------------------------------------


def _common_shape(sites: Mapping[str, _Parts]) -> tuple[int, ...]:
    """The shape of one sample, the same everywhere: `(h, w, 3)` or `(columns,)`."""
    found = {
        _where(site, split): part.inputs.shape[1:] for site, parts in sites.items() for split, part in parts.items()
    }
    first, *others = found
    for other in others:
        if found[other] != found[first]:
            raise InputError(
                "site-mismatch",
                f"{other} has {_tell(found[other])}, but {first} has {_tell(found[first])}: give all sites the same.",
            )
    return found[first]


def _tell(shape: tuple[int, ...]) -> str:
    return f"images of {shape[1]} x {shape[0]} pixels" if len(shape) == 3 else f"tables of {shape[0]} columns"


def _common_kind(sites: Mapping[str, _Parts]) -> LabelKind:
    found = {
        part.kind: _where(site, split) for site, parts in sites.items() for split, part in parts.items() if part.kind
    }
    if not found:
        raise InputError("data-labels", "no site has labels: give (x, y) for the sites that have them.")
    if len(found) > 1:
        (one, here), (other, there) = list(found.items())[:2]
        tell = {"numbers": "class numbers", "names": "class names", "masks": "masks"}
        raise InputError(
            "site-mismatch", f"{here} has {tell[one]}, but {there} has {tell[other]}: give all sites the same."
        )
    return next(iter(found))


def _class_names(
    name: str,
    sites: Mapping[str, _Parts],
    kind: LabelKind,
    given: tuple[str, ...] | None,
    warnings: list[str],
) -> tuple[str, ...]:
    """The class list that all sites share; an error names the site whose labels it does not have."""
    for site, split, labels in _labels_of(sites):
        if kind == "names":
            unknown = [] if given is None else sorted(set(labels.tolist()).difference(given))
            if unknown:
                message = f"{_where(site, split)}: y has {unknown[0]!r}, which is not in classes."
                raise InputError("data-labels", f"{message} {nearest(unknown[0], given or ())}")
        elif given is not None and labels.size and labels.max() >= len(given):
            raise InputError(
                "data-labels",
                f"{_where(site, split)}: y has the label {labels.max()}, but there are {len(given)} classes, numbered "
                "from 0.",
            )
    if kind != "names" and given is None:
        highest = max((int(labels.max()) for _, _, labels in _labels_of(sites) if labels.size), default=-1)
        given = tuple(str(number) for number in range(highest + 1))
    problems: list[Problem] = []
    counts = {} if kind == "masks" else _counts(sites, given)
    names = agree_on_classes(name, counts, given, problems, warnings)
    if kind == "masks" and len(names) < 2:
        problems.append(Problem("data-labels", f"The masks of {name} hold {len(names)} classes; there must be two."))
    if problems:
        raise InputError(problems[0].code, problems[0].message)
    return names


def _labels_of(sites: Mapping[str, _Parts]) -> list[tuple[str, SplitName | None, NDArray[Any]]]:
    """All labels, void left out."""
    return [
        (site, split, part.labels[part.labels != VOID] if part.kind == "masks" else part.labels)
        for site, parts in sites.items()
        for split, part in parts.items()
        if part.labels is not None and part.kind is not None
    ]


def _counts(sites: Mapping[str, _Parts], names: tuple[str, ...] | None) -> dict[str, Counter[str]]:
    """Samples by class at each site that has labels."""
    counts: dict[str, Counter[str]] = {}
    for site, _, labels in _labels_of(sites):
        is_text = labels.dtype.kind == "U"
        found = labels.tolist() if is_text or names is None else [names[number] for number in labels]
        counts.setdefault(site, Counter()).update(found)
    return counts


def _shown_in(sites: Mapping[str, _Parts]) -> dict[str, dict[str, str]]:
    """As in `Dataset`: site -> class -> the first mask that shows it."""
    shown: dict[str, dict[str, str]] = {site: {} for site in sites}
    for site, parts in sites.items():
        for split, part in parts.items():
            for i, mask in enumerate(part.labels if part.kind == "masks" and part.labels is not None else ()):
                for number in np.unique(mask[mask != VOID]):
                    shown[site].setdefault(str(number), f"{_where(site, split)}: mask {i}")
    return shown


def _to_domain(site: str, parts: _Parts, names: tuple[str, ...], kind: LabelKind) -> Domain:
    given = [split for split, part in parts.items() for _ in range(len(part.inputs))]
    indices = [str(i) for part in parts.values() for i in range(len(part.inputs))]
    groups = [label for part in parts.values() for label in _groups(part)]
    chosen = np.array(complete_splits(indices, groups, given), dtype=np.str_)
    wholes = [_numbered(part, names, kind) for part in parts.values()]
    # Without samples, a split is empty.
    splits: dict[str, Split] = dict.fromkeys(SPLITS, wholes[0].take(np.arange(0)))
    end = 0
    for whole in wholes:
        own = chosen[end : (end := end + len(whole))]
        for split in SPLITS:
            index = np.flatnonzero(own == split)
            if len(index):
                splits[split] = _read_only(whole) if len(index) == len(whole) else _frozen(whole.take(index))
    return Domain(site, splits["train"], splits["val"], splits["test"], test_given="test" in parts)


def _groups(part: Part) -> list[str]:
    """The class of each sample, within which splits are chosen; masks and unlabelled samples are one group."""
    if part.labels is None or part.kind == "masks":
        return [""] * len(part.inputs)
    return [str(label) for label in part.labels]


def _numbered(part: Part, names: tuple[str, ...], kind: LabelKind) -> Split:
    labels = part.labels
    if labels is not None and part.kind == "names":
        number = {name: i for i, name in enumerate(names)}
        labels = np.array([number[label] for label in labels.tolist()], dtype=np.int64)
    elif labels is not None and part.kind is None and kind == "masks":
        labels = np.empty((0, *part.inputs.shape[1:3]), dtype=np.uint8)
    return Split(part.inputs, labels)


def _read_only(split: Split) -> Split:
    """The same arrays, protected from changes through this split."""
    return _frozen(Split(split.inputs.view(), None if split.labels is None else split.labels.view()))


def _frozen(split: Split) -> Split:
    for array in (split.inputs, split.labels):
        if array is not None:
            array.flags.writeable = False
    return split
