"""The files of a suite: the same tables as text, Markdown, CSV, LaTeX and JSON."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

from fedshift.bench.changes import changes_of
from fedshift.bench.sheets import Sheet
from fedshift.bench.suite import Found, Order, Suite
from fedshift.bench.tables import CONFIDENCE, Table, comma_separated, latex, markdown, plain, text
from fedshift.files import write_atomically


def write_tables(suite: Suite, order: Order, found: Found) -> list[Path]:
    """Writes table.{txt,md,csv,tex,json} into the order's folder, and returns their paths."""
    tables: list[Table | Sheet] = [*found.tables, *found.sheets]
    order.out.mkdir(parents=True, exist_ok=True)
    contents = {
        "txt": _page(suite, order, found, text, ""),
        "md": _page(suite, order, found, markdown, ""),
        "tex": _page(suite, order, found, latex, "% "),
        "csv": comma_separated(*tables),
        "json": json.dumps(
            {
                "suite": suite.name,
                "paper": suite.paper,
                "question": suite.question,
                "scale": order.scale,
                "changed": vars(changes_of(suite, order)),
                "notes": list(found.notes),
                "tables": [plain(table) for table in tables],
                "files": [path.name for path in found.files],
                "failures": [
                    {"row": f.job.row, "column": f.job.column, "seed": f.job.config.seed, "error": f.words}
                    for f in found.failures
                ],
            },
            indent=2,
        )
        + "\n",
    }
    paths = [order.out / f"table.{ending}" for ending in contents]
    for path, content in zip(paths, contents.values(), strict=True):
        write_atomically(path, content.encode())
    return paths


def _page(suite: Suite, order: Order, found: Found, render: Callable[[Table | Sheet], str], before: str) -> str:
    changed = ", changed" if changes_of(suite, order).words else ""
    parts = [f"{before}{suite.name} ({suite.paper}), scale {order.scale}{changed}: {suite.question}"]
    parts += [f"{before}{note}" for note in found.notes]
    parts += [f"{before}{caption(table)}\n\n{render(table)}" for table in found.tables]
    parts += [f"{before}{sheet.title}\n\n{render(sheet)}" for sheet in found.sheets]
    if found.failures:
        lines = [f"{before}- {f.job.row}, {f.job.column}, seed {f.job.config.seed}: {f.words}" for f in found.failures]
        parts.append("\n".join([f"{before}Failed:", *lines]))
    return "\n\n".join(parts) + "\n"


def caption(table: Table) -> str:
    """What the numbers are."""
    count = len(table.seeds)
    seeds = ", ".join(str(seed) for seed in table.seeds)
    over = f"mean ± standard deviation over seeds {seeds}" if count > 1 else f"seed {seeds}"
    words = [f"{table.title}; round: {table.rule}. Per cent, {over}."]
    if not table.is_complete:
        words.append("A row with numbers over fewer seeds says so.")
    if table.differences:
        words.append(
            f"Last column: mean difference to {table.baseline} over pairs of equal column and seed, with its"
            f" {CONFIDENCE:.0%} interval."
        )
    if any(cell.theirs is not None for own in table.cells.values() for cell in own.values()):
        words.append("In brackets: what the paper printed.")
    return " ".join(words)
