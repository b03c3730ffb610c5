"""All suites by name. Each paper's file has its grids of trainings (`EXPERIMENTS`) and its other suites (`SUITES`)."""

from __future__ import annotations

from typing import Any

from fedshift.bench.grid import as_suite
from fedshift.bench.papers import copa, csac, dualadapt, kd3a, ours, poison, robust
from fedshift.bench.papers.selection import SELECTION
from fedshift.bench.suite import Suite
from fedshift.errors import InputError, nearest

EXPERIMENTS = (
    *copa.EXPERIMENTS,
    *csac.EXPERIMENTS,
    *kd3a.EXPERIMENTS,
    *dualadapt.EXPERIMENTS,
    *robust.EXPERIMENTS,
    *poison.EXPERIMENTS,
    *ours.EXPERIMENTS,
)


def _position(suite: Suite) -> tuple[bool, str, str]:
    """Sorts by paper, tables before figures."""
    paper, _, name = suite.name.partition("/")
    return not name, paper, name.replace("table", "0").replace("fig", "1")


SUITES: dict[str, Suite] = {
    suite.name: suite
    for suite in sorted(
        [*map(as_suite, EXPERIMENTS), *csac.SUITES, *kd3a.SUITES, *dualadapt.SUITES, SELECTION], key=_position
    )
}


def find_suite(name: str) -> Suite:
    suite = SUITES.get(name.lower())
    if suite is None:
        raise InputError("unknown-name", f"There is no suite {name!r}. {nearest(name, SUITES)}")
    return suite


def describe() -> list[dict[str, Any]]:
    """Name, paper, question, needs and cost of every suite, for lists and programs."""
    return [
        {
            "name": suite.name,
            "paper": suite.paper,
            "question": suite.question,
            "needs": "; ".join(f"{scale}: {needed}" for scale, needed in suite.needs.items()),
            "cost": "; ".join(f"{scale}: {cost}" for scale, cost in suite.cost.items()),
        }
        for suite in SUITES.values()
    ]
