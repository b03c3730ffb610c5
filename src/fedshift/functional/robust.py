"""Averages that a few bad models cannot ruin: of updates with a bounded length, of the values in the middle, or of the
models that are close to each other.

An update is a model minus the one that its site started from. It is measured in two parts: parameters by their L2 norm,
and BatchNorm statistics in units of the statistics before, because one large variance would outweigh all parameters.

`Models` are read as often as a rule needs, one at a time: a model may have to come from disk.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from fedshift.functional.averaging import WeightedMean, check_same_layout, square_distance

Model = Mapping[str, Tensor]
Models = Callable[[], Iterable[Model]]

_MEAN, _VARIANCE = "running_mean", "running_var"
_SMALLEST_VARIANCE = 1e-5
"""What BatchNorm layers add to a variance before they divide by its root."""
_GROUP_BYTES = 64 * 1024 * 1024
"""Of all models' numbers that are put side by side at a time, in float64."""


# --- Lengths, bounds and clipping -----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Parts:
    """A number for the parameters of a model and one for its BatchNorm statistics."""

    parameters: float
    statistics: float


WHOLE = Parts(1.0, 1.0)


def update_lengths(new: Model, old: Model, unit: Model | None = None) -> Parts:
    """L2 norms of `new` - `old`. A running mean is divided by the standard deviation of its channel in
    `unit` (None: `old`), a running variance by the variance."""
    check_same_layout(old, new)
    unit = old if unit is None else unit
    squares = {False: 0.0, True: 0.0}
    for name, before in old.items():
        if not before.is_floating_point():
            continue
        variance = unit.get(name.removesuffix(_MEAN) + _VARIANCE) if name.endswith(_MEAN) else unit.get(name)
        is_statistic = name.endswith((_MEAN, _VARIANCE)) and variance is not None
        if is_statistic and variance is not None:
            scale = variance.detach().double().clamp(min=0) + _SMALLEST_VARIANCE
            difference = new[name].detach().double() - before.detach().double()
            difference = difference / (scale.sqrt() if name.endswith(_MEAN) else scale)
            squares[True] += float(difference.square().sum())
        else:
            squares[False] += square_distance(new[name], before)
    return Parts(math.sqrt(squares[False]), math.sqrt(squares[True]))


def clip_factors(lengths: Sequence[Parts], multiple: float) -> list[Parts]:
    """By what each update is multiplied, for each part. Up to `multiple` times the median length: 1, so that nothing
    changes. One that is m times as long as this bound gets the m-th part of the bound as its length: an update that
    merely were cut to the bound could still undo what several honest ones have learned. Statistics of parameters that
    are far off count no more than these. The median is the lower one of two, and of updates that have a length: sites
    that changed nothing do not lower it."""
    parameters = _factors([length.parameters for length in lengths], multiple)
    moments = _factors([length.statistics for length in lengths], multiple)
    return [Parts(own, min(own, moment)) for own, moment in zip(parameters, moments, strict=True)]


def _factors(lengths: Sequence[float], multiple: float) -> list[float]:
    known = [length for length in lengths if length > 0]
    bound = multiple * _lower_median(known) if known else math.inf
    return [(bound / length) ** 2 if length > bound else 1.0 for length in lengths]


