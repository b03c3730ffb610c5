"""Where things go on a chart: scales, round tick values, labels that do not overlap."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

Point = tuple[float, float]


@dataclass(frozen=True)
class Scale:
    """A straight line from the values `low..high` to the positions `start..end`."""

    low: float
    high: float
    start: float
    end: float

    def __call__(self, value: float) -> float:
        # A single value, such as the only round so far, goes in the middle.
        share = (value - self.low) / (self.high - self.low) if self.high > self.low else 0.5
        return self.start + share * (self.end - self.start)


def step_of(span: float, count: int) -> float:
    """The smallest of 1, 2, 5 times a power of ten that cuts `span` into at most `count` parts."""
    if span <= 0:
        return 1.0
    power = 10.0 ** math.floor(math.log10(span / count))
    return next(factor * power for factor in (1, 2, 5, 10, 20) if span / (factor * power) <= count * (1 + 1e-9))


def ticks(low: float, high: float, count: int = 5, *, whole: bool = False) -> list[float]:
    """Round values inside `low..high`, at most `count + 1` of them; with `whole` only integers."""
    step = step_of(high - low, count)
    if whole:
        step = max(1.0, step)
    first, last = math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9)
    return [index * step for index in range(first, last + 1)]


def tick_text(value: float, step: float) -> str:
    """With as many decimals as the step needs: `0.25` under a step of 0.05, `20` under a step of 10."""
    if abs(value) >= 1e5 or 0 < step < 1e-4:
        return f"{value:.3g}"
    decimals = max(0, -math.floor(math.log10(step) + 1e-9))
    return f"{value:.{decimals}f}" if value else "0"


def padded(values: Sequence[float], floor: float = -math.inf, ceiling: float = math.inf) -> tuple[float, float]:
    """A range a little wider than the values, ending on round numbers, inside `floor..ceiling`."""
    if not values:
        return 0.0, 1.0
    low, high = min(values), max(values)
    if high - low < 1e-12:
        room = abs(low) * 0.1 or 0.5
        low, high = low - room, high + room
    step = step_of(high - low, 5)
    low = math.floor(low / step + 1e-9) * step
    high = math.ceil(high / step - 1e-9) * step
    return max(low, floor), min(high, ceiling)


def spread(positions: Sequence[float], gap: float, low: float, high: float) -> list[float]:
    """The positions moved apart until neighbours are `gap` from each other, in their order, inside `low..high`.

    Where they cannot all fit they keep their gap and stand out beyond `low`."""
    order = sorted(range(len(positions)), key=lambda index: positions[index])
    placed = [min(max(positions[index], low), high) for index in order]
    for index in range(1, len(placed)):
        placed[index] = max(placed[index], placed[index - 1] + gap)
    if placed and placed[-1] > high:
        placed[-1] = high
        for index in range(len(placed) - 2, -1, -1):
            placed[index] = min(placed[index], placed[index + 1] - gap)
    result = [0.0] * len(positions)
    for index, place in zip(order, placed, strict=True):
        result[index] = place
    return result


def thin(points: Sequence[Point], limit: int) -> list[Point]:
    """About `limit` points: the ends, and the lowest and highest of each stretch, so that no spike is lost."""
    if len(points) <= limit:
        return list(points)
    size = math.ceil(2 * len(points) / limit)
    kept = {0, len(points) - 1}
    for start in range(0, len(points), size):
        stretch = range(start, min(start + size, len(points)))
        kept |= {min(stretch, key=lambda i: points[i][1]), max(stretch, key=lambda i: points[i][1])}
    return [points[index] for index in sorted(kept)]


def runs_of(points: Sequence[tuple[float, float | None]]) -> list[list[Point]]:
    """Stretches without a missing or non-finite value: a line has gaps where nothing was measured."""
    stretches: list[list[Point]] = [[]]
    for x, y in points:
        if y is not None and math.isfinite(y):
            stretches[-1].append((x, y))
        elif stretches[-1]:
            stretches.append([])
    return [stretch for stretch in stretches if stretch]
