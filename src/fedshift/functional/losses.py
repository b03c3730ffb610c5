"""Losses for images `(B, C)` and pixels `(B, C, H, W)`: the class dimension is always 1.

Gradient reversal: Y. Ganin, V. Lempitsky: Unsupervised Domain Adaptation by Backpropagation. ICML 2015.
"""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

IGNORE = 255
"""The label of unlabelled pixels. With more than 255 classes it is an ordinary class."""

_NO_LABEL_IGNORED = -100
SYMMETRIC_SHARE, SYMMETRIC_MISS = 0.5, 4.0


def cross_entropy(scores: Tensor, labels: Tensor, *, smoothing: float = 0.0) -> Tensor:
    """Mean cross-entropy over all labels that are not IGNORE, as a scalar.

    `scores` are logits `(B, C)` or `(B, C, H, W)`, `labels` integers `(B,)` or `(B, H, W)`. With smoothing s
    the target is 1 - s + s/C for the true class and s/C for the others (Szegedy et al., CVPR 2016).
    If every label is IGNORE, the loss is 0 with zero gradients: a mean over nothing would be NaN.
    """
    ignored = IGNORE if scores.shape[1] <= IGNORE else _NO_LABEL_IGNORED
    labels = labels.long()
    total = F.cross_entropy(
        _full_precision(scores), labels, ignore_index=ignored, label_smoothing=smoothing, reduction="sum"
    )
    return total / (labels != ignored).sum().clamp(min=1)


def symmetric_cross_entropy(scores: Tensor, labels: Tensor, *, smoothing: float = 0.0) -> Tensor:
    """SYMMETRIC_SHARE times the cross-entropy plus SYMMETRIC_MISS times the mean of 1 - p(label), over all labels that
    are not IGNORE; arguments as for `cross_entropy` (Y. Wang et al.: Symmetric Cross Entropy for Robust Learning with
    Noisy Labels. ICCV 2019, where the second term is called reverse cross-entropy).

    Where three of ten labels are wrong, cross-entropy is least for a model that is 70 % sure, this for one that is 92 %
    sure: a label that contradicts all others moves it less.
    """
    ignored = IGNORE if scores.shape[1] <= IGNORE else _NO_LABEL_IGNORED
    labels = labels.long()
    is_label = labels != ignored
    own = _full_precision(scores).softmax(1).gather(1, labels.where(is_label, 0).unsqueeze(1)).squeeze(1)
    missed = ((1 - own) * is_label).sum() / is_label.sum().clamp(min=1)
    return SYMMETRIC_SHARE * cross_entropy(scores, labels, smoothing=smoothing) + SYMMETRIC_MISS * missed


def soft_cross_entropy(scores: Tensor, probabilities: Tensor, weights: Tensor | None = None) -> Tensor:
    """Mean over samples of -sum_c p_c log softmax(scores)_c, for probabilities in the shape of `scores`.

    `weights` `(B,)` multiply each sample's term. The sum is divided by B, not by the sum of the weights.
    """
    _require_same_shape(scores, probabilities)
    return _batch_mean(-(probabilities * F.log_softmax(_full_precision(scores), dim=1)).sum(dim=1), weights)


def kl_divergence(target_probs: Tensor, scores: Tensor, weights: Tensor | None = None) -> Tensor:
    """Mean over samples of KL(p || softmax(scores)), for target probabilities p in the shape of `scores`.

    The target is a constant: no gradient flows into it. `weights` as in `soft_cross_entropy`.
    """
    _require_same_shape(scores, target_probs)
    # p is detached because d(p log p)/dp is infinite at p = 0; xlogy makes 0 log 0 = 0.
    p = target_probs.detach()
    terms = torch.xlogy(p, p) - p * F.log_softmax(_full_precision(scores), dim=1)
    return _batch_mean(terms.sum(dim=1), weights)


def _full_precision(scores: Tensor) -> Tensor:
    """At least float32: bfloat16 is precise enough for scores, but not for a sum of their logarithms."""
    return scores.to(torch.promote_types(scores.dtype, torch.float32))


def _batch_mean(terms: Tensor, weights: Tensor | None) -> Tensor:
    """The mean of `(B, ...)` terms, each sample's multiplied by its weight `(B,)`."""
    if weights is None:
        return terms.mean()
    if weights.shape != terms.shape[:1]:
        raise ValueError(f"weights have shape {tuple(weights.shape)}, expected ({terms.shape[0]},)")
    return (terms.reshape(len(terms), -1).mean(dim=1) * weights).mean()


def _require_same_shape(scores: Tensor, others: Tensor) -> None:
    # Broadcasting would silently compare one sample, or one class, with all.
    if scores.shape != others.shape:
        raise ValueError(f"scores of shape {tuple(scores.shape)} and {tuple(others.shape)} cannot be compared")


def discrepancy(scores: Tensor, others: Tensor) -> Tensor:
    """||softmax(scores) - softmax(others)||_1 of each sample or pixel: logits `(B, C, ...)` to `(B, ...)` in [0, 2]."""
    _require_same_shape(scores, others)
    return (scores.float().softmax(1) - others.float().softmax(1)).abs().sum(1)


def pseudo_label_loss(scores: Tensor, teacher: Tensor) -> Tensor:
    """-log softmax(scores) at the most likely class of `teacher`: logits `(B, C, ...)` to `(B, ...)`.

    The teacher is a constant: no gradient flows into it.
    """
    _require_same_shape(scores, teacher)
    return F.cross_entropy(scores.float(), teacher.argmax(1), reduction="none")


def reverse_gradient(x: Tensor, strength: float) -> Tensor:
    """x, unchanged; the gradient is multiplied by -`strength`."""
    reversed_: Tensor = _Reverse.apply(x, strength)  # type: ignore[no-untyped-call]
    return reversed_


def reversal_strength(progress: float, sharpness: float = 10.0) -> float:
    """2 / (1 + exp(-sharpness p)) - 1: from 0 at the beginning (p = 0) to almost 1 at the end (p = 1)."""
    return 2 / (1 + math.exp(-sharpness * progress)) - 1


class _Reverse(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, strength: float) -> Tensor:
        ctx.strength = strength
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return -ctx.strength * gradient, None
