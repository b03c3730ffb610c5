"""Figures of what methods note in every round: weights of sites in CSAC's fusion and in KD3A's average."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from pathlib import Path

from fedshift.bench.figures import draw_lines
from fedshift.bench.records import Record
from fedshift.bench.sheets import Sheet
from fedshift.bench.suite import Order

FUSION = "fusion."


def fusion_weights(records: Sequence[Record], order: Order) -> tuple[list[Sheet], list[Path]]:
    """CSAC, Fig. 7: a sheet and a picture for each target, with a panel a layer and a line a site."""
    sheets, files = [], []
    for record in records:
        stages = {name.removeprefix(FUSION): curve for name, curve in record.notes.items() if name.startswith(FUSION)}
        rows = {f"{stage}, {site}": values for stage, curve in stages.items() for site, values in curve.items()}
        title = f"weight in the fusion, by round; target {record.column}, seed {record.seed}"
        sheets.append(Sheet(title, tuple(str(number) for number in record.rounds), rows))
        name = f"csac-fig7-{record.dataset}-{record.column}-seed{record.seed}.png"
        files.append(draw_lines(order.out / name, stages, record.rounds, "weight"))
    return sheets, files


def weight_of_the_bad_site(records: Sequence[Record], order: Order) -> tuple[list[Sheet], list[Path]]:
    """KD3A, Fig. 4: what weight the bad site gets in each round, mean over targets and seeds."""
    columns = list(dict.fromkeys(record.column for record in records))
    rounds = records[0].rounds
    found: dict[str, dict[str, list[float | None]]] = {column: {} for column in columns}
    for column in columns:
        for row in dict.fromkeys(record.row for record in records):
            curves = [
                record.notes.get("weight", {}).get(_bad_site(record), [])
                for record in records
                if (record.row, record.column) == (row, column)
            ]
            found[column][row] = [_mean_at(curves, place) for place in range(len(rounds))]
    sheet = Sheet(
        "weight of the bad site, by round",
        tuple(str(number) for number in rounds),
        {f"{column}: {row}": values for column, own in found.items() for row, values in own.items()},
    )
    return [sheet], [draw_lines(order.out / "kd3a-fig4.png", found, rounds, "weight of the bad site")]


def _bad_site(record: Record) -> str:
    """The attacked one; without an attack it is the irrelevant domain of the paper."""
    attacks = record.settings.get("attack") or ["irrelevant:quickdraw"]
    return str(attacks[0]).split(":")[1]


def _mean_at(curves: Sequence[Sequence[float | None]], place: int) -> float | None:
    values = [value for curve in curves if place < len(curve) and (value := curve[place]) is not None]
    return statistics.fmean(values) if values else None
