"""Tables: scores of records by row and column, with mean and standard deviation over seeds; sheets: any other numbers;
and both as text, Markdown, LaTeX, CSV and JSON."""

from __future__ import annotations

import csv
import io
import json
import math
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from fedshift.bench.records import Record

AVERAGE = "average"
CONFIDENCE = 0.95

Choose = Callable[[Record], Mapping[str, float]]
"""A record's score by target, under some rule that chooses a round."""


@dataclass(frozen=True)
class Cell:
    """`by_seed` has the score of each seed. `theirs` is what the paper printed, in per cent."""

    by_seed: Mapping[int, float]
    theirs: float | None = None
    is_best: bool = False

    @property
    def mean(self) -> float | None:
        return statistics.fmean(self.by_seed.values()) if self.by_seed else None

    @property
    def spread(self) -> float | None:
        """Standard deviation over seeds, with n - 1."""
        return statistics.stdev(self.by_seed.values()) if len(self.by_seed) > 1 else None

    @property
    def text(self) -> str:
        if self.mean is None:
            return "-"
        return f"{100 * self.mean:.1f}" + ("" if self.spread is None else f" ± {100 * self.spread:.1f}")


@dataclass(frozen=True)
class Difference:
    """A row minus the baseline over pairs of equal column and seed: the mean, and half of its confidence interval."""

    mean: float
    half_width: float | None
    pairs: int

    @property
    def text(self) -> str:
        interval = "" if self.half_width is None else f" ± {100 * self.half_width:.1f}"
        return f"{100 * self.mean:+.1f}{interval}"


@dataclass(frozen=True)
class Table:
    title: str
    rule: str
    columns: tuple[str, ...]
    cells: Mapping[str, Mapping[str, Cell]]
    """By row, then column; the average over columns comes last."""
    baseline: str | None
    differences: Mapping[str, Difference]
    seeds: tuple[int, ...]

    def seeds_of(self, row: str) -> tuple[int, ...]:
        """Seeds that any cell of the row has."""
        return tuple(sorted({seed for column in self.columns for seed in self.cells[row][column].by_seed}))

    def label(self, row: str) -> str:
        """The row's name, with the number of seeds if its cells have fewer than the table."""
        counts = {len(self.cells[row][column].by_seed) for column in self.columns} - {0}
        if not counts or counts == {len(self.seeds)}:
            return row
        fewest, most = min(counts), max(counts)
        return f"{row} ({fewest if fewest == most else f'{fewest} to {most}'} of {len(self.seeds)} seeds)"

    @property
    def is_complete(self) -> bool:
        """Whether all cells with a number have all seeds."""
        return all(self.label(row) == row for row in self.cells)


def make_table(
    records: Sequence[Record],
    choose: Choose,
    rule: str,
    title: str = "",
    baseline: str | None = None,
    theirs: Mapping[str, Mapping[str, float]] | None = None,
    not_ranked: Sequence[str] = (),
) -> Table:
    """Rows and columns are in the order of the records; rows that only the paper has come last. Targets of one column
    are averaged. Rows in `not_ranked` (bounds) are never marked as best."""
    printed = theirs or {}
    rows = list(dict.fromkeys([*(record.row for record in records), *printed]))
    columns = list(dict.fromkeys(record.column for record in records))
    scores = _scores(records, choose)
    cells = {
        row: {column: Cell(scores.get((row, column), {}), printed.get(row, {}).get(column)) for column in columns}
        for row in rows
    }
    for row, own in cells.items():
        own[AVERAGE] = Cell(_averages(own), printed.get(row, {}).get(AVERAGE))
    return Table(
        title=title,
        rule=rule,
        columns=(*columns, AVERAGE) if len(columns) > 1 else tuple(columns),
        cells=_with_best(cells, not_ranked),
        baseline=baseline if baseline in cells else None,
        differences=_differences(cells, baseline) if baseline in cells else {},
        seeds=tuple(sorted({record.seed for record in records})),
    )


