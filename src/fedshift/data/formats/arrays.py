"""A domain of images in arrays: `<domain>.npz` files, and the `.mat` files of public data sets.

A file holds `train_images, train_labels, test_images, test_labels` (and `val_...`), or just `images, labels`.
Images are uint8, `(n, h, w)` grey or `(n, h, w, 3)`; labels are numbers from 0, omitted if unknown.
"""

from __future__ import annotations

import math
import zipfile
import zlib
from collections import Counter
from collections.abc import Mapping
from functools import cached_property
from pathlib import Path
from typing import IO, Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from fedshift.data.cache import EntryWriter, cached_entry
from fedshift.data.decoding import Size, resize
from fedshift.data.domain import Domain, Split, Task
from fedshift.data.formats.base import InputFormat, Problem, Progress, Sample, printable
from fedshift.data.index.files import FileIndex, digest_of, in_parallel
from fedshift.data.splits import SPLITS, SplitName, complete_splits

CONVERSION = 1
"""Part of the cache's keys: raised when the same arrays would give other pixels or splits."""

MAX_UNPACKED = 32 * 2**30
UNSUSPICIOUS, MAX_RATIO = 256 * 2**20, 200
"""Archives that unpack to more bytes than that may not be packed more tightly: they would fill a disk with nothing."""
MAX_AT_ONCE = 2 * 2**30
BLOCK = 32 * 2**20

KERAS_NAMES = {
    "x_train": "train_images",
    "y_train": "train_labels",
    "x_test": "test_images",
    "y_test": "test_labels",
}
"""The names of the arrays in the `mnist.npz` of Keras."""

PARTS: dict[str, SplitName | None] = {"train": "train", "val": "val", "test": "test", "": None}


class ArraysError(Exception):
    """A file whose images cannot be used; the message is the reason."""

    code = "data-unreadable"


class LabelsError(ArraysError):
    """A file whose labels cannot be used."""

    code = "data-labels"


