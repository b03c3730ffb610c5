"""The shape of data once it is read: data sets hold domains, domains hold three splits."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

Task = Literal["classification", "segmentation"]

VOID = 255
"""The mask value of pixels without a label; losses and scores ignore them."""

MIN_SAMPLES = 10
"""A site with fewer training samples releases nothing learned from them, unless its policy says otherwise."""

SMALLEST_IMAGE, LARGEST_IMAGE = 8, 2048
"""Limits of `image_size`, in pixels."""


@dataclass(frozen=True, slots=True)
class Split:
    """Images `(n, height, width, 3)` uint8 or table rows `(n, columns)` float32 (NaN = missing), and their labels:
    classes `(n,)` int64, masks `(n, height, width)` uint8, or None if there are none."""

    inputs: NDArray[Any]
    labels: NDArray[Any] | None

    def __len__(self) -> int:
        return len(self.inputs)

    def take(self, index: NDArray[np.int64]) -> Split:
        return Split(self.inputs[index], None if self.labels is None else self.labels[index])

    def without_labels(self) -> Split:
        return Split(self.inputs, None)


@dataclass(frozen=True, slots=True)
class Skipped:
    """A sample that could not be used, why, and the code of the error it would be."""

    file: str
    reason: str
    code: str = "data-unreadable"


@dataclass(frozen=True, slots=True)
class Domain:
    """The data of one origin: a hospital, a camera, a drawing style.

    Unreadable samples are left out of the splits and named in `skipped`. Images that are nearly black, because their 16
    bits hold values of 12 bits or fewer, are kept and named in `dark`, files of which only the first of several frames
    or pages is used in `frames`. `test_given`: the test split came with the data;
    otherwise it was drawn from all samples. `rest`: splits that are scored together with test."""

    name: str
    train: Split
    val: Split
    test: Split
    skipped: tuple[Skipped, ...] = ()
    test_given: bool = True
    dark: tuple[str, ...] = ()
    rest: tuple[Split, ...] = ()
    frames: tuple[str, ...] = ()


@dataclass(frozen=True)
class DataSource:
    """Where a data set is and how to read it: all that another process needs to open it again. `task` and `classes`:
    what the sites of a federation agreed on, for a folder without labels."""

    name: str | None = None
    data_dir: Path | None = None
    image_size: int | None = None
    label_column: str | None = None
    task: Task | None = None
    classes: tuple[str, ...] | None = None


@dataclass(frozen=True)
class Dataset:
    """A named set of domains that share a task, a class list and an input shape: `(3, height, width)` for images, or
    `(columns,)` for tables, with the names in `columns`.

    `load` reads one domain. `shown_in` is filled if no class list was given and the classes are the ids found in masks:
    domain -> class -> the first mask that shows it. `mask_ids` has the id of each class in mask files, if there are
    any."""

    name: str
    task: Task
    classes: tuple[str, ...]
    domains: tuple[str, ...]
    input_shape: tuple[int, ...]
    load: Callable[[str], Domain]
    warnings: tuple[str, ...] = ()
    columns: tuple[str, ...] = ()
    shown_in: Mapping[str, Mapping[str, str]] = field(default_factory=dict)
    mask_ids: tuple[int, ...] = ()
