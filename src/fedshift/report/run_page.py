"""Everything the report shows of one run: scores, curves, mistakes, traffic, what left each site, counters."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from fedshift.report.charts import BYTES, COLOURS, PERCENT, PLAIN, SECONDS, Chart, Line, colour, line_chart, site_lines
from fedshift.report.comparison import BOUND_MEANINGS
from fedshift.report.confusion import Confusion, confusion
from fedshift.report.feature_map import FeatureMaps, feature_maps
from fedshift.report.reliability import SurenessPage, sureness_page
from fedshift.report.samples import DataView, DomainSamples, class_colour
from fedshift.report.stacked_bars import ShareChart, ShareGroup, are_shares, over_layers, over_rounds
from fedshift.report.text import (
    NOTHING,
    SCORE_NAMES,
    byte_size,
    compact,
    duration,
    explain_counter,
    kind_meanings,
    metric_title,
    percent,
)
from fedshift.runs.calibrated import Calibrated
from fedshift.runs.card import skipped_throughout
from fedshift.runs.health import PREDICT_RULE, interval_of
from fedshift.runs.privacy import OUTSIDE, privacy_lines
from fedshift.runs.record import LedgerLine, Points, RuleScores, RunRecord

WEIGHT_LIKE = ("agreement", "trust", "score")
"""Metrics that say how much a site is trusted but do not add up to one."""
_BY_LAYER = "fusion."
"""Metrics with this in their name are weights of one layer."""


@dataclass(frozen=True)
class Tile:
    """One headline number of the run."""

    label: str
    value: str
    note: str = ""


@dataclass(frozen=True)
class DomainRow:
    """One domain: its role, its sizes (train, val, test), its scores in percent."""

    site: str
    role: str
    style: str
    sizes: tuple[str, str, str]
    validation: str
    scores: tuple[str, str, str] | None
    """Last, source-validated, oracle; None if the run is not tested on this domain."""
    intervals: tuple[str, str, str] = ("", "", "")
    """95 % intervals of validation, last and source-validated, where there are some."""


@dataclass(frozen=True)
class TimeBar:
    """A duration as a bar of `width` percent."""

    label: str
    text: str
    width: float


@dataclass(frozen=True)
class FieldTotal:
    """What left one site in one field: how often, how many values, how many bytes."""

    times: int
    values: str
    size: str


@dataclass(frozen=True)
class LedgerTable:
    """`columns` are (step, field, kind); `rows` are (site, cells, note). A cell is None if nothing left."""

    columns: tuple[tuple[str, str, str], ...]
    rows: tuple[tuple[str, tuple[FieldTotal | None, ...], str], ...]
    meanings: tuple[tuple[str, str], ...]


@dataclass(frozen=True)
class CounterLine:
    """One counter of the run and what it counts."""

    name: str
    count: int
    meaning: str


@dataclass(frozen=True)
class RunPage:
    """What the templates draw, in the order of the page. `number` is that of the run in this report."""

    number: int
    record: RunRecord
    bound_meaning: str
    tiles: tuple[Tile, ...]
    domains: tuple[DomainRow, ...]
    charts: tuple[Chart, ...]
    weights: tuple[ShareGroup, ...]
    weight_charts: tuple[Chart, ...]
    confusions: tuple[Confusion, ...]
    traffic: tuple[tuple[str, str, str, str], ...]
    traffic_charts: tuple[Chart, ...]
    times: tuple[TimeBar, ...]
    ledger: LedgerTable
    counters: tuple[CounterLine, ...]
    maps: FeatureMaps | None
    samples: tuple[DomainSamples, ...]
    class_colours: tuple[tuple[str, str], ...]
    """(class, colour) if masks are shown."""
    notes: tuple[str, ...]
    sureness: SurenessPage
    predict_rule: str = PREDICT_RULE
    privacy: tuple[str, ...] = ()


def run_page(number: int, record: RunRecord, view: DataView) -> RunPage:
    results = record.results
    sites = _sites(record)
    styles = site_styles(record)
    task = results.task if results else "classification"
    matrices = results.confusion if results else {}
    return RunPage(
        number=number,
        record=record,
        bound_meaning=BOUND_MEANINGS.get(record.bound, ""),
        tiles=tuple(_tiles(record)),
        domains=tuple(_domain_row(record, site, styles[site]) for site in sites),
        charts=tuple(_charts(record, styles)),
        weights=tuple(_weights(record, styles)),
        weight_charts=tuple(_metric_charts(record, [n for n in logged_metrics(record) if n in WEIGHT_LIKE], styles)),
        confusions=tuple(confusion(s, m, results.classes if results else (), task) for s, m in matrices.items()),
        traffic=tuple(traffic_of(record)),
        traffic_charts=tuple(traffic_charts_of(record)),
        times=tuple(times_of(record)),
        ledger=ledger_of(record),
        counters=tuple(counters_of(results.counters if results else {})),
        maps=feature_maps(view.features, _domain_styles(view, styles)) if view.features else None,
        samples=tuple(sorted(view.samples, key=lambda domain: not domain.is_target)),
        class_colours=_class_colours(view, results.classes if results else ()),
        notes=tuple(view.notes),
        sureness=sureness_page(results.calibration if results else Calibrated()),
        privacy=(*lines, OUTSIDE) if (lines := tuple(privacy_lines(results.privacy if results else {}))) else (),
    )


def site_styles(record: RunRecord) -> dict[str, str]:
    """Site -> its colour. If there are more sites than colours, only targets have one."""
    sites = _sites(record)
    coloured = sites if len(sites) <= COLOURS else [site for site in sites if site in record.targets]
    return {site: colour(coloured.index(site)) if site in coloured else "c0" for site in sites}


def _sites(record: RunRecord) -> list[str]:
    """All sites of the run, targets last."""
    measured = {row.site for row in record.rows if row.site}
    known = measured | set(record.results.samples if record.results else ()) | set(record.targets)
    return sorted(known, key=lambda site: (site in record.targets, site))


def _tiles(record: RunRecord) -> list[Tile]:
    results, tiles = record.results, []
    rules: list[RuleScores] = list(record.scores.values())
    if rules:
        of = f"mean over {len(rules)} targets" if len(rules) > 1 else next(iter(record.scores))
        tiles += [
            Tile("Last round", f"{percent(_mean(rules, 'last'))} %", of),
            Tile("Source-validated", f"{percent(_mean(rules, 'source_val'))} %", f"round {record.chosen}"),
            Tile("Oracle", f"{percent(_mean(rules, 'oracle'))} %", "best round, needs target labels"),
        ]
    elif record.validation:
        mean = statistics.fmean(record.validation.values())
        tiles.append(Tile("Validation", f"{percent(mean)} %", "mean over sources, last round"))
    tiles.append(Tile("Rounds", f"{record.round} of {record.rounds}", f"seed {record.seed}"))
    if results:
        sent = results.bytes.get("up", 0) + results.bytes.get("down", 0)
        tiles.append(Tile("Traffic", byte_size(sent), "up and down, training"))
        tiles.append(Tile("Time", duration(results.seconds.get("total")), "wall clock"))
    return tiles


def _mean(rules: Sequence[RuleScores], rule: str) -> float:
    return statistics.fmean(getattr(r, rule) for r in rules)


def _domain_row(record: RunRecord, site: str, style: str) -> DomainRow:
    sizes = record.results.samples.get(site, {}) if record.results else {}
    rules = record.scores.get(site)
    return DomainRow(
        site=site,
        role=role_of(record, site),
        style=style,
        sizes=(_size(sizes, "train"), _size(sizes, "val"), _size(sizes, "test")),
        validation=percent(record.validation[site]) if site in record.validation else "",
        scores=(percent(rules.last), percent(rules.source_val), percent(rules.oracle)) if rules else None,
        intervals=(
            _interval(record, record.validation.get(site), sizes.get("val", 0)),
            _interval(record, rules.last if rules else None, sizes.get("test", 0)),
            _interval(record, rules.source_val if rules else None, sizes.get("test", 0)),
        ),
    )


def _interval(record: RunRecord, score: float | None, samples: int) -> str:
    task = record.results.task if record.results else ""
    found = interval_of(score, samples, task) if score is not None else None
    return f"{percent(found[0])}–{percent(found[1])}" if found else ""


def role_of(record: RunRecord, site: str) -> str:
    if site == record.home:
        return "home, labelled"
    if site in record.targets or site == record.target:  # One without test labels has no score, and is no source.
        if record.results and site in skipped_throughout(vars(record.results)):
            return "target, skipped in every round"
        if record.bound == "target-labels":
            return "target, trained on with its labels"
        return "target, held out for testing" if record.setting == "generalize" else "target, no labels used"
    return "all sources in one place" if record.bound == "pooled" else "source, labelled"


def _size(sizes: Mapping[str, int], split: str) -> str:
    return f"{sizes[split]:,}" if split in sizes else NOTHING


def _charts(record: RunRecord, styles: Mapping[str, str]) -> list[Chart]:
    """The score of every domain, then every metric of the method that is not a weight."""
    unit = SCORE_NAMES[record.headline]
    lines = site_lines(record.series("val"), styles)
    lines += site_lines(record.series("test"), styles, " (test)", record.chosen)
    chart = line_chart("Score by domain", lines, PERCENT, f"{unit}, %; thick: target, on test data")
    others = [name for name in logged_metrics(record) if name not in WEIGHT_LIKE and not _is_weight(record, name)]
    return ([chart] if chart else []) + _metric_charts(record, others, styles)


def _metric_charts(record: RunRecord, names: Sequence[str], styles: Mapping[str, str]) -> list[Chart]:
    charts = []
    for name in names:
        title, note = metric_title(name)
        charts.append(line_chart(title, site_lines(record.series("train", name), styles), PLAIN, note))
    return [chart for chart in charts if chart]


def logged_metrics(record: RunRecord) -> list[str]:
    """Every metric that the method logged, in its order."""
    return list(dict.fromkeys(row.name for row in record.rows if row.phase == "train"))


def _is_weight(record: RunRecord, name: str) -> bool:
    return name not in WEIGHT_LIKE and are_shares(record.series("train", name))


def _weights(record: RunRecord, styles: Mapping[str, str]) -> list[ShareGroup]:
    """The weights of sites in the model, by layer if the method has them by layer."""
    names = [name for name in logged_metrics(record) if _is_weight(record, name)]
    groups = []
    for name in [name for name in names if _BY_LAYER not in name]:
        title, note = metric_title(name)
        groups.append(ShareGroup(title, note, (over_rounds("", record.series("train", name), styles),)))
    phases = dict.fromkeys(name.partition(_BY_LAYER)[0] for name in names if _BY_LAYER in name)
    for phase in sorted(phases):
        layers = {
            name.removeprefix(phase + _BY_LAYER): record.series("train", name)
            for name in names
            if name.startswith(phase + _BY_LAYER)
        }
        groups.append(_layer_group(phase, layers, styles))
    return groups


def _layer_group(phase: str, layers: Mapping[str, Mapping[str, Points]], styles: Mapping[str, str]) -> ShareGroup:
    where = f", {phase.rstrip('_').replace('_', ' ')}" if phase else ""
    rounds = {x for series in layers.values() for points in series.values() for x, _ in points}
    charts: list[ShareChart] = [over_rounds(layer, series, styles) for layer, series in layers.items()]
    if len(rounds) == 1:
        charts = [over_layers(f"round {min(rounds)}", layers, styles)]
    return ShareGroup(f"Weight of each site by layer{where}", "share in the fusion of a layer", tuple(charts))


def traffic_of(record: RunRecord) -> list[tuple[str, str, str, str]]:
    """(messages, direction, total, per round) as text."""
    results = record.results
    if not results:
        return []
    rounds = max(record.rounds, 1)
    kinds = (
        ("Training", "up", "up"),
        ("Training", "down", "down"),
        ("Scoring", "up", "scoring_up"),
        ("Scoring", "down", "scoring_down"),
    )
    return [
        (what, direction, byte_size(results.bytes[key]), byte_size(results.bytes[key] / rounds))
        for what, direction, key in kinds
        if key in results.bytes
    ]


def traffic_charts_of(record: RunRecord) -> list[Chart]:
    sent = [
        Line(label, per_round(record.series("round", name).get("", [])), style)
        for label, name, style in (("up", "bytes_up", "c1"), ("down", "bytes_down", "c2 dashed"))
    ]
    took = [Line("", per_round(record.series("round", "seconds").get("", [])), "c8")]
    charts = (
        line_chart("Bytes per round", sent, BYTES, "training, all sites together"),
        line_chart("Seconds per round", took, SECONDS, "wall clock, training and scoring"),
    )
    return [chart for chart in charts if chart]


def per_round(cumulative: Points) -> Points:
    """What each round added to a running total."""
    known = [(x, y) for x, y in cumulative if y is not None]
    before = [0.0, *(y for _, y in known)]
    return [(x, y - old) for (x, y), old in zip(known, before, strict=False)]


def times_of(record: RunRecord) -> list[TimeBar]:
    """Wall clock, sites and coordinator. Sites that work in parallel add up to more than the wall clock."""
    seconds = record.results.seconds if record.results else {}
    named = (
        ("Wall clock", "total"),
        ("All sites, summed", "sites"),
        ("Coordinator", "coordinator"),
    )
    known = [(label, value) for label, key in named if (value := seconds.get(key)) is not None]
    longest = max((value for _, value in known), default=0.0) or 1.0
    return [TimeBar(label, duration(value), round(100 * value / longest, 1)) for label, value in known]


def ledger_of(record: RunRecord) -> LedgerTable:
    columns = tuple(dict.fromkeys((e.step, e.field, e.kind) for lines in record.ledger.values() for e in lines))
    meanings = kind_meanings()
    at_coordinator = record.home or (record.target if record.setting == "adapt" and not record.bound else None)
    rows = []
    for site, lines in record.ledger.items():
        cells = tuple(_field_total([e for e in lines if (e.step, e.field, e.kind) == column]) for column in columns)
        # The coordinator asks its own data like any site, but those answers never travel.
        rows.append((site, cells, "stays at the coordinator" if site == at_coordinator else ""))
    used = dict.fromkeys(kind for _, _, kind in columns)
    return LedgerTable(columns, tuple(rows), tuple((kind, meanings.get(kind, "")) for kind in used))


def _field_total(lines: Sequence[LedgerLine]) -> FieldTotal | None:
    if not lines:
        return None
    values = sum(line.values for line in lines)
    size = byte_size(sum(line.bytes for line in lines))
    return FieldTotal(len(lines), f"{compact(values)} value{'' if values == 1 else 's'}", size)


def counters_of(counters: Mapping[str, int]) -> list[CounterLine]:
    return [CounterLine(name, count, explain_counter(name)) for name, count in sorted(counters.items()) if count]


def _domain_styles(view: DataView, styles: Mapping[str, str]) -> dict[str, str]:
    """Domain -> its colour: that of the site, or if sites are not domains (pooled sources) one by order."""
    names = view.features.domains if view.features else []
    if all(name in styles for name in names):
        return dict(styles)
    return {name: colour(index) for index, name in enumerate(names)}


def _class_colours(view: DataView, classes: Sequence[str]) -> tuple[tuple[str, str], ...]:
    if not any(domain.scenes for domain in view.samples):
        return ()
    found = [class_colour(index, len(classes)) for index in range(len(classes))]
    return tuple((name, f"rgb({r} {g} {b})") for name, (r, g, b) in zip(classes, found, strict=True))