def _scores(records: Sequence[Record], choose: Choose) -> dict[tuple[str, str], dict[int, float]]:
    """By row and column, then seed. A seed without all targets of its column is left out: its mean would be over
    easier or harder targets."""
    found: dict[tuple[str, str], dict[int, dict[str, float]]] = {}
    for record in records:
        found.setdefault((record.row, record.column), {}).setdefault(record.seed, {}).update(choose(record))
    targets: dict[str, set[str]] = {}
    for (_, column), seeds in found.items():
        targets.setdefault(column, set()).update(*seeds.values())
    return {
        (row, column): {
            seed: statistics.fmean(by_target.values())
            for seed, by_target in seeds.items()
            if by_target and set(by_target) == targets[column]
        }
        for (row, column), seeds in found.items()
    }


def _averages(cells: Mapping[str, Cell]) -> dict[int, float]:
    """Per seed, the mean over columns. A seed without all columns is left out: its mean would be over easier or harder
    columns."""
    seeds = set.intersection(*(set(cell.by_seed) for cell in cells.values())) if cells else set()
    return {seed: statistics.fmean(cell.by_seed[seed] for cell in cells.values()) for seed in sorted(seeds)}


def _with_best(cells: Mapping[str, Mapping[str, Cell]], not_ranked: Sequence[str]) -> dict[str, dict[str, Cell]]:
    marked = {row: dict(own) for row, own in cells.items()}
    for column in next(iter(marked.values()), {}):
        means = {r: own[column].mean for r, own in marked.items() if r not in not_ranked}
        known = {row: mean for row, mean in means.items() if mean is not None}
        if len(known) > 1:
            top = max(known.values())
            for row, mean in known.items():
                if mean == top:
                    marked[row][column] = replace(marked[row][column], is_best=True)
    return marked


def _differences(cells: Mapping[str, Mapping[str, Cell]], baseline: str | None) -> dict[str, Difference]:
    assert baseline is not None
    found = {}
    for row, own in cells.items():
        pairs = [
            own[column].by_seed[seed] - base
            for column, cell in cells[baseline].items()
            for seed, base in cell.by_seed.items()
            if column != AVERAGE and seed in own[column].by_seed
        ]
        if row != baseline and pairs:
            found[row] = paired_difference(pairs)
    return found


def paired_difference(differences: Sequence[float]) -> Difference:
    """The mean of paired differences and its interval by Student's t."""
    mean, count = statistics.fmean(differences), len(differences)
    if count < 2:
        return Difference(mean, None, count)
    from scipy.stats import t  # slow to import, and only tables need it

    factor = float(t.ppf(0.5 + CONFIDENCE / 2, count - 1))
    return Difference(mean, factor * statistics.stdev(differences) / math.sqrt(count), count)


Value = float | str | None


