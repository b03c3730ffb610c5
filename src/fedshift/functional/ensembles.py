"""Several models' scores: one prediction from them, and how far they are apart."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor


def mean_probability(scores: Tensor, shares: Tensor) -> Tensor:
    """log sum_m shares_m softmax(scores_m): `(M, B, C, ...)` logits to `(B, C, ...)` log-probabilities.

    `shares` `(M,)` are at least 0 and sum to 1; a member with share 0 has no say. The sum is taken over logarithms,
    because a probability that every member finds tiny would underflow to 0.
    """
    log_shares = shares.log().reshape(-1, *[1] * (scores.ndim - 1))
    return torch.logsumexp(F.log_softmax(scores, dim=2) + log_shares, dim=0)


def mean_score(scores: Tensor, shares: Tensor) -> Tensor:
    """sum_m shares_m scores_m: `(M, B, C, ...)` logits to `(B, C, ...)` logits."""
    mean: Tensor = torch.tensordot(shares, scores, dims=1)
    return mean


def equal_shares(takes_part: Sequence[bool]) -> Tensor:
    """The same share for each member that takes part and 0 for the others, `(M,)`; all take part when none does."""
    chosen = torch.tensor(list(takes_part) if any(takes_part) else [True] * len(takes_part))
    return chosen / chosen.sum()


def inconsistency(scores: Tensor, target: Tensor) -> Tensor:
    """Mean over samples of ||mean_m softmax(scores_m) - softmax(target)||^2, as a scalar.

    `scores` are logits `(M, B, C)`, `target` is a constant `(B, C)`: no gradient flows into it.
    """
    distance = scores.softmax(2).mean(0) - target.detach().softmax(1)
    return distance.square().sum(1).mean()
