"""Prediction agreement: pseudo labels from several models' opinions, and how much each model is to count.

Guile Wu, Shaogang Gong: Collaborative Optimization and Aggregation for Decentralized Domain Generalization and
Adaptation. ICCV 2021, sec. 3.3.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

Rule = Literal["mean", "max", "most"]


class Opinions:
    """All that agreement needs of M models' probabilities for N samples and C classes. They are added one model at a
    time, so that memory is that of one model's, however many there are."""

    def __init__(self) -> None:
        self._choices: list[Tensor] = []
        self._confidences: list[Tensor] = []
        self._total = torch.zeros(())

    def add(self, probabilities: Tensor) -> None:
        """One model's `(N, C)`."""
        confidence, choice = probabilities.max(dim=1)
        self._confidences.append(confidence)
        self._choices.append(choice)
        self._total = self._total + probabilities

    @property
    def choices(self) -> Tensor:
        """Each model's favourite class, `(M, N)` int64."""
        return torch.stack(self._choices)

    @property
    def confidences(self) -> Tensor:
        """Its probability there, `(M, N)`."""
        return torch.stack(self._confidences)

    @property
    def mean(self) -> Tensor:
        """The mean of the models' probabilities, `(N, C)`."""
        return self._total / len(self._choices)


def pseudo_labels(given: Opinions, rule: Rule) -> tuple[Tensor, Tensor]:
    """The class of each sample `(N,)` int64 and how sure it is `(N,)`.

    - `mean`: the favourite of the models' mean, and its probability there.
    - `max`: the favourite of the most confident model, and that model's probability.
    - `most`: the favourite of most models, and the mean of their probabilities. Where several classes have equally many
      models, the one of the surer models wins.

    What is still equal goes to the class with the lower number, of models to the first.
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
    """Z `(M,)` int64: how many of the `kept` samples `(N,)` bool each model labels as `labels` `(N,)` does."""
    return ((choices == labels) & kept).sum(dim=1)


def aggregation_weights(agreed: Tensor) -> Tensor:
    """alpha = softmax(Z / sum Z), Eq. (8), `(M,)` float64; equal weights where nobody agrees with anything."""
    counts = agreed.double()
    return torch.softmax(counts / counts.sum().clamp(min=1), dim=0)  # Eq. (8)
