"""First and second moments of features per channel: those that BatchNorm layers have recorded, those of a batch, and
distances between them.

H. Feng et al.: KD3A: Unsupervised Multi-Source Decentralized Domain Adaptation via Knowledge Distillation. ICML 2021,
sec. 3.4.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Moments:
    """E[x] and E[x^2] of each channel, `(E,)` both."""

    mean: Tensor
    square: Tensor

    @property
    def deviation(self) -> Tensor:
        return (self.square - self.mean.square()).clamp(min=0).sqrt()


@dataclass(frozen=True)
class Anchor(Moments):
    """The weighted mean of several models' moments; `spread` is that of their squared distances from this mean."""

    spread: float


def channel_moments(features: Tensor) -> Moments:
    """The moments of a batch `(B, E)` or `(B, E, ...)`, with gradient, in float32 or better."""
    x = features.to(torch.promote_types(features.dtype, torch.float32))
    dims = [dim for dim in range(x.ndim) if dim != 1]
    return Moments(x.mean(dims), x.square().mean(dims))


def recorded_moments(weights: Mapping[str, Tensor], layers: Iterable[str]) -> dict[str, Moments]:
    """The moments in the BatchNorm layers of a state dict: E[x^2] = running_var + running_mean^2."""
    recorded = {}
    for layer in layers:
        mean, var = (weights[f"{layer}.{name}"].to(torch.float64) for name in ("running_mean", "running_var"))
        recorded[layer] = Moments(mean, var + mean.square())
    return recorded


def anchors(models: Iterable[tuple[Mapping[str, Moments], float]]) -> dict[str, Anchor]:
    """For each layer, the weighted mean of the models' moments, with weights normalised to sum 1.

    sum_k a_k ||m - E_k||^2 = ||m - sum_k a_k E_k||^2 + spread: one anchor replaces any number of models.
    """
    sums: dict[str, list[Tensor]] = {}
    total = 0.0
    for moments, weight in models:
        total += weight
        for layer, own in moments.items():
            length = own.mean.square().sum() + own.square.square().sum()
            terms = [weight * term for term in (own.mean, own.square, length)]
            sums[layer] = [a + b for a, b in zip(sums[layer], terms, strict=True)] if layer in sums else terms
    result = {}
    for layer, terms in sums.items():
        mean, square, length = (term / total for term in terms)
        spread = float(length - mean.square().sum() - square.square().sum())
        result[layer] = Anchor(mean, square, max(0.0, spread))
    return result


def batchnorm_mmd(target: Mapping[str, Moments], sources: Mapping[str, Anchor]) -> Tensor:
    """sum_l sum_k a_k (||mu(x_l) - E_k[x_l]||^2 + ||mu(x_l^2) - E_k[x_l^2]||^2), a scalar: the loss after Eq. (11).

    `target` has the moments of a batch at each layer, `sources` the anchors of the models.
    """
    total = torch.zeros(())
    for layer, anchor in sources.items():
        own = target[layer]
        for moment, wanted in ((own.mean, anchor.mean), (own.square, anchor.square)):
            total = total.to(moment.device) + (moment - wanted.to(moment)).square().sum()
        total = total + anchor.spread
    return total


def threshold_divergence(a: Moments, b: Moments) -> Tensor:
    """How well a threshold on each channel separates two domains, `(E,)` from 0 to 2: 2 (1 - 2 error), where the error
    is that of the threshold with equal error rates on both domains, for normal distributions with these moments.

    This is the proxy A-distance (S. Ben-David et al., Machine Learning 2010) without training a classifier. It is 0 for
    domains that differ only in variance.
    """
    width = (a.deviation + b.deviation).clamp(min=torch.finfo(a.mean.dtype).tiny)
    return 2 * torch.erf((a.mean - b.mean).abs() / width / math.sqrt(2))


def within_share(counts: Tensor, sums: Tensor, squares: Tensor) -> float:
    """The share of the variance of features that lies within clusters, from 0 to 1.

    `counts` `(R,)` and `sums` `(R, F)` are those of each cluster, `squares` the sum of all squared norms, float64.
    (1 / 2n) sum_ij ||f_i - f_j||^2 over pairs of a cluster is sum_i ||f_i||^2 - ||sum_i f_i||^2 / n.
    """
    between = (sums.square().sum(1) / counts.clamp(min=1)).sum()
    total = float(squares - sums.sum(0).square().sum() / counts.sum().clamp(min=1))
    return min(1.0, max(0.0, float(squares - between)) / total) if total > 0 else 0.0
