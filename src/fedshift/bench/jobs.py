"""A job is one training and its place in a table: the row (what is trained), the column (where or how), the seed."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from fedshift.runs.config import RunConfig, make_config


@dataclass(frozen=True)
class Row:
    """A line of a table. `settings` are configuration keys, with a method's own under its name; `theirs` has what the
    paper printed, by column."""

    label: str
    method: str
    settings: Mapping[str, Any] = field(default_factory=dict)
    theirs: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class Column:
    """`settings` say which domain is the target, or which value is tried."""

    label: str
    settings: Mapping[str, Any]


@dataclass(frozen=True)
class Job:
    row: str
    column: str
    config: RunConfig

    @cached_property
    def digest(self) -> str:
        """The job's name on disk: equal configurations are one job, in whatever table they stand."""
        return hashlib.sha256(self.config.to_yaml().encode()).hexdigest()[:16]


def grid(
    rows: Sequence[Row],
    columns: Sequence[Column],
    seeds: Sequence[int],
    common: Mapping[str, Any],
    by_method: Mapping[str, Mapping[str, Any]],
) -> Iterator[Job]:
    """Every row in every column with every seed, seed by seed: a first complete table is there early."""
    for seed in seeds:
        for column in columns:
            for row in rows:
                values: dict[str, Any] = {"method": row.method, "seed": seed}
                for layer in (common, by_method.get(row.method, {}), column.settings, row.settings):
                    values = merged(values, layer)
                yield Job(row.label, column.label, make_config(values))


def merged(values: Mapping[str, Any], over: Mapping[str, Any]) -> dict[str, Any]:
    """`values` with `over` laid on top; sections (a method's own keys) are merged key by key."""
    result = dict(values)
    for key, value in over.items():
        old = result.get(key)
        result[key] = {**old, **value} if isinstance(old, Mapping) and isinstance(value, Mapping) else value
    return result
