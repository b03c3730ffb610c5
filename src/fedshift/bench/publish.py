"""Writes the tables of a suite as text, Markdown, CSV, LaTeX and JSON."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

from fedshift.bench.overrides import overrides_of
from fedshift.bench.suite import Suite, SuiteRequest, SuiteResult
from fedshift.bench.tables import CONFIDENCE, Sheet, Table, comma_separated, latex, markdown, plain, text
from fedshift.files import write_atomically


def write_tables(suite: Suite, request: SuiteRequest, result: SuiteResult) -> list[Path]:
    """Writes table.{txt,md,csv,tex,json} into the request's folder and returns their paths."""
    tables: list[Table | Sheet] = [*result.tables, *result.sheets]
    request.out.mkdir(parents=True, exist_ok=True)
    contents = {
        "txt": _page(suite, request, result, text, ""),
        "md": _page(suite, request, result, markdown, ""),
        "tex": _page(suite, request, result, latex, "% "),
        "csv": comma_separated(*tables),
        "json": json.dumps(
            {
                "suite": suite.name,
                "paper": suite.paper,
                "question": suite.question,
                "scale": request.scale,
                "changed": vars(overrides_of(suite, request)),
                "notes": list(result.notes),
                "tables": [plain(table) for table in tables],
                "files": [path.name for path in result.files],
                "failures": [
                    {"row": f.job.row, "column": f.job.column, "seed": f.job.config.seed, "error": f.message}
                    for f in result.failures
                ],
            },
            indent=2,
        )
        + "\n",
    }
    paths = [request.out / f"table.{ending}" for ending in contents]
    for path, content in zip(paths, contents.values(), strict=True):
        write_atomically(path, content.encode())
    return paths


def _page(
    suite: Suite, request: SuiteRequest, result: SuiteResult, render: Callable[[Table | Sheet], str], before: str
) -> str:
    changed = ", changed" if overrides_of(suite, request).options else ""
    parts = [f"{before}{suite.name} ({suite.paper}), scale {request.scale}{changed}: {suite.question}"]
    parts += [f"{before}{note}" for note in result.notes]
    parts += [f"{before}{caption(table)}\n\n{render(table)}" for table in result.tables]
    parts += [f"{before}{sheet.title}\n\n{render(sheet)}" for sheet in result.sheets]
    if result.failures:
        lines = [
            f"{before}- {f.job.row}, {f.job.column}, seed {f.job.config.seed}: {f.message}" for f in result.failures
        ]
        parts.append("\n".join([f"{before}Failed:", *lines]))
    return "\n\n".join(parts) + "\n"


def caption(table: Table) -> str:
    """Says what the numbers of a table are."""
    count = len(table.seeds)
    seeds = ", ".join(str(seed) for seed in table.seeds)
    over = f"mean ± standard deviation over seeds {seeds}" if count > 1 else f"seed {seeds}"
    sentences = [f"{table.title}; round: {table.rule}. Per cent, {over}."]
    if not table.is_complete:
        sentences.append("Rows with fewer seeds say so.")
    if table.differences:
        sentences.append(
            f"Last column: mean difference to {table.baseline} over pairs of equal column and seed, with its"
            f" {CONFIDENCE:.0%} interval."
        )
    if any(cell.theirs is not None for own in table.cells.values() for cell in own.values()):
        sentences.append("In brackets: what the paper printed.")
    return " ".join(sentences)
