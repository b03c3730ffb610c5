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
from dataclasses import dataclass
from typing import Any, Literal, Protocol

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from fedshift.data.decoding import to_rgb
from fedshift.data.domain import VOID, Dataset, Domain, Split, Task
from fedshift.data.formats.base import Problem
from fedshift.data.index.survey import agree_on_classes
from fedshift.data.splits import SPLITS, SplitName, complete_splits
from fedshift.errors import InputError, nearest

MAX_CLASSES = 65_536
"""Higher labels are taken for a mistake, such as identifiers instead of classes."""


class MapStyle(Protocol):
    """What torch calls a map-style data set."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int, /) -> Any: ...


SiteData = NDArray[Any] | tuple[Any, Any] | Mapping[str, Any] | MapStyle
"""The data of one site, as described above. Tensors count as arrays."""

LabelKind = Literal["numbers", "names", "masks"]


@dataclass(frozen=True)
class _Part:
    """The samples of a site that were given together: inputs as in `Split`; labels `(n,)` int64 or text, or masks
    `(n, h, w)` uint8. `kind` is None without labels, and for an empty list of labels."""

    inputs: NDArray[Any]
    labels: NDArray[Any] | None
    kind: LabelKind | None


_Parts = Mapping[SplitName | None, _Part]
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
    parts = {split: _read_part(_where(site, split), some) for split, some in given.items()}
    if not any(len(part.inputs) for part in parts.values()):
        raise InputError("data-empty", f"site {site!r} has no samples.")
    trains_with_labels = "train" in parts and parts["train"].labels is not None
    for split, part in parts.items():
        if trains_with_labels and part.labels is None:
            raise InputError("data-labels", f"{_where(site, split)} has no labels, but train has.")
    return parts


def _where(site: str, split: SplitName | None) -> str:
    return f"site {site!r}" if split is None else f"site {site!r}, {split}"


def _read_part(where: str, data: Any) -> _Part:
    if isinstance(data, tuple):
        if len(data) != 2:
            raise InputError("data-unreadable", f"{where}: a tuple must be (x, y), but has {len(data)} values.")
        x, y = data
    elif _is_array(data):
        x, y = data, None
    elif hasattr(data, "__len__") and hasattr(data, "__getitem__"):
        x, y = _read_map_style(where, data)
    else:
        raise InputError(
            "data-unreadable",
            f"{where}: data of type {type(data).__name__} cannot be read. Give arrays (x, y), x alone, or a data "
            "set with __len__ and __getitem__.",
        )
    inputs = _to_inputs(where, _to_array(f"{where}: x", x))
    if y is None:
        return _Part(inputs, None, None)
    labels = _to_array(f"{where}: y", y, text=True)
    if labels.ndim == 0 or len(labels) != len(inputs):
        count = len(labels) if labels.ndim else 1
        raise InputError("data-labels", f"{where}: x has {len(inputs)} samples, but y has {count}.")
    return _Part(inputs, *_to_labels(where, labels, inputs))


def _is_array(data: Any) -> bool:
    return isinstance(data, np.ndarray | list) or hasattr(data, "__array__")


def _to_array(where: str, values: Any, text: bool = False) -> NDArray[Any]:
    """Lists, tensors and anything else that NumPy can convert; never an array of objects, except for text."""
    try:
        if hasattr(values, "detach"):  # A tensor, without importing torch.
            values = values.detach().cpu()
            # NumPy has no bfloat16.
            values = (values.float() if values.is_floating_point() else values).numpy()
        array = np.asarray(values)
    except (ValueError, TypeError, RuntimeError) as problem:
        raise InputError("data-unreadable", f"{where} cannot be made one array: {problem}.") from problem
    if text and array.dtype.kind in "OT" and all(isinstance(value, str) for value in array.ravel()):
        array = array.astype(np.str_)
    if array.dtype.kind not in ("biufU" if text else "biuf"):
        kind = "Python objects" if array.dtype.kind == "O" else str(array.dtype)
        raise InputError(
            "data-labels" if text else "data-unreadable",
            f"{where} is an array of {kind}; it must hold numbers{' or text' if text else ' of one shape per sample'}.",
        )
    return array


def _to_inputs(where: str, x: NDArray[Any]) -> NDArray[Any]:
    if x.ndim == 2:
        return _to_rows(where, x)
    if x.ndim not in (3, 4):
        raise InputError(
            "data-unreadable",
            f"{where}: x has shape {x.shape}; images are (n, h, w), (n, h, w, 3) or (n, 3, h, w), tables (n, columns).",
        )
    if not all(x.shape[1:]):
        raise InputError("data-empty", f"{where}: x has shape {x.shape}: its images have no pixels.")
    is_float = x.dtype.kind == "f"
    if x.dtype != np.uint8 and not (is_float and x.ndim == 4):
        raise InputError(
            "data-unreadable",
            f"{where}: x is {x.dtype} of shape {x.shape}; images are uint8, or floats from 0 to 1 of shape "
            "(n, 3, h, w) or (n, 1, h, w).",
        )
    return _to_bytes(where, _channels_last(where, x, is_float))


def _to_rows(where: str, x: NDArray[Any]) -> NDArray[np.float32]:
    if not x.shape[1]:
        raise InputError("data-empty", f"{where}: x has no columns.")
    limit = np.finfo(np.float32).max
    if x.dtype.kind == "f" and (np.abs(x) > limit).any():
        column = int(np.flatnonzero((np.abs(x) > limit).any(axis=0))[0])
        raise InputError(
            "data-unreadable", f"{where}: column {column} of x holds values that are infinite or beyond 32-bit floats."
        )
    return np.ascontiguousarray(x, dtype=np.float32)


def _channels_last(where: str, x: NDArray[Any], is_float: bool) -> NDArray[Any]:
    """Images as `(n, h, w, 1 or 3)`. Where both ends could be channels, those of floats come first, as in torch."""
    if x.ndim == 3:
        return x[..., None]
    first, last = x.shape[1] in (1, 3), x.shape[3] in (1, 3)
    if not first and not last:
        raise InputError("data-unreadable", f"{where}: x has shape {x.shape}; images have 1 or 3 channels.")
    return x.transpose(0, 2, 3, 1) if first and (is_float or not last) else x


def _to_bytes(where: str, images: NDArray[Any]) -> NDArray[np.uint8]:
    """`(n, h, w, 3)` uint8."""
    if images.dtype.kind == "f" and images.size:
        if not np.isfinite(images).all():
            raise InputError("data-unreadable", f"{where}: x has images with NaN or infinite values.")
        low, high = float(images.min()), float(images.max())
        if low < 0 or high > 1:
            raise InputError(
                "data-unreadable",
                f"{where}: x has values from {low:g} to {high:g}; images of floats go from 0 to 1. Divide by 255, "
                "undo a normalisation, or give uint8.",
            )
    levels = np.rint(images * 255).astype(np.uint8) if images.dtype.kind == "f" else images
    return np.ascontiguousarray(np.broadcast_to(levels, (*images.shape[:3], 3)))


def _to_labels(where: str, y: NDArray[Any], inputs: NDArray[Any]) -> tuple[NDArray[Any], LabelKind | None]:
    if y.ndim == 2 and y.shape[1] == 1:
        y = y[:, 0]
    if y.ndim == 3 and inputs.ndim == 4:
        return _to_masks(where, y, inputs), "masks"
    if y.ndim != 1:
        raise InputError(
            "data-labels", f"{where}: y has shape {y.shape}; classes are (n,), masks (n, h, w) for images (n, h, w, 3)."
        )
    if not len(y):
        return np.empty(0, dtype=np.int64), None
    if y.dtype.kind == "U":
        # As for class folders: Unicode spells an accented letter in two ways.
        names = [unicodedata.normalize("NFC", label) for label in y.tolist()]
        bad = [i for i, label in enumerate(names) if not label.strip() or not label.isprintable()]
        if bad:
            message = f"{where}: y of sample {bad[0]} is {names[bad[0]]!r}; a class name is printable text."
            raise InputError("data-labels", message)
        return np.array(names), "names"
    if y.dtype.kind == "f":
        raise InputError("data-labels", f"{where}: y is {y.dtype}; classes are whole numbers or names.")
    if y.min() < 0:
        raise InputError("data-labels", f"{where}: y has the label {y.min()}; classes are numbered from 0.")
    if y.max() >= MAX_CLASSES:
        message = f"{where}: y has the label {y.max()}; class numbers go up to {MAX_CLASSES - 1}."
        raise InputError("data-labels", message)
    return y.astype(np.int64), "numbers"


def _to_masks(where: str, y: NDArray[Any], inputs: NDArray[Any]) -> NDArray[np.uint8]:
    if y.dtype.kind not in "biu":
        raise InputError("data-labels", f"{where}: y is {y.dtype}; masks hold whole numbers.")
    if y.shape != inputs.shape[:3]:
        raise InputError("data-labels", f"{where}: masks have shape {y.shape[1:]}, images {inputs.shape[1:3]}.")
    if y.size and (y.min() < 0 or y.max() > VOID):
        value = y.min() if y.min() < 0 else y.max()
        raise InputError("data-labels", f"{where}: a mask holds {value}; classes are 0 to 254, and {VOID} is void.")
    return np.ascontiguousarray(y, dtype=np.uint8)


def _read_map_style(where: str, data: MapStyle) -> tuple[NDArray[Any], NDArray[Any] | None]:
    """Every sample of a data set, read once."""
    if not len(data):
        raise InputError("data-empty", f"{where}: the data set is empty.")
    inputs: list[NDArray[Any]] = []
    labels: list[NDArray[Any]] = []
    for i in range(len(data)):
        try:
            sample = data[i]
        except Exception as problem:  # Somebody else's code, which may raise anything.
            raise InputError("data-unreadable", f"{where}: sample {i} cannot be read: {problem!r}.") from problem
        values = sample if isinstance(sample, tuple | list) else (sample,)
        if len(values) not in (1, 2) or isinstance(values[0], Mapping):
            what = f"a {type(sample).__name__}" + (f" of {len(values)}" if values is sample else "")
            raise InputError("data-unreadable", f"{where}: sample {i} is {what}; it must be (x, y) or x.")
        inputs.append(_to_sample(f"{where}: x of sample {i}", values[0]))
        if len(values) == 2:
            labels.append(_to_sample(f"{where}: y of sample {i}", values[1], is_label=True))
        for what, read in (("x", inputs), ("y", labels)):
            if read and (read[-1].shape != read[0].shape or _is_bytes(read[-1]) != _is_bytes(read[0])):
                raise InputError(
                    "data-unreadable",
                    f"{where}: {what} of sample {i} is {read[-1].dtype} of shape {read[-1].shape}, but that of sample "
                    f"0 is {read[0].dtype} of shape {read[0].shape}.",
                )
    if labels and len(labels) != len(inputs):
        raise InputError("data-labels", f"{where}: {len(labels)} of {len(inputs)} samples have a label.")
    return np.stack(inputs), np.stack(labels) if labels else None


def _to_sample(where: str, value: Any, is_label: bool = False) -> NDArray[Any]:
    if isinstance(value, Image.Image):
        # The pixels of a mask are ids; those of an image, colours.
        return np.asarray(value if is_label else to_rgb(value))
    return _to_array(where, value, text=is_label)


def _is_bytes(values: NDArray[Any]) -> bool:
    return values.dtype == np.uint8


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
                splits[split] = _read_only(whole if len(index) == len(whole) else whole.take(index))
    return Domain(site, splits["train"], splits["val"], splits["test"], test_given="test" in parts)


def _groups(part: _Part) -> list[str]:
    """The class of each sample, within which splits are chosen; masks and unlabelled samples are one group."""
    if part.labels is None or part.kind == "masks":
        return [""] * len(part.inputs)
    return [str(label) for label in part.labels]


def _numbered(part: _Part, names: tuple[str, ...], kind: LabelKind) -> Split:
    labels = part.labels
    if labels is not None and part.kind == "names":
        number = {name: i for i, name in enumerate(names)}
        labels = np.array([number[label] for label in labels.tolist()], dtype=np.int64)
    elif labels is not None and part.kind is None and kind == "masks":
        labels = np.empty((0, *part.inputs.shape[1:3]), dtype=np.uint8)
    return Split(part.inputs, labels)


def _read_only(split: Split) -> Split:
    """The same arrays, protected from changes through this split."""
    inputs, labels = split.inputs.view(), None if split.labels is None else split.labels.view()
    for array in (inputs, labels):
        if array is not None:
            array.flags.writeable = False
    return Split(inputs, labels)
