"""One run in full: its domains, its curves, its mistakes, what it cost, what left each site, what was counted."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from fedshift.report.charts import BYTES, COLOURS, PERCENT, PLAIN, Chart, Line, colour, line_chart, site_lines
from fedshift.report.entries import BOUND_WORDS
from fedshift.report.matrix import Confusion, confusion
from fedshift.report.reading import HEADLINES, LedgerLine, Points, Record, Rules
from fedshift.report.words import (
    NOTHING,
    byte_size,
    duration,
    explain_counter,
    kind_meanings,
    metric_title,
    percent,
)


@dataclass(frozen=True)
class Tile:
    label: str
    value: str
    note: str = ""


@dataclass(frozen=True)
class Domain:
    site: str
    role: str
    style: str
    sizes: tuple[str, str, str]
    validation: str
    scores: tuple[str, str, str] | None
    """Last, source-validated, oracle, where the domain is tested on."""


@dataclass(frozen=True)
class Sent:
    """What of one field left one site: how often, how much."""

    times: int
    size: str
    tip: str


@dataclass(frozen=True)
class LedgerTable:
    """`columns` are (step, field, kind); `rows` hold one cell a column, None where nothing left."""

    columns: tuple[tuple[str, str, str], ...]
    rows: tuple[tuple[str, tuple[Sent | None, ...], str], ...]
    meanings: tuple[tuple[str, str], ...]


@dataclass(frozen=True)
class Counted:
    name: str
    count: int
    meaning: str


@dataclass(frozen=True)
class Share:
    """A bar of `width` percent."""

    label: str
    text: str
    width: float


@dataclass(frozen=True)
class Detail:
    number: int
    record: Record
    bound_words: str
    tiles: tuple[Tile, ...]
    domains: tuple[Domain, ...]
    charts: tuple[Chart, ...]
    confusions: tuple[Confusion, ...]
    traffic: tuple[tuple[str, str, str, str], ...]
    traffic_chart: Chart | None
    times: tuple[Share, ...]
    ledger: LedgerTable
    counters: tuple[Counted, ...]


def describe(number: int, record: Record) -> Detail:
    results = record.results
    sites = _sites(record)
    # Where there are too many to tell apart by colour, only those that are tested on have one.
    coloured = sites if len(sites) <= COLOURS else [site for site in sites if site in record.targets]
    styles = {site: colour(coloured.index(site)) if site in coloured else "c0" for site in sites}
    task = results.task if results else "classification"
    matrices = results.confusion if results else {}
    return Detail(
        number=number,
        record=record,
        bound_words=BOUND_WORDS.get(record.bound, ""),
        tiles=tuple(_tiles(record)),
        domains=tuple(_domain(record, site, styles[site]) for site in sites),
        charts=tuple(_charts(record, styles)),
        confusions=tuple(confusion(s, m, results.classes if results else (), task) for s, m in matrices.items()),
        traffic=tuple(_traffic(record)),
        traffic_chart=_traffic_chart(record),
        times=tuple(_times(record)),
        ledger=_ledger(record),
        counters=tuple(_counters(results.counters if results else {})),
    )


def _sites(record: Record) -> list[str]:
    """Everyone who takes part: those who train first, then those who are tested on."""
    measured = {row.site for row in record.rows if row.site}
    known = measured | set(record.results.samples if record.results else ()) | set(record.targets)
    return sorted(known, key=lambda site: (site in record.targets, site))


def role(record: Record, site: str) -> str:
    if site == record.home:
        return "home, labelled"
    if site in record.targets:
        if record.bound == "target-labels":
            return "target, trained on with its labels"
        return "target, held out for testing" if record.setting == "generalize" else "target, no labels used"
    return "all sources in one place" if record.bound == "pooled" else "source, labelled"


def _domain(record: Record, site: str, style: str) -> Domain:
    sizes = record.results.samples.get(site, {}) if record.results else {}
    rules = record.scores.get(site)
    return Domain(
        site=site,
        role=role(record, site),
        style=style,
        sizes=(_size(sizes, "train"), _size(sizes, "val"), _size(sizes, "test")),
        validation=percent(record.validation[site]) if site in record.validation else "",
        scores=(percent(rules.last), percent(rules.source_val), percent(rules.oracle)) if rules else None,
    )


def _size(sizes: Mapping[str, int], split: str) -> str:
    return f"{sizes[split]:,}" if split in sizes else NOTHING


def _tiles(record: Record) -> list[Tile]:
    results, tiles = record.results, []
    rules: list[Rules] = list(record.scores.values())
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


def _mean(rules: Sequence[Rules], rule: str) -> float:
    return statistics.fmean(getattr(r, rule) for r in rules)


def _charts(record: Record, styles: Mapping[str, str]) -> list[Chart]:
    """The score of every domain, then every metric that the method noted."""
    unit = HEADLINES[record.headline]
    lines = site_lines(record.series("val"), styles)
    lines += site_lines(record.series("test"), styles, " (test)", record.chosen)
    note = f"{unit}, %; bold: target, on test data"
    charts = [line_chart("Score by domain", lines, PERCENT, note)]
    for name in dict.fromkeys(row.name for row in record.rows if row.phase == "train"):
        series = record.series("train", name)
        note = "by site" if any(series) else "noted by the coordinator"
        charts.append(line_chart(metric_title(name), site_lines(series, styles), PLAIN, note))
    return [chart for chart in charts if chart]


def per_round(cumulative: Points) -> Points:
    """What each round added to a running total."""
    known = [(x, y) for x, y in cumulative if y is not None]
    before = [0.0, *(y for _, y in known)]
    return [(x, y - old) for (x, y), old in zip(known, before, strict=False)]


def _traffic(record: Record) -> list[tuple[str, str, str, str]]:
    """(what, direction, total, a round) in words."""
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


def _traffic_chart(record: Record) -> Chart | None:
    lines = [
        Line(label, per_round(record.series("round", name).get("", [])), style)
        for label, name, style in (("up", "bytes_up", "c1"), ("down", "bytes_down", "c2"))
    ]
    return line_chart("Bytes a round", lines, BYTES, "training, all sites together")


def _times(record: Record) -> list[Share]:
    """Wall clock, sites and coordinator. Sites that work side by side add up to more than the wall clock."""
    seconds = record.results.seconds if record.results else {}
    named = (
        ("Wall clock", "total"),
        ("Work at sites, added up", "sites"),
        ("Coordinator's own work", "coordinator"),
    )
    known = [(label, value) for label, key in named if (value := seconds.get(key)) is not None]
    longest = max((value for _, value in known), default=0.0) or 1.0
    return [Share(label, duration(value), round(100 * value / longest, 1)) for label, value in known]


def _ledger(record: Record) -> LedgerTable:
    columns = tuple(dict.fromkeys((e.step, e.field, e.kind) for lines in record.ledger.values() for e in lines))
    meanings = kind_meanings()
    at_coordinator = record.home or (record.target if record.setting == "adapt" and not record.bound else None)
    rows = []
    for site, lines in record.ledger.items():
        cells = tuple(_sent([e for e in lines if (e.step, e.field, e.kind) == column]) for column in columns)
        # The coordinator's own data is asked like any site, but its answers never travel.
        rows.append((site, cells, "stays at the coordinator" if site == at_coordinator else ""))
    used = dict.fromkeys(kind for _, _, kind in columns)
    return LedgerTable(columns, tuple(rows), tuple((kind, meanings.get(kind, "")) for kind in used))


def _sent(lines: Sequence[LedgerLine]) -> Sent | None:
    if not lines:
        return None
    values = sum(line.values for line in lines)
    return Sent(len(lines), byte_size(sum(line.bytes for line in lines)), f"{values:,} values in all")


def _counters(counters: Mapping[str, int]) -> list[Counted]:
    return [Counted(name, count, explain_counter(name)) for name, count in sorted(counters.items()) if count]
