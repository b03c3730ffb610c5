"""The shape of data once it is read: data sets hold domains, domains hold three splits."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
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
"""Limits of `image_size` and `tile`, in pixels."""


@dataclass(frozen=True, slots=True)
class Tiles:
    """Pictures that networks see in squares of `side` pixels. `sizes` `(n, 2)`: each one's own height and width, from
    the top left of arrays that have room for the largest; beyond, pictures are mirrored and masks are `VOID`."""

    side: int
    sizes: NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Split:
    """Images `(n, height, width, 3)` uint8 or table rows `(n, columns)` float32 (NaN = missing), and their labels:
    classes `(n,)` int64, masks `(n, height, width)` uint8, or None if there are none."""

    inputs: NDArray[Any]
    labels: NDArray[Any] | None
    tiles: Tiles | None = None

    def __len__(self) -> int:
        return len(self.inputs)

    def take(self, index: NDArray[np.int64]) -> Split:
        labels = None if self.labels is None else self.labels[index]
        tiles = None if self.tiles is None else Tiles(self.tiles.side, self.tiles.sizes[index])
        return Split(self.inputs[index], labels, tiles)

    def without_labels(self) -> Split:
        return Split(self.inputs, None, self.tiles)


def joined_inputs(splits: Sequence[Split]) -> Split:
    """The inputs of several splits of one data set, without labels."""
    tiles = [split.tiles for split in splits if split.tiles is not None]
    common = Tiles(tiles[0].side, np.concatenate([part.sizes for part in tiles])) if tiles else None
    return Split(np.concatenate([np.asarray(split.inputs) for split in splits]), None, common)


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
    tile: int | Literal["auto"] | None = None


@dataclass(frozen=True)
class Dataset:
    """A named set of domains that share a task, a class list and an input shape: `(3, height, width)` for images, or
    `(columns,)` for tables, with the names in `columns`.

    `load` reads one domain. `shown_in` is filled if no class list was given and the classes are the ids found in masks:
    domain -> class -> the first mask that shows it. `mask_ids` has the id of each class in mask files, if there are
    any. `tile`: networks see squares of so many pixels, cut from pictures at their own size, or with a shorter side of
    `scaled_to` pixels."""

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
    tile: int | None = None
    scaled_to: int | None = None
