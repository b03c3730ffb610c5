"""Drawing on many small pictures at once. Pictures are float32 in [0, 1]: `(n, h, w)` or `(n, h, w, 3)`.

Plain NumPy without matrix products, so that the bytes do not depend on the number of threads.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

Floats = NDArray[np.floating[Any]]
Ints = NDArray[np.int64]
Generator = np.random.Generator


def to_bytes(pictures: Floats) -> NDArray[np.uint8]:
    """Levels 0..255; values out of range are clipped."""
    levels: NDArray[np.uint8] = np.rint(np.clip(pictures, 0, 1) * 255).astype(np.uint8)
    return levels


def uniform(rng: Generator, low: float, high: float, size: int | tuple[int, ...]) -> Floats:
    return rng.uniform(low, high, size).astype(np.float32)


def per_picture(values: NDArray[Any]) -> NDArray[Any]:
    """`(n,)` or `(n, 3)` as `(n, 1, 1)` or `(n, 1, 1, 3)`, to be broadcast over the pixels."""
    return values.reshape(len(values), 1, 1, *values.shape[1:])


def smoothstep(low: Floats | float, high: Floats | float, values: Floats) -> Floats:
    """0 below `low`, 1 above `high`, an S-curve between."""
    t: Floats = np.clip((values - low) / (high - low), 0, 1)
    return t * t * (3 - 2 * t)


def over(below: Floats, colour: Floats, alpha: Floats) -> Floats:
    """Lay a colour `(n, 3)` or picture `(n, h, w, 3)` over pictures where `alpha` `(n, h, w)` says."""
    if colour.ndim == 2:
        colour = per_picture(colour)
    blended: Floats = below + (colour - below) * alpha[..., None]
    return blended


def luminance(colours: Floats) -> Floats:
    """`(..., 3)` -> `(...)`, by the weights of Rec. 601."""
    weighted: Floats = colours[..., 0] * 0.299 + colours[..., 1] * 0.587 + colours[..., 2] * 0.114
    return weighted


def pixel_grid(height: int, width: int) -> tuple[Floats, Floats]:
    """Column and row of each pixel, `(1, 1, w)` and `(1, h, 1)`."""
    x = np.arange(width, dtype=np.float32).reshape(1, 1, -1)
    y = np.arange(height, dtype=np.float32).reshape(1, -1, 1)
    return x, y


def sample_bilinear(pictures: Floats, x: Floats, y: Floats, index: Ints | None = None) -> Floats:
    """`pictures[index]` `(n, h, w)` read at columns `x` and rows `y` `(n, H, W)`; black outside."""
    count, height, width = pictures.shape
    index = np.arange(count) if index is None else index
    # A border of zeros makes every outside neighbour black without a mask.
    padded = np.pad(pictures, ((0, 0), (1, 1), (1, 1)))
    x = np.clip(x + 1, 0, width + 0.999)
    y = np.clip(y + 1, 0, height + 0.999)
    left, top = x.astype(np.int64), y.astype(np.int64)
    fx, fy = (x - left).astype(np.float32), (y - top).astype(np.float32)
    which = index.reshape(-1, 1, 1)
    upper = padded[which, top, left] * (1 - fx) + padded[which, top, left + 1] * fx
    lower = padded[which, top + 1, left] * (1 - fx) + padded[which, top + 1, left + 1] * fx
    return np.asarray(upper * (1 - fy) + lower * fy, np.float32)


def warp(pictures: Floats, matrices: Floats, size: int, index: Ints | None = None) -> Floats:
    """Square pictures through one projective map each.

    `matrices` `(n, 3, 3)` take an output pixel's place to the place in `pictures[index]` where its value is
    read; both places are measured from the picture's centre, in units of half its width. -> `(n, size, size)`"""
    x, y = pixel_grid(size, size)
    half = size / 2
    x, y = (x + 0.5 - half) / half, (y + 0.5 - half) / half
    m = matrices.reshape(-1, 3, 3, 1, 1)
    depth = m[:, 2, 0] * x + m[:, 2, 1] * y + m[:, 2, 2]
    source_x = (m[:, 0, 0] * x + m[:, 0, 1] * y + m[:, 0, 2]) / depth
    source_y = (m[:, 1, 0] * x + m[:, 1, 1] * y + m[:, 1, 2]) / depth
    source_half = pictures.shape[1] / 2
    return sample_bilinear(
        pictures,
        source_x * source_half + source_half - 0.5,
        source_y * source_half + source_half - 0.5,
        index,
    )


