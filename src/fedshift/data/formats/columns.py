"""What the columns of tables mean: `columns.yaml` beside the tables. Every key may be left out.

    label: target                # the column with the class
    positive: [1, 2, 3, 4]       # two classes: these values of the label, and all others
    categories:                  # columns whose values are names, also where they are written as numbers
      chest_pain: [1, 2, 3, 4]
    missing:                     # values that mean "not known", besides ?, NA and empty cells
      cholesterol: [0]
    leave_out: [patient]

A column that holds mostly text is categorical without being listed: values that `MIN_SAMPLES` rows or more have
are its categories. A category becomes a column `name=value` of ones and zeros, missing where the value is.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from fedshift.data.domain import MIN_SAMPLES
from fedshift.data.formats.base import printable
from fedshift.errors import InputError, nearest
from fedshift.yamlfiles import read_yaml

COLUMN_FILE = "columns.yaml"
MISSING = ("", "?", "na", "nan")
NEGATIVE, POSITIVE = "negative", "positive"
MOST_CATEGORIES = 50
_KEYS = ("label", "positive", "categories", "missing", "leave_out")


@dataclass(frozen=True)
class ColumnRules:
    """The content of a column file; `is_given` says whether there is one."""

    label: str | None = None
    positive: tuple[str, ...] = ()
    categories: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    missing: Mapping[str, frozenset[str]] = field(default_factory=dict)
    leave_out: tuple[str, ...] = ()
    is_given: bool = False

    def cell(self, column: str, text: str) -> str:
        """The text of a cell, empty where it is a missing value."""
        is_missing = text.lower() in MISSING or plain_value(text) in self.missing.get(column, ())
        return "" if is_missing else text

    def label_of(self, text: str) -> str:
        if not self.positive:
            return text
        return POSITIVE if text in self.positive else NEGATIVE

    def require_columns(self, columns: Sequence[str], folder: Path) -> None:
        """Every column that the file names must be in the tables."""
        named = {*self.categories, *self.missing, *self.leave_out, *([self.label] if self.label else [])}
        for name in sorted(named - set(columns)):
            raise InputError(
                "data-labels",
                f"{printable(folder / COLUMN_FILE)} names a column {printable(name)!r}, which no table has."
                f" {nearest(name, columns)}",
            )


def read_rules(folder: Path) -> ColumnRules:
    """The column file of a folder; the rules that go without one where there is none."""
    path = folder / COLUMN_FILE
    if not path.is_file():
        return ColumnRules()
    found = read_yaml(path, "data-layout") or {}
    where = printable(path)
    if not isinstance(found, dict):
        raise InputError("data-layout", f"{where} must hold keys and values, such as `label: target`.")
    for key in found:
        if key not in _KEYS:
            raise InputError("data-layout", f"{where}: unknown key {printable(str(key))!r}. {nearest(str(key), _KEYS)}")
    label = found.get("label")
    return ColumnRules(
        label=None if label is None else str(label),
        positive=_values(found.get("positive"), "positive", where),
        categories={name: _values(v, f"categories.{name}", where) for name, v in _section(found, "categories", where)},
        missing={
            name: frozenset(_values(v, f"missing.{name}", where)) for name, v in _section(found, "missing", where)
        },
        leave_out=_values(found.get("leave_out"), "leave_out", where),
        is_given=True,
    )


def plain_value(text: str) -> str:
    """One spelling for 1, 1.0 and 01."""
    try:
        number = float(text)
    except ValueError:
        return text
    return str(int(number)) if number.is_integer() else text


def is_number(text: str) -> bool:
    try:
        return abs(float(text)) <= float(np.finfo(np.float32).max)
    except ValueError:
        return False


def features_of_columns(
    columns: Sequence[str], cells: Mapping[str, Sequence[str]], rules: ColumnRules, listed: Path
) -> list[str]:
    """The columns of numbers that a network sees. `cells` has the values of each column in all tables, without missing
    ones."""
    features: list[str] = []
    for column in columns:
        values = cells.get(column, ())
        categories: Sequence[str] | None = rules.categories.get(column)
        # A word among numbers is a mistake in a cell, which the reader names by its line.
        if categories is None and sum(map(is_number, values)) < len(values) / 2:
            counts = Counter(map(plain_value, values))
            categories = sorted(value for value, count in counts.items() if count >= MIN_SAMPLES)
            if not categories or len(categories) > MOST_CATEGORIES or len(counts) > max(20, len(values) // 2):
                raise InputError(
                    "data-unreadable",
                    f"column {printable(column)!r} holds text with {len(counts)} different values, such as"
                    f" {printable(next(v for v in values if not is_number(v)))!r}: leave it out (leave_out in"
                    f" {printable(listed)}), list its categories there, or write numbers.",
                )
        features += [column] if categories is None else [f"{column}={value}" for value in categories]
    return features


def categorical(feature: str, header: Sequence[str]) -> tuple[str, str] | None:
    """Column and value of a feature `column=value`; None for a column of numbers."""
    if feature in header:
        return None
    column, equals, value = feature.rpartition("=")
    return (column, value) if equals else None


def _values(given: Any, key: str, where: str) -> tuple[str, ...]:
    if given is None:
        return ()
    listed = given if isinstance(given, list) else [given]
    if any(isinstance(value, list | dict) for value in listed):
        raise InputError("data-layout", f"{where}: {printable(key)} must be a value or a list of values.")
    return tuple(plain_value(str(value)) for value in listed)


def _section(found: Mapping[Any, Any], key: str, where: str) -> list[tuple[str, Any]]:
    given = found.get(key) or {}
    if not isinstance(given, dict):
        raise InputError("data-layout", f"{where}: {key} must hold a line per column, such as `sex: [F, M]`.")
    return [(str(name), value) for name, value in given.items()]
