"""How far an input is from what a network has seen: its own statistics in layers that normalise, compared with the
running ones. The model holds all that is needed; no sample's features are kept."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from fedshift.nn.normalisation import tracking_layers

DISTANCE_BINS = 256
_LOW, _HIGH = -3.0, 5.0
"""Limits of the logarithm (base 10) that the parts cover."""


@contextmanager
def watching_distances(net: nn.Module) -> Iterator[list[Tensor]]:
    """While the context is open, each forward pass of `net` adds one tensor a normalising layer, `(B,)`: the mean over
    channels of the squared distance, in standard deviations, of a sample's channel means from the running means."""
    found: list[Tensor] = []

    def look(layer: Any, inputs: tuple[Tensor, ...], output: Tensor) -> None:
        x = inputs[0].detach().float()
        means = x.flatten(2).mean(2) if x.ndim > 2 else x
        squares = (means - layer.running_mean).square() / (layer.running_var + layer.eps)
        found.append(squares.nanmean(1).nan_to_num(0.0))

    hooks = [layer.register_forward_hook(look) for layer in tracking_layers(net).values()]
    try:
        yield found
    finally:
        for hook in hooks:
            hook.remove()


def can_tell_distance(net: nn.Module) -> bool:
    return bool(tracking_layers(net))


def total_distance(found: list[Tensor]) -> Tensor:
    """One number a sample, `(B,)`: the mean over layers of the logarithm (base 10) of their distances."""
    return torch.stack(found).clamp(min=10**_LOW, max=10**_HIGH).log10().mean(0)


def distance_counts(distances: Tensor) -> Tensor:
    """How many samples are how far, `(DISTANCE_BINS,)` int64."""
    part = ((distances - _LOW) / (_HIGH - _LOW) * DISTANCE_BINS).long().clamp(0, DISTANCE_BINS - 1)
    return torch.bincount(part, minlength=DISTANCE_BINS)


def end_of_bin(number: int) -> float:
    return _LOW + (number + 1) * (_HIGH - _LOW) / DISTANCE_BINS
