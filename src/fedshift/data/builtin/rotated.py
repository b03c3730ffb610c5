"""The same handwriting seen at six angles: the protocol of Rotated MNIST in CSAC (Yuan et al., "Collaborative
Semantic Aggregation and Calibration for Federated Domain Generalization", TKDE 2023), on scikit-learn's digits.

Every domain holds the same samples, 100 of each digit for training, turned counter-clockwise by its angle.
"""

from __future__ import annotations

import numpy as np

from fedshift.data.builtin.generated import Recipe
from fedshift.data.builtin.handwriting import SIZE, read_handwriting
from fedshift.data.builtin.raster import Floats, Generator, Ints, placement, warp

PER_CLASS = {"train": 100, "val": 10, "test": 40}

ANGLES = {f"M{degrees}": degrees for degrees in range(0, 90, 15)}


def draw(domain: str, split: str, rng: Generator) -> tuple[Floats, Ints]:
    handwriting = read_handwriting()
    rows = handwriting.choose(split, PER_CLASS[split], rng)
    turned = warp(handwriting.ink[rows], placement(scale=1, degrees=ANGLES[domain]), SIZE)
    return np.repeat(turned[..., None], 3, axis=3), handwriting.labels[rows]


RECIPE = Recipe(
    name="rotated-digits",
    task="classification",
    classes=tuple("0123456789"),
    domains=tuple(ANGLES),
    input_shape=(3, SIZE, SIZE),
    revision=2,
    draw=draw,
    domains_share_randomness=True,
)
