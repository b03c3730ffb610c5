"""A confusion matrix to look at: shaded cells, the most frequent confusions, a bar a class."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from fedshift.report.words import compact, percent

MAX_COUNTED = 15
"""Up to so many classes every cell shows its count; beyond, colour alone."""
_LEVELS = 12
_FAINTEST = 0.06
_TOP = 8

Matrix = Sequence[Sequence[int]]


@dataclass(frozen=True)
class Cell:
    """`shade` in [0, 1] is the opacity of the cell's colour: the share of its row."""

    text: str
    tip: str
    shade: float
    is_right: bool


@dataclass(frozen=True)
class Row:
    name: str
    cells: tuple[Cell, ...]


@dataclass(frozen=True)
class Layer:
    """All cells of about one shade as one SVG path in units of cells."""

    shade: float
    is_right: bool
    path: str


@dataclass(frozen=True)
class Bar:
    """`share` None: there was nothing of this class to score."""

    name: str
    text: str
    share: float | None


@dataclass(frozen=True)
class Confusion:
    site: str
    classes: tuple[str, ...]
    rows: tuple[Row, ...]
    layers: tuple[Layer, ...]
    mistakes: tuple[str, ...]
    bars: tuple[Bar, ...]


def confusion(site: str, matrix: Matrix, classes: Sequence[str], task: str) -> Confusion:
    """`matrix[truth][prediction]` counts, `(classes, classes)`."""
    names = [classes[i] if i < len(classes) else f"class {i}" for i in range(len(matrix))]
    is_small = len(matrix) <= MAX_COUNTED
    return Confusion(
        site=site,
        classes=tuple(names),
        rows=_rows(matrix, names) if is_small else (),
        layers=() if is_small else _layers(matrix),
        mistakes=_mistakes(matrix, names),
        bars=tuple(_bars(matrix, names, task)),
    )


def shares(matrix: Matrix) -> list[list[float]]:
    """Each row divided by its sum; a row of zeros stays zeros."""
    return [[count / total if (total := sum(row)) else 0.0 for count in row] for row in matrix]


def shade(share: float) -> float:
    """The share itself, but a cell with anything in it can always be seen."""
    return 0.0 if share <= 0 else round(max(share, _FAINTEST), 3)


def class_scores(matrix: Matrix, task: str) -> list[float | None]:
    """Recall of each class, or for segmentation its intersection over union. None: nothing to score."""
    scores: list[float | None] = []
    for i, row in enumerate(matrix):
        predicted = sum(other[i] for other in matrix)
        total = sum(row) if task == "classification" else sum(row) + predicted - row[i]
        scores.append(row[i] / total if total else None)
    return scores


def _rows(matrix: Matrix, names: list[str]) -> tuple[Row, ...]:
    rows = []
    for i, (counts, row) in enumerate(zip(matrix, shares(matrix), strict=True)):
        cells = []
        for j, (count, share) in enumerate(zip(counts, row, strict=True)):
            tip = f"{names[i]} predicted as {names[j]}: {count:,} ({percent(share)} % of {names[i]})"
            cells.append(Cell(compact(count) if count else "", tip, shade(share), i == j))
        rows.append(Row(names[i], tuple(cells)))
    return tuple(rows)


def _layers(matrix: Matrix) -> tuple[Layer, ...]:
    paths: dict[tuple[bool, float], list[str]] = {}
    for i, row in enumerate(shares(matrix)):
        for j, share in enumerate(row):
            if share > 0:
                level = max(round(share * _LEVELS) / _LEVELS, _FAINTEST)
                paths.setdefault((i == j, round(level, 3)), []).append(f"M{j} {i}h1v1h-1z")
    return tuple(Layer(level, right, "".join(parts)) for (right, level), parts in sorted(paths.items()))


def _mistakes(matrix: Matrix, names: list[str]) -> tuple[str, ...]:
    share = shares(matrix)
    found = [(row[j], i, j) for i, row in enumerate(matrix) for j in range(len(row)) if i != j and row[j]]
    found.sort(key=lambda item: (-item[0], item[1], item[2]))
    return tuple(
        f"{names[i]} taken for {names[j]}: {count:,} ({percent(share[i][j])} %)" for count, i, j in found[:_TOP]
    )


def _bars(matrix: Matrix, names: list[str], task: str) -> list[Bar]:
    scores = class_scores(matrix, task)
    return [
        Bar(name, percent(score), None if score is None else round(100 * score, 1))
        for name, score in zip(names, scores, strict=True)
    ]