@dataclass(frozen=True)
class Sheet:
    """A table of plain numbers: `rows` has one value per column, `theirs` what the paper printed, by row and column."""

    title: str
    columns: tuple[str, ...]
    rows: Mapping[str, Sequence[Value]]
    theirs: Mapping[str, Mapping[str, Value]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for row, values in self.rows.items():
            assert len(values) == len(self.columns), f"{self.title}: {row} has {len(values)} values"

    def lines(self) -> tuple[list[str], list[list[str]]]:
        """Header and rows as text, with the paper's numbers in brackets."""
        return ["", *self.columns], [
            [row, *(self._cell(row, column, value) for column, value in zip(self.columns, values, strict=True))]
            for row, values in self.rows.items()
        ]

    def _cell(self, row: str, column: str, value: Value) -> str:
        printed = self.theirs.get(row, {}).get(column)
        return shown(value) if printed is None else f"{shown(value)} [{shown(printed)}]"


def shown(value: Value) -> str:
    """A number with four digits, `-` for None."""
    return "-" if value is None else value if isinstance(value, str) else f"{value:.4g}"


# --- Formats --------------------------------------------------------------------------------------------------------


def markdown(table: Table | Sheet) -> str:
    header, lines = _lines(table, lambda text: f"**{text}**")
    rows = [header, ["---"] * len(header), *lines]
    return "\n".join("| " + " | ".join(cell.replace("|", "\\|") for cell in row) + " |" for row in rows) + "\n"


def latex(table: Table | Sheet) -> str:
    header, lines = _lines(table, lambda text: f"\\textbf{{{text}}}")
    body = [" & ".join(_escaped(cell) for cell in row) + r" \\" for row in [header, *lines]]
    columns = "l" + "r" * (len(header) - 1)
    return "\n".join(
        [f"\\begin{{tabular}}{{{columns}}}", r"\hline", body[0], r"\hline", *body[1:], r"\hline", r"\end{tabular}", ""]
    )


def text(table: Table | Sheet) -> str:
    """For a terminal: aligned columns, the best with a star."""
    header, lines = _lines(table, lambda text: f"{text} *")
    widths = [max(len(row[index]) for row in [header, *lines]) for index in range(len(header))]
    return "".join(
        "  ".join([row[0].ljust(widths[0]), *(cell.rjust(w) for cell, w in zip(row[1:], widths[1:], strict=True))])
        + "\n"
        for row in [header, *lines]
    )


def _lines(table: Table | Sheet, best: Callable[[str], str]) -> tuple[list[str], list[list[str]]]:
    """Header and rows as text, the paper's numbers in brackets after ours. `best` marks the best of a column."""
    if isinstance(table, Sheet):
        return table.lines()
    header = ["", *table.columns, *([f"minus {table.baseline}"] if table.baseline else [])]
    lines = []
    for row, own in table.cells.items():
        line = [table.label(row)]
        for column in table.columns:
            cell = own[column]
            text = best(cell.text) if cell.is_best else cell.text
            line.append(text if cell.theirs is None else f"{text} [{cell.theirs:.1f}]")
        if table.baseline:
            line.append(table.differences[row].text if row in table.differences else "")
        lines.append(line)
    return header, lines


def _escaped(text: str) -> str:
    for plain, tex in (("&", r"\&"), ("%", r"\%"), ("_", r"\_"), ("#", r"\#"), ("±", r"$\pm$")):
        text = text.replace(plain, tex)
    return text


def comma_separated(*tables: Table | Sheet) -> str:
    """One line per cell and seed, for statistics programs. For a sheet, the column `rule` has its title."""
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow(["row", "column", "rule", "seed", "score", "theirs"])
    for table in tables:
        writer.writerows(_sheet_cells(table) if isinstance(table, Sheet) else _seed_cells(table))
    return out.getvalue()


def _seed_cells(table: Table) -> Iterator[list[Any]]:
    for row, own in table.cells.items():
        for column in table.columns:
            cell = own[column]
            for seed, score in cell.by_seed.items():
                yield [row, column, table.rule, seed, round(score, 6), cell.theirs]
            if not cell.by_seed and cell.theirs is not None:
                yield [row, column, table.rule, "", "", cell.theirs]


def _sheet_cells(sheet: Sheet) -> Iterator[list[Any]]:
    for row, values in sheet.rows.items():
        for column, value in zip(sheet.columns, values, strict=True):
            yield [row, column, sheet.title, "", value, sheet.theirs.get(row, {}).get(column)]


def as_json(*tables: Table | Sheet) -> str:
    return json.dumps([plain(table) for table in tables], indent=2) + "\n"


def plain(table: Table | Sheet) -> dict[str, Any]:
    """The table as dictionaries. Scores are fractions in [0, 1]; `theirs` is in per cent, as printed."""
    if isinstance(table, Sheet):
        rows = [
            {"row": row, "values": dict(zip(table.columns, values, strict=True)), "theirs": table.theirs.get(row, {})}
            for row, values in table.rows.items()
        ]
        return {"title": table.title, "columns": list(table.columns), "rows": rows}
    return {
        "title": table.title,
        "rule": table.rule,
        "seeds": list(table.seeds),
        "columns": list(table.columns),
        "baseline": table.baseline,
        "confidence": CONFIDENCE,
        "rows": [
            {
                "row": row,
                "seeds": list(table.seeds_of(row)),
                "cells": {
                    column: {
                        "mean": own[column].mean,
                        "std": own[column].spread,
                        "by_seed": {str(seed): score for seed, score in own[column].by_seed.items()},
                        "theirs": own[column].theirs,
                        "best": own[column].is_best,
                    }
                    for column in table.columns
                },
                "minus_baseline": vars(table.differences[row]) if row in table.differences else None,
            }
            for row, own in table.cells.items()
        ],
    }
