"""Runs side by side: which method did how well where, round by round, at what cost."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from fedshift.report.charts import Chart
from fedshift.report.curves import score_charts
from fedshift.report.entries import Entry, entries_of
from fedshift.report.reading import HEADLINES, Record
from fedshift.report.words import NOTHING, byte_size, duration, percent, plural


@dataclass(frozen=True)
class Figure:
    """A mean over seeds as a percentage; `spread` is the standard deviation where there are several."""

    value: float | None
    spread: float | None = None

    @property
    def text(self) -> str:
        return percent(self.value)

    @property
    def spread_text(self) -> str:
        return "" if self.spread is None else f"±{percent(self.spread)}"


MISSING = Figure(None)


@dataclass(frozen=True)
class Cell:
    """One method on one target (or the mean over targets), under the three ways to choose a round."""

    last: Figure = MISSING
    source_val: Figure = MISSING
    oracle: Figure = MISSING
    is_partial: bool = False
    is_best: bool = False
    run: int | None = None
    """The number of its run in this report, where it is a single one."""


@dataclass(frozen=True)
class Cost:
    """Means over the finished runs of a row, in words."""

    rounds: str
    up: str
    down: str
    total: str
    sites: str


@dataclass(frozen=True)
class Row:
    entry: Entry
    cells: tuple[Cell, ...]
    """The mean over targets where there are several, then one a target."""
    validation: Figure
    cost: Cost


@dataclass(frozen=True)
class Comparison:
    """All runs on one data set in one setting."""

    dataset: str
    setting: str
    home: str | None
    unit: str
    columns: tuple[str, ...]
    """Targets; an empty name in front where there are several stands for their mean."""
    has_mean: bool
    rows: tuple[Row, ...]
    summary: str
    charts: tuple[Chart, ...]
    seeds: int

    @property
    def unit_title(self) -> str:
        """At the start of a sentence: `Accuracy`, but `mIoU`."""
        return self.unit.capitalize() if self.unit.islower() else self.unit


def compare(runs: Sequence[tuple[int, Record]]) -> list[Comparison]:
    """One comparison for each data set, setting and home among the numbered runs."""
    groups: dict[tuple[str, str, str | None], list[tuple[int, Record]]] = {}
    for number, record in runs:
        groups.setdefault((record.dataset, record.setting, record.home), []).append((number, record))
    return [_comparison(*key, group) for key, group in groups.items()]


def _comparison(dataset: str, setting: str, home: str | None, runs: list[tuple[int, Record]]) -> Comparison:
    entries = entries_of(runs)
    targets = tuple(dict.fromkeys(target for _, record in runs for target in record.targets))
    rows = _mark_best([_row(entry, targets) for entry in entries])
    finished = [record for _, record in runs if record.results] or [runs[0][1]]
    unit = HEADLINES[finished[0].headline]
    has_mean = len(targets) > 1
    return Comparison(
        dataset=dataset,
        setting=setting,
        home=home,
        unit=unit,
        columns=("", *targets) if has_mean else targets,
        has_mean=has_mean,
        rows=tuple(rows),
        summary=_summary(rows, unit, targets),
        charts=tuple(score_charts(entries, targets, unit)),
        seeds=len({record.seed for _, record in runs}),
    )


def _row(entry: Entry, targets: Sequence[str]) -> Row:
    cells = [_cell(entry, target) for target in targets]
    validations = [statistics.fmean(r.validation.values()) for r in entry.counted if r.validation]
    if len(targets) > 1:
        cells.insert(0, _mean_cell(entry, targets, cells))
    return Row(entry, tuple(cells), _figure(validations), _cost(entry))


def _cell(entry: Entry, target: str) -> Cell:
    """Means over the finished runs; of unfinished ones only where there is no other."""
    known = [(number, record) for number, record in entry.runs if target in record.scores]
    runs = [(number, record) for number, record in known if record.results] or known
    scores = [record.scores[target] for _, record in runs]
    return Cell(
        last=_figure([score.last for score in scores]),
        source_val=_figure([score.source_val for score in scores]),
        oracle=_figure([score.oracle for score in scores]),
        is_partial=any(record.results is None for _, record in runs),
        run=runs[0][0] if len(runs) == 1 else None,
    )


def _mean_cell(entry: Entry, targets: Sequence[str], cells: Sequence[Cell]) -> Cell:
    """The mean over targets; missing unless every target is there, because it would not be comparable.

    With several seeds its spread is that of the seeds' means."""
    if any(cell.last.value is None for cell in cells):
        return Cell()
    seeds = sorted({record.seed for record in entry.counted})

    def figure(rule: str) -> Figure:
        means = []
        for seed in seeds:
            own = [r.scores for r in entry.counted if r.seed == seed]
            by_target = [[getattr(s[target], rule) for s in own if target in s] for target in targets]
            if all(by_target):
                means.append(statistics.fmean(statistics.fmean(values) for values in by_target))
        overall = statistics.fmean(value for cell in cells if (value := getattr(cell, rule).value) is not None)
        return replace(_figure(means), value=overall)

    return Cell(figure("last"), figure("source_val"), figure("oracle"), any(cell.is_partial for cell in cells))