class ImageArrays:
    """Images and labels in memory-mapped arrays. `classes` names the labels; without it, their numbers do."""

    def __init__(
        self, name: str, arrays: Mapping[str, NDArray[Any]], digest: str, classes: tuple[str, ...] | None = None
    ) -> None:
        self.name = name
        self.problems: tuple[Problem, ...] = ()
        self.warnings: tuple[str, ...] = ()
        self._digest = digest
        self._classes = classes
        self._images: dict[str, NDArray[np.uint8]] = {}
        self._labels: dict[str, NDArray[np.int64]] = {}
        try:
            self._take(arrays)
        except ArraysError as problem:
            self.problems = (Problem(problem.code, f"{name}: {problem}"),)
            self._images, self._labels = {}, {}

    def _take(self, arrays: Mapping[str, NDArray[Any]]) -> None:
        for part in PARTS:
            name = _array_name(part, "images")
            images = arrays.get(name)
            if images is None:
                continue
            colour = images.ndim == 4 and images.shape[3] in (1, 3)
            if images.dtype != np.uint8 or not (images.ndim == 3 or colour):
                raise ArraysError(
                    f"{name} is {images.dtype} of shape {images.shape}; it must be uint8 of shape (n, h, w) or "
                    "(n, h, w, 3)."
                )
            self._images[part] = images if colour else images[..., None]
            labels = arrays.get(_array_name(part, "labels"))
            if labels is not None:
                self._labels[part] = _check_labels(_array_name(part, "labels"), labels, len(images))
        # An empty train_images is valid: the roles in a run decide who may have no training data.
        if not self._images.keys() & {"train", ""} or not any(map(len, self._images.values())):
            raise ArraysError("it has no images to train on; they must be called train_images or images.")
        missing = sorted(self._images.keys() - self._labels.keys())
        if self._labels and missing:
            raise LabelsError(f"it has labels, but none for {_array_name(missing[0], 'images')}.")
        highest = max((int(labels.max()) for labels in self._labels.values() if len(labels)), default=0)
        if self._classes is not None and highest >= len(self._classes):
            raise LabelsError(
                f"it has the label {highest}, but there are {len(self._classes)} classes, numbered from 0."
            )

    @property
    def task(self) -> Task | None:
        return "classification" if self._labels else None

    def class_counts(self) -> Counter[str] | None:
        if not self._labels:
            return None
        return Counter(name for names in self._label_names.values() for name in names)

    def sizes(self) -> Counter[Size]:
        sizes: Counter[Size] = Counter()
        for images in self._images.values():
            sizes[(images.shape[1], images.shape[2])] += len(images)
        return sizes

    def samples(self) -> list[Sample]:
        return [
            Sample(f"{self.name}: {_array_name(part, 'images')}[{i}]", split, digest)
            for (part, i), split, digest in self._assigned
            if split is not None
        ]

    def read(self, form: InputFormat, progress: Progress | None = None) -> Domain:
        numbers = [form.classes.index(name) for name in self._distinct]
        key = f"arrays {CONVERSION} {self._digest} {form.size} {form.fit} {self._distinct} {numbers}"
        entry = cached_entry(key, lambda writer: self._convert(writer, form, progress))
        splits = (
            Split(entry.arrays[f"{split}_inputs"], np.array(entry.arrays[f"{split}_labels"]) if self._labels else None)
            for split in SPLITS
        )
        train, val, test = splits
        return Domain(self.name, train, val, test, test_given="test" in self._images)

    def _convert(self, writer: EntryWriter, form: InputFormat, progress: Progress | None) -> None:
        assert form.size is not None
        number = {name: form.classes.index(name) for name in self._distinct}
        done = 0
        for wanted in SPLITS:
            locations = [location for location, split, _ in self._assigned if split == wanted]
            with writer.rows(f"{wanted}_inputs", (*form.size, 3), np.uint8) as append:
                for block in in_parallel(lambda location: self._fitted(location, form), locations):
                    append(np.stack(block))
                    done += len(block)
                    if progress is not None:
                        progress(self.name, done, len(self._assigned))
            if self._labels:
                labels = [number[self._label_names[part][i]] for part, i in locations]
                writer.add(f"{wanted}_labels", np.array(labels, dtype=np.int64))

    def _fitted(self, location: tuple[str, int], form: InputFormat) -> NDArray[np.uint8]:
        part, i = location
        assert form.size is not None
        image = np.broadcast_to(self._images[part][i], (*self._images[part].shape[1:3], 3))
        if image.shape[:2] == form.size:
            return image
        return np.asarray(resize(Image.fromarray(np.ascontiguousarray(image)), form.size, form.fit))

    @cached_property
    def _label_names(self) -> dict[str, list[str]]:
        return {
            part: [str(number) if self._classes is None else self._classes[number] for number in labels]
            for part, labels in self._labels.items()
        }

    @cached_property
    def _distinct(self) -> list[str]:
        return sorted({name for names in self._label_names.values() for name in names})

    @cached_property
    def _assigned(self) -> list[tuple[tuple[str, int], SplitName | None, str]]:
        """The location, split and content hash of each image. Arrays have no file names, so the content decides the
        split: it does not depend on the order of the array, and an image that occurs twice is in one split only."""
        locations = [(part, i) for part, images in self._images.items() for i in range(len(images))]
        digests = [digest_of(self._images[part][i].tobytes()) for part, i in locations]
        groups = [self._label_names[part][i] if self._labels else "" for part, i in locations]
        splits = complete_splits(digests, groups, [PARTS[part] for part, _ in locations])
        return list(zip(locations, splits, digests, strict=True))


_UNREADABLE = (
    *(ValueError, OSError, EOFError, MemoryError, KeyError, zipfile.BadZipFile, zlib.error),
    RuntimeError,  # An encrypted archive, or one packed in a way that Python does not know.
)


