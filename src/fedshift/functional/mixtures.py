"""Gaussian mixtures of features: a description of a set of samples that may be sent instead of the samples.

Features are first reduced to their principal axes. A mixture gives a point the weight W(x) in [0, 1]: the share of the
points it was fitted to whose density is lower. The density itself is not used as a weight, because it overflows or
vanishes in more than a few dimensions; its root per dimension may be. All sums are in float64 and over logarithms.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

Among = Literal["fitted", "batch"]
Weighting = Literal["rank", "density"]

ITERATIONS = 100
TOLERANCE = 1e-4
"""EM ends when the mean log-density grows by less than TOLERANCE, or after ITERATIONS."""
FLOOR = 1e-3
"""The smallest variance of a component, as a share of the mean variance of the points."""
LEVELS = 32
"""Largest number of entries in the table of log-densities."""


@dataclass(frozen=True)
class Mixture:
    """K Gaussians in d dimensions with diagonal covariances, in float32.

    `weights` `(K,)` sum to 1, `means` and `variances` are `(K, d)`. `counts` `(K,)` int64 is the number of samples
    behind each component. `levels` `(G,)`, ascending, is the table for W(x): the mean log-densities of G equal groups
    of the fitted points, sorted by log-density.
    """

    weights: Tensor
    means: Tensor
    variances: Tensor
    counts: Tensor
    levels: Tensor

    def checked(self, dimensions: int) -> Mixture:
        """Itself if it is a valid mixture in that many dimensions, otherwise ValueError: for received mixtures."""
        size = len(self.weights) if self.weights.ndim == 1 else 0
        if size == 0 or self.means.shape != (size, dimensions) or self.variances.shape != self.means.shape:
            raise ValueError("weights, means and variances of a mixture do not fit each other")
        if self.counts.shape != (size,) or self.levels.ndim != 1 or not 1 <= len(self.levels) <= LEVELS:
            raise ValueError("counts or levels of a mixture have the wrong size")
        floats = (self.weights, self.means, self.variances, self.levels)
        if any(part.dtype != torch.float32 or not bool(part.isfinite().all()) for part in floats):
            raise ValueError("a mixture must be finite numbers in float32")
        if bool((self.variances <= 0).any()) or bool((self.weights < 0).any()):
            raise ValueError("a mixture has a variance of 0 or less, or a negative weight")
        if abs(float(self.weights.double().sum()) - 1) > 1e-3 or bool((self.levels.diff() < 0).any()):
            raise ValueError("a mixture's weights must sum to 1 and its levels ascend")
        return self


@dataclass(frozen=True)
class Axes:
    """Principal axes of a set of features: `centre` `(D,)` and orthonormal `axes` `(D, d)`, both float32."""

    centre: Tensor
    axes: Tensor

    def reduce(self, features: Tensor) -> Tensor:
        """`(n, D)` to coordinates `(n, d)`, float64."""
        points = features.double()
        return (points - self.centre.to(points)) @ self.axes.to(points)


def principal_axes(features: Tensor, energy: float) -> Axes:
    """The fewest axes that keep the share `energy` of the variance of `(n, D)` features; at least one."""
    points = features.double()
    centre = points.mean(0)
    spread = points - centre
    variances, axes = torch.linalg.eigh(spread.T @ spread)  # ascending
    kept = variances.clamp(min=0).flip(0).cumsum(0)
    # The sum has rounding errors: an energy of 1 must not ask for more than there is.
    enough = int((kept < (energy - 1e-9) * kept[-1]).sum()) + 1
    return Axes(centre.float(), axes.flip(1)[:, : min(enough, len(centre))].float().contiguous())


def fit_mixture(points: Tensor, owners: Tensor, components: int, smallest: int, generator: torch.Generator) -> Mixture:
    """EM from a k-means++ start on points `(n, d)`; `owners` `(n,)` says which sample each point belongs to.

    No component has fewer than `smallest` samples, because a component of a single sample would reveal that sample. The
    smaller half of those with fewer is removed and EM continues, so that the others take over their points, until none
    has fewer. The last component always stays. So the result may have fewer than `components`.
    """
    points = points.double()
    most = max(1, min(components, len(owners.unique()) // max(smallest, 1)))
    nearest = _nearest(points, _seeds(points, most, generator))
    spread = float(points.var(0, correction=0).mean())
    floor = FLOOR * spread if spread > 0 else FLOOR
    shares = torch.nn.functional.one_hot(nearest).double()
    while True:
        weights, means, variances = _converge(points, shares[:, shares.sum(0) > 0], floor)
        terms = _log_terms(points, weights, means, variances)
        counts = _distinct(terms.argmax(1), owners, len(weights))
        small = int((counts < smallest).sum())
        if small == 0 or len(weights) == 1:
            break
        kept = counts.argsort(stable=True)[min((small + 1) // 2, len(weights) - 1) :].sort().values
        shares = terms[:, kept].softmax(1)
    fitted = Mixture(weights.float(), means.float(), variances.float(), counts, torch.zeros(1))
    return Mixture(
        *(fitted.weights, fitted.means, fitted.variances, counts),
        levels=density_levels(log_density(points, fitted), len(owners.unique()) // max(smallest, 1)),
    )


def log_density(points: Tensor, mixture: Mixture) -> Tensor:
    """`(n, d)` to `(n,)`, float64."""
    points = points.double()
    terms = _log_terms(points, mixture.weights.to(points), mixture.means.to(points), mixture.variances.to(points))
    return terms.logsumexp(1)


def density_levels(log_densities: Tensor, groups: int) -> Tensor:
    """The means of (at most LEVELS) equal groups of the sorted log-densities `(n,)`, ascending, float32.

    They are means, because a quantile would be the log-density of one sample.
    """
    count = max(1, min(groups, LEVELS, len(log_densities)))
    parts = torch.tensor_split(log_densities.sort().values, count)
    return torch.stack([part.mean() for part in parts]).float()


def interpolate_share(log_densities: Tensor, levels: Tensor) -> Tensor:
    """The share of the fitted points with a lower density, `(n,)` in [0, 1], float32, by the table.

    Level j of G has the share (j + 1/2) / G. Between and beyond levels it is linear, limited to 0 and 1. With one level
    it is 0 below that level and 1 from it on.
    """
    table, size = levels.to(log_densities.device, torch.float64), len(levels)
    if size == 1:
        return (log_densities >= table).float()
    upper = torch.searchsorted(table, log_densities).clamp(1, size - 1)
    low, high = table[upper - 1], table[upper]
    along = (log_densities - low) / (high - low).clamp(min=torch.finfo(table.dtype).tiny)
    return ((upper - 0.5 + along) / size).clamp(0, 1).float()


def share_of_batch(log_densities: Tensor) -> Tensor:
    """The rank of each log-density in its batch, `(n,)` in [0, 1], float32: (number of lower ones + 1/2) / n."""
    ordered = log_densities.sort().values
    return ((torch.searchsorted(ordered, log_densities) + 0.5) / len(ordered)).float()


def relative_density(log_densities: Tensor, levels: Tensor, dimensions: int) -> Tensor:
    """(p(x) / p_median)^(1 / d), at most 1, `(n,)`, float32: how dense it is at x per dimension, compared with the
    median of the fitted points. Unlike a rank it goes on falling, slowly, where x is further away than any of them."""
    middle = levels.double().median().to(log_densities)
    return ((log_densities - middle) / dimensions).clamp(max=0).exp().float()


def as_rows(features: Tensor) -> Tensor:
    """`(B, D)` unchanged; maps `(B, D, h, w)` as one row per pixel, `(B h w, D)`."""
    return features.movedim(1, -1).flatten(0, -2)


def draw_rows(features: Tensor, per_sample: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Rows `(m, D)` and the sample that each is from `(m,)`: all rows of `(B, D)`, or up to `per_sample` random pixels
    of each map of `(B, D, h, w)`."""
    pixels = as_rows(features).reshape(len(features), -1, features.shape[1])
    count = min(per_sample, pixels.shape[1])
    order = torch.rand(pixels.shape[:2], generator=generator).argsort(1)[:, :count].to(features.device)
    rows = pixels.gather(1, order[..., None].expand(-1, -1, pixels.shape[2])).flatten(0, 1)
    return rows, torch.arange(len(features)).repeat_interleave(count)


