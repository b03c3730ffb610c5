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


def share_mistaken(confusion: Tensor, wanted: int) -> float:
    """The share of other classes' samples that are predicted as class `wanted`; NaN if there are none."""
    others = torch.arange(len(confusion)) != wanted
    total = int(confusion[others].sum())
    return int(confusion[others, wanted].sum()) / total if total else math.nan


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


def per_class_iou(confusion: Tensor) -> Tensor:
    """Intersection over union of each class, `(classes,)` float64; NaN for one that is neither there nor predicted."""
    hits = confusion.diagonal().double()
    return hits / (confusion.sum(dim=0).double() + confusion.sum(dim=1).double() - hits)


def per_class_dice(confusion: Tensor) -> Tensor:
    """Dice of each class, `(classes,)` float64: twice the hits over what is there plus what is predicted; NaN for a
    class that is neither."""
    return 2 * confusion.diagonal().double() / (confusion.sum(dim=0).double() + confusion.sum(dim=1).double())


def guessing_accuracy(confusion: Tensor) -> float:
    """The accuracy of predictions that are as frequent as these and have nothing to do with the truth: what Cohen's
    kappa compares with. NaN if the matrix is empty."""
    total = int(confusion.sum())
    if not total:
        return math.nan
    return float((confusion.sum(dim=0).double() / total) @ (confusion.sum(dim=1).double() / total))


def wilson_interval(share: float, count: int, z: float = 1.959964) -> tuple[float, float]:
    """Wilson's interval for a share seen in `count` independent samples, by default at 95 %. It is honest for few
    samples and for shares near 0 and 1. Without samples it is all of [0, 1]."""
    if count <= 0 or not math.isfinite(share):
        return 0.0, 1.0
    centre = share + z * z / (2 * count)
    spread = z * math.sqrt(share * (1 - share) / count + z * z / (4 * count * count))
    scale = 1 + z * z / count
    return max(0.0, (centre - spread) / scale), min(1.0, (centre + spread) / scale)
