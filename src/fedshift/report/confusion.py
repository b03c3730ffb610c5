"""A confusion matrix as geometry: shaded cells, the most frequent mistakes, one bar per class."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from fedshift.report.text import compact, percent

MAX_COUNTED = 15
"""Up to this many classes every cell shows its count. With more classes there is only colour."""
_SHADES = 12
"""Shades of a matrix without counts."""
_FAINTEST = 0.06
_MAX_MISTAKES = 8

Matrix = Sequence[Sequence[int]]


@dataclass(frozen=True)
class MatrixCell:
    """`shade` in [0, 1] is the opacity of the cell's colour: its share of the row."""

    text: str
    tip: str
    shade: float
    is_right: bool


@dataclass(frozen=True)
class MatrixRow:
    name: str
    cells: tuple[MatrixCell, ...]


@dataclass(frozen=True)
class ShadeLayer:
    """All cells of about one shade, as one SVG path in units of cells."""

    shade: float
    is_right: bool
    path: str


@dataclass(frozen=True)
class ClassBar:
    """The score of one class. `share` is None if there was no sample of the class."""

    name: str
    text: str
    share: float | None


@dataclass(frozen=True)
class Confusion:
    site: str
    classes: tuple[str, ...]
    rows: tuple[MatrixRow, ...]
    layers: tuple[ShadeLayer, ...]
    mistakes: tuple[str, ...]
    bars: tuple[ClassBar, ...]


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
    """The share itself, raised so that every cell that is not empty can be seen."""
    return 0.0 if share <= 0 else round(max(share, _FAINTEST), 3)


def class_scores(matrix: Matrix, task: str) -> list[float | None]:
    """The recall of each class; in segmentation its intersection over union. None if there is no sample of it."""
    scores: list[float | None] = []
    for i, row in enumerate(matrix):
        predicted = sum(other[i] for other in matrix)
        total = sum(row) if task == "classification" else sum(row) + predicted - row[i]
        scores.append(row[i] / total if total else None)
    return scores


def _rows(matrix: Matrix, names: list[str]) -> tuple[MatrixRow, ...]:
    rows = []
    for i, (counts, row) in enumerate(zip(matrix, shares(matrix), strict=True)):
        cells = []
        for j, (count, share) in enumerate(zip(counts, row, strict=True)):
            tip = f"{names[i]} predicted as {names[j]}: {count:,} ({percent(share)} % of {names[i]})"
            cells.append(MatrixCell(compact(count) if count else "", tip, shade(share), i == j))
        rows.append(MatrixRow(names[i], tuple(cells)))
    return tuple(rows)


def _layers(matrix: Matrix) -> tuple[ShadeLayer, ...]:
    paths: dict[tuple[bool, float], list[str]] = {}
    for i, row in enumerate(shares(matrix)):
        for j, share in enumerate(row):
            if share > 0:
                level = max(round(share * _SHADES) / _SHADES, _FAINTEST)
                paths.setdefault((i == j, round(level, 3)), []).append(f"M{j} {i}h1v1h-1z")
    return tuple(ShadeLayer(level, right, "".join(parts)) for (right, level), parts in sorted(paths.items()))


def _mistakes(matrix: Matrix, names: list[str]) -> tuple[str, ...]:
    share = shares(matrix)
    found = [(row[j], i, j) for i, row in enumerate(matrix) for j in range(len(row)) if i != j and row[j]]
    found.sort(key=lambda item: (-item[0], item[1], item[2]))
    return tuple(
        f"{names[i]} taken for {names[j]}: {count:,} ({percent(share[i][j])} %)"
        for count, i, j in found[:_MAX_MISTAKES]
    )


def _bars(matrix: Matrix, names: list[str], task: str) -> list[ClassBar]:
    """In segmentation with Dice beside IoU: twice the overlap over what is there plus what is predicted."""
    scores = class_scores(matrix, task)

    def text(score: float | None) -> str:
        dice = f" ({percent(2 * score / (1 + score))})" if task == "segmentation" and score is not None else ""
        return percent(score) + dice

    return [
        ClassBar(name, text(score), None if score is None else round(100 * score, 1))
        for name, score in zip(names, scores, strict=True)
    ]
