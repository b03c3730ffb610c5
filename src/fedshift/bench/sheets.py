"""Numbers in rows and columns that are no scores over seeds: weights, distances, costs, ratios."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

Value = float | str | None


@dataclass(frozen=True)
class Sheet:
    """`rows` has a value for each column. `theirs` is what the paper printed, by row and column."""

    title: str
    columns: tuple[str, ...]
    rows: Mapping[str, Sequence[Value]]
    theirs: Mapping[str, Mapping[str, Value]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for row, values in self.rows.items():
            assert len(values) == len(self.columns), f"{self.title}: {row} has {len(values)} values"

    def lines(self) -> tuple[list[str], list[list[str]]]:
        """Header and lines as text; the paper's own numbers in brackets."""
        return ["", *self.columns], [
            [row, *(self._cell(row, column, value) for column, value in zip(self.columns, values, strict=True))]
            for row, values in self.rows.items()
        ]

    def _cell(self, row: str, column: str, value: Value) -> str:
        printed = self.theirs.get(row, {}).get(column)
        return shown(value) if printed is None else f"{shown(value)} [{shown(printed)}]"


def shown(value: Value) -> str:
    """Four digits of a number, `-` for nothing."""
    return "-" if value is None else value if isinstance(value, str) else f"{value:.4g}"
