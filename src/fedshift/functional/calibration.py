"""How sure predictions are, and how right: counts that can be added up over sites, and what follows from them.

Temperature scaling: C. Guo, G. Pleiss, Y. Sun, K. Q. Weinberger: On Calibration of Modern Neural Networks. ICML 2017.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

TEMPERATURES: tuple[float, ...] = tuple(2 ** (k / 8) for k in range(-20, 25))
"""From 0.18 to 8, in steps of 9 %; 1 is among them."""
BINS = 20
"""Equal parts of the range of a probability."""


def confidence_counts(scores: Tensor, labels: Tensor) -> Tensor:
    """For every temperature, how many samples have which confidence, wrong and right: `(temperatures, BINS, 2)` int64,
    from logits `(B, C)` and classes `(B,)`."""
    right = (scores.argmax(1) == labels).long()
    temperatures = torch.tensor(TEMPERATURES, dtype=scores.dtype, device=scores.device)
    confidence = (scores[None] / temperatures[:, None, None]).softmax(2).amax(2)  # (temperatures, B)
    cell = 2 * (confidence * BINS).long().clamp(max=BINS - 1) + right
    rows = torch.arange(len(TEMPERATURES), device=scores.device)[:, None] * (2 * BINS)
    counts = torch.bincount((rows + cell).flatten(), minlength=2 * BINS * len(TEMPERATURES))
    return counts.reshape(len(TEMPERATURES), BINS, 2)


def share_counts(scores: Tensor, labels: Tensor, bins: int) -> Tensor:
    """Of two classes: how many samples of each have which probability of the second, `(bins, 2)` int64."""
    share = scores.softmax(1)[:, 1]
    cell = 2 * (share * bins).long().clamp(max=bins - 1) + labels
    return torch.bincount(cell, minlength=2 * bins).reshape(bins, 2)


def _middles() -> Tensor:
    return (torch.arange(BINS, dtype=torch.float64) + 0.5) / BINS


def best_temperature(counts: Tensor) -> float:
    """The temperature at which the predicted class is most likely to be right as often as its confidence says: the
    lowest negative log-likelihood of right and wrong, with the middle of each part as the confidence."""
    middle = _middles()
    right, wrong = counts[..., 1].double(), counts[..., 0].double()
    loss = -(right * middle.log() + wrong * (1 - middle).log()).sum(1)
    return TEMPERATURES[int(loss.argmin())]


def calibration_error(counts: Tensor) -> float:
    """The expected calibration error of `(BINS, 2)`: the mean distance of confidence and accuracy, in [0, 1]; NaN
    without samples. The confidence of a part is its middle."""
    per_bin = counts.sum(1).double()
    total = float(per_bin.sum())
    if not total:
        return math.nan
    accuracy = counts[:, 1].double() / per_bin.clamp(min=1)
    return float((per_bin * (accuracy - _middles()).abs()).sum() / total)


def area_under_curve(counts: Tensor) -> float:
    """The area under the ROC curve from `share_counts`: how often a sample of the second class has a higher probability
    of it than one of the first; equal parts count half. NaN where one class has no samples."""
    first, second = counts[:, 0].double(), counts[:, 1].double()
    if not first.sum() or not second.sum():
        return math.nan
    below = first.cumsum(0) - first
    return float((second * (below + first / 2)).sum() / (first.sum() * second.sum()))


def area_interval(area: float, first: int, second: int, z: float = 1.959964) -> tuple[float, float]:
    """The 95 % interval of an area under the curve from so many samples of each class (Hanley and McNeil, Radiology
    1982)."""
    one, two = area / (2 - area), 2 * area * area / (1 + area)
    variance = area * (1 - area) + (second - 1) * (one - area * area) + (first - 1) * (two - area * area)
    spread = z * math.sqrt(max(0.0, variance) / (first * second))
    return max(0.0, area - spread), min(1.0, area + spread)


def quantile_of_counts(counts: Tensor, share: float) -> int:
    """The first part of `(bins,)` counts below whose end at least `share` of all lie."""
    total = counts.sum().double()
    return int((counts.cumsum(0).double() >= share * total).nonzero()[0])
