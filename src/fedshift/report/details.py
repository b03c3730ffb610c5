"""One run in full: its domains, its curves, its mistakes, what it cost, what left each site, what was counted."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from fedshift.report.accounts import (
    Counted,
    LedgerTable,
    Share,
    counters_of,
    ledger_of,
    times_of,
    traffic_charts_of,
    traffic_of,
)
from fedshift.report.charts import COLOURS, PERCENT, PLAIN, Chart, colour, line_chart, site_lines
from fedshift.report.clouds import Maps, maps_of
from fedshift.report.entries import BOUND_WORDS
from fedshift.report.gallery import Gallery
from fedshift.report.matrix import Confusion, confusion
from fedshift.report.pictures import Strip, class_colour
from fedshift.report.reading import HEADLINES, Points, Record, Rules
from fedshift.report.shares import ShareChart, ShareGroup, are_shares, over_layers, over_rounds
from fedshift.report.words import NOTHING, byte_size, duration, metric_words, percent
from fedshift.runs.card import skipped_throughout


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
class Detail:
    number: int
    record: Record
    bound_words: str
    tiles: tuple[Tile, ...]
    domains: tuple[Domain, ...]
    charts: tuple[Chart, ...]
    weights: tuple[ShareGroup, ...]
    weight_charts: tuple[Chart, ...]
    confusions: tuple[Confusion, ...]
    traffic: tuple[tuple[str, str, str, str], ...]
    traffic_charts: tuple[Chart, ...]
    times: tuple[Share, ...]
    ledger: LedgerTable
    counters: tuple[Counted, ...]
    maps: Maps | None
    strips: tuple[Strip, ...]
    class_colours: tuple[tuple[str, str], ...]
    """Class and colour, where masks are shown."""
    notes: tuple[str, ...]


def describe(number: int, record: Record, gallery: Gallery) -> Detail:
    results = record.results
    sites = _sites(record)
    styles = site_styles(record)
    task = results.task if results else "classification"
    matrices = results.confusion if results else {}
    return Detail(
        number=number,
        record=record,
        bound_words=BOUND_WORDS.get(record.bound, ""),
        tiles=tuple(_tiles(record)),
        domains=tuple(_domain(record, site, styles[site]) for site in sites),
        charts=tuple(_charts(record, styles)),
        weights=tuple(_weights(record, styles)),
        weight_charts=tuple(_metric_charts(record, [n for n in noted(record) if n in WEIGHT_LIKE], styles)),
        confusions=tuple(confusion(s, m, results.classes if results else (), task) for s, m in matrices.items()),
        traffic=tuple(traffic_of(record)),
        traffic_charts=tuple(traffic_charts_of(record)),
        times=tuple(times_of(record)),
        ledger=ledger_of(record),
        counters=tuple(counters_of(results.counters if results else {})),
        maps=maps_of(gallery.cloud, _domain_styles(gallery, styles)) if gallery.cloud else None,
        strips=tuple(sorted(gallery.strips, key=lambda strip: not strip.is_target)),
        class_colours=_class_colours(gallery, results.classes if results else ()),
        notes=tuple(gallery.notes),
    )


def site_styles(record: Record) -> dict[str, str]:
    """Site -> its colour. Of too many to tell apart, only those that are tested on have one."""
    sites = _sites(record)
    coloured = sites if len(sites) <= COLOURS else [site for site in sites if site in record.targets]
    return {site: colour(coloured.index(site)) if site in coloured else "c0" for site in sites}


def _domain_styles(gallery: Gallery, styles: Mapping[str, str]) -> dict[str, str]:
    """As sites are coloured; where sites are not domains (all sources in one place), in their order."""
    names = gallery.cloud.domains if gallery.cloud else []
    if all(name in styles for name in names):
        return dict(styles)
    return {name: colour(index) for index, name in enumerate(names)}


def _class_colours(gallery: Gallery, classes: Sequence[str]) -> tuple[tuple[str, str], ...]:
    if not any(strip.scenes for strip in gallery.strips):
        return ()
    found = [class_colour(index, len(classes)) for index in range(len(classes))]
    return tuple((name, f"rgb({r} {g} {b})") for name, (r, g, b) in zip(classes, found, strict=True))


def _sites(record: Record) -> list[str]:
    """Everyone who takes part: those who train first, then those who are tested on."""
    measured = {row.site for row in record.rows if row.site}
    known = measured | set(record.results.samples if record.results else ()) | set(record.targets)
    return sorted(known, key=lambda site: (site in record.targets, site))


def role(record: Record, site: str) -> str:
    if site == record.home:
        return "home, labelled"
    if site in record.targets:
        if record.results and site in skipped_throughout(vars(record.results)):
            return "target, skipped in every round"
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


WEIGHT_LIKE = ("agreement", "trust", "score")
"""Metrics that say how much a site is believed, but do not add up to one."""
_BY_LAYER = "fusion."


def noted(record: Record) -> list[str]:
    """Every metric that the method noted, in its order."""
    return list(dict.fromkeys(row.name for row in record.rows if row.phase == "train"))


def _is_weight(record: Record, name: str) -> bool:
    return name not in WEIGHT_LIKE and are_shares(record.series("train", name))


def _charts(record: Record, styles: Mapping[str, str]) -> list[Chart]:
    """The score of every domain, then every metric that the method noted and that is no weight."""
    unit = HEADLINES[record.headline]
    lines = site_lines(record.series("val"), styles)
    lines += site_lines(record.series("test"), styles, " (test)", record.chosen)
    chart = line_chart("Score by domain", lines, PERCENT, f"{unit}, %; bold: target, on test data")
    others = [name for name in noted(record) if name not in WEIGHT_LIKE and not _is_weight(record, name)]
    return ([chart] if chart else []) + _metric_charts(record, others, styles)


def _metric_charts(record: Record, names: Sequence[str], styles: Mapping[str, str]) -> list[Chart]:
    charts = []
    for name in names:
        title, note = metric_words(name)
        charts.append(line_chart(title, site_lines(record.series("train", name), styles), PLAIN, note))
    return [chart for chart in charts if chart]


def _weights(record: Record, styles: Mapping[str, str]) -> list[ShareGroup]:
    """Shares that sites have in the model, by layer where a method has them so."""
    names = [name for name in noted(record) if _is_weight(record, name)]
    groups = []
    for name in [name for name in names if _BY_LAYER not in name]:
        title, note = metric_words(name)
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
    return ShareGroup(
        f"Weight of each site, layer by layer{where}", "its share in the fusion of a layer", tuple(charts)
    )
