"""What the gate knows of a field before it arrives: the shape of every tensor, the range of every number. What it does
not know of a single field it knows of its kind: a count is never negative, a variance never, a metric always finite."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from fedshift.federation.codec import Limits
from fedshift.functional.averaging import square_distance
from fedshift.functional.mixtures import LEVELS, Mixture

Sizes = Mapping[str, int]
"""How many samples a site has said that it has, by split; empty before it has said so."""

MOST_SAMPLES = 10**12
MOST_METRIC = 1e9
MOST_BATCHES = 2**53
LONGEST_NAME = 200
"""Characters of a class, a column, or any other text that a site names."""
MOST_NAMES = 65_536
DEEPEST_FACTS = 4

_UNKNOWN = Limits(data=256 * 2**20, header=8 * 2**20, tensors=16_384, nodes=100_000)
"""For tensors of which nothing is known beforehand. Their message may be as much larger as the question was."""
_FACTS = Limits(data=0, header=4 * 2**20, tensors=0, nodes=4 * MOST_NAMES)
_PLAIN = Limits(data=0, header=256, tensors=0, nodes=8)
_PIECE = 2**17
"""Numbers that are looked at in one go: a check may not take the memory of another copy."""
DTYPES = frozenset(
    {
        *(torch.float64, torch.float32, torch.float16, torch.bfloat16),
        *(torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool),
    }
)


_BOUNDED = ("running_var", "num_batches_tracked")


class Refused(Exception):
    """Why a reply is not used: a short word for counting."""

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason


def require(condition: bool, reason: str) -> None:
    if not condition:
        raise Refused(reason)


class Expected(Protocol):
    """What one field of a release must be like."""

    @property
    def limits(self) -> Limits: ...

    def check(self, value: Any, sizes: Sizes) -> None:
        """Raises `Refused`. All tensors in `value` are real and finite."""


@dataclass(frozen=True)
class Like:
    """Tensors with the names, shapes and types of `like`."""

    like: Mapping[str, Tensor]

    @property
    def limits(self) -> Limits:
        names = sum(len(name.encode()) for name in self.like)
        data = sum(tensor.nbytes for tensor in self.like.values())
        return Limits(data, header=256 + 8 * names + 256 * len(self.like), tensors=len(self.like), nodes=8)

    def fits(self, value: Any) -> bool:
        """Whether `check` finds nothing."""
        try:
            Like.check(self, value, {})
        except Refused:
            return False
        return True

    def check(self, value: Any, sizes: Sizes) -> None:
        require(isinstance(value, Mapping) and value.keys() == self.like.keys(), "keys")
        for name, tensor in self.like.items():
            require(isinstance(value[name], Tensor), "schema")
            require(value[name].shape == tensor.shape, "shape")
            require(value[name].dtype == tensor.dtype, "dtype")


@dataclass(frozen=True)
class Between(Like):
    """Such tensors, with all their numbers from `low` to `high`."""

    low: float
    high: float

    def check(self, value: Any, sizes: Sizes) -> None:
        super().check(value, sizes)
        for tensor in value.values():
            low, high = extremes(tensor)
            require(self.low <= low and high <= self.high, "range")


@dataclass(frozen=True)
class Confusion:
    """A confusion matrix of `classes` on a whole `split`. A sample is counted `each` times, or less often where
    `some_void`: pixels without a label are not counted."""

    classes: int
    split: str
    each: int = 1
    some_void: bool = False

    @property
    def limits(self) -> Limits:
        return Limits(8 * self.classes**2, header=256, tensors=1, nodes=8)

    def check(self, value: Any, sizes: Sizes) -> None:
        require(value.shape == (self.classes, self.classes), "shape")
        require(value.dtype == torch.int64, "dtype")
        low, high = extremes(value)
        total = self.each * sizes.get(self.split, MOST_SAMPLES)
        # No cell above the total first: a sum of larger ones might overflow to the right number.
        require(low >= 0 and high <= total, "confusion")
        found = sum(int(row.sum()) for row in value)
        exact = self.split in sizes and not self.some_void
        require(found == total if exact else found <= total, "confusion")


@dataclass(frozen=True)
class CountsOf:
    """Counts of a `shape` in which each of the first axis' `slices` (1: all of it) counts every sample of a `split`
    `each` times; with `or_none` it may count none at all. A shape without cells counts nothing."""

    shape: tuple[int, ...]
    split: str
    each: int = 1
    slices: int = 1
    or_none: bool = False

    @property
    def limits(self) -> Limits:
        return Limits(8 * math.prod(self.shape), header=256, tensors=1, nodes=8)

    def check(self, value: Any, sizes: Sizes) -> None:
        require(tuple(value.shape) == self.shape, "shape")
        require(value.dtype == torch.int64, "dtype")
        low, high = extremes(value)
        total = self.each * sizes.get(self.split, MOST_SAMPLES)
        require(low >= 0 and high <= total, "count")
        exact = self.split in sizes
        for part in value.reshape(self.slices, -1) if value.numel() else ():
            found = int(part.sum())
            is_none = self.or_none and found == 0
            require(is_none or (found == total if exact else found <= total), "count")


@dataclass(frozen=True)
class MixtureIn:
    """The terms of a mixture in `dimensions` with at most `components`."""

    dimensions: int
    components: int

    @property
    def limits(self) -> Limits:
        numbers = self.components * (2 * self.dimensions + 1) + LEVELS
        return Limits(4 * numbers + 8 * self.components, header=2048, tensors=5, nodes=8)

    def check(self, value: Any, sizes: Sizes) -> None:
        try:
            mixture = Mixture(**value).checked(self.dimensions)
        except (TypeError, ValueError) as error:
            raise Refused("mixture") from error
        require(len(mixture.weights) <= self.components, "mixture")
        require(mixture.counts.dtype == torch.int64, "mixture")
        require(bool((mixture.counts >= 1).all()), "mixture")
        require(bool((mixture.counts <= sizes.get("train", MOST_SAMPLES)).all()), "mixture")


@dataclass(frozen=True)
class AtMost:
    """A number from 0 to `most`."""

    most: float
    limits = _PLAIN

    def check(self, value: Any, sizes: Sizes) -> None:
        require(0 <= value <= self.most, "count" if isinstance(value, int) else "metric")


# --- By kind --------------------------------------------------------------------------------------------------------


PLAIN_KINDS: Mapping[str, Limits] = {"count": _PLAIN, "tally": _PLAIN, "metric": _PLAIN, "facts": _FACTS}
"""Kinds without tensors."""


def limits_of(kind: str) -> Limits:
    """How much a field of `kind` may hold where nothing else is known of it."""
    return PLAIN_KINDS.get(kind, _UNKNOWN)


def check_kind(kind: str, value: Any, sizes: Sizes, *, is_finite: bool = False) -> None:
    """What is true of every field of `kind`. Raises `Refused`. `is_finite`: all floating numbers are known to be."""
    if kind == "facts":
        _check_facts(value, DEEPEST_FACTS)
        return
    for name, tensor in tensors_of(value):
        require(tensor.dtype in DTYPES, "dtype")
        if is_finite and tensor.is_floating_point() and not name.endswith(_BOUNDED):
            continue
        low, high = extremes(tensor)
        require(math.isfinite(low) and math.isfinite(high), "non-finite")
        if name.endswith("running_var"):
            require(low >= 0, "variance")
        if name.endswith("num_batches_tracked"):
            require(low >= 0 and high <= MOST_BATCHES, "count")
    check = _BY_KIND.get(kind)
    if check is not None:
        check(value, sizes)


def _check_count(value: int, sizes: Sizes) -> None:
    # Of how many samples something was made: of none, nothing is.
    require(1 <= value <= sizes.get("train", MOST_SAMPLES), "count")


def _check_tally(value: int, sizes: Sizes) -> None:
    require(0 <= value <= MOST_SAMPLES, "count")


def _check_metric(value: float, sizes: Sizes) -> None:
    require(math.isfinite(value), "non-finite")
    require(abs(value) <= MOST_METRIC, "metric")


def _check_counts(value: Tensor, sizes: Sizes) -> None:
    require(not value.is_floating_point() and value.dtype != torch.bool, "dtype")
    low, high = extremes(value)
    require(low >= 0 and high <= MOST_SAMPLES, "count")


_BY_KIND: Mapping[str, Callable[[Any, Sizes], None]] = {
    "count": _check_count,
    "tally": _check_tally,
    "metric": _check_metric,
    "counts": _check_counts,
}


def _check_facts(value: Any, depth: int) -> None:
    """Plain values and names that can be shown as they are."""
    require(depth >= 0, "facts")
    if isinstance(value, Mapping):
        require(len(value) <= MOST_NAMES, "facts")
        for name, item in value.items():
            _check_facts(name, depth)
            _check_facts(item, depth - 1)
    elif isinstance(value, list | tuple):
        require(len(value) <= MOST_NAMES, "facts")
        for item in value:
            _check_facts(item, depth - 1)
    elif isinstance(value, str):
        require(is_a_name(value), "text")
    elif isinstance(value, float):
        require(math.isfinite(value), "non-finite")
    elif isinstance(value, int):
        require(abs(value) <= MOST_SAMPLES, "count")
    else:
        require(value is None, "facts")


_JOINERS = re.compile("[\u200c\u200d]")
"""Persian and other scripts need them within words. They print nothing by themselves."""


def is_a_name(text: str) -> bool:
    """Whether a text from elsewhere may be shown: not too long, and nothing in it that steers a terminal or turns the
    direction of what follows."""
    return len(text) <= LONGEST_NAME and _JOINERS.sub("", text).isprintable()


# --- Tensors --------------------------------------------------------------------------------------------------------


def extremes(tensor: Tensor) -> tuple[float, float]:
    """The smallest and the largest number; NaN if there is one among them, 0 and 0 if there are none."""
    if not tensor.numel():
        return 0.0, 0.0
    low, high = tensor.detach().aminmax()
    # In whole numbers: a float64 would round the largest ones.
    return low.item(), high.item()


def tensors_of(value: Any, name: str = "") -> Iterator[tuple[str, Tensor]]:
    """Every tensor in a tree, with the last name on the way to it."""
    if isinstance(value, Tensor):
        yield name, value
    elif isinstance(value, Mapping):
        for key, item in value.items():
            yield from tensors_of(item, str(key))
    elif isinstance(value, list | tuple):
        for item in value:
            yield from tensors_of(item, name)


def length_of_update(new: Mapping[str, Tensor], old: Mapping[str, Tensor] | None) -> float:
    """The L2 norm of `new` - `old`, or of `new` alone, over all floating tensors; not finite if they are not."""
    floating = {name: after for name, after in new.items() if after.is_floating_point()}
    before = None if old is None else [old[name] for name in floating]
    if before and sum(after.numel() for after in before) <= _PIECE:
        # A small model in three calls. Where squares are beyond float32, the long way below tells.
        changes = torch._foreach_sub(list(floating.values()), before)
        length = float(torch.linalg.vector_norm(torch.stack([norm.double() for norm in torch._foreach_norm(changes)])))
        if math.isfinite(length):
            return length
    squares = 0.0
    for name, after in floating.items():
        squares += square_distance(after, after.new_zeros(()).expand(after.shape) if old is None else old[name])
    return math.sqrt(squares)