class Sample:
    """Collects the feature vectors that a mixture is fitted to: at most `most`, from `samples` samples, each sample
    once, and equally many pixels of each map."""

    def __init__(self, samples: int, most: int, generator: torch.Generator) -> None:
        self._seen = torch.zeros(samples, dtype=torch.bool)
        self._left, self._per_sample = most, max(1, most // samples)
        self._generator = generator
        self._parts: list[tuple[Tensor, Tensor]] = []

    def add(self, features: Tensor, index: Tensor) -> None:
        """Features `(B, D)` or `(B, D, h, w)` of the samples numbered `index` `(B,)`."""
        fresh = ~self._seen[index]
        if self._left <= 0 or not bool(fresh.any()):
            return
        self._seen[index] = True
        rows, which = draw_rows(features[fresh.to(features.device)], self._per_sample, self._generator)
        self._parts.append((rows.float().cpu()[: self._left], index[fresh][which][: self._left]))
        self._left -= len(rows)

    def result(self) -> tuple[Tensor, Tensor]:
        """Rows `(n, D)` and the number of the sample `(n,)` that each is from."""
        return torch.cat([rows for rows, _ in self._parts]), torch.cat([owners for _, owners in self._parts])


def typicality(
    features: Tensor, axes: Axes, mixture: Mixture, among: Among = "fitted", weighting: Weighting = "rank"
) -> Tensor:
    """W(x) of features `(B, D)` or of every pixel of maps `(B, D, h, w)`: `(B,)` or `(B, h, w)` in [0, 1].

    A rank compares x with those that `among` names: the points that the mixture was fitted to, or the batch itself.
    """
    densities = log_density(axes.reduce(as_rows(features)), mixture)
    if weighting == "density":
        shares = relative_density(densities, mixture.levels, axes.axes.shape[1])
    else:
        shares = interpolate_share(densities, mixture.levels) if among == "fitted" else share_of_batch(densities)
    return shares.reshape(features.shape[:1] + features.shape[2:])


def _log_terms(points: Tensor, weights: Tensor, means: Tensor, variances: Tensor) -> Tensor:
    """log(w_k N(x; m_k, v_k)) for every point and component, `(n, K)`, by two matrix products."""
    precisions = 1 / variances
    distances = points.square() @ precisions.T - 2 * points @ (means * precisions).T
    distances = (distances + (means.square() * precisions).sum(1)).clamp(min=0)
    return weights.log() - 0.5 * (distances + variances.log().sum(1) + points.shape[1] * math.log(2 * math.pi))


def _converge(points: Tensor, shares: Tensor, floor: float) -> tuple[Tensor, Tensor, Tensor]:
    """EM from responsibilities `(n, K)`: weights, means and variances."""
    before = -math.inf
    for _ in range(ITERATIONS):
        weights, means, variances = _maximise(points, shares, floor)
        terms = _log_terms(points, weights, means, variances)
        densities = terms.logsumexp(1, keepdim=True)
        now = float(densities.mean())
        if now - before < TOLERANCE:
            break
        before, shares = now, (terms - densities).exp()
    return weights, means, variances


def _maximise(points: Tensor, shares: Tensor, floor: float) -> tuple[Tensor, Tensor, Tensor]:
    # A component without points keeps a tiny weight, because its logarithm must stay finite.
    totals = shares.sum(0).clamp(min=1e-10)
    means = (shares.T @ points) / totals[:, None]
    variances = (shares.T @ points.square()) / totals[:, None] - means.square()
    return totals / totals.sum(), means, variances.clamp(min=floor)


def _seeds(points: Tensor, count: int, generator: torch.Generator) -> Tensor:
    """k-means++ (Arthur and Vassilvitskii, 2007): each centre is a point drawn with a probability proportional to its
    squared distance from the centres before. Fewer than `count` if there are fewer different points."""
    chosen = [int(torch.randint(len(points), (1,), generator=generator))]
    distances = (points - points[chosen[0]]).square().sum(1)
    while len(chosen) < count and float(distances.max()) > 0:
        chosen.append(int(torch.multinomial(distances / distances.max(), 1, generator=generator)))
        distances = torch.minimum(distances, (points - points[chosen[-1]]).square().sum(1))
    return points[chosen]


def _nearest(points: Tensor, centres: Tensor) -> Tensor:
    return torch.cdist(points, centres).argmin(1)


def _distinct(component: Tensor, owners: Tensor, size: int) -> Tensor:
    """How many different owners each of `size` components has, `(size,)` int64."""
    base = int(owners.max()) + 1
    pairs = torch.unique(component * base + owners)
    return torch.bincount(torch.div(pairs, base, rounding_mode="floor"), minlength=size)
