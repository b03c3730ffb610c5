"""Pictures of three shapes in four looks: small enough to learn from in a second."""

from __future__ import annotations

from pathlib import Path

import numpy as np

CLASSES = 3


def shapes(count: int, tint: tuple[float, float, float], noise: float, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Bars across, bars down and blobs, 16x16x3 uint8, in one domain's colour and grain."""
    rng = np.random.default_rng(seed)
    labels = np.arange(count) % CLASSES
    rows, columns = np.mgrid[0:16, 0:16]
    phase = rng.integers(0, 4, count)[:, None, None]
    across, down = ((rows + phase) % 4 < 2), ((columns + phase) % 4 < 2)
    centre = 6 + phase
    blob = (rows - centre) ** 2 + (columns - centre) ** 2 < 20
    grey = np.select([labels[:, None, None] == 0, labels[:, None, None] == 1], [across, down], blob).astype(float)
    images = grey[..., None] * np.array(tint) + rng.normal(0, noise, (count, 16, 16, 3))
    return (np.clip(images, 0, 1) * 255).astype(np.uint8), labels.astype(np.int64)


TINTS = {"amber": (1.0, 0.7, 0.2), "blue": (0.2, 0.4, 1.0), "coral": (1.0, 0.4, 0.4), "dim": (0.5, 0.5, 0.5)}


def write_domain(root: Path, name: str, train: int = 66, test: int = 30, seed: int = 0) -> None:
    noise = 0.05 + 0.05 * sorted(TINTS).index(name) if name in TINTS else 0.1
    parts = {}
    for split, count in (("train", train), ("test", test)):
        images, labels = shapes(count, TINTS.get(name, (0.8, 0.8, 0.8)), noise, seed + len(split))
        parts |= {f"{split}_images": images, f"{split}_labels": labels}
    np.savez(root / f"{name}.npz", **parts)
