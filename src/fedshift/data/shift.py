"""A picture of the shift before anything is trained: how each site looks in a few numbers, and how far sites are apart.

Per sample there are a few features: brightness, contrast, colours and sharpness of an image, the columns of a table. Of
a site only their means and deviations count, over `MIN_SAMPLES` samples or more: no sample's own values.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fedshift.data.domain import MIN_SAMPLES, Dataset, Domain

IMAGE_FEATURES = ("brightness", "contrast", "red", "green", "blue", "saturation", "sharpness")
"""From 0 to 1. Colours are differences to the brightness, sharpness is the mean of the absolute Laplacian."""
UNLIKE = 0.8
"""From this distance on two sites look different: what is called a large effect where means are compared."""
_AT_ONCE = 256


@dataclass(frozen=True)
class SiteLook:
    """Means and standard deviations of a site's features, the share of missing values in each, and of its classes
    (None without labels)."""

    name: str
    samples: int
    means: Mapping[str, float]
    deviations: Mapping[str, float]
    missing: Mapping[str, float]
    classes: Mapping[str, float] | None


@dataclass(frozen=True)
class Shift:
    """`distances` has every pair of sites once. `unlike` names sites that look different from every other, `too_small`
    those with fewer samples than `MIN_SAMPLES`."""

    sites: tuple[SiteLook, ...]
    distances: Mapping[tuple[str, str], float]
    unlike: tuple[str, ...]
    too_small: tuple[str, ...]

    def between(self, one: str, other: str) -> float:
        return self.distances.get((one, other), self.distances.get((other, one), 0.0))

    def reasons(self, name: str, most: int = 3) -> list[str]:
        """The features in which a site differs the most from the mean of the others."""
        own = next(site for site in self.sites if site.name == name)
        others = [site for site in self.sites if site.name != name]
        scores = {
            feature: statistics.fmean(_difference(own, other, feature) for other in others) for feature in own.means
        }
        ranked = sorted(scores, key=lambda feature: -abs(scores[feature]))
        told = [f"{'higher' if scores[f] > 0 else 'lower'} {f}" for f in ranked if abs(scores[f]) >= UNLIKE / 2]
        return told[:most]

    def as_json(self) -> dict[str, Any]:
        return {
            "sites": [asdict(site) for site in self.sites],
            "distances": {f"{one} / {other}": value for (one, other), value in self.distances.items()},
            "unlike": list(self.unlike),
            "too_small": list(self.too_small),
        }


def measure_shift(dataset: Dataset) -> Shift:
    """Reads every domain; of its splits all count."""
    names = dataset.columns or (IMAGE_FEATURES if len(dataset.input_shape) == 3 else ())
    looks, too_small = [], []
    for name in dataset.domains:
        domain = dataset.load(name)
        if sum(map(len, _parts(domain))) < MIN_SAMPLES:
            too_small.append(name)
        else:
            looks.append(_look(domain, names, dataset.classes))
    distances = {
        (one.name, other.name): distance(one, other) for at, one in enumerate(looks) for other in looks[at + 1 :]
    }
    shift = Shift(tuple(looks), distances, (), tuple(too_small))
    return Shift(shift.sites, distances, tuple(_unlike(shift)), shift.too_small)


def distance(one: SiteLook, other: SiteLook) -> float:
    """The root mean square over features of the difference of means, in deviations (Cohen's d): 0 for sites that look
    alike, about 0.5 for a visible and 1 for a strong shift."""
    squares = [_difference(one, other, feature) ** 2 for feature in one.means if feature in other.means]
    return math.sqrt(statistics.fmean(squares)) if squares else 0.0


def image_features(images: NDArray[np.uint8]) -> NDArray[np.float64]:
    """`(n, h, w, 3)` to `(n, 7)`: see `IMAGE_FEATURES`."""
    x = images.astype(np.float32) / 255
    luma = x @ np.array([0.299, 0.587, 0.114], dtype=np.float32)
    brightness = luma.mean((1, 2))
    colours = x.mean((1, 2)) - brightness[:, None]
    saturation = (x.max(-1) - x.min(-1)).mean((1, 2))
    inner = luma[:, 1:-1, 1:-1]
    edges = luma[:, :-2, 1:-1] + luma[:, 2:, 1:-1] + luma[:, 1:-1, :-2] + luma[:, 1:-1, 2:] - 4 * inner
    columns = [brightness, luma.std((1, 2)), *colours.T, saturation, np.abs(edges).mean((1, 2))]
    return np.stack(columns, axis=1).astype(np.float64)


def _look(domain: Domain, names: Sequence[str], classes: Sequence[str]) -> SiteLook:
    parts = _parts(domain)
    blocks = [part.inputs[at : at + _AT_ONCE] for part in parts for at in range(0, len(part), _AT_ONCE)]
    rows = [image_features(block) if block.ndim == 4 else block.astype(np.float64) for block in map(np.asarray, blocks)]
    values = np.concatenate(rows)
    known = (~np.isnan(values)).sum(0)
    usable = [at for at in range(len(names)) if known[at] >= MIN_SAMPLES]
    return SiteLook(
        domain.name,
        len(values),
        {names[at]: float(np.nanmean(values[:, at])) for at in usable},
        {names[at]: float(np.nanstd(values[:, at])) for at in usable},
        {names[at]: float(1 - known[at] / len(values)) for at in range(len(names)) if known[at] < len(values)},
        _class_shares(domain, classes),
    )


def _class_shares(domain: Domain, classes: Sequence[str]) -> dict[str, float] | None:
    """Of samples, for masks of pixels that have a class."""
    labels = [np.asarray(part.labels).ravel() for part in _parts(domain) if part.labels is not None]
    if not labels:
        return None
    everything = np.concatenate(labels)
    counts = np.bincount(everything[everything < len(classes)], minlength=len(classes))
    return {name: float(count / max(counts.sum(), 1)) for name, count in zip(classes, counts, strict=True)}


def _difference(one: SiteLook, other: SiteLook, feature: str) -> float:
    if feature not in one.means or feature not in other.means:
        return 0.0
    spread = math.sqrt((one.deviations[feature] ** 2 + other.deviations[feature] ** 2) / 2)
    apart = one.means[feature] - other.means[feature]
    # A feature that hardly varies at either site would be an infinite shift.
    return max(-10.0, min(10.0, apart / max(spread, 1e-3)))


def _unlike(shift: Shift) -> list[str]:
    found = []
    for site in shift.sites:
        apart = [shift.between(site.name, other.name) for other in shift.sites if other is not site]
        if len(apart) >= 2 and min(apart) >= UNLIKE:
            found.append(site.name)
    return found


def _parts(domain: Domain) -> list[Any]:
    return [part for part in (domain.train, domain.val, domain.test, *domain.rest) if len(part)]
