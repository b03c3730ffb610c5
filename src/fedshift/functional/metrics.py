"""Scores from a confusion matrix. Matrices of batches and sites can be added up."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from fedshift.functional.losses import IGNORE


def confusion_matrix(predicted: Tensor, labels: Tensor, classes: int) -> Tensor:
    """Counts `(classes, classes)` int64: rows are the truth, columns the prediction.

    `predicted` and `labels` are integers of the same shape, `(B,)` or `(B, H, W)`. Samples or pixels with the label
    IGNORE (255, if there are at most 255 classes) are left out.
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
    """The share of correct predictions, in [0, 1]; NaN if the matrix is empty."""
    total = int(confusion.sum())
    return int(confusion.trace()) / total if total else math.nan


def per_class_accuracy(confusion: Tensor) -> Tensor:
    """The share of each class that is predicted correctly, `(classes,)` float64; NaN for a class without samples."""
    return confusion.diagonal().double() / confusion.sum(dim=1).double()


def mean_iou(confusion: Tensor) -> float:
    """The mean over classes of intersection over union, in [0, 1].

    Classes that occur neither in the truth nor in the prediction are left out; NaN if none is left.
    """
    hits = confusion.diagonal().double()
    union = confusion.sum(dim=0).double() + confusion.sum(dim=1).double() - hits
    present = union > 0
    return float((hits[present] / union[present]).mean())
