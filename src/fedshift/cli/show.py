"""What commands print: results of a run, a data report, cost, a benchmark."""

from __future__ import annotations

import dataclasses
import json
import sys
from collections.abc import Mapping
from math import isclose
from pathlib import Path
from typing import Any

from rich.box import HORIZONTALS
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from fedshift.audit.cost import TOLERANCE, Cost, Part, Sent, SiteCost
from fedshift.audit.ledger import LedgerAudit
from fedshift.bench.publish import caption
from fedshift.bench.run import FailedJob
from fedshift.bench.suite import SuiteResult
from fedshift.bench.tables import text
from fedshift.data import DataReport
from fedshift.data.shift import Shift
from fedshift.report.text import byte_size, duration, explain_counter, plural
from fedshift.runs.card import skipped_throughout
from fedshift.runs.health import PREDICT_RULE, class_overlaps, in_percent
from fedshift.runs.privacy import privacy_lines, read_promised

_MOST_FEATURES = 12
_SHOWN = 10
"""At most this many unreadable files and duplicates are named; the counts include all."""


def show_ledger(console: Console, found: LedgerAudit) -> None:
    """`fedshift audit ledger`: what one site was asked, and what left it, by kind."""
    asked = sum(found.questions.values())
    steps = ", ".join(f"{step or '(unreadable)'} x{count}" for step, count in sorted(found.questions.items()))
    console.print(
        f"{found.path}: whole, {found.lines:,} lines from {found.first or 'never'} to {found.last or 'never'}\n"
        f"{asked:,} questions, {found.answers:,} answers ({byte_size(found.answer_bytes)}),"
        f" {asked - found.answers:,} without an answer\nsteps asked for: {steps or 'none'}"
    )
    if found.codes:
        console.print("refused or failed: " + ", ".join(f"{code} x{n}" for code, n in sorted(found.codes.items())))
    table = Table(box=HORIZONTALS)
    table.add_column("kind")
    for name in ("releases", "values", "bytes", "rounds"):
        table.add_column(name, justify="right")
    for kind, total in sorted(found.kinds.items()):
        table.add_row(kind, f"{total.releases:,}", f"{total.values:,}", f"{total.bytes:,}", f"{len(total.rounds):,}")
    console.print(table)
    if found.epsilon is not None:
        console.print(f"Spent of the site's budget of privacy by then, in all runs: epsilon {found.epsilon:.4g}.")
    if found.behind:
        console.print(f"The site was stopped while it wrote: {found.behind} lines are newer than the ledger's head.")
    console.print(f"SHA-256 of the last line: {found.head}\n")


def show_results(results: Mapping[str, Any], folder: Path) -> None:
    """`fedshift train`: the scores per target, what the run cost, what was counted."""
    table = Table(title=f"{results['method']} on {results['dataset']}", title_justify="left")
    table.add_column("target")
    table.add_column("test samples", justify="right")
    is_segmentation = results["task"] == "segmentation"
    unit = "mIoU" if is_segmentation else "95 % interval"
    for rule in (f"last round ({unit})", f"source-validated ({unit})", "oracle round"):
        table.add_column(rule, justify="right")
    skipped = skipped_throughout(results)
    for target, scores in results["per_target"].items():
        count = results["samples"][target]["test"]
        name = f"{target} (skipped)" if target in skipped else target
        table.add_row(
            escape(name),
            f"{count:,}",
            *(in_percent(scores[rule], count, results["task"]) for rule in ("last", "source_val")),
            f"{100 * scores['oracle']:.1f} %",
        )
    console = Console()
    if results["per_target"]:
        console.print(table)
    else:
        console.print("No score: no target with labels to test on.")
    if is_segmentation and results["per_target"]:
        console.print(_by_class(results))
    for target in skipped:
        note = f"{target} was skipped in every round: its score is of a model that learned without it."
        console.print(note, markup=False, highlight=False)
    console.print(
        f"{results['seconds']['total']:.0f} s, {results['bytes']['up'] / 1e6:.1f} MB up,"
        f" {results['bytes']['down'] / 1e6:.1f} MB down; run in {folder}",
        highlight=False,
    )
    for name, count in results["counters"].items():
        console.print(f"[yellow]{escape(name)} x{count}[/yellow] {escape(explain_counter(name))}", highlight=False)
    for line in privacy_lines(read_promised(results)):
        console.print(f"differential privacy: {escape(line)}")
    for found in results.get("warnings", ()):
        code, text, advice = (escape(found[key]) for key in ("code", "text", "advice"))
        console.print(f"[bold yellow]warning: {code}[/bold yellow] {text} [dim]{advice}[/dim]", highlight=False)
    console.print(PREDICT_RULE, markup=False, highlight=False)


