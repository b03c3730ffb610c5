"""Runs side by side: which method did how well where, round by round, at what cost."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from fedshift.report.charts import PERCENT, Chart, Line, colour, line_chart, middle
from fedshift.report.reading import HEADLINES, Points, Record
from fedshift.report.words import NOTHING, byte_size, duration, percent, plural

BOUND_WORDS = {
    "pooled": "all labelled data in one place",
    "target-labels": "trained with the target's labels",
}

# Keys in which runs of one method may differ and still be the same experiment on another target or seed.
_SAME_EXPERIMENT = (
    *("method", "setting", "seed", "dataset", "data_dir", "home", "target", "targets", "sources"),
    *("engine", "workers", "deadline"),
)


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
class Entry:
    """A row: one method in one configuration, with all its runs."""

    method: str
    variant: str
    style: str
    bound: str
    runs: tuple[tuple[int, Record], ...]

    @property
    def label(self) -> str:
        return f"{self.method} ({self.variant})" if self.variant else self.method

    @property
    def records(self) -> list[Record]:
        return [record for _, record in self.runs]

    @property
    def bound_words(self) -> str:
        return BOUND_WORDS.get(self.bound, self.bound)

    @property
    def unfinished(self) -> str:
        """`round 3 of 20` for a row with a run that is still going."""
        open_runs = [record for record in self.records if record.results is None]
        if not open_runs:
            return ""
        if len(self.runs) > 1:
            return f"{len(open_runs)} of {len(self.runs)} runs not finished"
        return f"not finished: round {open_runs[0].round} of {open_runs[0].rounds}"


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


def compare(runs: Sequence[tuple[int, Record]]) -> list[Comparison]:
    """One comparison for each data set, setting and home among the numbered runs."""
    groups: dict[tuple[str, str, str | None], list[tuple[int, Record]]] = {}
    for number, record in runs:
        groups.setdefault((record.dataset, record.setting, record.home), []).append((number, record))
    return [_comparison(*key, group) for key, group in groups.items()]


def _comparison(dataset: str, setting: str, home: str | None, runs: list[tuple[int, Record]]) -> Comparison:
    entries = _entries(runs)
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
        charts=tuple(_charts(entries, targets, unit)),
        seeds=len({record.seed for _, record in runs}),
    )


def _entries(runs: list[tuple[int, Record]]) -> list[Entry]:
    """Rows in the order of the runs, bounds below all others."""
    variants = _variants([record for _, record in runs])
    grouped: dict[tuple[str, str, str], list[tuple[int, Record]]] = {}
    for (number, record), variant in zip(runs, variants, strict=True):
        grouped.setdefault((record.bound, record.method, variant), []).append((number, record))
    ordered = sorted(grouped, key=lambda key: key[0] != "")
    return [
        Entry(method, variant, colour(index) + (" dashed" if bound else ""), bound, tuple(grouped[key]))
        for index, key in enumerate(ordered)
        for bound, method, variant in [key]
    ]


def _variants(records: Sequence[Record]) -> list[str]:
    """For each run, the settings in which runs of its method differ: `lr 0.1, rounds 40`."""
    settings = [_settings(record) for record in records]
    labels = []
    for record, own in zip(records, settings, strict=True):
        peers = [other for peer, other in zip(records, settings, strict=True) if peer.method == record.method]
        keys = sorted({key for peer in peers for key in peer})
        differing = [key for key in keys if len({str(peer.get(key)) for peer in peers}) > 1]
        labels.append(", ".join(f"{key} {own.get(key)}" for key in differing))
    return labels


def _settings(record: Record) -> dict[str, Any]:
    """The configuration as flat `a.b` keys, without what names the data, the target or the seed."""
    flat: dict[str, Any] = {}
    for key, value in record.config.items():
        if isinstance(value, Mapping):
            flat |= {f"{key}.{inner}": item for inner, item in value.items()}
        elif key not in _SAME_EXPERIMENT:
            flat[key] = value
    # Leaving out each domain in turn is one experiment; leaving out other domains altogether is another.
    named = [*(record.config.get("sources") or ()), *(record.config.get("targets") or ()), record.target]
    domains = {str(name) for name in named if name}
    return flat | {"domains": ", ".join(sorted(domains))}


def _row(entry: Entry, targets: Sequence[str]) -> Row:
    cells = [_cell(entry, target) for target in targets]
    validations = [statistics.fmean(r.validation.values()) for r in entry.records if r.validation]
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
    seeds = sorted({record.seed for record in entry.records})

    def figure(rule: str) -> Figure:
        means = []
        for seed in seeds:
            own = [r.scores for r in entry.records if r.seed == seed]
            by_target = [[getattr(s[target], rule) for s in own if target in s] for target in targets]
            if all(by_target):
                means.append(statistics.fmean(statistics.fmean(values) for values in by_target))
        overall = statistics.fmean(value for cell in cells if (value := getattr(cell, rule).value) is not None)
        return replace(_figure(means), value=overall)

    return Cell(figure("last"), figure("source_val"), figure("oracle"), any(cell.is_partial for cell in cells))


def _figure(values: Sequence[float]) -> Figure:
    if not values:
        return MISSING
    return Figure(statistics.fmean(values), statistics.stdev(values) if len(values) > 1 else None)


def _mark_best(rows: list[Row]) -> list[Row]:
    """Marks each column's best last-round score among finished methods that can be deployed; equals share it."""
    rivals = [row for row in rows if not row.entry.bound]
    marked = []
    for row in rows:
        cells = []
        for column, cell in enumerate(row.cells):
            field = [r.cells[column] for r in rivals if not r.cells[column].is_partial]
            scores = [float(c.last.text) for c in field if c.last.value is not None]
            is_best = cell in field and row in rivals and len(scores) > 1 and cell.last.text == f"{max(scores):.1f}"
            cells.append(replace(cell, is_best=is_best))
        marked.append(replace(row, cells=tuple(cells)))
    return marked


def _summary(rows: Sequence[Row], unit: str, targets: Sequence[str]) -> str:
    """One sentence with the answer, where there is something to compare."""

    def score(row: Row) -> float | None:
        return None if not row.cells or row.cells[0].is_partial else row.cells[0].last.value

    ranked = sorted(
        ((value, row) for row in rows if not row.entry.bound and (value := score(row)) is not None),
        key=lambda pair: -pair[0],
    )
    if len(ranked) < 2:
        return ""
    (best, winner), (second, runner_up) = ranked[0], ranked[1]
    where = f"on {targets[0]}" if len(targets) == 1 else f"as the mean over {plural(len(targets), 'target')}"
    text = (
        f"{winner.entry.label} has the highest last-round {unit} {where}: {percent(best)} %,"
        f" {points(best - second)} above {runner_up.entry.label}"
    )
    bounds = [(value, row) for row in rows if row.entry.bound and (value := score(row)) is not None]
    if bounds:
        top, row = max(bounds, key=lambda pair: pair[0])
        gap = top - best
        text += f" and {points(abs(gap))} {'below' if gap >= 0 else 'above'} the bound {row.entry.label}"
    return text + "."


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


def mean_validation(record: Record) -> Points:
    """The mean over sources of the validation score, by round."""
    return [(s.round, statistics.fmean(s.val.values())) for s in record.history if s.val]


def _tip(entry: Entry, record: Record) -> str:
    where = record.home or record.target
    return entry.label + (f", {where}" if where else "") + f", seed {record.seed}"


def _charts(entries: Sequence[Entry], targets: Sequence[str], unit: str) -> list[Chart]:
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
