"""How far apart groups of points are, compared with the points of a group."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Separation:
    """Mean distances over pairs `within` a group and `between` groups; `nearest` is the share of points whose nearest
    neighbour is of their own group."""

    within: float
    between: float
    nearest: float


def separation(distances: Tensor, groups: Tensor) -> Separation:
    """Of points with pairwise `distances` `(n, n)` that belong to `groups` `(n,)`, two of each at least."""
    same = groups[:, None] == groups[None, :]
    itself = torch.eye(len(groups), dtype=torch.bool)
    others = distances.masked_fill(itself, torch.inf)
    return Separation(
        within=float(distances[same & ~itself].mean()),
        between=float(distances[~same].mean()),
        nearest=float((groups[others.argmin(1)] == groups).double().mean()),
    )
