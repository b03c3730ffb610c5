"""`fedshift demo`: methods compared on built-in data, with a table and a report, in all three settings."""

from __future__ import annotations

import shutil
import time
from dataclasses import dataclass
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
    """Methods on one task. `settings` are the configuration keys that all methods share; `methods` are the method of
    each row, with its own keys. `reading` says what to look at in the table."""

    question: str
    settings: dict[str, Any]
    methods: dict[str, dict[str, Any]]
    reading: str


_COMMON: dict[str, Any] = {
    "dataset": "digits",
    "image_size": 16,  # a quarter of the time of 32
    "train_per_site": 300,
    "batch_size": 16,
    "lr": 0.05,
    "momentum": 0.9,
}

COMPARISONS = (
    Comparison(
        "generalize: learn from four labelled sites, test on a fifth that no site has seen",
        {**_COMMON, "setting": "generalize", "target": "street", "rounds": 24, "evaluate_every": 8},
        {
            "fedavg": {},
            "deepall": {},
            "copa": {},
            "csac": {"rounds": 20, "csac": {"acquisition_epochs": 4, "calibration_epochs": 1}},
            "fedlooks": {},
        },
        "deepall has all labelled pictures in one place, which sites may not do: FedAvg does without, and COPA gets"
        " back much of the difference. FedLooks, which also learns from pictures that look as no site's do, gets back"
        " all of it; CSAC needs more steps than a demo has.",
    ),
    Comparison(
        "adapt: the same four sites, and the pictures of the fifth without labels",
        {**_COMMON, "setting": "adapt", "target": "street", "rounds": 8, "local_epochs": 3, "evaluate_every": 4},
        {"source-only": {}, "adabn": {}, "kd3a": {}, "fedlooks": {}},
        "source-only ignores the pictures of the fifth site, and adabn takes only means and variances from them."
        " What KD3A is above adabn it has learned from what the other sites' models agree on; FedLooks normalises as"
        " adabn does, and its sources learn from pictures that look as no site's do.",
    ),
    Comparison(
        "multi-adapt: one labelled home, and a model for each of four sites without labels",
        {
            **_COMMON,
            "setting": "multi-adapt",
            "home": "handwritten",
            "arch": "digits-dualadapt",
            "train_per_site": 400,
            "rounds": 12,
            "evaluate_every": 6,
        },
        {
            "source-only": {},
            "adabn": {},
            "dualadapt": {"rounds": 7, "norm": "own", "local_epochs": 1, "dualadapt": {"pretrain_epochs": 6}},
            "fedlooks": {},
        },
        "With one source, normalising by each site's own pictures, as adabn does, is all that DualAdapt gains here"
        " (norm=own). FedLooks also trains the home's model on pictures that look as no site's do.",
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
        for method, own in comparison.methods.items():
            folder = out / f"{comparison.settings['setting']}-{method}"
            keys = {**comparison.settings, **own, "method": method}
            results[method] = run(make_config(keys), folder, progress=for_terminal())
            folders.append(folder)
        console.print(_table(results))
        console.print(comparison.reading, highlight=False)
    console.print("A bound uses data or labels that sites may not share. It is only for comparison.", highlight=False)
    report = out / "report.html"
    write_report(folders, report, points=DEMO_POINTS)
    console.print(f"{time.perf_counter() - started:.0f} s in total. Open {report} in a browser.", highlight=False)


def _table(results: dict[str, dict[str, Any]]) -> Table:
    first = next(iter(results.values()))
    is_many = len(first["per_target"]) > 1
    table = Table()
    table.add_column("method")
    for target in first["per_target"]:
        table.add_column(target if is_many else f"{target}, last round", justify="right")
        if not is_many:
            table.add_column("source-validated", justify="right")
    table.add_column("MB up", justify="right")
    table.add_column("seconds", justify="right")
    for method, found in results.items():
        bound = " [dim](a bound)[/dim]" if find_about(method).is_bound else ""
        cells = [
            f"{100 * scores[rule]:.1f} %"
            for scores in found["per_target"].values()
            for rule in (("last",) if is_many else ("last", "source_val"))
        ]
        table.add_row(method + bound, *cells, f"{found['bytes']['up'] / 1e6:.1f}", f"{found['seconds']['total']:.0f}")
    return table
