"""Jobs: single trainings of a grid, each with its row (what is trained), column (where or how) and seed; and a rough
estimate of how long they take."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from fedshift.errors import InputError, nearest
from fedshift.federation import codec
from fedshift.methods import METHODS, find_about
from fedshift.methods.base import PRETRAINED
from fedshift.runs.config import RunConfig, make_config


@dataclass(frozen=True)
class Row:
    """A row of a table. `settings` are configuration keys, with a method's own keys under its name. `theirs` is what
    the paper printed, by column."""

    label: str
    method: str
    settings: Mapping[str, Any] = field(default_factory=dict)
    theirs: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class Column:
    """A column of a table. `settings` say which domain is the target, or which value is tried. `names` maps each
    `{name}` in the settings of rows to its value. Columns with equal labels are averaged."""

    label: str
    settings: Mapping[str, Any]
    names: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Job:
    """One training. `row` and `column` are the labels of its cell in the table. Suites give a method's own keys all;
    with `is_open`, those that nobody set are chosen for the data and network, as by `fedshift train`."""

    row: str
    column: str
    config: RunConfig
    is_open: bool = False

    @cached_property
    def digest(self) -> str:
        """The job's name on disk. Equal configurations are one job, whichever tables they are in, until the method
        computes something else, or with given weights has other defaults."""
        about = find_about(self.config.method)
        told = {**self.config.chosen(), **({"revision": about.revision} if about.revision else {})}
        if self.config.weights is not None:  # Decides with what is left open.
            told["pretrained"] = codec.plain({**PRETRAINED, **about.pretrained})
        return hashlib.sha256(json.dumps(told, sort_keys=True).encode()).hexdigest()[:16]


def grid_jobs(
    rows: Sequence[Row],
    columns: Sequence[Column],
    seeds: Sequence[int],
    common: Mapping[str, Any],
    by_method: Mapping[str, Mapping[str, Any]],
    last: Mapping[str, Any] | None = None,
    names: Mapping[str, Any] | None = None,
) -> Iterator[Job]:
    """Every row in every column with every seed. Seeds come one after the other, so that a first complete table is
    ready early. Settings are merged in this order, later ones win: `common`, the method's (`by_method`), the column's,
    the row's, the user's (`last`). Keys of other methods are left out."""
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
    """The rows whose method or label is among `methods`; all rows for None."""
    if methods is None:
        return list(rows)
    known = {name.lower() for row in rows for name in (row.method, row.label)}
    for name in methods:
        if name.lower() not in known:
            raise InputError("unknown-name", f"--methods: this suite has no {name!r}. {nearest(name, known)}")
    wanted = {name.lower() for name in methods}
    return [row for row in rows if {row.method, row.label.lower()} & wanted]


def filled(value: Any, names: Mapping[str, Any]) -> Any:
    """`value` with every `{name}` in it replaced by its value in `names`."""
    if isinstance(value, Mapping):
        return {key: filled(inner, names) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [filled(inner, names) for inner in value]
    is_name = isinstance(value, str) and value.startswith("{") and value.endswith("}")
    return names[value[1:-1]] if is_name else value


def merged(values: Mapping[str, Any], over: Mapping[str, Any]) -> dict[str, Any]:
    """`values` updated with `over`. Nested mappings (a method's own keys) are merged key by key."""
    result = dict(values)
    for key, value in over.items():
        old = result.get(key)
        result[key] = {**old, **value} if isinstance(old, Mapping) and isinstance(value, Mapping) else value
    return result


# --- Estimated times ------------------------------------------------------------------------------------------------

START_SECONDS = 5.0
"""Seconds in which a process starts, reads its data and writes its results."""

ROUND_SECONDS = 0.15
"""Seconds per round for sending and scoring models."""

MILLISECONDS = {
    ("digits-copa", 16): 0.7,
    ("digits-csac", 16): 0.4,
    ("digits-dualadapt", 20): 0.75,
    ("segnet-small", None): 6.0,
}
"""Milliseconds per training image in FedAvg, forward and backward, by network and image size. Times of other networks
were not measured."""

TRAINING_IMAGES = {"digits": 800, "rotated-digits": 1000, "streets": 200}
"""Training images per domain of the built-in data sets."""
SITES = {"digits": 4, "rotated-digits": 5, "streets": 4}
"""Source domains of the built-in data sets, one target left out."""


def estimated_seconds(jobs: Iterable[Job]) -> float | None:
    """Seconds of all jobs one after the other on built-in data. None if a network or data set was not measured."""
    total = 0.0
    for job in jobs:
        seconds = _seconds(job)
        if seconds is None:
            return None
        total += seconds
    return total


def _seconds(job: Job) -> float | None:
    config = job.config
    dataset = config.dataset or "digits"
    milliseconds = MILLISECONDS.get((config.arch, config.image_size))
    if milliseconds is None or dataset not in TRAINING_IMAGES:
        return None
    pictures = min(config.train_per_site or TRAINING_IMAGES[dataset], TRAINING_IMAGES[dataset])
    rounds, hyper, factor = config.rounds or 20, config.hyper, find_about(config.method).time_factor
    epochs: float = rounds * (config.local_epochs or 1.0)
    if config.method == "csac":
        epochs = hyper["acquisition_epochs"] + rounds * hyper["calibration_epochs"]
    if config.home:
        seen = pictures * (epochs * factor + hyper.get("pretrain_epochs", 0.0))
    else:
        sites = len(config.sources) if config.sources else SITES[dataset]
        seen = pictures * epochs * sites * factor
    return float(START_SECONDS + ROUND_SECONDS * rounds + seen * milliseconds / 1000)


def about_minutes(seconds: float) -> str:
    """`about a minute`, `about 12 minutes`."""
    minutes = max(1, math.ceil(seconds / 60))
    return "about a minute" if minutes == 1 else f"about {minutes} minutes"
