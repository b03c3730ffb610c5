"""A domain of images in arrays: `<domain>.npz` files, and the `.mat` files of public data sets.

A file holds `train_images, train_labels, test_images, test_labels` (and `val_...`), or just `images, labels`.
Images are uint8, `(n, h, w)` grey or `(n, h, w, 3)`; labels are numbers from 0, omitted if unknown.
"""

from __future__ import annotations

import zipfile
import zlib
from collections import Counter
from collections.abc import Mapping
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from fedshift.data.cache import EntryWriter, cached_arrays, cached_entry
from fedshift.data.decoding import Size, resize
from fedshift.data.domain import Domain, Split, Task
from fedshift.data.formats.base import InputFormat, Problem, Progress, Sample, printable
from fedshift.data.index.files import FileIndex, digest_of, in_parallel
from fedshift.data.splits import SPLITS, SplitName, complete_splits

CONVERSION = 1
"""Part of the cache's keys: raised when the same arrays would give other pixels or splits."""

MAX_UNPACKED = 32 * 2**30

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


def read_npz(path: Path, index: FileIndex) -> tuple[dict[str, NDArray[Any]], str]:
    """The arrays of an npz file that hold images and labels, memory-mapped, and the file's content hash."""
    names = [_array_name(part, kind) for part in PARTS for kind in ("images", "labels")]
    in_file = {name: name for name in names} | KERAS_NAMES

    def load() -> dict[str, NDArray[Any]]:
        with zipfile.ZipFile(path) as archive:
            if sum(member.file_size for member in archive.infolist()) > MAX_UNPACKED:
                raise ArraysError(f"it unpacks to more than {MAX_UNPACKED // 2**30} GB")
        with np.load(path, allow_pickle=False) as file:
            found = {name: np.atleast_1d(file[key]) for key, name in in_file.items() if key in file.files}
            if not any("images" in name for name in found):
                raise ArraysError(
                    "it needs the arrays train_images and test_images (or images), with labels beside them, but has "
                    + printable(", ".join(file.files[:10]))
                )
            return found

    try:
        digest = index.digest(path)
        return cached_arrays(f"npz {digest}", load), digest
    except (ValueError, OSError, EOFError, MemoryError, KeyError, zipfile.BadZipFile, zlib.error) as problem:
        raise ArraysError(str(problem) or type(problem).__name__) from problem


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
