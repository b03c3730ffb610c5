"""How far two classifiers disagree, for samples `(B, C)` and pixels `(B, C, H, W)`: the class dimension is always 1."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor


def discrepancy(scores: Tensor, others: Tensor) -> Tensor:
    """||softmax(scores) - softmax(others)||_1 of each sample or pixel: logits `(B, C, ...)` to `(B, ...)` in [0, 2]."""
    _require_same_shape(scores, others)
    return (scores.float().softmax(1) - others.float().softmax(1)).abs().sum(1)


def pseudo_label_loss(scores: Tensor, teacher: Tensor) -> Tensor:
    """-log softmax(scores) at the class that `teacher` finds most likely: logits `(B, C, ...)` to `(B, ...)`.

    The teacher is a constant: no gradient flows into it.
    """
    _require_same_shape(scores, teacher)
    return F.cross_entropy(scores.float(), teacher.argmax(1), reduction="none")


def _require_same_shape(scores: Tensor, others: Tensor) -> None:
    # Broadcasting would compare one sample with all.
    if scores.shape != others.shape:
        raise ValueError(f"scores of shape {tuple(scores.shape)} and {tuple(others.shape)} cannot be compared")
