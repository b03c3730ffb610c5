"""Line charts as geometry: every position is worked out here, the template only draws.

The plot is stretched to the width of its box while strokes and text keep their size, so that a chart reads as well on a
phone as on a wide screen. Horizontal positions are therefore in thousandths of the width, vertical ones in pixels.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from fedshift.report.scales import Point, Scale, padded, runs_of, spread, step_of, thin, tick_text, ticks
from fedshift.report.words import byte_size, duration, number, percent

WIDTH, HEIGHT = 1000, 190
COLOURS = 8
_LABEL_GAP = 17
_MAX_POINTS = 400
_MAX_TIPS = 60
_MAX_DOTS = 24

Series = Sequence[tuple[int, float | None]]


@dataclass(frozen=True)
class Unit:
    """How values read (in labels, on the axis) and the range an axis may not leave."""

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
    """`points` are (round, value); `chosen` is a round to mark. A `faint` line has no label, no dots and no marks."""

    label: str
    points: Series
    style: str
    chosen: int | None = None
    tip: str = ""


@dataclass(frozen=True)
class Mark:
    """A place on the plot with a text for the mouse."""

    x: float
    y: float
    text: str


@dataclass(frozen=True)
class Curve:
    """A drawn line: its stretches as SVG `points`, its dots as one SVG path, places to hover, the marked round."""

    label: str
    style: str
    stretches: tuple[str, ...]
    dots: str
    tips: tuple[Mark, ...]
    chosen: Mark | None


@dataclass(frozen=True)
class End:
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
    ends: tuple[End, ...]
    is_crowded: bool
    width: int = WIDTH
    height: int = HEIGHT

    @property
    def description(self) -> str:
        return f"{self.title}. Last values: " + ", ".join(f"{end.label} {end.value}".strip() for end in self.ends)


def colour(index: int) -> str:
    """The style of the n-th thing: a palette colour, dotted from the second time round."""
    return f"c{index % COLOURS + 1}" + (" dotted" if index >= COLOURS else "")


def line_chart(title: str, lines: Sequence[Line], unit: Unit, note: str = "") -> Chart | None:
    """None where there is not a single value to draw."""
    drawn = [(line, stretches) for line in lines if (stretches := runs_of(line.points))]
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


@dataclass(frozen=True)
class Sparkline:
    """A line without axes: `points` for SVG, a dot at its `end`, its last value in words."""

    points: str
    end: str
    last: str
    width: int = WIDTH
    height: int = 46


def sparkline(points: Series, unit: Unit) -> Sparkline | None:
    """None where there is nothing to draw. A single value is a dot."""
    known = [point for stretch in runs_of(points) for point in stretch]
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
    """One line a site. More sites than colours are drawn faintly, with their median on top."""
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
    """By round, the median (or another middle) of all lines that have a value there."""
    values: dict[int, list[float]] = {}
    for points in series:
        for x, y in points:
            if y is not None and math.isfinite(y):
                values.setdefault(x, []).append(y)
    return [(x, of(values[x])) for x in sorted(values)]


def place(points: Sequence[Point], x_scale: Scale, y_scale: Scale) -> list[Point]:
    return [(round(x_scale(x), 1), round(y_scale(y), 1)) for x, y in points]


def _curve(line: Line, stretches: list[list[Point]], x_scale: Scale, y_scale: Scale, unit: Unit) -> Curve:
    is_faint = "faint" in line.style
    every = [point for stretch in stretches for point in stretch]
    # Dots would fill the gaps of a dashed line.
    dotted = every if len(every) <= _MAX_DOTS and not is_faint and "dashed" not in line.style else []
    stride = -(-len(every) // _MAX_TIPS)
    name = line.tip or line.label
    start = f"{name}, " if name else ""

    def mark(point: Point, words: str = "") -> Mark:
        [(x, y)] = place([point], x_scale, y_scale)
        return Mark(x, y, f"{start}round {point[0]:.0f}{words}: {unit.text(point[1])}")

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


def _ends(drawn: Sequence[tuple[Line, list[list[Point]]]], y_scale: Scale, unit: Unit) -> tuple[End, ...]:
    """A label at the end of every line that is not faint, none over another."""
    labelled = [(line, stretches[-1][-1][1]) for line, stretches in drawn if "faint" not in line.style]
    tops = spread([y_scale(value) for _, value in labelled], _LABEL_GAP, 0, HEIGHT)
    return tuple(
        End(line.label, unit.text(value), line.style, round(top, 1))
        for (line, value), top in zip(labelled, tops, strict=True)
    )