def _figure(values: Sequence[float]) -> Figure:
    known = [value for value in values if math.isfinite(value)]
    if not known:
        return MISSING
    return Figure(statistics.fmean(known), statistics.stdev(known) if len(known) > 1 else None)


def _mark_best(rows: list[Row]) -> list[Row]:
    """Marks each column's best last-round score; those that read the same share it. One alone is not the best."""
    best = {}
    for column in range(len(rows[0].cells)):
        rivals = [row.cells[column].last for row in rows if _competes(row, column)]
        if len(rivals) > 1:
            best[column] = max(rivals, key=lambda figure: figure.value or 0.0).text
    return [
        replace(
            row,
            cells=tuple(
                replace(cell, is_best=_competes(row, column) and cell.last.text == best.get(column))
                for column, cell in enumerate(row.cells)
            ),
        )
        for row in rows
    ]


def _competes(row: Row, column: int) -> bool:
    """Bounds and unfinished runs do not."""
    cell = row.cells[column]
    return not row.entry.bound and not cell.is_partial and cell.last.value is not None


def _summary(rows: Sequence[Row], unit: str, targets: Sequence[str]) -> str:
    """One sentence with the answer, where there is something to compare."""
    finished = [
        (value, row)
        for row in rows
        for cell in row.cells[:1]
        if (value := cell.last.value) is not None and not cell.is_partial
    ]
    finished.sort(key=lambda pair: -pair[0])
    ranked = [(value, row) for value, row in finished if not row.entry.bound]
    if len(ranked) < 2:
        return ""
    (best, winner), (second, runner_up) = ranked[:2]
    where = f"on {targets[0]}" if len(targets) == 1 else f"as the mean over {plural(len(targets), 'target')}"
    text = (
        f"{winner.entry.label} has the highest last-round {unit} {where}: {percent(best)} %,"
        f" {_lead(best - second)} {runner_up.entry.label}"
    )
    bounds = [(value, row) for value, row in finished if row.entry.bound]
    if bounds:
        top, row = bounds[0]
        gap = top - best
        text += f" and {points(abs(gap))} {'below' if gap >= 0 else 'above'} the bound {row.entry.label}"
    return text + "."


def _lead(difference: float) -> str:
    return f"{points(difference)} above" if percent(difference) != "0.0" else "level with"


def points(difference: float) -> str:
    """A difference of two percentages: `3.2 points`."""
    text = percent(difference)
    return f"{text} {'point' if text == '1.0' else 'points'}"


def _cost(entry: Entry) -> Cost:
    """What bounds send is not told: a bound moves data, not models, and the run only simulates that."""
    results = [record.results for record in entry.records if record.results]

    def mean(values: Iterable[float | None]) -> float | None:
        known = [value for value in values if value is not None]
        return statistics.fmean(known) if known else None

    sent = [r.bytes for r in results if not entry.bound]
    up, down = mean(b.get("up") for b in sent), mean(b.get("down") for b in sent)
    return Cost(
        rounds=" or ".join(str(number) for number in sorted({record.rounds for record in entry.records})),
        up=NOTHING if up is None else byte_size(up),
        down=NOTHING if down is None else byte_size(down),
        total=duration(mean(r.seconds.get("total") for r in results)),
        sites=duration(mean(r.seconds.get("sites") for r in results)),
    )
