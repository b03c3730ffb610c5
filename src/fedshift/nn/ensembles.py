"""Modules that answer for several: heads on one backbone, or whole networks."""

from __future__ import annotations

import copy
from typing import Literal

import torch
from torch import Tensor, nn

from fedshift.functional.ensembles import equal_shares, mean_probability, mean_score

Rule = Literal["probabilities", "logits"]


class Ensemble(nn.Module):
    """`members` copies of `template` to be filled with different weights: what each takes in, to the mean of what they
    give out, `(B, classes)` or `(B, classes, H, W)`.

    The mean is of probabilities, given as their logarithms, or of logits; either way its softmax is the prediction.
    `shares` says how much each member counts.
    """

    shares: Tensor

    def __init__(self, template: nn.Module, members: int, rule: Rule) -> None:
        super().__init__()
        self.members = nn.ModuleList(copy.deepcopy(template) for _ in range(members))
        self.rule = rule
        self.register_buffer("shares", equal_shares([True] * members))

    def forward(self, x: Tensor) -> Tensor:
        scores = torch.stack([member(x) for member in self.members])
        mean = mean_probability if self.rule == "probabilities" else mean_score
        return mean(scores, self.shares)
