"""Groups of points: how tight each one is and how far apart they are."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor


def kmeans(features: Tensor, clusters: int, steps: int = 10) -> Tensor:
    """The cluster of each sample, `(N,)` int64, by Lloyd's algorithm on `(N, D)`. The first `clusters` samples are the
    first centres, so samples should be in random order. A centre without samples stays where it is."""
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
    # Torch's default uses a matrix product, whose rounding errors exceed the distances of near points.
    return torch.cdist(a, b, compute_mode="donot_use_mm_for_euclid_dist")


@dataclass(frozen=True)
class Separation:
    """Mean distances over pairs `within` a group and `between` groups; `nearest` is the share of points whose nearest
    neighbour is in the same group."""

    within: float
    between: float
    nearest: float


def separation(distances: Tensor, groups: Tensor) -> Separation:
    """The separation of points with pairwise `distances` `(n, n)` and `groups` `(n,)` of at least two points each."""
    same = groups[:, None] == groups[None, :]
    itself = torch.eye(len(groups), dtype=torch.bool, device=distances.device)
    others = distances.masked_fill(itself, torch.inf)
    return Separation(
        within=float(distances[same & ~itself].mean()),
        between=float(distances[~same].mean()),
        nearest=float((groups[others.argmin(1)] == groups).double().mean()),
    )
