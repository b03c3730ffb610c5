"""The samples that a user gives for one site or split, as checked NumPy arrays: see `fedshift.data.memory` for what
they may be. Errors begin with `where`, the name of the site and split."""

from __future__ import annotations

import unicodedata
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, Protocol

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from fedshift.data.decoding import to_rgb
from fedshift.data.domain import VOID
from fedshift.errors import InputError

MAX_CLASSES = 65_536
"""Higher labels are taken for a mistake, such as identifiers instead of classes."""


class MapStyle(Protocol):
    """What torch calls a map-style data set."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int, /) -> Any: ...


SiteData = NDArray[Any] | tuple[Any, Any] | Mapping[str, Any] | MapStyle
"""The data of one site, as described in `fedshift.data.memory`. Tensors count as arrays."""

LabelKind = Literal["numbers", "names", "masks"]


@dataclass(frozen=True)
class Part:
    """The samples of a site that were given together: inputs as in `Split`; labels `(n,)` int64 or text, or masks
    `(n, h, w)` uint8. `kind` is None without labels, and for an empty list of labels."""

    inputs: NDArray[Any]
    labels: NDArray[Any] | None
    kind: LabelKind | None


def read_part(where: str, data: Any) -> Part:
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
        return Part(inputs, None, None)
    labels = _to_array(f"{where}: y", y, text=True)
    if labels.ndim == 0 or len(labels) != len(inputs):
        count = len(labels) if labels.ndim else 1
        raise InputError("data-labels", f"{where}: x has {len(inputs)} samples, but y has {count}.")
    return Part(inputs, *_to_labels(where, labels, inputs))


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
