"""Line charts as geometry: every position is computed here, the template only draws.

A plot is stretched to the width of its box, but strokes and text keep their size, so that a chart can be read
on a phone and on a wide screen. Therefore horizontal positions are in thousandths of the width, vertical ones in
pixels.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from fedshift.report.text import byte_size, duration, number, percent

WIDTH, HEIGHT = 1000, 190
COLOURS = 8
"""Colours in the palette of the style sheet."""
_LABEL_GAP = 17
_MAX_POINTS, _MAX_TIPS, _MAX_DOTS = 400, 60, 24
"""Per line: points that are drawn, places with a text for the mouse, points up to which each has a dot."""
Point = tuple[float, float]
Series = Sequence[tuple[int, float | None]]
"""(round, value), where a value may be missing."""


def tick_text(value: float, step: float) -> str:
    """The value with as many decimals as the step needs: `0.25` for a step of 0.05, `20` for a step of 10."""
    if abs(value) >= 1e5 or 0 < step < 1e-4:
        return f"{value:.3g}"
    decimals = max(0, -math.floor(math.log10(step) + 1e-9))
    return f"{value:.{decimals}f}" if value else "0"


@dataclass(frozen=True)
class Unit:
    """How values are written, in labels (`text`) and on the axis (`tick`), and the limits of the axis."""

    text: Callable[[float], str]
    tick: Callable[[float, float], str] = tick_text
    floor: float = -math.inf
    ceiling: float = math.inf
    from_zero: bool = False


PERCENT = Unit(percent, lambda value, step: tick_text(100 * value, 100 * step), 0.0, 1.0)
PLAIN = Unit(number)
BYTES = Unit(byte_size, lambda value, step: byte_size(value), from_zero=True)
SECONDS = Unit(duration, from_zero=True)


@dataclass(frozen=True)
class Line:
    """A line to draw. `chosen` is a round to mark. A `faint` line has no label, no dots and no marks."""

    label: str
    points: Series
    style: str
    chosen: int | None = None
    tip: str = ""


@dataclass(frozen=True)
class Mark:
    """A position on the plot with a text for the mouse."""

    x: float
    y: float
    text: str


@dataclass(frozen=True)
class Curve:
    """A drawn line: stretches as SVG `points`, dots as one SVG path, texts for the mouse, the marked round."""

    label: str
    style: str
    stretches: tuple[str, ...]
    dots: str
    tips: tuple[Mark, ...]
    chosen: Mark | None


@dataclass(frozen=True)
class EndLabel:
    """The name and last value of a line, at its right end or in the legend."""

    label: str
    value: str
    style: str
    top: float


@dataclass(frozen=True)
class Chart:
    title: str
    note: str
    x_ticks: tuple[tuple[float, str], ...]
    y_ticks: tuple[tuple[float, str], ...]
    curves: tuple[Curve, ...]
    ends: tuple[EndLabel, ...]
    is_crowded: bool
    width: int = WIDTH
    height: int = HEIGHT

    @property
    def description(self) -> str:
        return f"{self.title}. Last values: " + ", ".join(f"{end.label} {end.value}".strip() for end in self.ends)


@dataclass(frozen=True)
class Sparkline:
    """A line without axes: `points` for SVG, a dot at its `end`, its last value as text."""

    points: str
    end: str
    last: str
    width: int = WIDTH
    height: int = 46


def line_chart(title: str, lines: Sequence[Line], unit: Unit, note: str = "") -> Chart | None:
    """The chart of these lines, or None if there is no value to draw."""
    drawn = [(line, stretches) for line in lines if (stretches := unbroken_stretches(line.points))]
    if not drawn:
        return None
    points = [point for _, stretches in drawn for stretch in stretches for point in stretch]
    rounds = [x for x, _ in points]
    values = [y for _, y in points] + ([0.0] if unit.from_zero else [])
    low, high = padded(values, unit.floor, unit.ceiling)
    x_scale = Scale(min(rounds), max(rounds), 0, WIDTH)
    y_scale = Scale(low, high, HEIGHT, 0)
    step = step_of(high - low, 5)
    ends = _ends(drawn, y_scale, unit)
    return Chart(
        title=title,
        note=note,
        x_ticks=tuple((x_scale(x), f"{x:.0f}") for x in ticks(min(rounds), max(rounds), 5, whole=True)),
        y_ticks=tuple((y_scale(y), unit.tick(y, step)) for y in ticks(low, high, 5)),
        curves=tuple(_curve(line, stretches, x_scale, y_scale, unit) for line, stretches in drawn),
        ends=ends,
        is_crowded=len(ends) > COLOURS + 2,
    )


def _curve(line: Line, stretches: list[list[Point]], x_scale: Scale, y_scale: Scale, unit: Unit) -> Curve:
    is_faint = "faint" in line.style
    every = [point for stretch in stretches for point in stretch]
    # Dots would fill the gaps of a dashed line.
    dotted = every if len(every) <= _MAX_DOTS and not is_faint and "dashed" not in line.style else []
    stride = -(-len(every) // _MAX_TIPS)
    name = line.tip or line.label
    start = f"{name}, " if name else ""

    def mark(point: Point, note: str = "") -> Mark:
        [(x, y)] = place([point], x_scale, y_scale)
        return Mark(x, y, f"{start}round {point[0]:.0f}{note}: {unit.text(point[1])}")

    chosen = [mark(point, " (chosen on source validation)") for point in every if point[0] == line.chosen]
    return Curve(
        label=name,
        style=line.style,
        stretches=tuple(
            " ".join(f"{x:g},{y:g}" for x, y in place(thin(stretch, _MAX_POINTS), x_scale, y_scale))
            for stretch in stretches
        ),
        dots="".join(f"M{x:g} {y:g}h0" for x, y in place(dotted, x_scale, y_scale)),
        tips=() if is_faint else tuple(mark(point) for point in every[::-1][::stride]),
        chosen=chosen[0] if chosen else None,
    )


def _ends(drawn: Sequence[tuple[Line, list[list[Point]]]], y_scale: Scale, unit: Unit) -> tuple[EndLabel, ...]:
    """A label at the end of every line that is not faint. Labels do not overlap."""
    labelled = [(line, stretches[-1][-1][1]) for line, stretches in drawn if "faint" not in line.style]
    tops = spread([y_scale(value) for _, value in labelled], _LABEL_GAP, 0, HEIGHT)
    return tuple(
        EndLabel(line.label, unit.text(value), line.style, round(top, 1))
        for (line, value), top in zip(labelled, tops, strict=True)
    )


def sparkline(points: Series, unit: Unit) -> Sparkline | None:
    """The line of these points, or None if there is no value. A single value is a dot."""
    known = [point for stretch in unbroken_stretches(points) for point in stretch]
    if not known:
        return None
    values = [y for _, y in known]
    low, high = padded(values, unit.floor, unit.ceiling)
    x_scale, y_scale = Scale(known[0][0], known[-1][0], 0, WIDTH), Scale(low, high, Sparkline.height - 4, 4)
    placed = place(thin(known, _MAX_POINTS), x_scale, y_scale)
    x, y = placed[-1]
    return Sparkline(" ".join(f"{x:g},{y:g}" for x, y in placed), f"M{x:g} {y:g}h0", unit.text(values[-1]))


def site_lines(
    series: Mapping[str, Series], styles: Mapping[str, str], suffix: str = "", chosen: int | None = None
) -> list[Line]:
    """One line per site. If there are more sites than colours, all are faint and their median is drawn on top."""
    strength = " strong" if suffix else ""
    if len(series) <= COLOURS:
        return [
            Line(site + suffix, points, styles.get(site, "c0") + strength, chosen) for site, points in series.items()
        ]
    return [
        *(Line(site, points, "c0 faint") for site, points in series.items()),
        Line(f"median of {len(series)}{suffix}", middle(list(series.values())), "c8" + strength, chosen),
    ]


def middle(series: Sequence[Series], of: Callable[[list[float]], float] = statistics.median) -> Series:
    """By round, the median (or another average `of`) of all series that have a value there."""
    values: dict[int, list[float]] = {}
    for points in series:
        for x, y in points:
            if y is not None and math.isfinite(y):
                values.setdefault(x, []).append(y)
    return [(x, of(values[x])) for x in sorted(values)]


def colour(index: int) -> str:
    """The style of the n-th line: a colour of the palette; dotted when all colours are used up."""
    return f"c{index % COLOURS + 1}" + (" dotted" if index >= COLOURS else "")


@dataclass(frozen=True)
class Scale:
    """Maps the values `low..high` linearly to the positions `start..end`."""

    low: float
    high: float
    start: float
    end: float

    def __call__(self, value: float) -> float:
        # A single value, such as the only round so far, is in the middle.
        share = (value - self.low) / (self.high - self.low) if self.high > self.low else 0.5
        return self.start + share * (self.end - self.start)


def place(points: Sequence[Point], x_scale: Scale, y_scale: Scale) -> list[Point]:
    return [(round(x_scale(x), 1), round(y_scale(y), 1)) for x, y in points]


def padded(values: Sequence[float], floor: float = -math.inf, ceiling: float = math.inf) -> tuple[float, float]:
    """A range that contains the values and ends on round numbers, inside `floor..ceiling`."""
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


def ticks(low: float, high: float, count: int = 5, *, whole: bool = False) -> list[float]:
    """At most `count + 1` round values inside `low..high`; with `whole`, integers only."""
    step = step_of(high - low, count)
    if whole:
        step = max(1.0, step)
    first, last = math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9)
    return [index * step for index in range(first, last + 1)]


def step_of(span: float, count: int) -> float:
    """The smallest of 1, 2, 5 times a power of ten that divides `span` into at most `count` parts."""
    if span <= 0:
        return 1.0
    power = 10.0 ** math.floor(math.log10(span / count))
    return next(factor * power for factor in (1, 2, 5, 10, 20) if span / (factor * power) <= count * (1 + 1e-9))


def spread(positions: Sequence[float], gap: float, low: float, high: float) -> list[float]:
    """The positions moved apart until neighbours are `gap` from each other, in their order, inside `low..high`.

    If they do not all fit, they keep their gap and extend below `low`."""
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
    """About `limit` points: both ends, and the lowest and highest of each part, so that no spike is lost."""
    if len(points) <= limit:
        return list(points)
    size = math.ceil(2 * len(points) / limit)
    kept = {0, len(points) - 1}
    for start in range(0, len(points), size):
        stretch = range(start, min(start + size, len(points)))
        kept |= {min(stretch, key=lambda i: points[i][1]), max(stretch, key=lambda i: points[i][1])}
    return [points[index] for index in sorted(kept)]


def unbroken_stretches(points: Sequence[tuple[float, float | None]]) -> list[list[Point]]:
    """The parts without a missing or non-finite value: a line has gaps where nothing was measured."""
    stretches: list[list[Point]] = [[]]
    for x, y in points:
        if y is not None and math.isfinite(y):
            stretches[-1].append((x, y))
        elif stretches[-1]:
            stretches.append([])
    return [stretch for stretch in stretches if stretch]
