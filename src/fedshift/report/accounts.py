"""What a run cost and what left its sites: bytes and seconds, the ledger, what was refused or missing."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from fedshift.report.charts import BYTES, SECONDS, Chart, Line, line_chart
from fedshift.report.reading import LedgerLine, Points, Record
from fedshift.report.words import byte_size, compact, duration, explain_counter, kind_meanings


@dataclass(frozen=True)
class Sent:
    """What of one field left one site: how often, how many values, how many bytes."""

    times: int
    values: str
    size: str


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


def per_round(cumulative: Points) -> Points:
    """What each round added to a running total."""
    known = [(x, y) for x, y in cumulative if y is not None]
    before = [0.0, *(y for _, y in known)]
    return [(x, y - old) for (x, y), old in zip(known, before, strict=False)]


def traffic_of(record: Record) -> list[tuple[str, str, str, str]]:
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


def traffic_charts_of(record: Record) -> list[Chart]:
    sent = [
        Line(label, per_round(record.series("round", name).get("", [])), style)
        for label, name, style in (("up", "bytes_up", "c1"), ("down", "bytes_down", "c2"))
    ]
    took = [Line("", per_round(record.series("round", "seconds").get("", [])), "c8")]
    charts = (
        line_chart("Bytes a round", sent, BYTES, "training, all sites together"),
        line_chart("Seconds a round", took, SECONDS, "wall clock, training and scoring"),
    )
    return [chart for chart in charts if chart]


def times_of(record: Record) -> list[Share]:
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


def ledger_of(record: Record) -> LedgerTable:
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
    size = byte_size(sum(line.bytes for line in lines))
    return Sent(len(lines), f"{compact(values)} value{'' if values == 1 else 's'}", size)


def counters_of(counters: Mapping[str, int]) -> list[Counted]:
    return [Counted(name, count, explain_counter(name)) for name, count in sorted(counters.items()) if count]