def _by_class(results: Mapping[str, Any]) -> Table:
    """IoU and Dice of each class in the last round: their mean alone hides a class that is never found."""
    table = Table(title="last round by class: IoU / Dice, %", title_justify="left")
    table.add_column("class")
    scores = {target: class_overlaps(matrix) for target, matrix in results["confusion"].items()}
    for target in scores:
        table.add_column(escape(target), justify="right")
    for number, name in enumerate(results["classes"]):
        table.add_row(escape(name), *(found[number] for found in scores.values()))
    return table


def show_data_report(report: DataReport, *, as_json: bool = False, shift: Shift | None = None) -> None:
    """`fedshift check-data`: samples per domain, class and split, and every problem."""
    if as_json:
        print(json.dumps(report.as_json() | ({"shift": shift.as_json()} if shift else {}), indent=2))
        return
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
    if shift:
        _show_shift(console, shift)
    console.print("A run can start." if report.ok else "A run cannot start.")


def _show_shift(console: Console, shift: Shift) -> None:
    """How sites look, and a number for every pair; only means over many samples."""
    names = list(dict.fromkeys(name for site in shift.sites for name in site.means))[:_MOST_FEATURES]
    table = Table(title="how sites look: means over samples", title_justify="left")
    for column in ("site", "samples", *names, "classes"):
        table.add_column(column, justify="left" if column in ("site", "classes") else "right", overflow="fold")
    for site in shift.sites:
        shares = sorted((site.classes or {}).items(), key=lambda item: -item[1])
        told = ", ".join(f"{name} {100 * share:.0f} %" for name, share in shares[:3]) + (", ..." if shares[3:] else "")
        means = [_short(site.means[name]) if name in site.means else "-" for name in names]
        table.add_row(escape(site.name), f"{site.samples:,}", *means, escape(told) or "no labels")
    console.print(table)
    pairs = Table(title="how far sites are apart (0: alike, 0.5: visible, 1: strong)", title_justify="left")
    for column in ("", *(site.name for site in shift.sites)):
        pairs.add_column(escape(column), justify="right" if column else "left")
    for one in shift.sites:
        cells = [f"{shift.between(one.name, o.name):.2f}" if o is not one else "" for o in shift.sites]
        pairs.add_row(escape(one.name), *cells)
    console.print(pairs)
    for name in shift.unlike:
        why = ", ".join(shift.reasons(name))
        _line(console, "yellow", "unlike", f"{name} looks unlike the others{f': {why}' if why else ''}")
    for site in shift.sites:
        gaps = sorted(((share, name) for name, share in site.missing.items() if share >= 0.2), reverse=True)
        if gaps:
            told = ", ".join(f"{name} {100 * share:.0f} %" for share, name in gaps[:6])
            _line(console, "yellow", "missing", f"{site.name}: {told} of the rows{' and more' if gaps[6:] else ''}")
    for name in shift.too_small:
        _line(console, "yellow", "small", f"{name} has too few samples for statistics")


def _short(value: float) -> str:
    return "0" if abs(value) < 5e-4 else f"{value:.3g}"


def _line(console: Console, colour: str, what: str, text: str) -> None:
    console.print(f"[{colour}]{what}[/{colour}] {escape(text)}", highlight=False)


