"""Tables: one CSV file per domain with a header, numbers and one column of labels.

An empty cell, `?`, `NA` or `NaN` is a missing value; a column file says what else is known (`columns`). A table without
the label column is an unlabelled domain. Rows have no names, so a row's content decides its split: equal rows are
always in the same split.
"""

from __future__ import annotations

import csv
import io
import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from fedshift.data.decoding import Size
from fedshift.data.domain import Domain, Split, Task
from fedshift.data.formats.base import InputFormat, Problem, Progress, Sample, printable
from fedshift.data.formats.columns import MISSING, ColumnRules, categorical, is_number, plain_value, read_rules
from fedshift.data.index.files import digest_of
from fedshift.data.splits import SPLITS, SplitName, choose_splits
from fedshift.errors import InputError, nearest

SUFFIXES = (".csv", ".data")
LABEL_COLUMNS = ("label", "target", "class")


@dataclass(frozen=True)
class Cells:
    """The text of a table, stripped: one list per row, as long as the header. `lines` has the line of the file in which
    each row ends."""

    path: Path
    header: list[str]
    rows: list[list[str]]
    lines: list[int]


class TableError(Exception):
    """A table that cannot be used: the code of the error and what is wrong."""

    def __init__(self, code: str, message: str) -> None:
        super().__init__(message)
        self.problem = Problem(code, message)


def read_cells(path: Path) -> Cells:
    """The text of a table. The separator is the one of comma, semicolon and tab that the header has most of."""
    where = printable(path)
    try:
        text = path.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as problem:
        raise TableError("data-unreadable", f"{where} cannot be read as text: {problem}.") from problem
    if not text.strip():
        raise TableError("data-empty", f"{where} is empty.")
    separator = max(",;\t", key=text.lstrip().splitlines()[0].count)
    reader = csv.reader(io.StringIO(text), delimiter=separator)
    try:
        table = [(reader.line_num, [cell.strip() for cell in row]) for row in reader if row]
    except csv.Error as problem:
        raise TableError("data-unreadable", f"{where} is not a table: {problem}.") from problem
    header = table[0][1]
    lines, rows = [line for line, _ in table[1:]], [row for _, row in table[1:]]
    if all(is_number(name) for name in header):
        raise TableError("data-layout", f"{where} has no header; its first line must name the columns.")
    twice = [name for name, count in Counter(header).items() if count > 1]
    if twice:
        raise TableError("data-layout", f"{where} has several columns called {printable(twice[0])!r}.")
    if not rows:
        raise TableError("data-empty", f"{where} has a header but no rows.")
    for line, row in zip(lines, rows, strict=True):
        if len(row) != len(header):
            raise TableError(
                "data-unreadable", f"{where}, line {line}: {len(row)} cells where the header has {len(header)}."
            )
    return Cells(path, header, rows, lines)


def understood(cells: Cells, rules: ColumnRules) -> Cells:
    """The table without the columns that are left out, its missing values empty."""
    kept = [at for at, name in enumerate(cells.header) if name not in rules.leave_out]
    header = [cells.header[at] for at in kept]
    rows = [[rules.cell(cells.header[at], row[at]) for at in kept] for row in cells.rows]
    return Cells(cells.path, header, rows, cells.lines)


def values_of(tables: Sequence[Cells], columns: Sequence[str]) -> dict[str, list[str]]:
    """The values of each column in all tables, without missing ones."""
    places = [(table, {name: at for at, name in enumerate(table.header)}) for table in tables]
    return {
        name: [row[at[name]] for table, at in places if name in at for row in table.rows if row[at[name]]]
        for name in columns
    }


def find_label_column(tables: Sequence[Cells], wanted: str | None) -> str:
    """The label column asked for, or the last column called label, target or class in any of the tables."""
    columns = list(dict.fromkeys(name for table in tables for name in table.header))
    if wanted is not None:
        if wanted not in columns:
            raise TableError(
                "data-labels",
                f"No table has a column {printable(wanted)!r}. {nearest(wanted, map(printable, columns))}",
            )
        return wanted
    named = [name for name in columns if name.lower() in LABEL_COLUMNS]
    if not named:
        raise TableError(
            "data-labels",
            f"No column is called {', '.join(LABEL_COLUMNS)}; name the label column with --label-column. The columns "
            f"are: {printable(', '.join(columns))}.",
        )
    return named[-1]


