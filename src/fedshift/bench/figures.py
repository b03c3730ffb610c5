"""Pictures of a grid's records: bars, and lines over columns or rounds. Drawn without a screen."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from fedshift.bench.records import Record
from fedshift.bench.selection import MAIN_RULES
from fedshift.bench.sheets import Sheet
from fedshift.bench.suite import Order
from fedshift.bench.tables import Cell, make_table

Series = Mapping[str, Sequence[float | None]]


def bars(name: str) -> Any:
    """A picture of the last round's scores: a group of bars a column, a bar a row."""

    def draw(records: Sequence[Record], order: Order) -> tuple[list[Sheet], list[Path]]:
        table = make_table(records, MAIN_RULES["last"], "last")
        figure, axes = new_figure(1)
        width = 0.8 / len(table.cells)
        for number, (row, cells) in enumerate(table.cells.items()):
            places = [place + (number - len(table.cells) / 2 + 0.5) * width for place in range(len(table.columns))]
            heights = [100 * (cells[column].mean or 0) for column in table.columns]
            spread = [100 * (cells[column].spread or 0) for column in table.columns]
            axes[0].bar(places, heights, width, yerr=spread if any(spread) else None, label=row)
        axes[0].set_xticks(range(len(table.columns)), table.columns)
        axes[0].set_ylabel("accuracy in %")
        axes[0].legend(fontsize="small")
        return [], [saved(figure, order.out / name)]

    return draw


def lines_over_columns(name: str) -> Any:
    """A picture of the last round's scores: a line a row, over the columns."""

    def draw(records: Sequence[Record], order: Order) -> tuple[list[Sheet], list[Path]]:
        table = make_table(records, MAIN_RULES["last"], "last")
        columns = list(dict.fromkeys(record.column for record in records))
        series = {row: [_per_cent(cells[column]) for column in columns] for row, cells in table.cells.items()}
        return [], [draw_lines(order.out / name, {"": series}, columns, "accuracy in %")]

    return draw


def _per_cent(cell: Cell) -> float | None:
    return None if cell.mean is None else 100 * cell.mean


def draw_lines(path: Path, panels: Mapping[str, Series], x: Sequence[Any], y_label: str) -> Path:
    """A panel for each name, a line for each series."""
    figure, axes = new_figure(len(panels))
    for axis, (title, series) in zip(axes, panels.items(), strict=True):
        for label, values in series.items():
            known = [(place, value) for place, value in enumerate(values) if value is not None]
            axis.plot([place for place, _ in known], [value for _, value in known], marker=".", label=label)
        step = max(1, len(x) // 10)
        axis.set_xticks(range(0, len(x), step), [str(value) for value in x[::step]])
        axis.set_title(title)
        axis.set_ylabel(y_label)
    axes[0].legend(fontsize="small")
    return saved(figure, path)


def new_figure(panels: int, rows: int = 1) -> tuple[Any, list[Any]]:
    from matplotlib.figure import Figure  # slow to import, and few need it

    figure = Figure(figsize=(5.5 * panels, 4.0 * rows), layout="constrained")
    return figure, list(figure.subplots(rows, panels, squeeze=False).flat)


def saved(figure: Any, path: Path) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110)
    return path
