"""A job is one training and its place in a table: the row (what is trained), the column (where or how), the seed."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from fedshift.errors import InputError, nearest
from fedshift.methods import METHODS
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
    """`settings` say which domain is the target, or which value is tried. `names` is what `{name}` stands for in the
    settings of rows. Several columns of one label are averaged."""

    label: str
    settings: Mapping[str, Any]
    names: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Job:
    row: str
    column: str
    config: RunConfig

    @cached_property
    def digest(self) -> str:
        """The job's name on disk: equal configurations are one job, in whatever table they stand."""
        return hashlib.sha256(json.dumps(self.config.chosen(), sort_keys=True).encode()).hexdigest()[:16]


def grid(
    rows: Sequence[Row],
    columns: Sequence[Column],
    seeds: Sequence[int],
    common: Mapping[str, Any],
    by_method: Mapping[str, Mapping[str, Any]],
    last: Mapping[str, Any] | None = None,
    names: Mapping[str, Any] | None = None,
) -> Iterator[Job]:
    """Every row in every column with every seed, seed by seed: a first complete table is there early. Later layers of
    settings win: `common`, a method's, the column's, the row's, and `last` what the user set. Sections of other methods
    are left out."""
    for seed in seeds:
        for column in columns:
            for row in rows:
                values: dict[str, Any] = {"method": row.method, "seed": seed}
                own = filled(row.settings, {**(names or {}), **column.names})
                for layer in (common, by_method.get(row.method, {}), column.settings, own, last or {}):
                    values = merged(values, layer)
                known = {key: value for key, value in values.items() if key == row.method or key not in METHODS}
                yield Job(row.label, column.label, make_config(known))


def chosen_rows(rows: Sequence[Row], methods: Sequence[str] | None) -> list[Row]:
    """Those of the named methods, or of that label."""
    if methods is None:
        return list(rows)
    known = {name.lower() for row in rows for name in (row.method, row.label)}
    for name in methods:
        if name.lower() not in known:
            raise InputError("unknown-name", f"--methods: this suite has no {name!r}. {nearest(name, known)}")
    wanted = {name.lower() for name in methods}
    return [row for row in rows if {row.method, row.label.lower()} & wanted]


def filled(value: Any, names: Mapping[str, Any]) -> Any:
    """`value` with every `{name}` in it replaced by what it stands for."""
    if isinstance(value, Mapping):
        return {key: filled(inner, names) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [filled(inner, names) for inner in value]
    is_name = isinstance(value, str) and value.startswith("{") and value.endswith("}")
    return names[value[1:-1]] if is_name else value


def merged(values: Mapping[str, Any], over: Mapping[str, Any]) -> dict[str, Any]:
    """`values` with `over` laid on top; sections (a method's own keys) are merged key by key."""
    result = dict(values)
    for key, value in over.items():
        old = result.get(key)
        result[key] = {**old, **value} if isinstance(old, Mapping) and isinstance(value, Mapping) else value
    return result
