"""`ours/...`: fedshift's own method beside the papers', beside baselines that are tuned as hard, and beside controls.
There are no printed numbers."""

from __future__ import annotations

from fedshift.bench import recipes
from fedshift.bench.columns import each_target, one_home
from fedshift.bench.grid import Experiment
from fedshift.bench.jobs import Row
from fedshift.bench.papers.controls import ADABN, POOLED, with_own_statistics

SOURCE = "no paper: fedshift's own method"

TUNED = {"augment": "{tuned}", "average_rounds": "{averaged}", "probe_epochs": "{probe}"}
"""Chosen for FedAvg as FedLooks was: docs/methods/fedlooks.md."""
CROPS = {"augment": "{crops}"}
OWN = {"norm": "{own}"}

_SCRATCH = {"tuned": ["standard-unflipped"], "averaged": 0.33, "probe": None, "crops": ["resized-crop"], "own": "own"}
"""No flips, for a mirrored digit is none."""
_GIVEN = recipes.PHOTOS.names

_PHOTOS = recipes.COPA_PACS.with_seeds(0, 1, 2).with_names(**_GIVEN)
_DIGIT_FIVE = recipes.COPA_DIGIT_FIVE.with_seeds(0, 1, 2).with_names(**_SCRATCH)
_CLIENTS = recipes.DUAL_DIGIT_FIVE.with_seeds(0, 1, 2)

EXPERIMENTS = (
    Experiment(
        "ours/generalize",
        SOURCE,
        "How well does FedLooks generalize to an unseen look, beside FedAvg tuned as hard, papers and rivals?",
        (
            Row("FedAvg", "fedavg"),
            Row("FedAvg, tuned", "fedavg", TUNED),
            Row("COPA", "copa"),
            Row("CSAC", "csac"),
            Row("FedDG", "feddg"),
            Row("FedDG-GA", "feddg-ga"),
            Row("FedOMG", "fedomg"),
            Row("guided head", "guided-head"),
            Row("FedLooks, no crops", "fedlooks"),
            Row("FedLooks", "fedlooks", CROPS),
            Row("DeepAll", "deepall"),
        ),
        each_target,
        (_PHOTOS,),
        recipes.DIGITS.with_names(**_SCRATCH),
        baseline="FedAvg, tuned",
    ),
    Experiment(
        "ours/adapt",
        SOURCE,
        "How well does FedLooks adapt to a look without labels, beside normalisation alone and three papers?",
        (
            Row("source-only", "source-only"),
            POOLED,
            ADABN,
            Row("AdaBN, tuned", "adabn", {**TUNED, **OWN}),
            Row("COPA", "copa-uda"),
            Row("KD3A", "kd3a"),
            Row("FADA", "fada"),
            Row("FedLooks, adapted", "fedlooks", {**CROPS, **OWN, "fedlooks": {"source_rounds": 0.67}}),
            Row("FedLooks", "fedlooks", {**CROPS, **OWN}),
            Row("oracle", "oracle"),
        ),
        each_target,
        (_DIGIT_FIVE,),
        recipes.ADAPT_DIGITS.with_names(**_SCRATCH),
        baseline="AdaBN",
    ),
    Experiment(
        "ours/multi-adapt",
        SOURCE,
        "One labelled look of digits, four clients without labels: what does FedLooks add to each client's statistics?",
        (
            Row("source only", "source-only"),
            ADABN,
            *with_own_statistics(Row("Fed-MCD", "fed-mcd"), Row("DualAdapt", "dualadapt")),
            Row("FedLooks, no looks", "fedlooks", {"norm": "own", "fedlooks": {"depth": 0}}),
            Row("FedLooks", "fedlooks", {"norm": "own"}),
        ),
        one_home,
        (_CLIENTS,),
        recipes.ONE_TO_MANY.but({"fedlooks": {"rounds": 16}}),
        baseline="AdaBN",
        per_client=True,
    ),
)
