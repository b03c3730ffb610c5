"""Real handwriting: scikit-learn's digits, 1,797 pictures of 8x8 pixels by thirteen people, upright and rotated.

The file does not name its writers, but they filled in the same form: the sequence of labels starts again about every
130 pictures, fourteen times. So the splits are runs of whole forms, and share no writer unless one person's two forms
lie apart in the file. All data sets use the same cuts: a picture that is in the test split of one domain is in no
domain's training or validation split.

`rotated-digits` shows it at six angles: the protocol of Rotated MNIST in CSAC (Yuan et al., "Collaborative Semantic
Aggregation and Calibration for Federated Domain Generalization", TKDE 2023). Every domain holds the same samples, 100
of each digit for training. They are turned counter-clockwise, in the paper clockwise: with the other direction, results
that are kept would no longer be about this data set.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import numpy as np
from numpy.typing import NDArray

from fedshift.data.builtin.generated import GeneratedDataset
from fedshift.data.builtin.raster import Floats, Generator, Ints, placement, smoothstep, warp

CUTS = {"train": (0, 1157), "val": (1157, 1287), "test": (1287, 1797)}
"""Nine forms, one form and four forms, as row numbers of the file."""

SIZE = 32
DIGIT_SIZE = 24


@dataclass(frozen=True)
class Handwriting:
    """Ink in [0, 1] `(n, 32, 32)`, the digit in the middle 24x24, and which digit it is `(n,)`."""

    ink: Floats
    labels: NDArray[np.int64]

    def choose(self, split: str, per_class: int, rng: Generator) -> Ints:
        """Row numbers `(10 * per_class,)` of a split in a random order, as many of each digit, none twice."""
        first, end = CUTS[split]
        labels = self.labels[first:end]
        rows = [rng.permutation(np.flatnonzero(labels == digit))[:per_class] for digit in range(10)]
        assert all(len(chosen) == per_class for chosen in rows)
        return first + rng.permutation(np.concatenate(rows))


@cache
def read_handwriting() -> Handwriting:
    from scipy.ndimage import zoom
    from sklearn.datasets import load_digits

    digits = load_digits()
    coarse = np.asarray(digits.images, np.float64) / 16
    fine = zoom(coarse, (1, DIGIT_SIZE // 8, DIGIT_SIZE // 8), order=3, mode="grid-constant", grid_mode=True)
    margin = (SIZE - DIGIT_SIZE) // 2
    fine = np.pad(fine, ((0, 0), (margin, margin), (margin, margin)))
    # The 8x8 values are shares of ink in the original strokes: an S-curve gives the enlarged ones edges again.
    ink = smoothstep(0.25, 0.85, fine.astype(np.float32))
    return Handwriting(ink, np.asarray(digits.target, np.int64))


PER_CLASS = {"train": 100, "val": 10, "test": 40}

ANGLES = {f"M{degrees}": degrees for degrees in range(0, 90, 15)}


def draw(domain: str, split: str, rng: Generator) -> tuple[Floats, Ints]:
    handwriting = read_handwriting()
    rows = handwriting.choose(split, PER_CLASS[split], rng)
    turned = warp(handwriting.ink[rows], placement(scale=1, degrees=ANGLES[domain]), SIZE)
    return np.repeat(turned[..., None], 3, axis=3), handwriting.labels[rows]


RECIPE = GeneratedDataset(
    name="rotated-digits",
    task="classification",
    classes=tuple("0123456789"),
    domains=tuple(ANGLES),
    input_shape=(3, SIZE, SIZE),
    revision=2,
    draw=draw,
    domains_share_randomness=True,
)
