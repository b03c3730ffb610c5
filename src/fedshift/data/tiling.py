"""Segmentation at the pictures' own resolution: networks see squares of them, which `tile` says the side of.

Shrunk to what a network can take as a whole, thin structures vanish. With `image_size`, pictures are brought to that
shorter side first, so that a structure has the same width at sites with other cameras.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import Literal

import numpy as np

from fedshift.data.decoding import DEFAULT_SIZE, Size, median_shorter_side, scaled_size
from fedshift.data.domain import LARGEST_IMAGE, SMALLEST_IMAGE, Dataset, Domain, Split, Tiles
from fedshift.data.formats.images import ImageFiles
from fedshift.data.index.survey import Survey
from fedshift.errors import InputError

AUTO_SIDE = DEFAULT_SIZE
AUTO_FROM = 1.5
"""With `auto`, pictures are cut if they would lose more than this factor of their side lengths otherwise."""

Wanted = int | Literal["auto"] | None


def check_tile(tile: Wanted) -> None:
    if tile is not None and tile != "auto" and not SMALLEST_IMAGE <= tile <= LARGEST_IMAGE:
        raise InputError("config-value", f"tile is {tile}; it must be {SMALLEST_IMAGE} to {LARGEST_IMAGE} pixels.")


def surveyed_in_tiles(found: Survey, tile: Wanted, image_size: int | None) -> Survey:
    """A survey of pictures that are read as they are, and cut later. With `auto` it may be left as it is."""
    sizes = [domain.sizes() for domain in found.domains]
    side = _side(tile, found, sizes, image_size)
    if side is None:
        return found
    if not found.form.classes:
        return found  # A site without labels, of which nobody has said yet what they are elsewhere.
    if found.task != "segmentation":
        raise InputError("config-value", f"tile is for segmentation; {found.name} has classes: use image_size.")
    if other := next((one.name for one in found.domains if not isinstance(one, ImageFiles)), None):
        raise InputError("config-value", f"tile: {other} is a file of arrays; save its pictures as files.")
    scaled = [scaled_size(size, image_size) for part in sizes for size in part] or [(side, side)]
    largest = max(side, *(height for height, _ in scaled)), max(side, *(width for _, width in scaled))
    form = replace(found.form, size=largest, fit="tiles", tile=side, scaled_to=image_size)
    return replace(found, form=form, input_shape=(3, side, side))


def told_shrunk(found: Survey) -> Survey:
    """The survey with a warning if masks are about to lose what is thin."""
    sides = [median_shorter_side(sizes) for domain in found.domains if (sizes := domain.sizes())]
    if found.task != "segmentation" or not sides or max(sides) <= AUTO_FROM * min(found.input_shape[1:]):
        return found
    warning = (
        f"Pictures of up to {max(sides)} pixels are shrunk to {min(found.input_shape[1:])}, and what is thin vanishes:"
        " --set tile=auto sees them in squares at their own resolution."
    )
    return replace(found, warnings=(*found.warnings, warning))


def in_tiles(dataset: Dataset, tile: Wanted, scaled_to: int | None = None) -> Dataset:
    """A data set of pictures of one size, to be cut into squares. With `auto` it may be left as it is."""
    if len(dataset.input_shape) != 3 or dataset.task != "segmentation":
        if tile == "auto":
            return dataset
        raise InputError("config-value", f"tile is for segmentation, and {dataset.name} is none: leave it out.")
    shorter = min(dataset.input_shape[1:])
    if tile == "auto":
        tile = AUTO_SIDE if shorter > AUTO_FROM * AUTO_SIDE else None
    if tile is None:
        return dataset
    if tile > shorter:
        raise InputError("config-value", f"tile: the pictures of {dataset.name} have {shorter} pixels; take fewer.")

    def load(name: str) -> Domain:
        domain = dataset.load(name)
        train, val, test, *rest = (_cut(part, tile) for part in (domain.train, domain.val, domain.test, *domain.rest))
        return replace(domain, train=train, val=val, test=test, rest=tuple(rest))

    return replace(dataset, input_shape=(3, tile, tile), load=load, tile=tile, scaled_to=scaled_to)


def middles(split: Split, count: int) -> Split:
    """The first pictures of a split, each as the square in its middle, as plain samples of one size."""
    assert split.tiles is not None
    side, found = split.tiles.side, range(min(count, len(split)))
    places = []
    for number in found:
        top, left = (max(int(length) - side, 0) // 2 for length in split.tiles.sizes[number])
        places.append((number, slice(top, top + side), slice(left, left + side)))
    if not places:
        return Split(split.inputs[:0, :side, :side], None if split.labels is None else split.labels[:0, :side, :side])
    labels = None if split.labels is None else np.stack([split.labels[place] for place in places])
    return Split(np.stack([split.inputs[place] for place in places]), labels)


def _cut(split: Split, side: int) -> Split:
    return replace(split, tiles=Tiles(side, np.tile(np.array(split.inputs.shape[1:3]), (len(split), 1))))


def _side(tile: Wanted, found: Survey, sizes: list[Counter[Size]], image_size: int | None) -> int | None:
    if tile != "auto":
        return tile
    if found.task != "segmentation" or not any(sizes):
        return None
    shorter = image_size or max(median_shorter_side(part) for part in sizes if part)
    return AUTO_SIDE if shorter > AUTO_FROM * AUTO_SIDE else None
