"""DualAdapt, Tables 4 and 5: what a client computes and sends."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

from fedshift.audit.cost import cost
from fedshift.bench.jobs import Row, chosen_rows
from fedshift.bench.records import Record
from fedshift.bench.sheets import Sheet, Value
from fedshift.bench.suite import Found, Order
from fedshift.errors import InputError

ROWS = (
    Row("Fed-DAN", "fed-dan"),
    Row("Fed-DANN", "fed-dann"),
    Row("Fed-MCD", "fed-mcd"),
    Row("DualAdapt", "dualadapt"),
)

NETS = {
    "Digit-Five": ("digits-dualadapt", 10, 4, 32),
    "DomainNet": ("resnet101", 345, 5, 224),
    "GTA5-to-CrossCity": ("deeplab_mobilenet_v2_half", 13, 4, 512),
}
"""Experiment -> network, classes, clients, side of the pictures in pixels."""

SMALL = {"Digit-Five": NETS["Digit-Five"], "streets": ("segnet-small", 8, 4, 64)}

PRINTED = {
    "Digit-Five": {
        "Fed-DAN": (314.0e6, 493e3, 493e3),
        "Fed-DANN": (314.3e6, 493e3, 493e3),
        "Fed-MCD": (314.6e6, 510e3, 510e3),
        "DualAdapt": (78.7e6, 18e3, 494e3),
    },
    "DomainNet": {
        "Fed-DAN": (36.1e9, 2.5e6, 2.5e6),
        "Fed-DANN": (36.1e9, 2.5e6, 2.5e6),
        "Fed-MCD": (36.1e9, 2.5e6, 2.5e6),
        "DualAdapt": (9.0e9, 0.02e6, 2.5e6),
    },
    "GTA5-to-CrossCity": {
        "Fed-DAN": (31.5e9, 45.4e6, 45.4e6),
        "Fed-DANN": (32.0e9, 45.4e6, 45.4e6),
        "Fed-MCD": (32.6e9, 46.1e6, 46.1e6),
        "DualAdapt": (8.4e9, 1.6e6, 46.2e6),
    },
}
"""Operations a sample, parameters up, parameters down."""

COUNTED = ("FLOPs a sample", "numbers up", "numbers down")
BY_FORMULA = "FLOPs by the paper's formula"


def table4(order: Order) -> Found:
    """Counted on made-up data, exact at any scale; mini leaves the large networks out."""
    nets = NETS if order.scale == "paper" else SMALL
    if order.settings:
        raise InputError(
            "config-key", f"--set {order.settings[0]}: nothing is trained here, and no key changes a count"
        )
    wanted = {row.label: row.method for row in chosen_rows(ROWS, order.methods)}
    sheets = []
    for number, (title, (arch, classes, clients, side)) in enumerate(nets.items()):
        rows: dict[str, list[Value]] = {}
        for label, method in wanted.items():
            found = cost(method, arch, classes, sites=clients, image_size=side)
            published = found.published[1] if found.published else None
            site = found.round
            rows[label] = [site.flops_per_sample, site.upload.numbers, site.broadcast.numbers, published]
            order.tell(f"{label}, {title}", number * len(wanted) + len(rows), len(nets) * len(wanted), 0.0)
        theirs = {
            label: {BY_FORMULA: flops, COUNTED[1]: up, COUNTED[2]: down}
            for label, (flops, up, down) in PRINTED.get(title, {}).items()
            if label in rows
        }
        sheets.append(Sheet(f"{title}: {arch}", (*COUNTED, BY_FORMULA), rows, theirs))
    note = "Counted, on a network made as the paper describes it; its own is not published. Brackets: the paper's."
    return Found(sheets=tuple(sheets), notes=(note,))


def costs_of_runs(records: Sequence[Record], order: Order) -> tuple[list[Sheet], list[Path]]:
    """Table 5: what a client of each row computes for a sample, and sends and gets in a round, as its run counted."""
    rows: dict[str, list[Value]] = {}
    for record in records:
        if record.row in rows:
            continue
        results = order.work / "jobs" / record.job / "results.json"
        if not results.is_file():
            continue
        found = json.loads(results.read_text())
        clients, rounds = len(found["per_target"]), found["rounds"]
        rows[record.row] = [
            found["flops_client"],
            found["bytes"]["up"] / 4 / clients / rounds,
            found["bytes"]["down"] / 4 / clients / rounds,
        ]
    return [Sheet("cost of a client", COUNTED, rows)], []
