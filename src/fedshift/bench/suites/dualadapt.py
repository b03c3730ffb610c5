"""DualAdapt: C.-H. Yao et al., Federated Multi-Target Domain Adaptation, WACV 2022. Numbers are those printed there."""

from __future__ import annotations

from collections.abc import Sequence

from fedshift.bench import recipes
from fedshift.bench.costs import costs_of_runs
from fedshift.bench.experiment import Experiment, printed
from fedshift.bench.figures import lines_over_columns
from fedshift.bench.jobs import Row
from fedshift.bench.layouts import each_home, one_home, shares_of_clients

PAPER = "Yao et al., WACV 2022"

CLIENTS = ("mnist_m", "svhn", "syn", "usps")
DOMAINNET = ("clipart", "infograph", "painting", "quickdraw", "real", "sketch")
CITIES = ("rio", "rome", "taipei", "tokyo")


def compared(columns: Sequence[str], *numbers: Sequence[float]) -> tuple[Row, ...]:
    """The rows of Tables 1 to 3."""
    rows = (
        ("source only", "source-only"),
        ("Cent-MCD", "cent-mcd"),
        ("Fed-oracle", "fed-oracle"),
        ("Fed-DAN", "fed-dan"),
        ("Fed-DANN", "fed-dann"),
        ("Fed-MCD", "fed-mcd"),
        ("DualAdapt", "dualadapt"),
    )
    return tuple(
        Row(label, method, theirs=printed(columns, *line)) for (label, method), line in zip(rows, numbers, strict=True)
    )


EXPERIMENTS = (
    Experiment(
        "dualadapt/table1",
        f"{PAPER}, Table 1",
        "One labelled look of digits, four clients without labels: how well does each method serve them?",
        compared(
            CLIENTS,
            (26.1, 10.4, 26.9, 57.7, 30.3),
            (28.5, 12.3, 29.2, 70.8, 35.2),
            (28.1, 12.0, 28.3, 69.5, 34.5),
            (26.6, 10.4, 27.1, 59.4, 30.9),
            (26.9, 10.6, 27.8, 59.9, 31.3),
            (27.2, 10.7, 27.4, 61.6, 31.7),
            (27.7, 11.9, 28.0, 68.9, 34.1),
        ),
        one_home,
        (recipes.DUAL_DIGIT_FIVE,),
        recipes.ONE_TO_MANY,
        baseline="source only",
        per_client=True,
    ),
    Experiment(
        "dualadapt/table2",
        f"{PAPER}, Table 2",
        "Each style of DomainNet as the labelled one: how well does each method serve the others?",
        compared(
            DOMAINNET,
            (25.7, 19.3, 29.6, 4.4, 31.5, 10.5, 20.2),
            (29.6, 23.4, 34.1, 7.2, 36.1, 14.2, 24.1),
            (29.2, 22.9, 33.8, 6.6, 35.8, 13.5, 23.6),
            (25.9, 19.7, 30.3, 4.6, 31.1, 11.4, 20.5),
            (25.5, 20.1, 30.4, 4.7, 31.3, 10.8, 20.5),
            (27.1, 19.9, 31.4, 4.7, 32.5, 10.4, 21.0),
            (29.0, 22.3, 33.5, 6.0, 35.7, 13.2, 23.3),
        ),
        each_home,
        (recipes.DUAL_DOMAINNET,),
        recipes.ONE_TO_MANY.with_seeds(0),
        baseline="source only",
    ),
    Experiment(
        "dualadapt/table3",
        f"{PAPER}, Table 3",
        "Segmentation: one labelled city, clients in others (mean IoU).",
        compared(
            CITIES,
            (27.9, 27.6, 26.0, 28.2, 27.4),
            (31.1, 30.6, 28.8, 31.6, 30.5),
            (30.3, 28.4, 28.3, 30.7, 29.4),
            (27.3, 26.4, 26.0, 28.5, 27.1),
            (28.6, 26.0, 26.6, 28.6, 27.5),
            (27.7, 27.3, 26.5, 29.0, 27.6),
            (29.2, 28.0, 27.6, 30.7, 28.9),
        ),
        one_home,
        (recipes.DUAL_CITIES,),
        recipes.STREETS,
        baseline="source only",
        per_client=True,
    ),
    Experiment(
        "dualadapt/table5",
        f"{PAPER}, Table 5",
        "What does each part of DualAdapt earn, and what does it cost a client?",
        (
            Row("Fed-MCD", "fed-mcd", theirs={"average": 31.7}),
            Row(
                "DualAdapt: discrepancy, mixed-up pictures",
                "dualadapt",
                {"dualadapt": {"self_training": False, "mixtures": False}},
                {"average": 32.8},
            ),
            Row("+ self-training", "dualadapt", {"dualadapt": {"mixtures": False}}, {"average": 33.5}),
            Row("+ mixtures (DualAdapt)", "dualadapt", {}, {"average": 34.1}),
            Row("Fed-oracle", "fed-oracle", theirs={"average": 34.5}),
        ),
        one_home,
        (recipes.DUAL_DIGIT_FIVE,),
        recipes.ONE_TO_MANY,
        baseline="Fed-MCD",
        per_client=True,
        draw=costs_of_runs,
    ),
    Experiment(
        "dualadapt/fig4",
        f"{PAPER}, Figure 4",
        "How much client data does each method need? Dashed in the paper: all data in one place.",
        (
            Row("Fed-DAN", "fed-dan"),
            Row("Fed-DANN", "fed-dann"),
            Row("Fed-MCD", "fed-mcd"),
            Row("DualAdapt", "dualadapt"),
            Row("Cent-MCD one-to-one", "cent-mcd", {"cent-mcd": {"form": "one-to-one"}}),
            Row("Cent-MCD one-to-combined", "cent-mcd", {"cent-mcd": {"form": "one-to-combined"}}),
            Row("Cent-MCD one-to-multiple", "cent-mcd", {"cent-mcd": {"form": "one-to-multiple"}}),
        ),
        shares_of_clients(0.05, 0.1, 0.3, 1.0),
        (recipes.DUAL_DIGIT_FIVE,),
        recipes.ONE_TO_MANY.with_seeds(0).but(
            {"dualadapt": {"rounds": 5, "dualadapt": {"pretrain_epochs": 4.0}}}, train_per_site=800, rounds=4
        ),
        baseline="Fed-MCD",
        draw=lines_over_columns("dualadapt-fig4.png"),
    ),
)
