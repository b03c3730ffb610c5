"""Fusing models layer by layer, each layer weighted by its distance from the mean.

J. Yuan et al.: Collaborative Semantic Aggregation and Calibration for Federated Domain Generalization. IEEE TKDE 2023
(CSAC), sec. 3.4. A layer is one tensor of the state dict.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from fedshift.functional.averaging import WeightedMean, square_distance, weighted_mean

Rule = Literal["divergence", "similarity", "average"]
Distance = Literal["l2", "l1", "cosine"]

_SMALLEST = 1e-12
"""Replaces a distance of 0 in its inverse."""


@dataclass(frozen=True)
class Fused:
    """The fused model, and the weights: name of a model -> layer -> weight."""

    model: dict[str, Tensor]
    weights: dict[str, dict[str, float]]


def fuse(
    models: Callable[[], Iterable[tuple[str, Mapping[str, Tensor]]]],
    rule: Rule = "divergence",
    distance: Distance = "l2",
) -> Fused:
    """The weighted mean of each layer. `models()` iterates over named models and is called twice, so that only a few
    models are in memory at a time; a list of those that are anyway is faster.

    `divergence` weights a layer by its distance from the mean, `similarity` by the inverse distance, `average` equally.
    A layer that is equal in all models stays as it is. Integer and boolean buffers are those of the first model.
    """
    found = models()
    together = len(found) if isinstance(found, Sequence) else 1
    pairs = ((model, 1.0) for _, model in found)
    mean = weighted_mean(list(pairs) if together > 1 else pairs)  # Eq. (3)
    layers = [name for name, tensor in mean.items() if tensor.is_floating_point()]
    means = {layer: WeightedMean(together) for layer in layers}
    shares: dict[str, dict[str, float]] = {}
    for name, model in models():
        shares[name] = {layer: _share(model[layer], mean[layer], rule, distance) for layer in layers}
        for layer, share in shares[name].items():
            if share:
                means[layer].add({layer: model[layer]}, share)
    totals = {layer: sum(own[layer] for own in shares.values()) for layer in layers}
    fused = mean | {layer: means[layer].result()[layer] for layer in layers if totals[layer]}  # Eq. (4)
    weights = {
        name: {layer: share / totals[layer] if totals[layer] else 1 / len(shares) for layer, share in own.items()}
        for name, own in shares.items()
    }
    return Fused(fused, weights)


def layer_distance(layer: Tensor, mean: Tensor, distance: Distance = "l2") -> float:
    """dist(G_l, G_l^AVG): the L2 or L1 norm of the difference, or 1 - cosine (1 if either is 0, which has no
    direction). Exactly 0 for equal tensors."""
    if distance == "l2":
        return math.sqrt(square_distance(layer, mean))
    a, b = layer.detach().to(torch.float64).flatten(), mean.detach().to(torch.float64).flatten()
    if torch.equal(a, b):
        return 0.0
    if distance == "l1":
        return float((a - b).abs().sum())
    lengths = float(torch.linalg.vector_norm(a) * torch.linalg.vector_norm(b))
    return max(0.0, 1.0 - float(a @ b) / lengths) if lengths else 1.0


def _share(layer: Tensor, mean: Tensor, rule: Rule, distance: Distance) -> float:
    if rule == "average":
        return 1.0
    far = layer_distance(layer, mean, distance)
    return far if rule == "divergence" else 1.0 / max(far, _SMALLEST)
