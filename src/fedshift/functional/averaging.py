"""Averages of models as dictionaries of tensors, the size of an update, and noise on it."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping

import torch
from torch import Tensor


class WeightedMean:
    """A running weighted mean of models, in the memory of one model.

    Floating tensors (parameters and normalisation statistics) are summed in float64 and returned in their own
    dtype. Integer and boolean buffers are counters or flags, which have no meaningful mean: the first model's are kept.
    """

    def __init__(self) -> None:
        self._total = 0.0
        self._sums: dict[str, Tensor] = {}
        self._first: dict[str, Tensor] = {}

    def add(self, weights: Mapping[str, Tensor], weight: float) -> None:
        """Adds one model with its weight, a finite number above 0. A refused model changes nothing."""
        if not (math.isfinite(weight) and weight > 0):
            raise ValueError(f"a model's weight in a mean must be finite and above 0, not {weight}")
        if not math.isfinite(self._total + weight):
            raise ValueError(f"the total weight of the mean is no longer finite after adding {weight}")
        if self._first:
            check_same_layout(self._first, weights)
        else:
            self._start(weights)
        for name, total in self._sums.items():
            # The product must be formed in float64 as well: weight * a half-precision tensor may overflow.
            total.add_(weights[name].detach().to(torch.float64), alpha=weight)
        self._total += weight

    def result(self) -> dict[str, Tensor]:
        """The mean so far, as new tensors in the order of the first model's keys."""
        if not self._first:
            raise ValueError("there is no mean of no models")
        return {
            name: (self._sums[name] / self._total).to(first.dtype) if name in self._sums else first.clone()
            for name, first in self._first.items()
        }

    def _start(self, weights: Mapping[str, Tensor]) -> None:
        if not weights:
            raise ValueError("a model without tensors cannot be averaged")
        for name, tensor in weights.items():
            if tensor.is_floating_point():
                self._sums[name] = torch.zeros_like(tensor, dtype=torch.float64, requires_grad=False)
                # Only shape and dtype are needed later; an expanded scalar keeps them without the memory.
                self._first[name] = torch.zeros((), dtype=tensor.dtype).expand(tensor.shape)
            elif tensor.is_complex():
                raise ValueError(f"tensor {name!r} is complex; only real tensors can be averaged")
            else:
                self._first[name] = tensor.detach().clone()


def weighted_mean(items: Iterable[tuple[Mapping[str, Tensor], float]]) -> dict[str, Tensor]:
    """The mean of (model, weight) pairs, with weights normalised to sum 1. The pairs may be a generator."""
    mean = WeightedMean()
    for weights, weight in items:
        mean.add(weights, weight)
    return mean.result()


def update_norm(new: Mapping[str, Tensor], old: Mapping[str, Tensor]) -> float:
    """The L2 norm of `new - old` over all floating tensors together, in float64."""
    check_same_layout(old, new)
    squares = 0.0
    for name, before in old.items():
        if before.is_floating_point():
            difference = new[name].detach().to(torch.float64) - before.detach().to(torch.float64)
            squares += float(difference.square().sum())
    return math.sqrt(squares)


def check_same_layout(expected: Mapping[str, Tensor], given: Mapping[str, Tensor]) -> None:
    """Refuses models whose keys, shapes or dtypes differ.

    Never leave this to tensor arithmetic: a (1, 3) tensor would be broadcast into a (7, 3) one silently.
    """
    missing = [name for name in expected if name not in given]
    extra = [name for name in given if name not in expected]
    if missing or extra:
        raise ValueError(f"models have different tensors: missing {missing or 'none'}, unexpected {extra or 'none'}")
    for name, tensor in expected.items():
        other = given[name]
        if other.shape != tensor.shape:
            raise ValueError(f"tensor {name!r} has shape {tuple(other.shape)}, expected {tuple(tensor.shape)}")
        if other.dtype != tensor.dtype:
            raise ValueError(f"tensor {name!r} has dtype {other.dtype}, expected {tensor.dtype}")


def add_noise(weights: Mapping[str, Tensor], deviation: float, generator: torch.Generator) -> dict[str, Tensor]:
    """Adds independent Gaussian noise to every number of every floating tensor; integer buffers stay.

    Running variances are kept at 0 or more, because a network takes their root.
    """
    noisy: dict[str, Tensor] = {}
    for name, value in weights.items():
        if not value.is_floating_point():
            noisy[name] = value
            continue
        drawn = torch.randn(value.shape, generator=generator, dtype=value.dtype).to(value.device)
        noisy[name] = value + deviation * drawn
        if name.endswith("running_var"):
            noisy[name].clamp_(min=0)
    return noisy
