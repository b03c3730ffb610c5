"""What `fedshift cost` prints."""

from __future__ import annotations

import dataclasses
import json
from math import isclose

from rich.console import Console
from rich.table import Table

from fedshift.audit.cost import TOLERANCE, Cost, Part, Sent, SiteCost
from fedshift.report.words import byte_size

NONE = "-"


def show_cost(cost: Cost, *, as_json: bool) -> None:
    if as_json:
        print(json.dumps(dataclasses.asdict(cost), indent=2))
        return
    console = Console(highlight=False)
    shape = "x".join(str(side) for side in cost.input_shape)
    console.print(
        f"[bold]{cost.method}[/bold] ({cost.setting}) with {cost.arch}: {cost.classes} classes, inputs {shape},"
        f" {cost.sites} sites of {cost.samples} samples, batches of {cost.batch}"
    )
    for name, part in cost.network.items():
        console.print(f"{name}: {_part(part)}")
    console.print(_totals(cost))
    console.print(_steps(cost))
    if cost.home_flops:
        console.print(
            f"The coordinator: {si(cost.home_flops)}FLOP in the last round, on {cost.samples} samples of its own."
        )
    if cost.published:
        formula, value = cost.published
        console.print(
            f"Published formula: {formula} = {si(value)}FLOP (it takes a backward pass for as much as a forward pass)."
        )
    if cost.note:
        console.print(cost.note)


def si(value: float) -> str:
    """Four significant digits and a unit: `81411072` is `81.41 M`."""
    for unit in ("", "k", "M", "G"):
        if abs(value) < 999.95:
            return f"{value:.4g} {unit}"
        value /= 1000
    return f"{value:.4g} T"


def _part(part: Part) -> str:
    return (
        f"{si(part.forward_flops)}FLOP forward, {part.parameters:,} parameters,"
        f" {part.numbers:,} numbers with normalisation statistics"
    )


def _totals(cost: Cost) -> Table:
    table = Table(title="For a site, in a round", title_justify="left")
    for column in ("", "counted", "formula", "its value", f"agree (to {TOLERANCE:.0%})"):
        table.add_column(column, justify="right" if column in ("counted", "its value") else "left")
    found = {comparison.quantity: comparison for comparison in cost.comparisons}
    counted = {
        "FLOPs a sample": cost.round.flops_per_sample,
        "numbers uploaded": cost.round.upload.numbers,
        "numbers broadcast": cost.round.broadcast.numbers,
    }
    for quantity, number in counted.items():
        comparison = found.get(quantity)
        beside = (
            (comparison.formula, f"{comparison.value:,.0f}", "yes" if comparison.agrees else "no")
            if comparison
            else (NONE, "", "")
        )
        table.add_row(quantity, f"{number:,.0f}", *beside)
    for name, sent in (("bytes uploaded", cost.round.upload), ("bytes broadcast", cost.round.broadcast)):
        table.add_row(name, f"{sent.bytes:,.0f}", "4 a number, and headers", f"{4 * sent.numbers:,.0f}", "")
    return table


def _steps(cost: Cost) -> Table:
    """Step by step, and the first round where it is another."""
    table = Table(title="What it is made of", title_justify="left")
    for column in ("step", "asked", "FLOPs a sample", "other FLOPs", "up", "down", "what goes up", "what goes down"):
        table.add_column(column, justify="left" if column.startswith(("step", "what")) else "right")
    rows = dict(cost.steps)
    if not all(
        isclose(a, b, rel_tol=TOLERANCE) for a, b in zip(_sizes(cost.first_round), _sizes(cost.round), strict=True)
    ):
        rows["first round, all in all"] = cost.first_round
    for name, row in rows.items():
        table.add_row(
            name,
            f"{row.times:g} x",
            si(row.flops_per_sample),
            si(row.other_flops),
            byte_size(row.upload.bytes),
            byte_size(row.broadcast.bytes),
            *(", ".join(f"{field} {number:,.0f}" for field, number in s.fields.items()) for s in _both(row)),
        )
    return table


def _both(row: SiteCost) -> tuple[Sent, Sent]:
    return row.upload, row.broadcast


def _sizes(row: SiteCost) -> tuple[float, float]:
    return row.upload.numbers, row.broadcast.numbers
