"""The features of a network for some samples, and their map in two dimensions."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn import functional as F

from fedshift.data.domain import VOID
from fedshift.nn.network import Backbone

Floats = NDArray[np.float32]
Ints = NDArray[np.int64]

_BATCH = 64
_PRINCIPAL = 50
_PERPLEXITY = 30.0
_ITERATIONS = 500
_LEAST_AREA = 4
"""In segmentation, a class of an image becomes a point if it covers at least this many cells of the feature map."""


@dataclass(frozen=True)
class NetworkOutputs:
    """What a network computes: features `(n, d)` or `(n, d, h, w)`, probabilities `(n, classes[, h, w])`."""

    features: Tensor
    probabilities: Tensor


@torch.inference_mode()
def network_outputs(net: nn.Module, inputs: Tensor) -> NetworkOutputs:
    """Runs `net` and keeps the outputs of its backbones. Those of several backbones are concatenated."""
    features, probabilities = [], []
    with _backbone_outputs(net) as collected:
        for part in inputs.split(_BATCH):
            collected.clear()
            probabilities.append(net(part).softmax(1))
            features.append(torch.cat([output.float() for output in collected], dim=1))
    return NetworkOutputs(torch.cat(features), torch.cat(probabilities))


@contextmanager
def _backbone_outputs(net: nn.Module) -> Iterator[list[Tensor]]:
    """The outputs of all backbones of `net`, collected while the context is open."""
    collected: list[Tensor] = []
    backbones = [module for module in net.modules() if isinstance(module, Backbone)]
    hooks = [
        module.register_forward_hook(lambda _module, _inputs, output: collected.append(output)) for module in backbones
    ]
    try:
        yield collected
    finally:
        for hook in hooks:
            hook.remove()


def feature_points(features: Tensor, labels: Ints | None) -> tuple[Floats, Ints]:
    """Points `(m, d)` and their classes `(m,)`, -1 for no label. With one vector per sample, each is a point.

    With feature maps, each class in an image gives a point: the mean over the cells that it covers. Without labels, an
    image gives one point: the mean over all cells."""
    if features.ndim == 2:
        none = np.full(len(features), -1, np.int64)
        return features.numpy(), none if labels is None else labels.astype(np.int64)
    if labels is None:
        return features.mean((2, 3)).numpy(), np.full(len(features), -1, np.int64)
    masks = torch.from_numpy(labels.astype(np.float32))[:, None]
    small = F.interpolate(masks, size=features.shape[2:], mode="nearest")[:, 0].long()
    points, classes = [], []
    for features_of, mask in zip(features, small, strict=True):
        for label in mask.unique().tolist():
            place = mask == label
            if label != VOID and int(place.sum()) >= _LEAST_AREA:
                points.append(features_of[:, place].mean(1).numpy())
                classes.append(int(label))
    if not points:
        return np.zeros((0, features.shape[1]), np.float32), np.zeros(0, np.int64)
    return np.stack(points), np.array(classes, np.int64)


def flatten(points: Floats) -> Floats:
    """t-SNE of finite points `(n, d)`: `(n, 2)` in [0, 1], the same in every call. All points are in the middle if
    there are fewer than five, or if all are equal."""
    from sklearn.decomposition import PCA
    from sklearn.manifold import TSNE

    centred = points.astype(np.float64) - points.mean(0, dtype=np.float64)
    size = float(np.abs(centred).max(initial=0.0))
    # t-SNE divides by the spread of the points. If it is zero, scikit-learn's tree ends the process.
    if len(points) < 5 or size <= 1e-12 * (1 + float(np.abs(points).max())):
        return np.full((len(points), 2), 0.5, np.float32)
    reduced = PCA(min(_PRINCIPAL, *points.shape), random_state=0).fit_transform(centred / size)
    perplexity = min(_PERPLEXITY, (len(points) - 1) / 3)
    flat = TSNE(perplexity=perplexity, init="pca", random_state=0, max_iter=_ITERATIONS).fit_transform(reduced)
    low, high = flat.min(0), flat.max(0)
    return np.asarray((flat - low) / np.maximum(high - low, 1e-9), np.float32)


def neighbours_agree(points: Floats, classes: Ints, is_target: NDArray[np.bool_]) -> float | None:
    """The share of the targets' labelled points whose nearest labelled point of another domain has the same class.
    Distance is by angle. None if either side has no labelled point."""
    asked, others = is_target & (classes >= 0), ~is_target & (classes >= 0)
    if not asked.any() or not others.any():
        return None
    unit = points / np.maximum(np.linalg.norm(points, axis=1, keepdims=True), 1e-12)
    nearest = (unit[asked] @ unit[others].T).argmax(1)
    share = float((classes[others][nearest] == classes[asked]).mean())
    return share if math.isfinite(share) else None