def show_cost(cost: Cost, *, as_json: bool) -> None:
    """`fedshift cost`: totals beside the paper's formulas, then step by step."""
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
            f"The coordinator: {si(cost.home_flops)}FLOP in the last round, on its own {cost.samples} samples."
        )
    if cost.published:
        formula, value = cost.published
        console.print(
            f"Published formula: {formula} = {si(value)}FLOP (it counts a backward pass like a forward pass)."
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
    table = Table(title="Per site and round", title_justify="left")
    for column in ("", "counted", "formula", "its value", f"agree (to {TOLERANCE:.0%})"):
        table.add_column(column, justify="right" if column in ("counted", "its value") else "left")
    found = {comparison.quantity: comparison for comparison in cost.comparisons}
    counted = {
        "FLOPs per sample": cost.round.flops_per_sample,
        "numbers uploaded": cost.round.upload.numbers,
        "numbers broadcast": cost.round.broadcast.numbers,
    }
    for quantity, number in counted.items():
        comparison = found.get(quantity)
        beside = (
            (comparison.formula, f"{comparison.value:,.0f}", "yes" if comparison.agrees else "no")
            if comparison
            else ("-", "", "")
        )
        table.add_row(quantity, f"{number:,.0f}", *beside)
    for name, sent in (("bytes uploaded", cost.round.upload), ("bytes broadcast", cost.round.broadcast)):
        table.add_row(name, f"{sent.bytes:,.0f}", "4 per number, and headers", f"{4 * sent.numbers:,.0f}", "")
    return table


def _steps(cost: Cost) -> Table:
    """Each step, and the total of the first round if it differs from the later ones."""
    table = Table(title="By step, with the numbers in each field", title_justify="left", show_lines=True)
    for column in ("step", "asked", "FLOPs per sample", "other FLOPs", "up", "down"):
        table.add_column(column, justify="left" if column == "step" else "right", no_wrap=column == "step")
    rows = dict(cost.steps)
    sizes = zip(_sizes(cost.first_round), _sizes(cost.round), strict=True)
    if not all(isclose(first, later, rel_tol=TOLERANCE) for first, later in sizes):
        rows["first round, total"] = cost.first_round
    for name, row in rows.items():
        table.add_row(
            name,
            f"{row.times:g} x",
            si(row.flops_per_sample),
            si(row.other_flops),
            _sent(row.upload),
            _sent(row.broadcast),
        )
    return table


def _sent(sent: Sent) -> str:
    """The size, then one line per field with how many numbers it has."""
    return "\n".join([byte_size(sent.bytes), *(f"{field} {number:,.0f}" for field, number in sent.fields.items())])


def _sizes(row: SiteCost) -> tuple[float, float]:
    return row.upload.numbers, row.broadcast.numbers


def show_progress(what: str, done: int, total: int, left: float) -> None:
    """One line per finished training; `left` is the estimated time left in seconds."""
    print(f"{done}/{total}  {what}{f'; {duration(left)} left' if left >= 1 else ''}", file=sys.stderr, flush=True)


def show_found(found: SuiteResult) -> None:
    console = Console(highlight=False, markup=False, soft_wrap=True)
    for note in found.notes:
        console.print(note)
    for table in found.tables:
        console.print(f"\n{caption(table)}\n{text(table)}", end="")
    for sheet in found.sheets:
        console.print(f"\n{sheet.title}\n{text(sheet)}", end="")
    for path in found.files:
        console.print(f"picture: {path}")
    if found.broken_lines:
        console.print(f"{plural(found.broken_lines, 'half-written line')} in the records left out")
    console.print(f"\ntables: {found.out / 'table'}.txt, .md, .csv, .tex, .json")
    if found.failures:
        console.print(f"{plural(len(found.failures), 'training')} failed; all others are in the table:")
    alike: dict[str, list[FailedJob]] = {}
    for failure in found.failures:
        alike.setdefault(failure.message, []).append(failure)
    for words, failures in alike.items():
        job = failures[0].job
        console.print(f"  {job.row}, {job.column}, seed {job.config.seed}: {words} (log: {failures[0].log})")
        if len(failures) > 1:
            console.print(f"    and {len(failures) - 1} more with the same message (their logs are in the same folder)")
