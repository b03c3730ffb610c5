"""Scores round by round: one chart a target, one for the sources, one line a run."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence

from fedshift.report.charts import PERCENT, Chart, Line, line_chart, middle
from fedshift.report.entries import Entry
from fedshift.report.reading import Points, Record


def score_charts(entries: Sequence[Entry], targets: Sequence[str], unit: str) -> list[Chart]:
    """The test score on each target, then the mean validation score of the sources."""

    def tested_on(target: str) -> Callable[[Record], Points]:
        return lambda record: record.series("test").get(target, [])

    charts = [line_chart(t, _lines(entries, tested_on(t)), PERCENT, f"test {unit}, %") for t in targets]
    charts.append(line_chart("Sources", _lines(entries, mean_validation), PERCENT, f"mean validation {unit}, %"))
    return [chart for chart in charts if chart]


def _lines(entries: Sequence[Entry], points_of: Callable[[Record], Points]) -> list[Line]:
    """One line a run; where a row has several, they are faint and the mean of the finished ones stands out."""
    lines = []
    for entry in entries:
        drawn = [(record, points) for record in entry.records if (points := points_of(record))]
        if len(drawn) == 1:
            [(record, points)] = drawn
            lines.append(Line(entry.label, points, entry.style, record.chosen, _tip(entry, record)))
        elif drawn:
            finished = [points for record, points in drawn if record.results]
            mean = middle(finished or [points for _, points in drawn], statistics.fmean)
            lines += [Line(entry.label, points, f"{entry.style} faint", tip=_tip(entry, r)) for r, points in drawn]
            lines.append(Line(entry.label, mean, entry.style, tip=f"{entry.label}, mean"))
    return lines


def mean_validation(record: Record) -> Points:
    """The mean over sources of the validation score, by round."""
    return [(s.round, statistics.fmean(s.val.values())) for s in record.history if s.val]


def _tip(entry: Entry, record: Record) -> str:
    where = record.home or record.target
    return entry.label + (f", {where}" if where else "") + f", seed {record.seed}"
