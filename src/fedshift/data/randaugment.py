"""RandAugment with the paper's 14 operations, on whole batches (Cubuk, Zoph, Shlens, Le, NeurIPS 2020).

Inside, images are 8-bit levels as in the paper's code, and every operation has the arithmetic of its Pillow
counterpart: fast, because bytes are small, and the same result on every machine, because most of it is whole
numbers. It is written in numpy because a call costs half of what it costs in torch, and groups are small.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

Levels = NDArray[np.uint8]
Strengths = NDArray[np.float64]

MAX_MAGNITUDE = 10
"""The scale of the paper and its code: 10 is the largest distortion, 0 none. Autocontrast and equalize
have no strength. Implementations that count to 30 call our 3 a 9."""

MagnitudeDraw = Literal["fixed", "uniform"]
"""Whether every operation has the given magnitude, or each sample draws one for each of its operations, uniformly from
0 to the given one."""

# What magnitude 10 means: the ranges of AutoAugment (Cubuk et al., CVPR 2019), which RandAugment keeps.
# DIFFERS: more is always stronger and in both directions. In the authors' code solarize and posterize grow weaker
# with the magnitude, and enhancement factors run from 0.1 to 1.9, so that 5 changes nothing.
MAX_ANGLE = 30.0
MAX_SHEAR = 0.3
MAX_SHIFT = 150 / 331  # of the side: 150 pixels at AutoAugment's 331
MAX_ENHANCEMENT = 0.9  # factors 0.1 to 1.9
MAX_LOST_BITS = 4

FILL = 128
"""The grey of pixels that come from outside the image."""


def rand_augment(
    x: Tensor, generator: torch.Generator, ops: int = 2, magnitude: float = 9, draw: MagnitudeDraw = "fixed"
) -> Tensor:
    """Distort each sample of `(B, 3, H, W)` floats in [0, 1] by its own `ops` operations.

    Operations are drawn with replacement, and those with a direction (turns, shears, shifts, enhancements) draw
    their sign. The result is a new tensor of multiples of 1/255; no gradient flows through it. CPU only.
    """
    if not 0 <= magnitude <= MAX_MAGNITUDE:
        raise ValueError(f"the magnitude of RandAugment is {magnitude}, outside 0..{MAX_MAGNITUDE}")
    scaled = x.detach().float().numpy() * np.float32(255)
    scaled += 0.5
    levels = np.ascontiguousarray(_to_bytes(scaled))
    for _ in range(ops):
        choice = torch.randint(len(OPERATIONS), (len(x),), generator=generator).numpy()
        sign = torch.randint(2, (len(x),), generator=generator).numpy() * 2 - 1
        strength = sign * (magnitude / MAX_MAGNITUDE)
        if draw == "uniform":
            strength = strength * torch.rand(len(x), generator=generator, dtype=torch.float64).numpy()
        levels = apply_operations(levels, choice, strength)
    return torch.from_numpy(levels).to(x.dtype).div_(255)


def apply_operations(levels: Levels, choice: NDArray[np.int64], strength: Strengths) -> Levels:
    """Apply to sample b operation `OPERATIONS[choice[b]]` at `strength[b]` in [-1, 1]; returns new levels.

    `levels` are `(B, 3, H, W)`, `choice` and `strength` `(B,)`. Samples are grouped by operation, so the work is a
    few calls however large the batch.
    """
    result = np.empty_like(levels)
    for number, operation in enumerate(RECOLORINGS.values()):
        members = np.flatnonzero(choice == number)
        if len(members):
            result[members] = operation(levels[members], strength[members])
    # All operations that move pixels are one group, because each is a matrix.
    members = np.flatnonzero(choice >= len(RECOLORINGS))
    if len(members):
        result[members] = _move(levels[members], choice[members], strength[members])
    return result


# --- Operations that change colours: levels `(G, 3, H, W)` and strengths `(G,)` in, levels out ------------------


def identity(levels: Levels, strength: Strengths) -> Levels:
    return levels


def autocontrast(levels: Levels, strength: Strengths) -> Levels:
    """Stretch each channel to 0..255; a channel of one level stays."""
    low, high = levels.min(axis=(2, 3)).astype(np.float64), levels.max(axis=(2, 3)).astype(np.float64)
    flat = high == low
    scale = np.where(flat, 1.0, 255.0 / np.where(flat, 1.0, high - low))
    offset = np.where(flat, 0.0, -low * scale)
    return _look_up(np.arange(256) * scale[..., None] + offset[..., None], levels)


def equalize(levels: Levels, strength: Strengths) -> Levels:
    """Spread each channel's levels so that their histogram becomes as even as it can."""
    channels = levels.reshape(len(levels) * 3, -1)
    shifted = channels + np.arange(len(channels))[:, None] * 256
    counts = np.bincount(shifted.ravel(), minlength=len(channels) * 256).reshape(-1, 256)
    brightest = np.take_along_axis(counts, channels.max(axis=1, keepdims=True).astype(np.int64), axis=1)
    step = (channels.shape[1] - brightest) // 255
    below = counts.cumsum(axis=1) - counts
    table = (below + step // 2) // np.maximum(step, 1)
    # With fewer than 255 pixels below the brightest level there is nothing to spread: the channel stays.
    return _look_up(np.where(step > 0, table, np.arange(256)), levels)


def solarize(levels: Levels, strength: Strengths) -> Levels:
    """Invert all levels from a threshold on, which falls from 256 (none) to 0 (all)."""
    threshold = np.rint(256 * (1 - np.abs(strength))).astype(np.int16)
    # Exclusive or with 255 inverts a byte: much faster than choosing by np.where.
    inverted = (levels >= threshold[:, None, None, None]).view(np.uint8)
    result: Levels = levels ^ (inverted * np.uint8(255))
    return result


def posterize(levels: Levels, strength: Strengths) -> Levels:
    """Drop the lowest bits."""
    lost_bits = np.rint(MAX_LOST_BITS * np.abs(strength)).astype(np.uint8)
    result: Levels = levels & (np.uint8(255) << lost_bits)[:, None, None, None]
    return result


def brightness(levels: Levels, strength: Strengths) -> Levels:
    """Away from or towards black."""
    return _blend(np.float32(0), levels.astype(np.float32), strength)


def contrast(levels: Levels, strength: Strengths) -> Levels:
    """Away from or towards the image's mean grey."""
    mean = np.floor(_grey(levels).mean(axis=(1, 2, 3), keepdims=True) + 0.5)
    return _blend(mean.astype(np.float32), levels.astype(np.float32), strength)


def color(levels: Levels, strength: Strengths) -> Levels:
    """Away from or towards the image in grey."""
    return _blend(_grey(levels).astype(np.float32), levels.astype(np.float32), strength)


def sharpness(levels: Levels, strength: Strengths) -> Levels:
    """Away from or towards the image smoothed by (1 1 1, 1 5 1, 1 1 1) / 13; the outermost pixels stay."""
    image = levels.astype(np.int16)
    rows = image[..., :-2, :] + image[..., 1:-1, :] + image[..., 2:, :]
    sums = rows[..., :-2] + rows[..., 1:-1] + rows[..., 2:] + 4 * image[..., 1:-1, 1:-1]
    smooth = levels.astype(np.float32)
    smooth[..., 1:-1, 1:-1] = np.floor(sums * np.float32(1 / 13) + np.float32(0.5))
    return _blend(smooth, levels.astype(np.float32), strength)


def _look_up(table: NDArray[Any], levels: Levels) -> Levels:
    """Replace each level by its entry, rounded down, in the table `(G, 3, 256)` of its sample and channel."""
    entries = np.clip(table, 0, 255).astype(np.uint8)
    index = levels.reshape(-1, levels.shape[2] * levels.shape[3]) + np.arange(len(levels) * 3)[:, None] * 256
    result: Levels = entries.ravel().take(index).reshape(levels.shape)
    return result


def _grey(levels: Levels) -> NDArray[np.int32]:
    """Luma (ITU-R 601-2) in 16-bit fixed point, `(G, 1, H, W)`."""
    red, green, blue = levels[:, 0:1], levels[:, 1:2], levels[:, 2:3]
    weighted = red * np.int32(19595) + green * np.int32(38470) + blue * np.int32(7471)
    grey: NDArray[np.int32] = (weighted + np.int32(0x8000)) >> 16
    return grey


def _blend(plain: Any, image: NDArray[np.float32], strength: Strengths) -> Levels:
    """plain + factor (image - plain): a factor of 1 leaves the image, more than 1 exaggerates it."""
    factor = (1 + MAX_ENHANCEMENT * strength).astype(np.float32)[:, None, None, None]
    image -= plain
    image *= factor
    image += plain
    return _to_bytes(image)


def _to_bytes(values: NDArray[np.floating[Any]]) -> Levels:
    """Clip to 0..255 (in place) and round down."""
    return np.clip(values, 0, 255, out=values).astype(np.uint8)


RECOLORINGS: dict[str, Callable[[Levels, Strengths], Levels]] = {
    "identity": identity,
    "autocontrast": autocontrast,
    "equalize": equalize,
    "solarize": solarize,
    "posterize": posterize,
    "brightness": brightness,
    "contrast": contrast,
    "color": color,
    "sharpness": sharpness,
}


# --- Operations that move pixels --------------------------------------------------------------------------------

MOVES = ("rotate", "shear-x", "shear-y", "translate-x", "translate-y")
OPERATIONS = (*RECOLORINGS, *MOVES)


def _move(levels: Levels, choice: NDArray[np.int64], strength: Strengths) -> Levels:
    """Fetch each pixel from the nearest source pixel; positive angles turn counter-clockwise about the centre."""
    height, width = levels.shape[2:]
    matrix = _source_matrix(choice, strength, height, width)
    # Pixel (column, row) has its centre at (column + 1/2, row + 1/2). All positions are moved by 1 because the
    # source gets a border of grey, one pixel wide, onto which everything outside falls.
    matrix[:, :, 2] += matrix[:, :, :2].sum(axis=2) / 2 + 1
    fixed = np.rint(matrix * 65536).astype(np.int32)[..., None, None]
    x, y = np.arange(width, dtype=np.int32), np.arange(height, dtype=np.int32)[:, None]
    source = fixed[:, :, 0] * x + (fixed[:, :, 1] * y + fixed[:, :, 2])
    source >>= 16
    column, row = source[:, 0].clip(0, width + 1), source[:, 1].clip(0, height + 1)
    row *= width + 2
    row += column
    bordered = np.full((len(levels), 3, height + 2, width + 2), FILL, dtype=np.uint8)
    bordered[..., 1:-1, 1:-1] = levels
    pixels = torch.from_numpy(bordered).flatten(start_dim=2)
    index = torch.from_numpy(row).long().reshape(len(levels), 1, -1).expand(-1, 3, -1)
    return pixels.gather(2, index).numpy().reshape(levels.shape)


def _source_matrix(choice: NDArray[np.int64], strength: Strengths, height: int, width: int) -> NDArray[np.float64]:
    """`(G, 2, 3)`: the source (x, y) of position (x, y) in the result is matrix @ (x, y, 1)."""

    def amount(name: str, largest: float) -> NDArray[np.float64]:
        return np.where(choice == OPERATIONS.index(name), strength * largest, 0.0)

    angle = amount("rotate", math.radians(MAX_ANGLE))
    cosine, sine = np.cos(angle), np.sin(angle)
    matrix = np.empty((len(choice), 2, 3))
    matrix[:, 0, 0] = matrix[:, 1, 1] = cosine
    matrix[:, 0, 1] = amount("shear-x", MAX_SHEAR) - sine
    matrix[:, 1, 0] = amount("shear-y", MAX_SHEAR) + sine
    middle_x, middle_y = width / 2, height / 2  # the point a rotation leaves where it is
    matrix[:, 0, 2] = amount("translate-x", MAX_SHIFT * width) + middle_x - cosine * middle_x + sine * middle_y
    matrix[:, 1, 2] = amount("translate-y", MAX_SHIFT * height) + middle_y - sine * middle_x - cosine * middle_y
    return matrix
