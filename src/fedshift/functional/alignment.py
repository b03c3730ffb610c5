"""Aligning every layer of one network with every layer of another, weighted by their similarity.

J. Yuan et al.: Collaborative Semantic Aggregation and Calibration for Federated Domain Generalization. IEEE TKDE 2023
(CSAC), sec. 3.5. The maps of all layers have one size: `a` is `(K, B, d, c)` for K layers, B samples, d positions and c
channels, `b` is `(L, B, d, c)`.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from fedshift.functional.mmd import Estimator, mmd, pairwise_mmd, squared_distances

Attention = Literal["both", "position", "channel", "none"]
Discrepancy = Literal["mmd", "mse"]
Pairs = Literal["cross-layer", "same-layer"]


def alignment_loss(
    a: Tensor,
    b: Tensor,
    *,
    attention: Attention = "both",
    pairs: Pairs = "cross-layer",
    discrepancy: Discrepancy = "mmd",
    estimator: Estimator = "biased",
) -> Tensor:
    """L_AL of Eq. (6), a scalar. With `same-layer` pairs (K = L) there is no attention: each pair has weight 1."""
    samples_a, samples_b = a.flatten(2), b.flatten(2)
    if pairs == "same-layer":
        each = mmd(samples_a, samples_b, estimator) if discrepancy == "mmd" else (a - b).square().mean((1, 2, 3))
        return each.sum()
    if discrepancy == "mmd":
        table = pairwise_mmd(samples_a, samples_b, estimator)
    else:
        table = squared_distances(a.flatten(1), b.flatten(1)) / a[0].numel()
    return (attention_weights(a, b, attention) * table).sum()  # Eq. (6)


@torch.no_grad()
def attention_weights(a: Tensor, b: Tensor, attention: Attention = "both") -> Tensor:
    """alpha `(K, L)`, rows summing to 1, without gradient: it chooses the pairs to align and is not learned."""
    if attention == "none":
        return a.new_full((len(a), len(b)), 1 / len(b))
    weights = []
    if attention in ("both", "position"):
        weights.append(position_similarity(a, b).softmax(1))  # Eq. (7)
    if attention in ("both", "channel"):
        weights.append(channel_similarity(a, b).softmax(1))  # Eq. (8)
    return torch.stack(weights).mean(0)  # Eq. (9)


def position_similarity(a: Tensor, b: Tensor) -> Tensor:
    """avg(A_k^T B_l) of Eq. (7), `(K, L)`: the mean over the d x d map and over samples.

    The mean of all entries of A^T B is the inner product of the two means over positions: the map is never built.
    """
    return torch.einsum("kbc,lbc->kl", a.mean(2), b.mean(2)) / a.shape[1]


def channel_similarity(a: Tensor, b: Tensor) -> Tensor:
    """avg(A_k B_l^T) of Eq. (8), `(K, L)`: the mean over the c x c map and over samples, by the same identity."""
    return torch.einsum("kbd,lbd->kl", a.mean(3), b.mean(3)) / a.shape[1]
