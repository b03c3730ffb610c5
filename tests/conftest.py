"""Small data that learns in a second, and a cache of the tests' own."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest
import torch

CLASSES = 3


@pytest.fixture(scope="session", autouse=True)
def _own_cache(tmp_path_factory: pytest.TempPathFactory) -> None:
    """Nothing is read from or left in the user's cache; xdist workers share one so that data is made once."""
    root = tmp_path_factory.getbasetemp()
    shared = root.parent if os.environ.get("PYTEST_XDIST_WORKER") else root
    os.environ["FEDSHIFT_CACHE"] = str(shared / "fedshift-cache")
    torch.set_num_threads(1)


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


@pytest.fixture(scope="session")
def tiny_data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Four domains of three classes: a folder to train on in a second."""
    root = tmp_path_factory.mktemp("tiny")
    for number, name in enumerate(TINTS):
        write_domain(root, name, seed=10 * number)
    return root
