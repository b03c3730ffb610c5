"""Scores computed from a confusion matrix, so that those of batches and sites can be added up first."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from fedshift.functional.losses import IGNORE


def confusion_matrix(predicted: Tensor, labels: Tensor, classes: int) -> Tensor:
    """Counts `(classes, classes)` int64: rows are the truth, columns the prediction.

    `predicted` and `labels` are integers of one shape, `(B,)` or `(B, H, W)`. Labels that are IGNORE (255,
    when there are no more than 255 classes) are left out, whatever was predicted there.
    """
    if predicted.shape != labels.shape:
        raise ValueError(f"predictions {tuple(predicted.shape)} and labels {tuple(labels.shape)} differ in shape")
    truth, guess = labels.flatten().long(), predicted.flatten().long()
    if classes <= IGNORE:
        known = truth != IGNORE
        truth, guess = truth[known], guess[known]
    for what, values in (("label", truth), ("prediction", guess)):
        # An id out of range would be counted in the cell of another class.
        if values.numel() and (int(values.min()) < 0 or int(values.max()) >= classes):
            raise ValueError(f"a {what} is outside 0..{classes - 1}: {int(values.min())}..{int(values.max())}")
    return torch.bincount(truth * classes + guess, minlength=classes * classes).reshape(classes, classes)


def accuracy(confusion: Tensor) -> float:
    """The share of correct predictions, in [0, 1]; NaN when nothing was counted."""
    total = int(confusion.sum())
    return int(confusion.trace()) / total if total else math.nan


def per_class_accuracy(confusion: Tensor) -> Tensor:
    """The share of each class recognised, `(classes,)` float64; NaN where it has none."""
    return confusion.diagonal().double() / confusion.sum(dim=1).double()


def mean_iou(confusion: Tensor) -> float:
    """The mean over classes of intersection over union, in [0, 1].

    Classes found neither in the truth nor in the prediction are left out; NaN when that leaves none.
    """
    hits = confusion.diagonal().double()
    union = confusion.sum(dim=0).double() + confusion.sum(dim=1).double() - hits
    present = union > 0
    return float((hits[present] / union[present]).mean())
