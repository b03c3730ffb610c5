"""Every suite by name. One that is a grid of trainings is an entry in its paper's file; one that is a function of its
own (`Order -> Found`) is an entry here."""

from __future__ import annotations

import functools
from dataclasses import replace

from fedshift.bench import recipes
from fedshift.bench.costs import ROWS, table4
from fedshift.bench.experiment import Experiment, as_suite
from fedshift.bench.jobs import Row
from fedshift.bench.layouts import each_target
from fedshift.bench.leaks import fig5
from fedshift.bench.local_models import run_local_models
from fedshift.bench.populations import fig4
from fedshift.bench.rules import SELECTION
from fedshift.bench.suite import Suite
from fedshift.bench.suites import copa, csac, dualadapt, kd3a
from fedshift.errors import InputError, nearest

EXPERIMENTS = (*copa.EXPERIMENTS, *csac.EXPERIMENTS, *kd3a.EXPERIMENTS, *dualadapt.EXPERIMENTS)

LOCAL_MODELS = Experiment(
    "csac/fig9",
    f"{csac.PAPER}, Figure 9",
    "How good is each site's model on every domain, before and after fusion?",
    (Row("CSAC", "csac"),),
    each_target,
    (recipes.CSAC_PACS.at("sketch").with_seeds(0),),
    recipes.DIGITS.at("street"),
)

FUNCTIONS = (
    replace(as_suite(LOCAL_MODELS), run=functools.partial(run_local_models, LOCAL_MODELS)),
    Suite(
        name="dualadapt/table4",
        paper=f"{dualadapt.PAPER}, Table 4",
        question="What does each method cost a client: operations, numbers up and down?",
        needs={"mini": "nothing: counted on made-up pictures", "paper": "nothing: counted on made-up pictures"},
        cost={"mini": "about a minute", "paper": "some minutes on 2 cores"},
        run=table4,
        rows=ROWS,
    ),
    Suite(
        name="csac/fig4",
        paper=f"{csac.PAPER}, Figure 4",
        question="Do parameters know their domain?",
        needs={"mini": "nothing: built-in digits", "paper": "Digits-DG, VLCS and ImageNet weights of resnet18"},
        cost={"mini": "about 5 minutes on 2 cores", "paper": "400 trainings of resnet18, days on a GPU"},
        run=fig4,
        seeds={"mini": (0,), "paper": (0,)},
    ),
    Suite(
        name="kd3a/fig5",
        paper=f"{kd3a.PAPER}, Figure 5",
        question="Which images can be rebuilt from what a site sends after a batch, and after an epoch?",
        needs={"mini": "nothing: built-in digits", "paper": "DomainNet"},
        cost={"mini": "about 10 minutes on 2 cores", "paper": "days on a CPU: double gradients of resnet101"},
        run=fig5,
        seeds={"mini": (0,), "paper": (0,)},
    ),
    SELECTION,
)


def _in_order(suite: Suite) -> tuple[bool, str, str]:
    """By paper, tables before figures."""
    paper, _, name = suite.name.partition("/")
    return not name, paper, name.replace("table", "0").replace("fig", "1")


SUITES: dict[str, Suite] = {
    suite.name: suite for suite in sorted([*map(as_suite, EXPERIMENTS), *FUNCTIONS], key=_in_order)
}


def find_suite(name: str) -> Suite:
    suite = SUITES.get(name.lower())
    if suite is None:
        raise InputError("unknown-name", f"There is no suite {name!r}. {nearest(name, SUITES)}")
    return suite
