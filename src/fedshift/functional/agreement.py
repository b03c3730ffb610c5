"""One prediction from several models: mean scores, pseudo labels, and how much each model counts.

Guile Wu, Shaogang Gong: Collaborative Optimization and Aggregation for Decentralized Domain Generalization and
Adaptation. ICCV 2021, sec. 3.3.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor


def mean_probability(scores: Tensor, shares: Tensor) -> Tensor:
    """log sum_m shares_m softmax(scores_m): `(M, B, C, ...)` logits to `(B, C, ...)` log-probabilities.

    `shares` `(M,)` are at least 0 and sum to 1; a member with share 0 is ignored. The sum is taken over logarithms,
    because a probability that is tiny for every member would underflow to 0.
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


Rule = Literal["mean", "max", "most"]


class Opinions:
    """What agreement needs of M models' probabilities for N samples and C classes. Models are added one at a time, so
    that memory grows by two numbers per sample and model, not by C."""

    def __init__(self) -> None:
        self._choices: list[Tensor] = []
        self._confidences: list[Tensor] = []
        self._total = torch.zeros(())

    def add(self, probabilities: Tensor) -> None:
        """Adds one model's probabilities `(N, C)`."""
        confidence, choice = probabilities.max(dim=1)
        self._confidences.append(confidence)
        self._choices.append(choice)
        self._total = self._total + probabilities

    @property
    def choices(self) -> Tensor:
        """Each model's most likely class, `(M, N)` int64."""
        return torch.stack(self._choices)

    @property
    def confidences(self) -> Tensor:
        """Its probability, `(M, N)`."""
        return torch.stack(self._confidences)

    @property
    def mean(self) -> Tensor:
        """The mean of the models' probabilities, `(N, C)`."""
        return self._total / len(self._choices)


def pseudo_labels(given: Opinions, rule: Rule) -> tuple[Tensor, Tensor]:
    """The class of each sample `(N,)` int64 and its confidence `(N,)`.

    - `mean`: the most likely class in the models' mean, and its mean probability.
    - `max`: the class of the most confident model, and that model's probability.
    - `most`: the class of most models, and the mean of these models' probabilities. If several classes have equally
      many models, the class with the higher mean probability wins.

    Remaining ties go to the class with the lower number, or to the first model.
    """
    if rule == "mean":
        confidence, label = given.mean.max(dim=1)
        return label, confidence
    if rule == "max":
        confidence, model = given.confidences.max(dim=0)
        return given.choices.gather(0, model[None]).squeeze(0), confidence
    choices, confidences, nothing = given.choices.T, given.confidences.T, torch.zeros_like(given.mean)
    votes = nothing.scatter_add(1, choices, torch.ones_like(confidences))
    sureness = nothing.scatter_add(1, choices, confidences) / votes.clamp(min=1)
    is_leading = votes == votes.amax(dim=1, keepdim=True)
    confidence, label = sureness.where(is_leading, -1.0).max(dim=1)
    return label, confidence


def agreements(choices: Tensor, labels: Tensor, kept: Tensor) -> Tensor:
    """Z `(M,)` int64: for how many of the `kept` samples `(N,)` bool each model agrees with `labels` `(N,)`."""
    return ((choices == labels) & kept).sum(dim=1)


def aggregation_weights(agreed: Tensor) -> Tensor:
    """alpha = softmax(Z / sum Z), Eq. (8), `(M,)` float64; equal weights if Z is 0 for all models."""
    counts = agreed.double()
    return torch.softmax(counts / counts.sum().clamp(min=1), dim=0)  # Eq. (8)
