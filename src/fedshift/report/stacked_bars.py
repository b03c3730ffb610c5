"""Shares that add up to one, such as the weights of sites, as stacked columns: one per round or one per layer."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from fedshift.report.charts import COLOURS, WIDTH
from fedshift.report.text import percent
from fedshift.runs.record import Points

HEIGHT = 120
_MAX_COLUMNS = 80
_TOLERANCE = 0.02

Series = Mapping[str, Points]


@dataclass(frozen=True)
class Part:
    """One site's part of a column, in pixels from the top."""

    style: str
    top: float
    height: float
    tip: str


@dataclass(frozen=True)
class Column:
    """`left` and `width` are in thousandths of the width."""

    left: float
    width: float
    parts: tuple[Part, ...]


@dataclass(frozen=True)
class ShareChart:
    title: str
    columns: tuple[Column, ...]
    ticks: tuple[tuple[float, str], ...]
    last: tuple[tuple[str, str, str], ...]
    """(site, style, share) of the last column."""
    is_by_round: bool
    width: int = WIDTH
    height: int = HEIGHT

    @property
    def description(self) -> str:
        return f"{self.title}. Last: " + ", ".join(f"{site} {share} %" for site, _, share in self.last)


@dataclass(frozen=True)
class ShareGroup:
    """Charts of one metric: one chart for whole models, or one per layer."""

    title: str
    note: str
    charts: tuple[ShareChart, ...]


def are_shares(series: Series) -> bool:
    """Whether the values of at least two sites are in [0, 1] and add up to one in every round."""
    by_round: dict[int, list[float]] = {}
    for points in series.values():
        for x, y in points:
            if y is None or not math.isfinite(y) or y < -1e-6:
                return False
            by_round.setdefault(x, []).append(y)
    sums = [sum(values) for values in by_round.values()]
    return 2 <= len(series) <= COLOURS and all(abs(total - 1) <= _TOLERANCE for total in sums)


def over_rounds(title: str, series: Series, styles: Mapping[str, str]) -> ShareChart:
    """One column per round. Of many rounds every n-th is drawn, and always the last."""
    rounds = sorted({x for points in series.values() for x, _ in points})
    stride = -(-len(rounds) // _MAX_COLUMNS)
    shown = rounds[::-1][::stride][::-1]
    values = {site: dict(points) for site, points in series.items()}
    columns = [(f"round {x}", {site: values[site].get(x) or 0.0 for site in series}) for x in shown]
    every = max(1, -(-len(shown) // 6))
    names = ["" if (len(shown) - 1 - index) % every else str(x) for index, x in enumerate(shown)]
    return _chart(title, columns, names, styles, is_by_round=True)


def over_layers(title: str, layers: Mapping[str, Series], styles: Mapping[str, str]) -> ShareChart:
    """One column per layer, for a single round."""
    columns = [
        (layer, {site: points[-1][1] or 0.0 for site, points in series.items()}) for layer, series in layers.items()
    ]
    return _chart(title, columns, list(layers), styles, is_by_round=False)


def _chart(
    title: str,
    columns: Sequence[tuple[str, Mapping[str, float]]],
    names: Sequence[str],
    styles: Mapping[str, str],
    *,
    is_by_round: bool,
) -> ShareChart:
    slot = WIDTH / len(columns)
    gap = min(0.18 * slot, 12)
    drawn, ticks = [], []
    for number, ((where, shares), name) in enumerate(zip(columns, names, strict=True)):
        top, parts = 0.0, []
        for site, share in shares.items():
            height = HEIGHT * share
            parts.append(
                Part(styles.get(site, "c0"), round(top, 2), round(height, 2), f"{site}, {where}: {percent(share)} %")
            )
            top += height
        drawn.append(Column(round(number * slot + gap / 2, 2), round(slot - gap, 2), tuple(parts)))
        if name:
            ticks.append((round((number + 0.5) * slot, 1), name))
    last = tuple((site, styles.get(site, "c0"), percent(share)) for site, share in columns[-1][1].items())
    return ShareChart(title, tuple(drawn), tuple(ticks), last, is_by_round)
