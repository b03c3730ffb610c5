"""Small image files for the tests of the data package."""

from __future__ import annotations

import struct
import zlib
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from PIL import Image


def picture(seed: int, height: int = 12, width: int = 12) -> NDArray[np.uint8]:
    """Noise that PNG keeps exactly, another one for each seed."""
    return np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8)


def save(path: Path, pixels: NDArray[np.uint8]) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(pixels).save(path)
    return path


def write_classes(domain: Path, counts: dict[str, int], seed: int = 0, side: int = 12) -> None:
    """`<domain>/<class>/<number>.png`, all different."""
    for number, (label, count) in enumerate(counts.items()):
        (domain / label).mkdir(parents=True, exist_ok=True)
        for i in range(count):
            save(domain / label / f"{i:03}.png", picture(seed + 1000 * number + i, side, side))


def png(header: bytes, rows: bytes) -> bytes:
    """A PNG from what Pillow would not write."""

    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", zlib.compress(rows)) + chunk(b"IEND", b"")


def png_of_declared_size(width: int, height: int) -> bytes:
    """A few bytes that claim to be an image of any size."""
    return png(struct.pack(">IIBBBBB", width, height, 8, 0, 0, 0, 0), b"\0" * 64)
