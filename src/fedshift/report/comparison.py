"""Runs compared: the score of each method on each target, over rounds, and its cost."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from fedshift.report.charts import PERCENT, Chart, Line, colour, line_chart, middle
from fedshift.report.text import NOTHING, SCORE_NAMES, byte_size, duration, percent, plural
from fedshift.runs.health import interval_of, majority_control
from fedshift.runs.record import Points, RunRecord

BOUND_MEANINGS = {
    "pooled": "all labelled data in one place",
    "target-copies": "the clients' data at the home",
    "target-labels": "trained with the target's labels",
}

_SAME_EXPERIMENT = (
    *("method", "setting", "seed", "dataset", "home", "target", "targets", "sources"),
    *("engine", "workers", "deadline"),
)
"""Keys in which runs of one method may differ and still be in the same row, on other targets or seeds."""
_UNSET: tuple[Any, ...] = (None, "", [], {})


@dataclass(frozen=True)
class MeanScore:
    """The mean of a score over seeds, in [0, 1]; `spread` is the standard deviation if there are several seeds."""

    value: float | None
    spread: float | None = None
    interval: str = ""
    """Of a single run, where the score is an accuracy."""

    @property
    def text(self) -> str:
        return percent(self.value)

    @property
    def spread_text(self) -> str:
        return self.interval if self.spread is None else f"±{percent(self.spread)}"


MISSING = MeanScore(None)


@dataclass(frozen=True)
class ScoreCell:
    """One method on one target (or the mean over targets), under the three rules that choose a round. `run` is the
    number of its run in this report, if there is only one."""

    last: MeanScore = MISSING
    source_val: MeanScore = MISSING
    oracle: MeanScore = MISSING
    is_partial: bool = False
    is_best: bool = False
    run: int | None = None


@dataclass(frozen=True)
class MeanCost:
    """Means over the finished runs of a row, as text."""

    rounds: str
    up: str
    down: str
    total: str
    sites: str


@dataclass(frozen=True)
class MethodRuns:
    """One method in one configuration, with all its numbered runs: a row of the table."""

    method: str
    variant: str
    style: str
    bound: str
    runs: tuple[tuple[int, RunRecord], ...]

    @property
    def label(self) -> str:
        return f"{self.method} ({self.variant})" if self.variant else self.method

    @property
    def records(self) -> list[RunRecord]:
        return [record for _, record in self.runs]

    @property
    def counted(self) -> list[RunRecord]:
        """The runs that scores are taken from: the finished ones, or all if none is finished."""
        return [record for record in self.records if record.results] or self.records

    @property
    def bound_meaning(self) -> str:
        return BOUND_MEANINGS.get(self.bound, self.bound)

    @property
    def moved_data(self) -> str:
        return self.records[0].moved_data

    @property
    def unfinished(self) -> str:
        """`not finished: round 3 of 20` if a run is still running, was stopped or failed; else empty."""
        open_runs = [record for record in self.records if record.results is None]
        if not open_runs:
            return ""
        failed = sum(bool(record.failure) for record in open_runs)
        if len(self.runs) > 1:
            return f"{len(open_runs)} of {len(self.runs)} runs not finished" + (f", {failed} failed" if failed else "")
        return f"{'failed' if failed else 'not finished'}: round {open_runs[0].round} of {open_runs[0].rounds}"


@dataclass(frozen=True)
class ComparisonRow:
    """One row of the table."""

    group: MethodRuns
    cells: tuple[ScoreCell, ...]
    """One per column of the comparison."""
    validation: MeanScore
    cost: MeanCost


@dataclass(frozen=True)
class Comparison:
    """All runs on one data set in one setting. `columns` are the targets. If there are several, an empty name
    comes first and stands for their mean."""

    dataset: str
    setting: str
    home: str | None
    unit: str
    columns: tuple[str, ...]
    has_mean: bool
    rows: tuple[ComparisonRow, ...]
    summary: str
    charts: tuple[Chart, ...]
    seeds: int
    control: str = ""
    """What always giving the most frequent class scores on each target."""

    @property
    def unit_title(self) -> str:
        """At the start of a sentence: `Accuracy`, but `mIoU`."""
        return self.unit.capitalize() if self.unit.islower() else self.unit


def compare(runs: Sequence[tuple[int, RunRecord]]) -> list[Comparison]:
    """One comparison per data set, setting and home among the numbered runs."""
    groups: dict[tuple[str, str, str | None], list[tuple[int, RunRecord]]] = {}
    for number, record in runs:
        groups.setdefault((record.dataset, record.setting, record.home), []).append((number, record))
    return [_comparison(*key, group) for key, group in groups.items()]


def _comparison(dataset: str, setting: str, home: str | None, runs: list[tuple[int, RunRecord]]) -> Comparison:
    groups = group_runs(runs)
    targets = tuple(dict.fromkeys(target for _, record in runs for target in record.targets))
    rows = _mark_best([_row(group, targets) for group in groups])
    finished = [record for _, record in runs if record.results] or [runs[0][1]]
    unit = SCORE_NAMES[finished[0].headline]
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
        charts=tuple(score_charts(groups, targets, unit)),
        seeds=len({record.seed for _, record in runs}),
        control=_control([record for _, record in runs], targets),
    )


def _control(records: Sequence[RunRecord], targets: Sequence[str]) -> str:
    """`photo 12.3, street 11.0`: the score of always answering with a target's most frequent class, in percent."""
    found: dict[str, str] = {}
    for record in records:
        for target, rows in (record.results.confusion if record.results else {}).items():
            if record.results and any(map(any, rows)):
                found[target] = percent(majority_control(rows, record.results.task)[1])
    return ", ".join(f"{target} {found[target]}" for target in targets if target in found)