def _lower_median(values: Sequence[float]) -> float:
    return sorted(values)[(len(values) - 1) // 2]


def shortened(new: Model, old: Model, factors: Parts) -> Model:
    """`old` plus the update times its factors. With factors of 1 it is `new` itself, to the last bit."""
    if factors == WHOLE:
        return new
    found: dict[str, Tensor] = {}
    for name, after in new.items():
        factor = factors.statistics if name.endswith((_MEAN, _VARIANCE)) else factors.parameters
        if factor == 1.0 or not after.is_floating_point():
            found[name] = after
        else:
            before = old[name].detach().double()
            found[name] = (before + factor * (after.detach().double() - before)).to(after.dtype)
    return found


def mean_of_parts(models: Iterable[Model], weights: Sequence[float], factors: Sequence[Parts]) -> dict[str, Tensor]:
    """The weighted mean, where a model's weight is multiplied by its factor for the part that a tensor belongs to."""
    together = len(models) if isinstance(models, Sequence) else 1
    means = {False: WeightedMean(together), True: WeightedMean(together)}
    names: list[str] = []
    parts: dict[bool, list[str]] = {}
    for model, weight, own in zip(models, weights, factors, strict=True):
        if not names:
            names = list(model)
            parts = {kind: [name for name in names if name.endswith((_MEAN, _VARIANCE)) == kind] for kind in means}
        for kind, factor in ((False, own.parameters), (True, own.statistics)):
            if parts[kind]:
                means[kind].add({name: model[name] for name in parts[kind]}, weight * factor)
    found: dict[str, Tensor] = {}
    for kind, mean in means.items():
        if parts.get(kind):
            found |= mean.result()
    return {name: found[name] for name in names}


def has_negative_variance(model: Model) -> bool:
    return any(name.endswith(_VARIANCE) and bool((value < 0).any()) for name, value in model.items())


def with_variances_from_zero(model: Model) -> Model:
    """The model with running variances below 0, of which a network cannot take the root, at 0. A model without any is
    returned as it is."""
    if not has_negative_variance(model):
        return model
    return {name: value.clamp(min=0) if name.endswith(_VARIANCE) else value for name, value in model.items()}


def capped(weights: Sequence[float], multiple: float) -> list[float]:
    """The weights, none above `multiple` times their median (the lower one of two)."""
    if not weights:
        return []
    most = multiple * _lower_median(weights)
    return [min(weight, most) for weight in weights]


# --- The middle of all models, number by number ---------------------------------------------------------------------


def coordinate_median(models: Models) -> dict[str, Tensor]:
    """The median of the models, number by number; of an even count, the mean of the two in the middle. Integer buffers
    are those of the first model."""
    return _number_by_number(models, lambda values: values.quantile(0.5, dim=0))


def trimmed_mean(models: Models, trim: int) -> dict[str, Tensor]:
    """The mean, number by number, without the `trim` highest and the `trim` lowest values. Integer buffers are those of
    the first model."""

    def middle(values: Tensor) -> Tensor:
        if len(values) <= 2 * trim:
            raise ValueError(f"{len(values)} models are too few to leave out {trim} at either end")
        return values.sort(dim=0).values[trim : len(values) - trim].mean(dim=0)

    return _number_by_number(models, middle)


def _number_by_number(models: Models, middle: Callable[[Tensor], Tensor]) -> dict[str, Tensor]:
    """`middle` of `(models, n)` float64 values, for a group of tensors at a time."""
    first, count = None, 0
    for model in models():
        first = first or {name: value.detach().clone() for name, value in model.items()}
        check_same_layout(first, model)
        count += 1
    if first is None:
        raise ValueError("there is no average of no models")
    found = dict(first)
    for names in _groups(first, _GROUP_BYTES // (8 * count)):
        rows = torch.stack(
            [torch.cat([model[name].detach().double().flatten() for name in names]) for model in models()]
        )
        pieces = torch.cat([middle(piece) for piece in rows.split(2**20, dim=1)])
        for name, values in zip(names, pieces.split([first[name].numel() for name in names]), strict=True):
            found[name] = values.reshape(first[name].shape).to(first[name].dtype)
    return found


def _groups(model: Model, most: int) -> Iterator[list[str]]:
    """Floating tensors in groups of about `most` numbers."""
    group: list[str] = []
    size = 0
    for name, value in model.items():
        if not value.is_floating_point() or not value.numel():
            continue
        if group and size + value.numel() > most:
            yield group
            group, size = [], 0
        group.append(name)
        size += value.numel()
    if group:
        yield group


# --- The models that point against the others ---------------------------------------------------------------------


OPPOSED = -0.1
"""While a model learns, updates of honest sites have cosines of 0.1 to 0.2 with each other; later they are anywhere
from -0.1 to 0.1 (docs/robustness.md)."""


def opposed(models: Models, old: Model) -> list[int]:
    """Which models' updates from `old` have a median cosine below `OPPOSED` with those of the others: those with the
    lowest, and always fewer than half of all."""
    lengths = [update_lengths(model, old).parameters for model in models()]
    cosines: list[list[float]] = [[] for _ in lengths]
    for i, one in enumerate(models()):
        for j, other in zip(range(i), models(), strict=False):
            between = update_lengths(one, other, old).parameters
            product = (lengths[i] ** 2 + lengths[j] ** 2 - between**2) / 2
            cosine = product / (lengths[i] * lengths[j]) if lengths[i] and lengths[j] else 0.0
            cosines[i].append(cosine)
            cosines[j].append(cosine)
    usual = [float(np.median(found)) if found else 0.0 for found in cosines]
    worst = sorted((place for place, cosine in enumerate(usual) if cosine < OPPOSED), key=lambda place: usual[place])
    return sorted(worst[: (len(usual) - 1) // 2])


# --- The models that are close to each other ------------------------------------------------------------------------


def chosen_by_krum(models: Models, unit: Model | None, bad: int) -> list[int]:
    """Multi-Krum (Blanchard, El Mhamdi, Guerraoui, Stainer: Machine Learning with Adversaries. NeurIPS 2017): the n -
    `bad` models with the smallest sums of squared distances to their n - `bad` - 2 nearest others. Parameters and
    statistics are measured apart, each in units of the median distance. `unit` as in `update_lengths`."""
    pairs: dict[tuple[int, int], Parts] = {}
    count = 0
    for i, one in enumerate(models()):
        count = i + 1
        for j, other in enumerate(models()):
            if j < i:
                pairs[j, i] = update_lengths(one, other, unit)
    nearest = count - bad - 2
    if nearest < 1:
        raise ValueError(f"{count} models are too few for Krum with {bad} bad ones")
    parameters = _in_medians([parts.parameters for parts in pairs.values()])
    moments = _in_medians([parts.statistics for parts in pairs.values()])
    squares = {pair: a**2 + b**2 for pair, a, b in zip(pairs, parameters, moments, strict=True)}
    scores = [
        sum(sorted(squares[min(i, j), max(i, j)] for j in range(count) if j != i)[:nearest]) for i in range(count)
    ]
    return sorted(sorted(range(count), key=lambda i: (scores[i], i))[: count - bad])


def _in_medians(distances: Sequence[float]) -> list[float]:
    usual = _lower_median(distances)
    return [distance / usual if usual > 0 else distance for distance in distances]
