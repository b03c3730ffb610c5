"""Classification losses for images `(B, C)` and pixels `(B, C, H, W)`: the class dimension is always 1."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

IGNORE = 255
"""The label of pixels nobody has labelled. With more than 255 classes it is an ordinary class."""

_NO_LABEL_IGNORED = -100


def cross_entropy(scores: Tensor, labels: Tensor, *, smoothing: float = 0.0) -> Tensor:
    """Mean cross-entropy over all labels that are not IGNORE, as a scalar.

    `scores` are logits `(B, C)` or `(B, C, H, W)`, `labels` integers `(B,)` or `(B, H, W)`. With smoothing s
    the target is 1 - s + s/C for the true class and s/C for the others (Szegedy et al., CVPR 2016).
    When every label is IGNORE the loss is 0 with zero gradients: a mean over nothing would be NaN.
    """
    ignored = IGNORE if scores.shape[1] <= IGNORE else _NO_LABEL_IGNORED
    labels = labels.long()
    total = F.cross_entropy(
        _full_precision(scores), labels, ignore_index=ignored, label_smoothing=smoothing, reduction="sum"
    )
    return total / (labels != ignored).sum().clamp(min=1)


def soft_cross_entropy(scores: Tensor, probabilities: Tensor, weights: Tensor | None = None) -> Tensor:
    """Mean over samples of -sum_c p_c log softmax(scores)_c, for probabilities in the shape of `scores`.

    `weights` `(B,)` multiply each sample's term; the sum is divided by B all the same, not by their sum.
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
    """At least float32: bfloat16 scores are good enough for a network, a sum of their logarithms is not."""
    return scores.to(torch.promote_types(scores.dtype, torch.float32))


def _batch_mean(terms: Tensor, weights: Tensor | None) -> Tensor:
    """The mean of `(B, ...)` terms after each sample's were multiplied by its weight `(B,)`."""
    if weights is None:
        return terms.mean()
    if weights.shape != terms.shape[:1]:
        raise ValueError(f"weights have shape {tuple(weights.shape)}, expected ({terms.shape[0]},)")
    return (terms.reshape(len(terms), -1).mean(dim=1) * weights).mean()


def _require_same_shape(scores: Tensor, probabilities: Tensor) -> None:
    # Broadcasting would accept (1, C) probabilities for every sample, or (B, 1) for every class.
    if scores.shape != probabilities.shape:
        raise ValueError(f"probabilities have shape {tuple(probabilities.shape)}, the scores {tuple(scores.shape)}")
