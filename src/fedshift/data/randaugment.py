"""RandAugment on whole batches (Cubuk, Zoph, Shlens, Le: RandAugment, NeurIPS 2020; the 14 operations of sec. 3).

Inside, images are 8-bit levels as in the paper's code, and every operation has the arithmetic of its Pillow
counterpart: fast, because bytes are small, and the same result on every machine, because most of it is whole
numbers.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

MAX_MAGNITUDE = 10
"""The paper's scale (sec. 3): 10 is the largest distortion, 0 none; autocontrast and equalize have no strength.
Implementations that count to 30 call our 3 a 9."""

# What magnitude 10 means: the ranges of AutoAugment (Cubuk et al., CVPR 2019, table 6), which RandAugment keeps.
MAX_ANGLE = 30.0
MAX_SHEAR = 0.3
MAX_SHIFT = 150 / 331  # of the side: 150 pixels at AutoAugment's 331
MAX_ENHANCEMENT = 0.9  # factors 0.1 to 1.9
MAX_LOST_BITS = 4

FILL = 128
"""The grey of pixels that come from outside the image."""


def rand_augment(x: Tensor, generator: torch.Generator, ops: int = 2, magnitude: float = 9) -> Tensor:
    """Distort each sample of `(B, 3, H, W)` floats in [0, 1] by `ops` operations of its own.

    Operations are drawn with replacement, and those with a direction (turns, shears, shifts, enhancements) draw
    their sign. The result is a new tensor of multiples of 1/255; no gradient flows through it.
    """
    if not 0 <= magnitude <= MAX_MAGNITUDE:
        raise ValueError(f"the magnitude of RandAugment is {magnitude}, outside 0..{MAX_MAGNITUDE}")
    levels = _to_bytes(x.detach().mul(255).add_(0.5))
    for _ in range(ops):
        choice = torch.randint(len(OPERATIONS), (len(x),), generator=generator)
        sign = torch.randint(2, (len(x),), generator=generator) * 2 - 1
        levels = apply_operations(levels, choice, sign.double() * (magnitude / MAX_MAGNITUDE))
    return levels.to(x.dtype).div_(255)


def apply_operations(levels: Tensor, choice: Tensor, strength: Tensor) -> Tensor:
    """Apply to sample b operation `OPERATIONS[choice[b]]` at `strength[b]` in [-1, 1].

    `levels` `(B, 3, H, W)` uint8, `choice` `(B,)` int64, `strength` `(B,)` float64; returns new levels. Samples
    are sorted by operation and put back after it, so the work is a few calls however large the batch.
    """
    order = choice.argsort(stable=True)
    choice, strength = choice[order], strength[order]
    counts = torch.bincount(choice, minlength=len(OPERATIONS)).tolist()
    # All operations that move pixels are one group: each is a matrix.
    sizes = [*counts[: len(RECOLORINGS)], sum(counts[len(RECOLORINGS) :])]
    *recolored, moved = levels.index_select(0, order).split(sizes)
    groups = zip(RECOLORINGS.values(), recolored, strength.split(sizes), strict=False)
    changed = [operation(group, strengths) for operation, group, strengths in groups if len(group)]
    if len(moved):
        changed.append(_move(moved, choice[-len(moved) :], strength[-len(moved) :]))
    return torch.cat(changed).index_select(0, order.argsort())


# --- Operations that change colours: levels `(G, 3, H, W)` uint8 and strengths `(G,)` float64 in, levels out ----


def identity(levels: Tensor, strength: Tensor) -> Tensor:
    return levels


def autocontrast(levels: Tensor, strength: Tensor) -> Tensor:
    """Stretch each channel to 0..255; a channel of one level stays."""
    low, high = levels.amin(dim=(2, 3)).double(), levels.amax(dim=(2, 3)).double()
    full = torch.tensor(255.0, dtype=torch.float64)  # torch turns 255 / tensor into a rounded reciprocal
    scale = torch.where(high > low, full / (high - low), 1.0)
    offset = torch.where(high > low, -low * scale, 0.0)
    return _look_up(torch.arange(256) * scale[..., None] + offset[..., None], levels)


def equalize(levels: Tensor, strength: Tensor) -> Tensor:
    """Spread each channel's levels so that their histogram becomes as even as it can."""
    channels = levels.flatten(end_dim=1).flatten(start_dim=1)
    shifted = channels + torch.arange(len(channels))[:, None] * 256
    counts = torch.bincount(shifted.flatten(), minlength=len(channels) * 256).reshape(len(levels), 3, 256)
    brightest = counts.gather(2, levels.amax(dim=(2, 3)).long()[..., None])
    step = (channels.shape[1] - brightest) // 255
    below = counts.cumsum(dim=2) - counts
    table = (below + step // 2) // step.clamp(min=1)
    # With fewer than 255 pixels below the brightest level there is nothing to spread: the channel stays.
    return _look_up(torch.where(step > 0, table, torch.arange(256)), levels)


def solarize(levels: Tensor, strength: Tensor) -> Tensor:
    """Invert all levels from a threshold on, which falls from 256 (none) to 0 (all)."""
    last_kept = (256 * (1 - strength.abs())).round()[:, None, None, None] - 1
    # Exclusive or with 255 inverts a byte; torch.where on bytes takes twenty times as long.
    return levels ^ (levels > last_kept.to(torch.int16)).to(torch.uint8).mul_(255)


def posterize(levels: Tensor, strength: Tensor) -> Tensor:
    """Drop the lowest bits."""
    lost_bits = (MAX_LOST_BITS * strength.abs()).round().to(torch.uint8)[:, None, None, None]
    return levels >> lost_bits << lost_bits


def brightness(levels: Tensor, strength: Tensor) -> Tensor:
    """Away from or towards black."""
    return _blend(torch.zeros(1), levels.float(), strength)


def contrast(levels: Tensor, strength: Tensor) -> Tensor:
    """Away from or towards the image's mean grey."""
    mean = (_grey(levels).double().mean(dim=(1, 2, 3), keepdim=True) + 0.5).floor()
    return _blend(mean.float(), levels.float(), strength)


def color(levels: Tensor, strength: Tensor) -> Tensor:
    """Away from or towards the image in grey."""
    return _blend(_grey(levels).float(), levels.float(), strength)


def sharpness(levels: Tensor, strength: Tensor) -> Tensor:
    """Away from or towards the image smoothed by (1 1 1, 1 5 1, 1 1 1) / 13; the outermost pixels stay."""
    image = levels.to(torch.int16)
    rows = image[..., :-2, :] + image[..., 1:-1, :] + image[..., 2:, :]
    sums = rows[..., :-2] + rows[..., 1:-1] + rows[..., 2:] + 4 * image[..., 1:-1, 1:-1]
    smooth = image.float()
    smooth[..., 1:-1, 1:-1] = (sums.float() / 13 + 0.5).floor_()
    return _blend(smooth, image.float(), strength)


def _look_up(table: Tensor, levels: Tensor) -> Tensor:
    """Replace each level by its entry, rounded down, in the table `(G, 3, 256)` of its sample and channel."""
    return table.clamp(0, 255).to(torch.uint8).gather(2, levels.flatten(start_dim=2).long()).view_as(levels)


def _grey(levels: Tensor) -> Tensor:
    """Luma (ITU-R 601-2) in 16-bit fixed point, `(G, 1, H, W)` int32."""
    red, green, blue = levels.to(torch.int32).split(1, dim=1)
    return (red * 19595 + green * 38470 + blue * 7471 + 0x8000) >> 16


def _blend(plain: Tensor, image: Tensor, strength: Tensor) -> Tensor:
    """plain + factor (image - plain): a factor of 1 leaves the image, more than 1 exaggerates it."""
    factor = (1 + MAX_ENHANCEMENT * strength).float()[:, None, None, None]
    return _to_bytes((image - plain).mul_(factor).add_(plain))


def _to_bytes(values: Tensor) -> Tensor:
    """Clip to 0..255 (in place) and round down."""
    # Through int16, because torch converts floats to uint8 directly at a quarter of the speed.
    return values.clamp_(0, 255).to(torch.int16).to(torch.uint8)


RECOLORINGS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
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


def _move(levels: Tensor, choice: Tensor, strength: Tensor) -> Tensor:
    """Fetch each pixel from the nearest source pixel; positive angles turn counter-clockwise about the centre."""
    height, width = levels.shape[2:]
    matrix = _source_matrix(choice, strength, height, width)
    # In 16-bit fixed point. Pixel (column, row) has its centre at (column + 1/2, row + 1/2).
    matrix[:, :, 2] += matrix[:, :, :2].sum(dim=2) / 2
    a, b, c = (matrix * 65536).round().to(torch.int32)[..., None, None].unbind(dim=2)
    x, y = torch.arange(width, dtype=torch.int32), torch.arange(height, dtype=torch.int32)[:, None]
    column, row = ((a * x + (b * y + c)) >> 16).unbind(dim=1)
    # Sources outside the image fall onto a border of grey, one pixel wide.
    column, row = column.clamp_(-1, width) + 1, row.clamp_(-1, height) + 1
    index = (row * (width + 2) + column).long().flatten(start_dim=1)[:, None]
    bordered = F.pad(levels, (1, 1, 1, 1), value=FILL).flatten(start_dim=2)
    return bordered.gather(2, index.expand(-1, 3, -1)).view_as(levels)


def _source_matrix(choice: Tensor, strength: Tensor, height: int, width: int) -> Tensor:
    """`(G, 2, 3)` float64: the source (x, y) of position (x, y) in the result is matrix @ (x, y, 1)."""

    def amount(name: str, largest: float) -> Tensor:
        return torch.where(choice == OPERATIONS.index(name), strength * largest, 0.0)

    angle = amount("rotate", math.radians(MAX_ANGLE))
    cosine, sine = angle.cos(), angle.sin()
    matrix = torch.empty(len(choice), 2, 3, dtype=torch.float64)
    matrix[:, 0, 0] = matrix[:, 1, 1] = cosine
    matrix[:, 0, 1] = amount("shear-x", MAX_SHEAR) - sine
    matrix[:, 1, 0] = amount("shear-y", MAX_SHEAR) + sine
    middle_x, middle_y = width / 2, height / 2  # the point a rotation leaves where it is
    matrix[:, 0, 2] = amount("translate-x", MAX_SHIFT * width) + middle_x - cosine * middle_x + sine * middle_y
    matrix[:, 1, 2] = amount("translate-y", MAX_SHIFT * height) + middle_y - sine * middle_x - cosine * middle_y
    return matrix
