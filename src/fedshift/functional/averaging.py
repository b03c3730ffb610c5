"""Averages of models as dictionaries of tensors, the size of an update, and noise on it."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import repeat

import torch
from torch import Tensor

PIECE = 2**16
"""Numbers that are worked on at a time: in float64 they stay in the processor's cache."""
_SUMMED = 2**17
_ROWS = 4
"""The same of sums over models, of which so many are brought to float64 at a time."""
_SMALLEST_SQUARE = 1e-25


class WeightedMean:
    """A running weighted mean of models, in the memory of one model.

    Floating tensors (parameters and normalisation statistics) are summed in float64 and returned in their own
    dtype. Integer and boolean buffers are counters or flags, which have no meaningful mean: the first model's are kept.

    So many models are added up `together`, piece by piece: of those that are in memory anyway, sums then stay in the
    processor's cache. Until then they must not change.
    """

    def __init__(self, together: int = 1) -> None:
        self._together = together
        self._total = 0.0
        self._waiting: list[tuple[Mapping[str, Tensor], float]] = []
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
        self._total += weight
        self._waiting.append((weights, weight))
        if len(self._waiting) > self._together or self._together == 1:
            self._add_up()

    def result(self) -> dict[str, Tensor]:
        """The mean so far, as new tensors in the order of the first model's keys."""
        if not self._first:
            raise ValueError("there is no mean of no models")
        found = {
            name: torch.empty(first.shape, dtype=first.dtype) if first.is_floating_point() else first.clone()
            for name, first in self._first.items()
        }
        for name, mean in found.items():
            if mean.is_floating_point():
                known = self._sums.get(name)
                sums = known.split(_SUMMED) if known is not None else ()
                # Scratch in the cache: further models may still be added to the sums.
                scratch = torch.empty(min(_SUMMED, mean.numel()), dtype=torch.float64)
                for place, (part, pieces) in enumerate(self._pieces(name, mean.view(-1))):
                    total = scratch[: len(part)]
                    if sums:
                        total.copy_(sums[place])
                    self._add_pieces(total, pieces, is_new=not sums)
                    part.copy_(total.div_(self._total))
        return found

    def _add_up(self) -> None:
        for name, first in self._first.items():
            if first.is_floating_point():
                is_new = name not in self._sums
                if is_new:
                    self._sums[name] = torch.empty(first.numel(), dtype=torch.float64)
                for total, pieces in self._pieces(name, self._sums[name]):
                    self._add_pieces(total, pieces, is_new=is_new)
        self._waiting.clear()

    def _pieces(self, name: str, flat: Tensor) -> Iterator[tuple[Tensor, tuple[Tensor, ...]]]:
        """Every piece of `flat`, and the same piece of the tensor in each waiting model."""
        models = [weights[name].detach().reshape(-1).split(_SUMMED) for weights, _ in self._waiting]
        if flat.numel():
            yield from zip(flat.split(_SUMMED), zip(*models, strict=True) if models else repeat(()), strict=False)

    def _add_pieces(self, total: Tensor, pieces: Sequence[Tensor], *, is_new: bool) -> None:
        """Adds a piece of each waiting model to `total`, which holds nothing yet if it `is_new`."""
        weights = [weight for _, weight in self._waiting]
        if is_new and pieces:
            # The product must be formed in float64 as well: weight * a half-precision tensor may overflow.
            total.copy_(pieces[0]).mul_(weights[0])
            pieces, weights = pieces[1:], weights[1:]
        rows = list(torch.empty(min(_ROWS, len(pieces)), len(total), dtype=torch.float64).unbind())
        for start in range(0, len(pieces), _ROWS):
            some = pieces[start : start + _ROWS]
            torch._foreach_copy_(rows[: len(some)], list(some))  # One call for all of them.
            for row, weight in zip(rows, weights[start : start + _ROWS], strict=False):
                total.add_(row, alpha=weight)

    def _start(self, weights: Mapping[str, Tensor]) -> None:
        if not weights:
            raise ValueError("a model without tensors cannot be averaged")
        for name, tensor in weights.items():
            if tensor.is_floating_point():
                # Only shape and dtype are needed later; an expanded scalar keeps them without the memory.
                self._first[name] = torch.zeros((), dtype=tensor.dtype).expand(tensor.shape)
            elif tensor.is_complex():
                raise ValueError(f"tensor {name!r} is complex; only real tensors can be averaged")
            else:
                self._first[name] = tensor.detach().clone()


def weighted_mean(items: Iterable[tuple[Mapping[str, Tensor], float]]) -> dict[str, Tensor]:
    """The mean of (model, weight) pairs, with weights normalised to sum 1. The pairs may be a generator, of which one
    model is in memory at a time."""
    mean = WeightedMean(len(items) if isinstance(items, Sequence) else 1)
    for weights, weight in items:
        mean.add(weights, weight)
    return mean.result()


def mean_so_far(mean: Mapping[str, Tensor], new: Mapping[str, Tensor], count: int) -> dict[str, Tensor]:
    """The plain mean of `count` models, of which `mean` is that of all but the last and `new` is the last. Integer and
    boolean tensors are the last model's."""
    if count == 1:
        return {name: tensor.clone() for name, tensor in new.items()}
    check_same_layout(mean, new)
    return {
        name: (before.double() + (new[name].double() - before.double()) / count).to(before.dtype)
        if before.is_floating_point()
        else new[name].clone()
        for name, before in mean.items()
    }


def update_norm(new: Mapping[str, Tensor], old: Mapping[str, Tensor]) -> float:
    """The L2 norm of `new - old` over all floating tensors together."""
    check_same_layout(old, new)
    return math.sqrt(sum(square_distance(new[key], old[key]) for key in old if old[key].is_floating_point()))


def square_distance(a: Tensor, b: Tensor) -> float:
    """The sum of the squares of `a` - `b`, two floating tensors of one shape, to six digits or more; not finite if they
    are not. Squares are added up in float32 for a piece, and pieces in float64."""
    squares = 0.0
    for one, other in zip(a.detach().reshape(-1).split(PIECE), b.detach().reshape(-1).split(PIECE), strict=True):
        difference = one - other
        square = float(torch.dot(difference, difference)) if difference.dtype == torch.float32 else 0.0
        if not _SMALLEST_SQUARE < square < math.inf and bool(difference.any()):
            # Beyond what float32 can add up, or another type.
            exact = one.to(torch.float64) - other.to(torch.float64)
            square = float(torch.dot(exact, exact))
        squares += square
    return squares


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
