"""Draws figures from the records of a grid: bars, lines over columns, lines over rounds. No display is needed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from fedshift.bench.records import Record
from fedshift.bench.selection import MAIN_RULES
from fedshift.bench.suite import Draw, Drawn, SuiteRequest
from fedshift.bench.tables import Cell, make_table

Series = Mapping[str, Sequence[float | None]]


def bars(name: str) -> Draw:
    """Draws the scores of the last round: one group of bars per column, one bar per row."""

    def draw(records: Sequence[Record], request: SuiteRequest) -> Drawn:
        table = make_table(records, MAIN_RULES["last"], "last")
        figure, axes = new_figure(1)
        width = 0.8 / len(table.cells)
        for number, (row, cells) in enumerate(table.cells.items()):
            left = [group + (number - len(table.cells) / 2 + 0.5) * width for group in range(len(table.columns))]
            heights = [100 * (cells[column].mean or 0) for column in table.columns]
            spread = [100 * (cells[column].spread or 0) for column in table.columns]
            axes[0].bar(left, heights, width, yerr=spread if any(spread) else None, label=row)
        axes[0].set_xticks(range(len(table.columns)), table.columns)
        axes[0].set_ylabel("accuracy in %")
        axes[0].legend(fontsize="small")
        return [], [saved(figure, request.out / name)]

    return draw


def lines_over_columns(name: str) -> Draw:
    """Draws the scores of the last round over the columns: one line per row."""

    def draw(records: Sequence[Record], request: SuiteRequest) -> Drawn:
        table = make_table(records, MAIN_RULES["last"], "last")
        columns = list(dict.fromkeys(record.column for record in records))
        series = {row: [_per_cent(cells[column]) for column in columns] for row, cells in table.cells.items()}
        return [], [draw_lines(request.out / name, {"": series}, columns, "accuracy in %")]

    return draw


def _per_cent(cell: Cell) -> float | None:
    return None if cell.mean is None else 100 * cell.mean


def draw_lines(path: Path, panels: Mapping[str, Series], x: Sequence[Any], y_label: str) -> Path:
    """One panel per name, one line per series."""
    figure, axes = new_figure(len(panels))
    for axis, (title, series) in zip(axes, panels.items(), strict=True):
        for label, values in series.items():
            known = [(index, value) for index, value in enumerate(values) if value is not None]
            axis.plot([index for index, _ in known], [value for _, value in known], marker=".", label=label)
        step = max(1, len(x) // 10)
        axis.set_xticks(range(0, len(x), step), [str(value) for value in x[::step]])
        axis.set_title(title)
        axis.set_ylabel(y_label)
    axes[0].legend(fontsize="small")
    return saved(figure, path)


def new_figure(panels: int, rows: int = 1) -> tuple[Any, list[Any]]:
    from matplotlib.figure import Figure  # slow to import, rarely needed

    figure = Figure(figsize=(5.5 * panels, 4.0 * rows), layout="constrained")
    return figure, list(figure.subplots(rows, panels, squeeze=False).flat)


def saved(figure: Any, path: Path) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110)
    return path
