"""One prediction from several models' scores."""

from __future__ import annotations

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
    return torch.tensordot(shares, scores, dims=1)


def equal_shares(takes_part: list[bool]) -> Tensor:
    """The same share for each member that takes part, `(M,)`; for all of them when none does."""
    chosen = torch.tensor(takes_part if any(takes_part) else [True] * len(takes_part))
    return chosen / chosen.sum()
