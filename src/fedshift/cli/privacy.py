"""`fedshift privacy`: what leaves a site, and the noise that a budget of differential privacy takes."""

from __future__ import annotations

from typing import Any, cast, get_args

from rich.box import HORIZONTALS
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from fedshift.audit.privacy import propose
from fedshift.errors import InputError
from fedshift.federation.handshake import introduce
from fedshift.federation.policy import Level
from fedshift.federation.releases import kinds
from fedshift.methods import find_about, find_method
from fedshift.methods.calibration import sureness
from fedshift.methods.evaluation import score
from fedshift.methods.probe import probe
from fedshift.methods.statistics import measure
from fedshift.runs.privacy import LEVELS, OUTSIDE


def show_privacy(method: str) -> None:
    """`fedshift privacy`: what leaves a site, read from the types that the code itself obeys."""
    implementation, about = find_method(method), find_about(method)
    table = Table(
        title=f"What leaves a site under {method.lower()}",
        title_justify="left",
        box=HORIZONTALS,
        pad_edge=False,
        padding=(0, 1, 0, 0),
    )
    # Names must not wrap; sentences may. Each step has its own line, so that 80 columns are enough.
    for column in ("step and field", "kind"):
        table.add_column(column, no_wrap=True, overflow="fold")
    for column in ("what it is", "to", "secure aggregation"):
        table.add_column(column, min_width=12, overflow="fold")
    # Besides the method's steps, every site introduces itself once, trains a head with probe_epochs, measures its
    # statistics with norm=own, and scores models if it has labels. DualAdapt's clients send theirs in its own step.
    measures = "multi-adapt" in about.settings and not about.uses_statistics
    probes = about.aggregation != "own"
    for step in (
        introduce,
        *((probe,) if probes else ()),
        *implementation.steps,
        *((measure,) if measures else ()),
        score,
        sureness,
    ):
        table.add_section()
        table.add_row(step.name)
        for field, kind in kinds(step.release).items():
            if field in about.unsent:
                continue
            is_summed = field in step.release.summed
            aggregation = "possible: only the sum is used" if is_summed else "no: used one by one"
            to = "coordinator, other sites" if field in step.release.passed_on else "coordinator"
            table.add_row(f"  {field}", kind.name, kind.meaning, to, aggregation)
    console = Console()
    console.print(table)
    if about.data != "federated":
        console.print(f"[yellow]In addition, {about.name} needs {escape(about.needs)}.[/yellow]", highlight=False)


def show_proposal(method: str, epsilon: float, rounds: int, delta: float, name: str, how: dict[str, Any]) -> None:
    """`fedshift privacy METHOD --epsilon E`: the noise, and the keys that set it."""
    if name not in get_args(Level):
        raise InputError("config-value", f"--level {name}: site or record")
    level = cast(Level, name)
    found = propose(method, epsilon, rounds, delta=delta, level=level, **how)
    print(f"{method}, {rounds} rounds: a site gives {found.answers} answers with noise")
    if level == "record":
        print(f"each is {found.steps} steps of DP-SGD; a sample is in a batch with chance {found.rate:.4g} (Poisson)")
    print(f"epsilon {epsilon:g} at delta {delta:g} takes noise of {found.noise:g} times an answer's sensitivity\n")
    print("\n".join(f"  --set policy.{key}={value:.10g}" for key, value in found.settings.items()))
    print(f"\nIt protects {LEVELS[level]}, towards whoever sees the site's own answers.\n{OUTSIDE}")
    if level == "site":
        small, usual = (f"{found.sites_needed(n):,}" for n in (10_000, 1_000_000))
        print(
            f"The noise on the mean of all sites is as long as the longest update with {small} sites for a network of"
            f" 10,000 numbers, and with {usual} for one of a million: with fewer, little is learned."
        )
