"""CSAC, Table 6: how long runs take, as ratios."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from pathlib import Path

from fedshift.bench.records import Record
from fedshift.bench.sheets import Sheet, Value
from fedshift.bench.suite import Order

HOURS = {
    "pacs": {"FedAvg": 4.04, "FedDG": 11.86, "CSAC": 4.61},
    "vlcs": {"FedAvg": 3.08, "FedDG": 10.48, "CSAC": 3.60},
}
"""What the paper printed, mean over targets."""


def run_times(records: Sequence[Record], order: Order, baseline: str = "FedAvg") -> tuple[list[Sheet], list[Path]]:
    """A sheet for each data set: seconds of a run by target, their mean, and its ratio to that of the baseline."""
    return [
        _sheet([record for record in records if record.dataset == dataset], dataset, baseline, order.scale == "paper")
        for dataset in dict.fromkeys(record.dataset for record in records)
    ], []


def _sheet(records: Sequence[Record], dataset: str, baseline: str, is_theirs_shown: bool) -> Sheet:
    columns = list(dict.fromkeys(record.column for record in records))
    means: dict[str, list[float | None]] = {}
    for row in dict.fromkeys(record.row for record in records):
        own = [[r.seconds for r in records if (r.row, r.column) == (row, column)] for column in columns]
        means[row] = [statistics.fmean(values) if values else None for values in own]
    totals = {row: statistics.fmean(values) for row, own in means.items() if (values := [v for v in own if v])}
    rows: dict[str, list[Value]] = {
        row: [*own, totals.get(row), totals[row] / totals[baseline] if {row, baseline} <= set(totals) else None]
        for row, own in means.items()
    }
    ratio = f"x {baseline}"
    hours = HOURS.get(dataset, {}) if is_theirs_shown else {}
    theirs = {row: {ratio: round(value / hours[baseline], 2)} for row, value in hours.items()}
    return Sheet(f"seconds a run on {dataset}", (*columns, "mean", ratio), rows, theirs)
