"""From a drawing function to a data set whose domains are drawn on first use and then read from the cache."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from importlib.metadata import version
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from fedshift.data.builtin.raster import Floats, Generator, to_bytes
from fedshift.data.cache import cached_arrays
from fedshift.data.domain import Dataset, Domain, Split, Task
from fedshift.errors import InputError, nearest

SPLITS = ("train", "val", "test")

_DRAWN_WITH = ("numpy", "scipy", "pillow", "scikit-learn", "matplotlib")
"""Packages whose version may change a pixel."""

Draw = Callable[[str, str, Generator], tuple[Floats, NDArray[Any]]]
"""Domain, split and randomness -> pictures `(n, h, w, 3)` in [0, 1] and their labels."""


@dataclass(frozen=True)
class GeneratedDataset:
    """A built-in data set: what it is, and how one split of one domain is drawn."""

    name: str
    task: Task
    classes: tuple[str, ...]
    domains: tuple[str, ...]
    input_shape: tuple[int, int, int]
    revision: int
    """Raised whenever the drawing changes, so that no cache holds old pictures."""
    draw: Draw
    domains_share_randomness: bool = False
    """Whether the domains show the same samples: their drawing then starts from the same random state."""

    def __call__(self, image_size: int | None = None) -> Dataset:
        """With `image_size`, pictures (and masks) of that side instead of the one they are drawn at."""
        shape = self.input_shape if image_size is None else (3, image_size, image_size)
        load = partial(self.load, image_size=None if shape == self.input_shape else image_size)
        return Dataset(self.name, self.task, self.classes, self.domains, shape, load)

    def load(self, domain: str, image_size: int | None = None) -> Domain:
        if domain not in self.domains:
            raise InputError(
                "unknown-name",
                f"The data set {self.name!r} has no domain {domain!r}. {nearest(domain, self.domains)}",
            )
        made_by = " ".join(f"{package}={version(package)}" for package in _DRAWN_WITH)
        key = f"builtin {self.name} {domain} revision={self.revision} {made_by}"
        if image_size is None:
            arrays = cached_arrays(key, lambda: self.arrays(domain))
        else:
            arrays = cached_arrays(
                f"{key} image_size={image_size}",
                lambda: {name: _resized(values, image_size) for name, values in self.arrays(domain).items()},
            )
        train, val, test = (Split(arrays[f"{split}_images"], arrays[f"{split}_labels"]) for split in SPLITS)
        return Domain(domain, train, val, test)

    def arrays(self, domain: str) -> dict[str, NDArray[Any]]:
        """All splits of a domain, drawn anew: `train_images`, `train_labels`, and so on."""
        from fedshift.rng import Rng

        arrays: dict[str, NDArray[Any]] = {}
        for split in SPLITS:
            path = (self.name, split) if self.domains_share_randomness else (self.name, split, domain)
            pictures, labels = self.draw(domain, split, Rng.of(*path).numpy())
            arrays[f"{split}_images"], arrays[f"{split}_labels"] = to_bytes(pictures), labels
        return arrays


def _resized(values: NDArray[Any], side: int) -> NDArray[Any]:
    """Pictures and masks at another size; labels of whole pictures as they are."""
    if values.ndim == 1:
        return values
    how = Image.Resampling.BILINEAR if values.ndim == 4 else Image.Resampling.NEAREST
    return np.stack([np.asarray(Image.fromarray(value).resize((side, side), how)) for value in values])
