"""Rules that make one model of several, by name: the key `aggregation`, read by `Federation.average`."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

from torch import Tensor

from fedshift.errors import InputError
from fedshift.registry import Registry

Rule = Callable[[Iterable[tuple[Mapping[str, Tensor], float]]], dict[str, Tensor]]
"""From models as dictionaries of tensors, each with its weight above 0, to one model."""


def _as_rule(name: str, value: Any) -> Rule:
    if not callable(value):
        raise InputError("config-value", f"aggregation rule {name!r}: {value!r} is not a function")
    rule: Rule = value
    return rule


RULES: Registry[Rule] = Registry(
    "aggregation rule",
    "rules",
    {
        "mean": "fedshift.functional.averaging:weighted_mean",
        "median": "fedshift.functional.averaging:coordinate_median",
    },
    _as_rule,
)


def register_rule(name: str, rule: Rule) -> None:
    """Makes a rule known by a name, for `aggregation=NAME`."""
    RULES.register(name, rule)