def read_npz(path: Path, index: FileIndex) -> tuple[dict[str, NDArray[Any]], str]:
    """The arrays of an npz file that hold images and labels, memory-mapped, and the file's content hash."""
    names = [_array_name(part, kind) for part in PARTS for kind in ("images", "labels")]
    in_file = {name: name for name in names} | KERAS_NAMES

    def unpack(writer: EntryWriter) -> None:
        with zipfile.ZipFile(path) as archive:
            members = {member.filename.removesuffix(".npy"): member for member in archive.infolist()}
            wanted = {name: members[key] for key, name in in_file.items() if key in members}
            if not any("images" in name for name in wanted):
                raise ArraysError(
                    "it needs the arrays train_images and test_images (or images), with labels beside them, but has "
                    + printable(", ".join(list(members)[:10]))
                )
            size = sum(member.file_size for member in wanted.values())
            packed = sum(member.compress_size for member in wanted.values())
            if size > MAX_UNPACKED:
                raise ArraysError(f"it unpacks to more than {MAX_UNPACKED // 2**30} GB")
            if size > UNSUSPICIOUS and size > MAX_RATIO * packed:
                raise ArraysError(f"it unpacks to more than {MAX_RATIO} times its size, which no pictures do")
            for name, member in wanted.items():
                with archive.open(member) as stream:
                    _unpack_array(stream, member.file_size, name, writer)

    try:
        digest = index.digest(path)
        return cached_entry(f"npz {digest}", unpack).arrays, digest
    except _UNREADABLE as problem:
        raise ArraysError(str(problem) or type(problem).__name__) from problem


def _unpack_array(stream: IO[bytes], size: int, name: str, writer: EntryWriter) -> None:
    """Stores one `.npy` block by block. What it declares must be what there is, before any memory is taken."""
    version = np.lib.format.read_magic(stream)
    if version not in ((1, 0), (2, 0)):
        raise ArraysError(f"{name} has version {version} of the format, which is not read here")
    read_header = np.lib.format.read_array_header_1_0 if version == (1, 0) else np.lib.format.read_array_header_2_0
    shape, is_fortran, dtype = read_header(stream)
    if dtype.hasobject:
        raise ArraysError(f"{name} holds Python objects, which are not read (allow_pickle=False)")
    declared = math.prod(shape) * dtype.itemsize
    if min(shape, default=1) < 0 or declared != size - stream.tell():
        raise ArraysError(f"{name} declares {declared:,} bytes and has {size - stream.tell():,}")
    if not shape:
        shape = (1,)
    if is_fortran and len(shape) > 1:
        if declared > MAX_AT_ONCE:
            raise ArraysError(f"{name} is stored column by column and too large for that: save it in the usual order")
        array = np.frombuffer(stream.read(declared), dtype).reshape(shape[::-1]).transpose()
        writer.add(name, np.ascontiguousarray(array))
        return
    row = math.prod(shape[1:]) * dtype.itemsize
    rows = max(1, BLOCK // max(1, row))
    with writer.rows(name, shape[1:], dtype) as append:
        for start in range(0, shape[0], rows):
            count = min(rows, shape[0] - start)
            append(np.frombuffer(stream.read(count * row), dtype).reshape(count, *shape[1:]))


def _array_name(part: str, kind: str) -> str:
    return f"{part}_{kind}" if part else kind


def _check_labels(name: str, labels: NDArray[Any], count: int) -> NDArray[np.int64]:
    if labels.ndim == 2 and labels.shape[1] == 1:
        labels = labels[:, 0]
    if labels.ndim != 1 or len(labels) != count:
        raise LabelsError(f"{name} has shape {labels.shape}; there are {count} images.")
    if labels.dtype.kind not in "iu":
        raise LabelsError(f"{name} is {labels.dtype}; labels must be whole numbers.")
    if count and labels.min() < 0:
        raise LabelsError(f"{name} has the label {labels.min()}; labels count from 0.")
    return labels.astype(np.int64)
