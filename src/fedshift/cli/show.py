"""Tables for the terminal, and the same as JSON where programs read them."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rich.box import HORIZONTALS
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from fedshift.data import DataReport, list_datasets
from fedshift.errors import InputError
from fedshift.federation.handshake import introduce
from fedshift.federation.kinds import kinds
from fedshift.methods import METHODS, find_about, find_method
from fedshift.methods.evaluation import score
from fedshift.nn.archs import ARCHS
from fedshift.report.words import explain_counter
from fedshift.runs.card import skipped_throughout

_SHOWN = 10
"""How many unreadable files and duplicates are named one by one; the counts are complete."""


def show_list(what: str, part: str = "", *, as_json: bool) -> None:
    everything = {"methods": _methods, "datasets": _datasets, "archs": _archs, "suites": _suites}[what]()
    rows = [row for row in everything if part.lower() in row["name"].lower()]
    if not rows:
        raise InputError("unknown-name", f"no {what} with {part!r} in their name: fedshift list {what}")
    if as_json:
        print(json.dumps(rows, indent=2))
        return
    if what == "suites":
        rows = [_in_short(row) for row in rows]
    table = Table(box=None, header_style="bold", pad_edge=False)
    for column in rows[0]:
        table.add_column(column, overflow="fold")
    for row in rows:
        table.add_row(*(_cell(value) for value in row.values()))
    Console().print(table)


def show_results(results: Mapping[str, Any], folder: Path) -> None:
    table = Table(title=f"{results['method']} on {results['dataset']}", title_justify="left")
    table.add_column("target")
    table.add_column("test samples", justify="right")
    for rule in ("last round", "source-validated round", "oracle round"):
        table.add_column(rule, justify="right")
    skipped = skipped_throughout(results)
    for target, scores in results["per_target"].items():
        count = f"{results['samples'][target]['test']:,}"
        name = f"{target} (skipped)" if target in skipped else target
        table.add_row(
            escape(name), count, *(f"{100 * scores[rule]:.1f} %" for rule in ("last", "source_val", "oracle"))
        )
    console = Console()
    if results["per_target"]:
        console.print(table)
    else:
        console.print("No score: no target with labels to test on.")
    for target in skipped:
        told = f"{target} was skipped in every round: it is scored with what was learned without it."
        console.print(told, markup=False, highlight=False)
    console.print(
        f"{results['seconds']['total']:.0f} s, {results['bytes']['up'] / 1e6:.1f} MB up,"
        f" {results['bytes']['down'] / 1e6:.1f} MB down; run in {folder}",
        highlight=False,
    )
    for name, count in results["counters"].items():
        console.print(f"[yellow]{escape(name)} x{count}[/yellow] {escape(explain_counter(name))}", highlight=False)


def show_data_report(report: DataReport) -> None:
    console = Console()
    table = Table(
        title=f"{report.task}, {len(report.classes)} classes, inputs {report.input_shape}", title_justify="left"
    )
    for column in ("domain", "class", "train", "val", "test"):
        table.add_column(column, justify="left" if column in ("domain", "class") else "right")
    for domain in report.domains:
        rows = {"all": domain.splits, **(domain.classes or {"no labels": {}})}
        for number, (label, counts) in enumerate(rows.items()):
            cells = [str(counts.get(split, "")) for split in ("train", "val", "test")]
            table.add_row(
                escape(domain.name) if number == 0 else "", escape(label), *cells, end_section=number == len(rows) - 1
            )
    if report.domains:
        console.print(table)
    for domain in report.domains:
        sizes = ", ".join(f"{w}x{h} ({n})" for (h, w), n in sorted(domain.sizes.items(), key=lambda item: -item[1])[:5])
        if sizes:
            console.print(f"{domain.name}: image sizes {sizes}", markup=False, highlight=False)
        for skipped in domain.skipped[:_SHOWN]:
            _line(console, "yellow", "unreadable", f"{skipped.file}: {skipped.reason}")
    for duplicate in report.duplicates[:_SHOWN]:
        _line(console, "yellow", "duplicate", f"{duplicate.first} = {duplicate.second} (across {duplicate.across})")
    for warning in report.warnings:
        _line(console, "yellow", "warning", warning)
    for problem in report.problems:
        _line(console, "red", "problem", f"[{problem.code}] {problem.message}")
    console.print("A run can start." if report.ok else "A run cannot start.")


def _line(console: Console, colour: str, what: str, text: str) -> None:
    console.print(f"[{colour}]{what}[/{colour}] {escape(text)}", highlight=False)


def show_privacy(method: str) -> None:
    """What leaves a site, straight from the types that the code itself obeys."""
    implementation, about = find_method(method), find_about(method)
    table = Table(
        title=f"What leaves a site under {method.lower()}",
        title_justify="left",
        box=HORIZONTALS,
        pad_edge=False,
        padding=(0, 1, 0, 0),
    )
    # Names have to be read whole; sentences may wrap. A step has a line of its own, so that 80 columns are enough.
    for column in ("step and field", "kind"):
        table.add_column(column, no_wrap=True, overflow="fold")
    for column in ("what it is", "to", "secure aggregation"):
        table.add_column(column, min_width=12, overflow="fold")
    # Before the first round every site introduces itself, and every one with labels scores the model.
    for step in (introduce, *implementation.steps, score):
        table.add_section()
        table.add_row(step.name)
        for field, kind in kinds(step.release).items():
            if field in about.unsent:
                continue
            alone = "possible: only the sum is used" if field in step.release.summed else "no: used one by one"
            to = "coordinator, other sites" if field in step.release.passed_on else "coordinator"
            table.add_row(f"  {field}", kind.name, kind.meaning, to, alone)
    console = Console()
    console.print(table)
    if about.data != "federated":
        console.print(f"[yellow]Beyond that, {about.name} needs {escape(about.needs)}.[/yellow]", highlight=False)


def _methods() -> list[dict[str, Any]]:
    return [
        {
            "name": name,
            "setting": ", ".join(entry.about.settings),
            "paper": entry.about.paper,
            "needs": entry.about.needs,
        }
        for name, entry in METHODS.items()
    ]


def _datasets() -> list[dict[str, Any]]:
    return [
        {
            "name": info.name,
            "domains": list(info.domains),
            "classes": list(info.classes),
            "builtin": info.builtin,
            "description": info.description,
        }
        for info in list_datasets()
    ]


def _archs() -> list[dict[str, Any]]:
    return [
        {"name": arch.name, "kind": arch.kind, "imagenet": arch.imagenet, "description": arch.description}
        for arch in ARCHS.values()
    ]


def _suites() -> list[dict[str, Any]]:
    # Imported here: it reads the recipes of all suites.
    from fedshift.bench.suites import SUITES

    return [
        {
            "name": suite.name,
            "paper": suite.paper,
            "question": suite.question,
            "needs": "; ".join(f"{scale}: {words}" for scale, words in suite.needs.items()),
            "cost": "; ".join(f"{scale}: {words}" for scale, words in suite.cost.items()),
        }
        for suite in SUITES.values()
    ]


def _in_short(suite: Mapping[str, Any]) -> dict[str, Any]:
    """Five columns of sentences would be unreadable: two, with paper, needs and costs below the question."""
    lines = (suite["question"], f"  {suite['paper']}", f"  needs {suite['needs']}", f"  costs {suite['cost']}")
    about = "\n".join(lines)
    return {"name": suite["name"], "question, needs and costs": about}


def _cell(value: Any) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    return ", ".join(str(item) for item in value) if isinstance(value, list | tuple) else str(value)
