"""`fedshift demo`: methods compared on built-in data, with a table and a report, in two minutes on two cores."""

from __future__ import annotations

import shutil
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from fedshift.methods import find_about
from fedshift.report import write_report
from fedshift.runs.config import make_config
from fedshift.runs.execute import run
from fedshift.runs.progress import for_terminal


@dataclass(frozen=True)
class Comparison:
    """Methods on one task. `settings` are the configuration keys that all methods share, `own` those of one method."""

    question: str
    settings: dict[str, Any]
    methods: tuple[str, ...]
    own: dict[str, dict[str, Any]] = field(default_factory=dict)


COMPARISONS = (
    Comparison(
        "generalize: learn from four labelled sites, test on a fifth that no site has seen",
        {
            "dataset": "digits",
            "target": "street",
            "setting": "generalize",
            "rounds": 10,
            "evaluate_every": 2,
            "train_per_site": 300,
            "batch_size": 16,
            "lr": 0.05,
            "momentum": 0.9,
        },
        ("fedavg", "copa", "csac", "oracle"),
        {"csac": {"csac": {"acquisition_epochs": 2, "calibration_epochs": 1}}},
    ),
    Comparison(
        "adapt: the same four sites, and the pictures of the fifth without labels",
        {
            "dataset": "digits",
            "target": "street",
            "setting": "adapt",
            "rounds": 7,
            "evaluate_every": 2,
            "train_per_site": 300,
            "batch_size": 16,
            "lr": 0.05,
            "momentum": 0.9,
        },
        ("source-only", "kd3a"),
    ),
)


DEMO_POINTS = 150
"""Points on each map of features: fewer than usual, so that the page takes only seconds."""


def run_demo(out: Path) -> None:
    """Trains every comparison into the folder `out` and writes report.html there. An earlier demo in it is deleted."""
    started = time.perf_counter()
    console = Console()
    if (out / "demo").exists():
        shutil.rmtree(out)
    out.mkdir(parents=True, exist_ok=True)
    (out / "demo").touch()
    folders = []
    for comparison in COMPARISONS:
        console.print(f"[bold]{comparison.question}[/bold]", highlight=False)
        results = {}
        for method in comparison.methods:
            folder = out / f"{comparison.settings['setting']}-{method}"
            keys = {**comparison.settings, **comparison.own.get(method, {}), "method": method}
            results[method] = run(make_config(keys), folder, progress=for_terminal())
            folders.append(folder)
        console.print(_table(results))
    console.print("A bound uses data or labels that sites may not share. It is only for comparison.", highlight=False)
    report = out / "report.html"
    write_report(folders, report, points=DEMO_POINTS)
    console.print(f"{time.perf_counter() - started:.0f} s in total. Open {report} in a browser.", highlight=False)


def _table(results: dict[str, dict[str, Any]]) -> Table:
    first = next(iter(results.values()))
    table = Table()
    table.add_column("method")
    for target in first["per_target"]:
        table.add_column(f"{target}, last round", justify="right")
        table.add_column("source-validated", justify="right")
    table.add_column("MB up", justify="right")
    table.add_column("seconds", justify="right")
    for method, found in results.items():
        bound = " [dim](a bound)[/dim]" if find_about(method).is_bound else ""
        cells = [
            f"{100 * scores[rule]:.1f} %" for scores in found["per_target"].values() for rule in ("last", "source_val")
        ]
        table.add_row(method + bound, *cells, f"{found['bytes']['up'] / 1e6:.1f}", f"{found['seconds']['total']:.0f}")
    return table
