"""Clusters of features, and how tight they are."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor


def kmeans(features: Tensor, clusters: int, steps: int = 10) -> Tensor:
    """The cluster of each sample, `(N,)` int64, by Lloyd's algorithm on `(N, D)`. It starts from the first `clusters`
    samples, so these should come in no order; a centre that loses all its samples stays where it is."""
    centres = features[:clusters]
    nearest = _distances(features, centres).argmin(dim=1)
    for _ in range(steps):
        members = F.one_hot(nearest, len(centres)).to(features.dtype)
        sizes = members.sum(dim=0)[:, None]
        centres = torch.where(sizes > 0, members.T @ features / sizes.clamp(min=1), centres)
        before, nearest = nearest, _distances(features, centres).argmin(dim=1)
        if torch.equal(nearest, before):
            break
    return nearest


def gap_statistic(features: Tensor, cluster: Tensor) -> float:
    """sum_r 1 / (2 n_r) sum_{i, j in C_r} ||f_i - f_j||_2 for `(N, D)` and cluster numbers `(N,)`: small when clusters
    are tight (Peng et al.: Federated Adversarial Domain Adaptation, ICLR 2020)."""
    together = cluster[:, None] == cluster
    sizes = together.sum(dim=1)
    inside = (_distances(features, features) * together).sum(dim=1)
    return float((inside / (2 * sizes)).sum())


def _distances(a: Tensor, b: Tensor) -> Tensor:
    # Through a matrix product, which torch prefers, near points would get a distance of rounding errors.
    return torch.cdist(a, b, compute_mode="donot_use_mm_for_euclid_dist")
