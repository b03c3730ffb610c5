"""Rules that make one model of several, by name: the key `aggregation`, read by `Federation.average`."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar

from torch import Tensor

from fedshift.errors import InputError
from fedshift.functional import robust
from fedshift.functional.averaging import weighted_mean
from fedshift.registry import Registry

DEFAULT = "clipped"
CLIP_MULTIPLE = 2.0
"""`clipped`: an update may be this many times as long as the round's median. docs/robustness.md says why."""
FAR = 0.25
"""The factor of an update that is twice as long as the bound."""
COUNT_MULTIPLE = 4.0
"""A site may count this many times as much as the median site, whatever number of samples it states."""

HELD_BYTES, HELD_MODELS = 256 * 1024 * 1024, 256
"""What of replies is kept in memory at most. Small ones cost more than they have bytes."""

T = TypeVar("T")

Rule = Callable[[Iterable[tuple[Mapping[str, Tensor], float]]], dict[str, Tensor]]
"""From models as dictionaries of tensors, each with its weight above 0, to one model."""


@dataclass(frozen=True)
class Gathered:
    """A round's models, for rules that have to see them more often than once. `models()` reads them one after another;
    `weights` are in the same order. `since` is what sites started from; None: the method has not said. `tell` counts
    what was done to the model at a place."""

    models: robust.Models
    weights: Sequence[float]
    since: Mapping[str, Tensor] | None
    bad_sites: int
    tell: Callable[[str, int], None]


@dataclass(frozen=True)
class RobustRule:
    """A rule that limits what `bad_sites` sites can do. `least_sites` says how many there must be for that number of
    bad ones."""

    combine: Callable[[Gathered], dict[str, Tensor]]
    least_sites: Callable[[int], int] = lambda bad_sites: 1


def clipping(
    models: Iterable[Mapping[str, Tensor]], since: Iterable[Mapping[str, Tensor]], tell: Callable[[str, int], None]
) -> list[robust.Parts]:
    """By what each model's update is to be multiplied so that none is longer than `CLIP_MULTIPLE` times the median.
    `since` has a model for each: what its site started from."""
    lengths = [robust.update_lengths(model, old) for model, old in zip(models, since, strict=True)]
    factors = robust.clip_factors(lengths, CLIP_MULTIPLE)
    for place, own in enumerate(factors):
        if own != robust.WHOLE:
            tell("clipped", place)
    return factors


def held(items: Iterable[T], model_of: Callable[[T], Mapping[str, Tensor]]) -> Iterable[T]:
    """The items as a list where all their models together are no more than replies in memory are, which is where most
    of them come from: a mean of a list is faster. Otherwise an iterator."""
    kept: list[T] = []
    size, rest = 0, iter(items)
    for item in rest:
        kept.append(item)
        size += sum(tensor.nbytes for tensor in model_of(item).values())
        if size > HELD_BYTES or len(kept) > HELD_MODELS:
            return itertools.chain(kept, rest)
    return kept


def _clipped(given: Gathered) -> dict[str, Tensor]:
    if given.since is None:
        given.tell("unguarded", -1)
        return weighted_mean(zip(given.models(), given.weights, strict=True))
    since = given.since
    factors = clipping(given.models(), [since] * len(given.weights), given.tell)
    return robust.mean_of_parts(given.models(), given.weights, factors)


def _aligned(given: Gathered) -> dict[str, Tensor]:
    out = [] if given.since is None else robust.opposed(given.models, given.since)
    for place in out:
        given.tell("left-out", place)
    kept = [place for place in range(len(given.weights)) if place not in out]

    def models() -> Iterable[robust.Model]:
        read = given.models()
        return read if not out else (model for place, model in enumerate(read) if place not in out)

    def tell(what: str, place: int) -> None:
        given.tell(what, kept[place] if place >= 0 else place)

    return _clipped(replace(given, models=models, weights=[given.weights[place] for place in kept], tell=tell))


def _median(given: Gathered) -> dict[str, Tensor]:
    return robust.coordinate_median(given.models)


def _trimmed(given: Gathered) -> dict[str, Tensor]:
    return robust.trimmed_mean(given.models, given.bad_sites)


def _krum(given: Gathered) -> dict[str, Tensor]:
    chosen = set(robust.chosen_by_krum(given.models, given.since, given.bad_sites))
    for place in range(len(given.weights)):
        if place not in chosen:
            given.tell("left-out", place)
    pairs = enumerate(zip(given.models(), given.weights, strict=True))
    return weighted_mean(pair for place, pair in pairs if place in chosen)


CLIPPED = RobustRule(_clipped)
ALIGNED = RobustRule(_aligned)
MEDIAN = RobustRule(_median)
TRIMMED = RobustRule(_trimmed, lambda bad_sites: 2 * bad_sites + 1)
KRUM = RobustRule(_krum, lambda bad_sites: 2 * bad_sites + 3)


def _as_rule(name: str, value: Any) -> Rule | RobustRule:
    if not callable(value) and not isinstance(value, RobustRule):
        raise InputError("config-value", f"aggregation rule {name!r}: {value!r} is not a function")
    rule: Rule | RobustRule = value
    return rule


RULES: Registry[Rule | RobustRule] = Registry(
    "aggregation rule",
    "rules",
    {
        "mean": weighted_mean,
        "clipped": CLIPPED,
        "aligned": ALIGNED,
        "median": MEDIAN,
        "trimmed": TRIMMED,
        "krum": KRUM,
    },
    _as_rule,
)


def register_rule(name: str, rule: Rule | RobustRule) -> None:
    """Makes a rule known by a name, for `aggregation=NAME`."""
    RULES.register(name, rule)


def least_sites(rule: str, bad_sites: int) -> int:
    """How many models the rule needs at least."""
    found = RULES.find(rule)
    return found.least_sites(bad_sites) if isinstance(found, RobustRule) else 1
