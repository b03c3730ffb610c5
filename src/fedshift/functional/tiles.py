"""Pictures of any size through a network for squares: overlapping tiles, whose answers are blended."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import product

import torch
from torch import Tensor
from torch.nn import functional as F

OVERLAP = 4
"""Neighbouring tiles share a side divided by this, or more."""
_AT_ONCE = 16


def tile_starts(length: int, side: int, overlap: int = 0) -> list[int]:
    """Where tiles begin along `length` pixels: as few as cover them with at least this overlap, evenly spread."""
    count = max(1, -(-(length - overlap) // (side - overlap)))
    return [round(number * max(length - side, 0) / max(count - 1, 1)) for number in range(count)]


def tile_weights(side: int, overlap: int) -> Tensor:
    """How much each pixel `(side, side)` of a tile counts: less towards its borders, where a network sees less."""
    ramp = ((torch.arange(side) + 1) / (overlap + 1)).clamp(max=1.0)
    edge = torch.minimum(ramp, ramp.flip(0))
    return edge[:, None] * edge[None, :]


def mirrored(picture: Tensor, least: int) -> Tensor:
    """A picture `(h, w, ...)` with sides of at least `least` pixels: what is missing is mirrored."""
    for axis in (0, 1):
        length = picture.shape[axis]
        if length < least:
            at = torch.arange(least).remainder(2 * length)
            picture = picture.index_select(axis, torch.minimum(at, 2 * length - 1 - at))
    return picture


def stitched_rows(function: Callable[[Tensor], Tensor], picture: Tensor, side: int) -> Iterator[Tensor]:
    """The probabilities of a picture `(h, w, 3)` uint8 from top to bottom, some rows `(classes, rows, w)` at a time:
    all of a large picture would take gigabytes. `function`: tiles `(b, 3, side, side)` in [0, 1] to scores
    `(b, classes, side, side)`."""
    height, width = picture.shape[:2]
    picture, overlap = mirrored(picture, side), side // OVERLAP
    tops, lefts = (tile_starts(length, side, overlap) for length in picture.shape[:2])
    weights = tile_weights(side, overlap)
    across = torch.zeros(picture.shape[1])
    for left in lefts:
        across[left : left + side] += weights[side // 2]
    sums, down = torch.zeros(0), torch.zeros(side)
    for top, following in zip(tops, [*tops[1:], height], strict=True):
        for part in _split(lefts):
            tiles = torch.stack([picture[top : top + side, left : left + side] for left in part])
            shares = function(tiles.permute(0, 3, 1, 2).float() / 255).float().softmax(1).cpu()
            if not len(sums):
                sums = torch.zeros(shares.shape[1], side, picture.shape[1])
            for left, share in zip(part, shares, strict=True):
                sums[:, :, left : left + side] += share * weights
        down += weights[side // 2]
        ready = following - top
        yield (sums[:, :ready] / (down[:ready, None] * across))[:, :, :width]
        sums, down = F.pad(sums[:, ready:], (0, 0, 0, ready)), F.pad(down[ready:], (0, ready))


def stitched(function: Callable[[Tensor], Tensor], picture: Tensor, side: int) -> Tensor:
    """All probabilities `(classes, h, w)` of a picture."""
    return torch.cat(list(stitched_rows(function, picture, side)), dim=1)


def stitched_classes(function: Callable[[Tensor], Tensor], picture: Tensor, side: int) -> Tensor:
    """The likeliest class `(h, w)` uint8 of each pixel of a picture."""
    return torch.cat([rows.argmax(0).to(torch.uint8) for rows in stitched_rows(function, picture, side)])


def grid(height: int, width: int, side: int) -> list[tuple[int, int]]:
    """Top and left of the fewest tiles that cover a picture."""
    return list(product(tile_starts(height, side), tile_starts(width, side)))


def _split(lefts: Sequence[int]) -> Iterator[Sequence[int]]:
    for start in range(0, len(lefts), _AT_ONCE):
        yield lefts[start : start + _AT_ONCE]