def group_runs(runs: list[tuple[int, RunRecord]]) -> list[MethodRuns]:
    """Rows in the order of the runs, bounds last."""
    variants = _variants([record for _, record in runs])
    grouped: dict[tuple[str, str, str], list[tuple[int, RunRecord]]] = {}
    for (number, record), variant in zip(runs, variants, strict=True):
        grouped.setdefault((record.bound, record.method, variant), []).append((number, record))
    ordered = sorted(grouped, key=lambda key: key[0] != "")
    return [
        MethodRuns(method, variant, colour(index) + (" dashed" if bound else ""), bound, tuple(grouped[key]))
        for index, key in enumerate(ordered)
        for bound, method, variant in [key]
    ]


def _variants(records: Sequence[RunRecord]) -> list[str]:
    """For each run, the settings in which the runs of its method differ: `lr 0.1, rounds 40`."""
    settings = [_settings(record) for record in records]
    domains = [_domains(record) for record in records]
    labels = []
    for number, record in enumerate(records):
        peers = [other for other, peer in enumerate(records) if peer.method == record.method]
        keys = sorted({key for peer in peers for key in settings[peer]})
        differing = [key for key in keys if len({str(settings[peer].get(key)) for peer in peers}) > 1]
        own = [(key, settings[number].get(key)) for key in differing]
        values = [
            f"{key.removeprefix(f'{record.method}.')} {_value(value)}" for key, value in own if value not in _UNSET
        ]
        # Holding out each domain in turn is one experiment. A run without some domain at all is another.
        missing = sorted(set().union(*(domains[peer] for peer in peers)) - domains[number])
        labels.append(", ".join(values + ([f"without {', '.join(missing)}"] if missing else [])))
    return labels


def _settings(record: RunRecord) -> dict[str, Any]:
    """The configuration as flat `a.b` keys, without data, target and seed."""
    flat: dict[str, Any] = {}
    for key, value in record.config.items():
        if isinstance(value, Mapping):
            flat |= {f"{key}.{inner}": item for inner, item in value.items()}
        elif key not in _SAME_EXPERIMENT:
            flat[key] = value
    return flat