class Table:
    """One domain's table, its columns in the order that all domains agreed on."""

    def __init__(
        self, name: str, cells: Cells, label_column: str, columns: Sequence[str], rules: ColumnRules | None = None
    ) -> None:
        self.name = name
        self.warnings: tuple[str, ...] = ()
        self.problems: tuple[Problem, ...] = ()
        self._labels: list[str] | None = None
        self._features: NDArray[np.float32] = np.empty((0, len(columns)), dtype=np.float32)
        self._lines: list[int] = []
        self._digests: list[str] = []
        try:
            labels = _labels_of(cells, label_column) if label_column in cells.header else None
            if labels is not None and rules is not None:
                labels = [rules.label_of(label) for label in labels]
            self._features = _features_of(cells, columns)
        except TableError as error:
            self.problems = (error.problem,)
            return
        self._labels = labels
        self._lines = cells.lines
        self._digests = [digest_of("\0".join(row).encode("utf-8", "surrogatepass")) for row in cells.rows]

    @property
    def task(self) -> Task | None:
        return "classification" if self._labels is not None else None

    def class_counts(self) -> Counter[str] | None:
        return None if self._labels is None else Counter(self._labels)

    def sizes(self) -> Counter[Size]:
        return Counter()

    def samples(self) -> list[Sample]:
        return [
            Sample(f"{self.name}, line {line}", split, digest)
            for line, split, digest in zip(self._lines, self._splits(), self._digests, strict=True)
        ]

    def read(self, form: InputFormat, progress: Progress | None = None) -> Domain:
        splits = np.array(self._splits())
        labels = None
        if self._labels is not None:
            number = {name: i for i, name in enumerate(form.classes)}
            labels = np.array([number[label] for label in self._labels], dtype=np.int64)
        whole = Split(self._features, labels)
        train, val, test = (whole.take(np.flatnonzero(splits == name)) for name in SPLITS)
        return Domain(self.name, train, val, test, test_given=False)

    def _splits(self) -> list[SplitName]:
        groups = self._labels if self._labels is not None else [""] * len(self._digests)
        return [SPLITS[split] for split in choose_splits(self._digests, groups)]


def _labels_of(cells: Cells, column: str) -> list[str]:
    at = cells.header.index(column)
    labels = []
    for line, row in zip(cells.lines, cells.rows, strict=True):
        text = row[at]
        if text.lower() in MISSING:
            raise TableError("data-labels", f"{printable(cells.path)}, line {line}: the label is missing.")
        # Sites write the same class as 1, 1.0 or 01.
        if is_number(text):
            if not float(text).is_integer():
                raise TableError(
                    "data-labels",
                    f"{printable(cells.path)}, line {line}: the label {printable(text)!r} in column "
                    f"{printable(column)!r} is a measurement, not a class.",
                )
            text = str(int(float(text)))
        labels.append(text)
    return labels


def _features_of(cells: Cells, columns: Sequence[str]) -> NDArray[np.float32]:
    features = np.empty((len(cells.rows), len(columns)), dtype=np.float32)
    for i, column in enumerate(columns):
        named = categorical(column, cells.header)
        if named is not None:
            at, value = cells.header.index(named[0]), named[1]
            texts = [row[at] for row in cells.rows]
            features[:, i] = [math.nan if t.lower() in MISSING else plain_value(t) == value for t in texts]
            continue
        at = cells.header.index(column)
        for j, (line, row) in enumerate(zip(cells.lines, cells.rows, strict=True)):
            features[j, i] = _number(row[at], cells.path, column, line)
    return features


def _number(text: str, path: Path, column: str, line: int) -> float:
    if text.lower() in MISSING:
        return math.nan
    if not is_number(text):
        raise TableError(
            "data-unreadable",
            f"{printable(path)}, line {line}: column {printable(column)!r} holds {printable(text)!r}, which is not a "
            "number; encode the column as numbers or remove it.",
        )
    return float(text)


def read_features(path: Path, columns: Sequence[str]) -> NDArray[np.float32]:
    """The named columns of a new table, `(rows, columns)`, for prediction; other columns are left out. A column file
    beside it says which values are missing."""
    try:
        cells = understood(read_cells(path), read_rules(path.parent))
        needed = [named[0] if (named := categorical(name, cells.header)) else name for name in columns]
        missing = [column for column in needed if column not in cells.header]
        if missing:
            raise InputError("data-labels", f"{printable(path)} has no column {printable(missing[0])!r}.")
        return _features_of(cells, columns)
    except TableError as error:
        raise InputError(error.problem.code, error.problem.message) from error
