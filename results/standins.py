"""Labelled stand-ins for clients, made from a home's own digits: what a method's keys may be chosen on.

python results/standins.py DIGITS/mnist.npz STANDINS
fedshift train --method dualadapt --data-dir STANDINS --home home ...

The home keeps 4,000 of its training images. The others are changed in four ways, one per client; so are 700 of its test
images, whose labels the scores are made with. No data of any real client is used.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from scipy import ndimage

Images = NDArray[np.float64]
Change = Callable[[Images, np.random.Generator], Images]
HOME, TESTED = 4000, 700


def turned(images: Images, rng: np.random.Generator) -> Images:
    """By 25 to 40 degrees."""
    return np.stack([ndimage.rotate(image, rng.uniform(25, 40), reshape=False, order=1) for image in images])


def coarse(images: Images, rng: np.random.Generator) -> Images:
    """At half the size, with thicker strokes, and enlarged again."""
    small = [ndimage.grey_dilation(ndimage.zoom(image, 0.5, order=1), (2, 2)) for image in images]
    return np.stack([ndimage.zoom(image, 2, order=1) for image in small])


def blended(images: Images, rng: np.random.Generator) -> Images:
    """The difference to a smooth random texture."""
    noise = ndimage.gaussian_filter(rng.normal(size=images.shape), (0, 2, 2))
    low, span = noise.min((1, 2), keepdims=True), np.ptp(noise, axis=(1, 2), keepdims=True)
    difference: Images = np.abs(images - 255 * (noise - low) / span)
    return difference


def faint(images: Images, rng: np.random.Generator) -> Images:
    """A third of the contrast, dark or light on noisy grey."""
    sign = rng.choice([-1, 1], (len(images), 1, 1))
    grey = rng.uniform(100, 160, (len(images), 1, 1))
    return grey + sign * images * 0.35 + rng.normal(0, 12, images.shape)


CLIENTS: dict[str, Change] = {"turned": turned, "coarse": coarse, "blended": blended, "faint": faint}


def main(source: Path, folder: Path) -> None:
    rng = np.random.default_rng(0)
    with np.load(source) as file:
        images, labels = file["train_images"], file["train_labels"]
        tests, test_labels = file["test_images"][:TESTED], file["test_labels"][:TESTED]
    order = rng.permutation(len(images))
    images, labels = images[order], labels[order]
    folder.mkdir(parents=True, exist_ok=True)

    def save(name: str, train: slice, change: Change | None) -> None:
        parts = {"train": images[train], "test": tests}
        changed = {
            key: np.clip(change(part.astype(float), rng), 0, 255).astype(np.uint8) if change else part
            for key, part in parts.items()
        }
        np.savez(
            folder / f"{name}.npz",
            train_images=changed["train"],
            train_labels=labels[train],
            test_images=changed["test"],
            test_labels=test_labels,
        )

    save("home", slice(HOME), None)
    for name, change in CLIENTS.items():
        save(name, slice(HOME, None), change)


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