def placement(
    scale: ArrayLike, degrees: ArrayLike = 0.0, shear: ArrayLike = 0.0, aspect: ArrayLike = 1.0
) -> NDArray[np.float64]:
    """`(n, 3, 3)` for `warp`: the picture drawn `scale` times as large, turned counter-clockwise, slanted and
    `aspect` times as wide."""
    scale, degrees, shear, aspect = np.broadcast_arrays(
        *(np.atleast_1d(np.asarray(value, np.float64)) for value in (scale, degrees, shear, aspect))
    )
    cos, sin = np.cos(np.deg2rad(degrees)), np.sin(np.deg2rad(degrees))
    matrices = np.zeros((len(scale), 3, 3))
    matrices[:, 0, 0] = (cos + shear * sin) / (scale * aspect)
    matrices[:, 0, 1] = (-sin + shear * cos) / (scale * aspect)
    matrices[:, 1, 0] = sin / scale
    matrices[:, 1, 1] = cos / scale
    matrices[:, 2, 2] = 1
    return matrices


def moved(matrices: NDArray[np.float64], dx: ArrayLike, dy: ArrayLike = 0.0) -> NDArray[np.float64]:
    """The same maps with the source picture moved right by `dx` and down by `dy`, in half-widths of it."""
    shifted = matrices.copy()
    shifted[:, 0] -= np.reshape(dx, (-1, 1)) * matrices[:, 2]
    shifted[:, 1] -= np.reshape(dy, (-1, 1)) * matrices[:, 2]
    return shifted


def enlarge(grid: Floats, height: int, width: int) -> Floats:
    """Coarse values `(n, h, w)` spread smoothly over `(n, height, width)`, corner on corner."""
    x = np.linspace(0, grid.shape[2] - 1, width, dtype=np.float32)
    y = np.linspace(0, grid.shape[1] - 1, height, dtype=np.float32)
    left = np.minimum(x.astype(np.int64), grid.shape[2] - 2)
    top = np.minimum(y.astype(np.int64), grid.shape[1] - 2)
    fx = smoothstep(0, 1, (x - left).astype(np.float32))
    fy = smoothstep(0, 1, (y - top).astype(np.float32))[:, None]
    rows = grid[:, :, left] * (1 - fx) + grid[:, :, left + 1] * fx
    upper, lower = rows.take(top, axis=1), rows.take(top + 1, axis=1)
    spread: Floats = upper + (lower - upper) * fy
    return spread


def smooth_noise(rng: Generator, count: int, size: int, cells: int | tuple[int, int]) -> Floats:
    """`(count, size, size)` in [0, 1]: hills as large as a cell. `cells` = (down, across) or one number."""
    down, across = (cells, cells) if isinstance(cells, int) else cells
    return enlarge(rng.random((count, down + 1, across + 1), dtype=np.float32), size, size)


def blur(pictures: Floats, sigma: Floats) -> Floats:
    """Each picture `(n, h, w, ...)` with its own Gaussian of `sigma` `(n,)` pixels, at most 2; edges repeat."""
    radius = 4
    offsets = np.arange(-radius, radius + 1, dtype=np.float32)
    weights = np.exp(-0.5 * (offsets / np.maximum(sigma, 0.05)[:, None]) ** 2)
    weights /= weights.sum(axis=1, keepdims=True)
    for axis in (1, 2):
        pad = [(0, 0)] * pictures.ndim
        pad[axis] = (radius, radius)
        padded = np.pad(pictures, pad, mode="edge")
        length = pictures.shape[axis]
        blurred = np.zeros_like(pictures)
        for step in range(2 * radius + 1):
            window = padded[:, step : step + length] if axis == 1 else padded[:, :, step : step + length]
            blurred += window * weights[:, step].reshape(-1, *[1] * (pictures.ndim - 1))
        pictures = blurred
    return pictures
