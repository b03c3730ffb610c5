"""Pictures with thin lines, as the eye's vessels: shrunk to what a small network takes as a whole, they vanish."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from PIL import Image

SIZES = {"amber": (104, 112), "blue": (128, 120), "coral": (112, 132)}
TINTS = {"amber": (180, 110, 60), "blue": (90, 110, 170), "coral": (190, 90, 90)}


def eye(size: tuple[int, int], tint: tuple[int, int, int], seed: int) -> tuple[NDArray[np.uint8], NDArray[np.uint8]]:
    """A picture and its mask: 1 along six curves that are two pixels wide, 0 elsewhere."""
    rng = np.random.default_rng(seed)
    height, width = size
    mask = np.zeros(size, dtype=np.uint8)
    across = np.arange(width)
    for _ in range(6):
        start, slope = rng.uniform(0.1, 0.9), rng.uniform(-0.5, 0.5)
        wave = 8 * np.sin(across / rng.uniform(12, 30) + rng.uniform(0, 6))
        down = (start * height + slope * (across - width / 2) + wave).round().astype(int)
        inside = (down >= 0) & (down < height)
        for thick in range(2):
            mask[np.minimum(down[inside] + thick, height - 1), across[inside]] = 1
    picture = np.array(tint) * (1 - 0.45 * mask[..., None]) + rng.normal(0, 8, (*size, 3))
    return picture.clip(0, 255).astype(np.uint8), mask


def write_eyes(root: Path, count: int = 15, sites: tuple[str, ...] = tuple(SIZES)) -> Path:
    for number, site in enumerate(sites):
        for i in range(count):
            picture, mask = eye(SIZES[site], TINTS[site], 100 * number + i)
            for kind, pixels in (("images", picture), ("masks", mask)):
                (root / site / kind).mkdir(parents=True, exist_ok=True)
                Image.fromarray(pixels).save(root / site / kind / f"e{i:02}.png")
    (root / "classes.txt").write_text("background\nvessel\n")
    return root