def _domains(record: RunRecord) -> set[str]:
    """All domains that the run trains or tests on."""
    named = [*(record.config.get("sources") or ()), *(record.config.get("targets") or ()), record.target]
    return {str(name) for name in named if name}


def _value(value: Any) -> str:
    return ", ".join(str(item) for item in value) if isinstance(value, list | tuple) else str(value)


def _row(group: MethodRuns, targets: Sequence[str]) -> ComparisonRow:
    cells = [_cell(group, target) for target in targets]
    validations = [statistics.fmean(r.validation.values()) for r in group.counted if r.validation]
    if len(targets) > 1:
        cells.insert(0, _mean_cell(group, targets, cells))
    return ComparisonRow(group, tuple(cells), _mean_score(validations), _cost(group))


def _cell(group: MethodRuns, target: str) -> ScoreCell:
    """Means over the finished runs, or over all if none is finished."""
    known = [(number, record) for number, record in group.runs if target in record.scores]
    runs = [(number, record) for number, record in known if record.results] or known
    scores = [record.scores[target] for _, record in runs]
    return ScoreCell(
        last=_with_interval([score.last for score in scores], runs, target),
        source_val=_with_interval([score.source_val for score in scores], runs, target),
        oracle=_mean_score([score.oracle for score in scores]),
        is_partial=any(record.results is None for _, record in runs),
        run=runs[0][0] if len(runs) == 1 else None,
    )


def _mean_cell(group: MethodRuns, targets: Sequence[str], cells: Sequence[ScoreCell]) -> ScoreCell:
    """The mean over targets. It is missing unless every target is there, because it would not be comparable.

    With several seeds, its spread is that of the means of the seeds."""
    if any(cell.last.value is None for cell in cells):
        return ScoreCell()
    seeds = sorted({record.seed for record in group.counted})

    def figure(rule: str) -> MeanScore:
        means = []
        for seed in seeds:
            own = [r.scores for r in group.counted if r.seed == seed]
            by_target = [[getattr(s[target], rule) for s in own if target in s] for target in targets]
            if all(by_target):
                means.append(statistics.fmean(statistics.fmean(values) for values in by_target))
        overall = statistics.fmean(value for cell in cells if (value := getattr(cell, rule).value) is not None)
        return replace(_mean_score(means), value=overall)

    return ScoreCell(figure("last"), figure("source_val"), figure("oracle"), any(cell.is_partial for cell in cells))


def _mean_score(values: Sequence[float]) -> MeanScore:
    known = [value for value in values if math.isfinite(value)]
    if not known:
        return MISSING
    return MeanScore(statistics.fmean(known), statistics.stdev(known) if len(known) > 1 else None)


def _with_interval(scores: Sequence[float], runs: Sequence[tuple[int, RunRecord]], target: str) -> MeanScore:
    """The mean score; of a single finished run with its 95 % interval."""
    mean, results = _mean_score(scores), runs[0][1].results if len(runs) == 1 else None
    if results is None or mean.value is None:
        return mean
    found = interval_of(mean.value, results.samples.get(target, {}).get("test", 0), results.task)
    return replace(mean, interval=f"{percent(found[0])}–{percent(found[1])}") if found else mean


def _mark_best(rows: list[ComparisonRow]) -> list[ComparisonRow]:
    """Marks the best last-round score of each column, and all that read the same. A single score is not marked."""
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


def _competes(row: ComparisonRow, column: int) -> bool:
    """Whether the cell can be the best of its column: bounds and unfinished runs cannot."""
    cell = row.cells[column]
    return not row.group.bound and not cell.is_partial and cell.last.value is not None


