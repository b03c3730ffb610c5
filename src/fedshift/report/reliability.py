"""Reliability plots: how often predictions of a given confidence are right."""

from __future__ import annotations

from dataclasses import dataclass

from fedshift.runs.calibrated import Calibrated, Reliability, told, two_class_rows

SIZE = 200
_FEWEST = 5
"""A part of the range with fewer samples is not drawn: its accuracy would be noise."""


@dataclass(frozen=True)
class Dot:
    """A part of the range of confidence, at its place; its area is in proportion to its samples."""

    x: float
    y: float
    radius: float
    tip: str


@dataclass(frozen=True)
class ReliabilityPlot:
    title: str
    note: str
    dots: tuple[Dot, ...]
    size: int = SIZE


@dataclass(frozen=True)
class SurenessPage:
    """What the run's page shows of it; empty where nothing was measured."""

    lines: tuple[str, ...]
    plots: tuple[ReliabilityPlot, ...]
    positive: str
    rows: tuple[tuple[str, str, str, str, str], ...]


def sureness_page(found: Calibrated) -> SurenessPage:
    parts = [("Validation at the sources", found.validation)] if found.validation else []
    parts += [(f"Test at {site}", one) for site, one in found.targets.items()]
    plots = [reliability_plot(title, one.after) for title, one in parts]
    return SurenessPage(
        tuple(told(found)), tuple(plot for plot in plots if plot.dots), found.positive, tuple(two_class_rows(found))
    )


def reliability_plot(title: str, found: Reliability) -> ReliabilityPlot:
    total = sum(sum(part) for part in found.parts)
    width = SIZE / max(len(found.parts), 1)
    dots = []
    for number, (wrong, right) in enumerate(found.parts):
        count = wrong + right
        if count < _FEWEST:
            continue
        accuracy, middle = right / count, (number + 0.5) / len(found.parts)
        tip = f"confidence about {100 * middle:.0f} %: {100 * accuracy:.0f} % of {count:,} right"
        radius = 2.5 + 9 * (count / total) ** 0.5
        dots.append(Dot(round((number + 0.5) * width, 1), round(SIZE * (1 - accuracy), 1), round(radius, 1), tip))
    error = "" if found.error is None else f"error {100 * found.error:.1f} points"
    return ReliabilityPlot(title, error, tuple(dots))
