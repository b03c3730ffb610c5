"""Ten digits in five looks, 32x32 pixels in colour: handwritten, photo, typeset, street, chalk.

Handwriting comes from scikit-learn's digits, photographs from its two sample photos, typefaces from matplotlib.
Writers, typefaces and pieces of the photos in a test split are in no training split of any domain. Within a split
the domains draw on the same writers (handwritten, photo, chalk) or typefaces (typeset, street), as MNIST and MNIST-M
do.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from fedshift.data.builtin.generated import GeneratedDataset
from fedshift.data.builtin.glyphs import Glyphs, read_glyphs
from fedshift.data.builtin.handwriting import SIZE, read_handwriting
from fedshift.data.builtin.raster import (
    Floats,
    Generator,
    Ints,
    blur,
    luminance,
    moved,
    over,
    per_picture,
    pixel_grid,
    placement,
    smooth_noise,
    smoothstep,
    uniform,
    warp,
)

PER_CLASS = {"train": 80, "val": 10, "test": 30}

_PHOTO_TILES = {"train": (0, 1, 2), "val": (3,), "test": (4,)}
"""Each photo is cut into 3 x 5 tiles; the tile in row r and column c belongs to the split with (2r + c) mod 5, so
that every split has tiles from all over the photos."""


def handwritten(split: str, rng: Generator) -> tuple[Floats, Ints]:
    """White on black, as scanned."""
    ink, labels = _written(split, rng)
    return np.repeat(ink[..., None], 3, axis=3), labels


def photo(split: str, rng: Generator) -> tuple[Floats, Ints]:
    """Handwriting that inverts a piece of a photograph: |piece - ink|, as Ganin & Lempitsky made MNIST-M
    ("Unsupervised Domain Adaptation by Backpropagation", ICML 2015)."""
    ink, labels = _written(split, rng)
    return np.abs(_photo_pieces(split, len(labels), rng) - ink[..., None]), labels


def typeset(split: str, rng: Generator) -> tuple[Floats, Ints]:
    """Crisp coloured type over coloured shapes."""
    labels = _balanced(split, rng)
    count = len(labels)
    glyphs = read_glyphs()
    place = placement(
        scale=rng.uniform(0.95, 1.4, count),
        degrees=rng.uniform(-20, 20, count),
        shear=rng.uniform(-0.25, 0.25, count),
        aspect=rng.uniform(0.8, 1.25, count),
    )
    place = moved(place, rng.uniform(-0.12, 0.12, count), rng.uniform(-0.12, 0.12, count))
    field = _warp_field(glyphs, glyphs.choose(labels, split, rng), place)
    clutter = _coloured_shapes(count, rng)
    around = luminance(clutter[:, 6:26, 6:26].mean(axis=(1, 2)))
    face = _colour_apart_from(around, 0.4, rng)
    weight = per_picture(uniform(rng, -0.01, 0.05, count))
    # Two in five digits have an outline in another colour.
    outline = per_picture((rng.random(count) < 0.4) * uniform(rng, 0.05, 0.1, count))
    picture = over(clutter, uniform(rng, 0, 1, (count, 3)), _ink(field, weight + outline, 0.04) * (outline > 0))
    return over(picture, face, _ink(field, weight, 0.04)), labels


def street(split: str, rng: Generator) -> tuple[Floats, Ints]:
    """House numbers: neighbours at both sides, oblique, blurred, unevenly lit, dull and noisy."""
    labels = _balanced(split, rng)
    count = len(labels)
    glyphs = read_glyphs()
    rows = glyphs.choose(labels, split, rng)
    place = placement(
        scale=rng.uniform(1.05, 1.45, count),
        degrees=rng.uniform(-8, 8, count),
        shear=rng.uniform(-0.2, 0.2, count),
        aspect=rng.uniform(0.75, 1.15, count),
    )
    place = moved(place, rng.uniform(-0.08, 0.08, count), rng.uniform(-0.08, 0.08, count))
    place[:, 2, :2] = rng.uniform(-0.25, 0.25, (count, 2))
    number = _warp_field(glyphs, rows, place)
    for side in (-1, 1):
        beside = glyphs.in_same_typeface(rows, rng.integers(10, size=count))
        gap = (glyphs.width[rows] + glyphs.width[beside]) / 2 + rng.uniform(0.08, 0.25, count)
        there = rng.random(count) < 0.6
        neighbour = _warp_field(glyphs, beside, moved(place, side * gap))
        number = np.where(per_picture(there), np.maximum(number, neighbour), number)
    weight = per_picture(uniform(rng, 0.0, 0.08, count))

    wall = uniform(rng, 0.15, 0.85, (count, 1)) + uniform(rng, -0.12, 0.12, (count, 3))
    rough = smooth_noise(rng, count, SIZE, 12) - 0.5
    picture = per_picture(wall) + (rough * per_picture(uniform(rng, 0, 0.2, count)))[..., None]
    face = _colour_apart_from(luminance(wall), 0.22, rng, saturation=0.35)
    shadow = np.roll(_ink(number, weight, 0.1), (1, 1), axis=(1, 2)) * per_picture(uniform(rng, 0, 0.6, count))
    picture = over(picture * (1 - 0.6 * shadow[..., None]), face, _ink(number, weight, 0.08))
    light = 0.65 + 0.6 * smooth_noise(rng, count, SIZE, 1)
    picture = blur(picture * light[..., None], uniform(rng, 0.5, 1.3, count))
    grain = rng.standard_normal(picture.shape, dtype=np.float32)
    return picture + grain * per_picture(uniform(rng, 0.01, 0.06, count))[..., None], labels


def chalk(split: str, rng: Generator) -> tuple[Floats, Ints]:
    """Handwriting in broken chalk on coloured boards, with dust and half-erased digits."""
    ink, labels = _written(split, rng)
    count = len(labels)
    place = placement(
        scale=rng.uniform(0.85, 1.15, count),
        degrees=rng.uniform(-15, 15, count),
        shear=rng.uniform(-0.3, 0.3, count),
    )
    stroke = smoothstep(0.1, 0.5, warp(ink, place, SIZE))
    boards = np.array([[0.12, 0.3, 0.2], [0.1, 0.1, 0.12], [0.16, 0.2, 0.34], [0.36, 0.24, 0.16]], np.float32)
    board = boards[rng.integers(len(boards), size=count)] + uniform(rng, -0.05, 0.05, (count, 3))
    chalks = np.array([[1, 1, 0.96], [1, 0.92, 0.55], [0.98, 0.68, 0.7], [0.65, 0.85, 1]], np.float32)
    colour = chalks[rng.integers(len(chalks), size=count)]
    # The board's pores: a stroke leaves chalk only where they stand out.
    tooth = 0.6 * rng.random((count, SIZE, SIZE), dtype=np.float32) + 0.4 * smooth_noise(rng, count, SIZE, 14)
    dust = smooth_noise(rng, count, SIZE, (3, 5)) ** 2 * per_picture(uniform(rng, 0.0, 0.6, count))
    erased = np.roll(ink, 1, axis=0)[:, ::-1, ::-1] * per_picture(uniform(rng, 0, 0.3, count))
    picture = over(np.broadcast_to(per_picture(board), (count, SIZE, SIZE, 3)), colour, dust * tooth)
    picture = over(picture, colour, erased * (0.5 + 0.5 * tooth))
    cover = smoothstep(-0.1, 0.25, tooth - per_picture(uniform(rng, 0.25, 0.5, count)))
    return over(picture, colour, stroke * cover), labels


LOOKS = {"handwritten": handwritten, "photo": photo, "typeset": typeset, "street": street, "chalk": chalk}

RECIPE = GeneratedDataset(
    name="digits",
    task="classification",
    classes=tuple("0123456789"),
    domains=tuple(LOOKS),
    input_shape=(3, SIZE, SIZE),
    revision=2,
    draw=lambda domain, split, rng: LOOKS[domain](split, rng),
)


def _written(split: str, rng: Generator) -> tuple[Floats, Ints]:
    """Handwriting of the split, as ink `(n, 32, 32)`, and labels."""
    handwriting = read_handwriting()
    rows = handwriting.choose(split, PER_CLASS[split], rng)
    return handwriting.ink[rows], handwriting.labels[rows]


def _balanced(split: str, rng: Generator) -> Ints:
    return rng.permutation(np.repeat(np.arange(10), PER_CLASS[split]))


def _photo_pieces(split: str, count: int, rng: Generator) -> Floats:
    """Random squares of 64 pixels of the two photos at half resolution, `(count, 32, 32, 3)`."""
    from sklearn.datasets import load_sample_image

    photos = np.stack([load_sample_image("china.jpg"), load_sample_image("flower.jpg")])
    photos = photos[:, :426, :640].astype(np.float32) / 255
    half = (photos[:, ::2, ::2] + photos[:, 1::2, ::2] + photos[:, ::2, 1::2] + photos[:, 1::2, 1::2]) / 4
    tiles = half.reshape(2, 3, 71, 5, 64, 3).transpose(1, 3, 0, 2, 4, 5)
    group = (2 * np.arange(3)[:, None] + np.arange(5)) % 5
    tiles = tiles[np.isin(group, _PHOTO_TILES[split])].reshape(-1, 71, 64, 3)
    which = rng.integers(len(tiles), size=(count, 1, 1))
    row = rng.integers(71 - SIZE + 1, size=(count, 1, 1)) + np.arange(SIZE).reshape(1, -1, 1)
    column = rng.integers(64 - SIZE + 1, size=(count, 1, 1)) + np.arange(SIZE).reshape(1, 1, -1)
    return np.asarray(tiles[which, row, column])


def _warp_field(glyphs: Glyphs, rows: Ints, place: NDArray[np.float64]) -> Floats:
    """Distance fields seen through `place`. Moved up by 2 while sampled, so that outside a glyph's picture counts
    as far away, not as the edge of a stroke."""
    return warp(glyphs.distance + 2, place, SIZE, rows) - 2


def _ink(field: Floats, weight: Floats, softness: float) -> Floats:
    """Strokes of a distance field, `weight` bolder than drawn, with edges `softness` wide."""
    return smoothstep(-softness, softness, field + weight)


def _colour_apart_from(level: Floats, least: float, rng: Generator, saturation: float = 0.8) -> Floats:
    """Random colours `(n, 3)` whose luminance differs from `level` `(n,)` by `least` or more."""
    room_above, room_below = np.maximum(1 - level - least, 0), np.maximum(level - least, 0)
    up = rng.random(len(level)) * (room_above + room_below) < room_above
    share = rng.random(len(level))
    wanted = np.where(up, level + least + share * room_above, level - least - share * room_below)
    colour = uniform(rng, -0.5, 0.5, (len(level), 3)) * saturation
    colour = colour - luminance(colour)[:, None] + wanted[:, None]
    return np.asarray(np.clip(colour, 0, 1), np.float32)


def _coloured_shapes(count: int, rng: Generator) -> Floats:
    """A colour gradient with bars and discs on it, `(count, 32, 32, 3)`."""
    x, y = pixel_grid(SIZE, SIZE)
    fade = smooth_noise(rng, count, SIZE, 2)
    below = np.broadcast_to(per_picture(uniform(rng, 0, 1, (count, 3))), (count, SIZE, SIZE, 3))
    picture = over(below, uniform(rng, 0, 1, (count, 3)), fade)
    for number in range(8):
        centre_x, centre_y, angle = (per_picture(uniform(rng, 0, high, count)) for high in (SIZE, SIZE, np.pi))
        along = (x - centre_x) * np.cos(angle) + (y - centre_y) * np.sin(angle)
        across = (y - centre_y) * np.cos(angle) - (x - centre_x) * np.sin(angle)
        if number % 2:
            long, wide = per_picture(uniform(rng, 6, 20, count)), per_picture(uniform(rng, 0.5, 2, count))
            inside = np.minimum(long - np.abs(along), wide - np.abs(across))
        else:
            inside = per_picture(uniform(rng, 2, 6, count)) - np.sqrt(along**2 + across**2)
        picture = over(picture, uniform(rng, 0, 1, (count, 3)), np.clip(inside + 0.5, 0, 1) * 0.7)
    return picture