def _summary(rows: Sequence[ComparisonRow], unit: str, targets: Sequence[str]) -> str:
    """One sentence: which method is best, by how much. Empty if there is nothing to compare."""
    finished = [
        (value, row)
        for row in rows
        for cell in row.cells[:1]
        if (value := cell.last.value) is not None and not cell.is_partial
    ]
    finished.sort(key=lambda pair: -pair[0])
    ranked = [(value, row) for value, row in finished if not row.group.bound]
    if len(ranked) < 2:
        return ""
    (best, winner), (second, runner_up) = ranked[:2]
    where = f"on {targets[0]}" if len(targets) == 1 else f"as the mean over {plural(len(targets), 'target')}"
    text = (
        f"{winner.group.label} has the highest last-round {unit} {where}: {percent(best)} %,"
        f" {_lead(best - second)} {runner_up.group.label}"
    )
    bounds = [(value, row) for value, row in finished if row.group.bound]
    if bounds:
        top, row = bounds[0]
        gap = top - best
        text += f" and {points(abs(gap))} {'below' if gap >= 0 else 'above'} the bound {row.group.label}"
    return text + "."


def _lead(difference: float) -> str:
    return f"{points(difference)} above" if percent(difference) != "0.0" else "equal to"


def points(difference: float) -> str:
    """The difference of two scores: `3.2 points`."""
    text = percent(difference)
    return f"{text} {'point' if text == '1.0' else 'points'}"


def _cost(group: MethodRuns) -> MeanCost:
    """The mean cost of the finished runs. Bounds have no traffic: they move data, which the run only simulates."""
    results = [record.results for record in group.records if record.results]

    def mean(values: Iterable[float | None]) -> float | None:
        known = [value for value in values if value is not None]
        return statistics.fmean(known) if known else None

    sent = [r.bytes for r in results if not group.bound]
    up, down = mean(b.get("up") for b in sent), mean(b.get("down") for b in sent)
    return MeanCost(
        rounds=" or ".join(str(number) for number in sorted({record.rounds for record in group.records})),
        up=NOTHING if up is None else byte_size(up),
        down=NOTHING if down is None else byte_size(down),
        total=duration(mean(r.seconds.get("total") for r in results)),
        sites=duration(mean(r.seconds.get("sites") for r in results)),
    )


def score_charts(groups: Sequence[MethodRuns], targets: Sequence[str], unit: str) -> list[Chart]:
    """The test score on each target, then the mean validation score of the sources."""

    def tested_on(target: str) -> Callable[[RunRecord], Points]:
        return lambda record: record.series("test").get(target, [])

    charts = [line_chart(t, _lines(groups, tested_on(t)), PERCENT, f"test {unit}, %") for t in targets]
    charts.append(line_chart("Sources", _lines(groups, mean_validation), PERCENT, f"mean validation {unit}, %"))
    return [chart for chart in charts if chart]


def _lines(groups: Sequence[MethodRuns], points_of: Callable[[RunRecord], Points]) -> list[Line]:
    """One line per run. If a row has several runs, they are faint and the mean of the finished ones is drawn on top."""
    lines = []
    for group in groups:
        drawn = [(record, points) for record in group.records if (points := points_of(record))]
        if len(drawn) == 1:
            [(record, points)] = drawn
            lines.append(Line(group.label, points, group.style, record.chosen, _tip(group, record)))
        elif drawn:
            finished = [points for record, points in drawn if record.results]
            mean = middle(finished or [points for _, points in drawn], statistics.fmean)
            lines += [Line(group.label, points, f"{group.style} faint", tip=_tip(group, r)) for r, points in drawn]
            lines.append(Line(group.label, mean, group.style, tip=f"{group.label}, mean"))
    return lines


def mean_validation(record: RunRecord) -> Points:
    """The mean over sources of the validation score, by round."""
    return [(s.round, statistics.fmean(s.val.values())) for s in record.history if s.val]


def _tip(group: MethodRuns, record: RunRecord) -> str:
    where = record.home or record.target
    return group.label + (f", {where}" if where else "") + f", seed {record.seed}"
