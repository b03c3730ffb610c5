"""DualAdapt: C.-H. Yao et al., Federated Multi-Target Domain Adaptation, WACV 2022. Numbers are those printed there."""

from __future__ import annotations

import json
from collections.abc import Sequence

from fedshift.audit.cost import cost
from fedshift.audit.counting import flops_per_sample
from fedshift.bench import recipes
from fedshift.bench.columns import each_home, one_home, shares_of_clients
from fedshift.bench.figures import lines_over_columns
from fedshift.bench.grid import Experiment, printed
from fedshift.bench.jobs import Row, chosen_rows
from fedshift.bench.papers.controls import ADABN, with_own_statistics
from fedshift.bench.records import Record
from fedshift.bench.suite import Drawn, Suite, SuiteRequest, SuiteResult
from fedshift.bench.tables import Sheet, Value
from fedshift.errors import InputError
from fedshift.runs.config import make_config, read_config

PAPER = "Yao et al., WACV 2022"

CLIENTS = ("mnist_m", "svhn", "syn", "usps")
DOMAINNET = ("clipart", "infograph", "painting", "quickdraw", "real", "sketch")
CITIES = ("rio", "rome", "taipei", "tokyo")


def compared(columns: Sequence[str], *numbers: Sequence[float]) -> tuple[Row, ...]:
    """The rows of Tables 1 to 3, then the controls: there is one labelled site, so that its pooled data are source
    only's."""
    rows = (
        ("source only", "source-only"),
        ("Cent-MCD", "cent-mcd"),
        ("Fed-oracle", "fed-oracle"),
        ("Fed-DAN", "fed-dan"),
        ("Fed-DANN", "fed-dann"),
        ("Fed-MCD", "fed-mcd"),
        ("DualAdapt", "dualadapt"),
    )
    found = tuple(
        Row(label, method, theirs=printed(columns, *line)) for (label, method), line in zip(rows, numbers, strict=True)
    )
    return *found, ADABN, *with_own_statistics(*found[1:])


COUNTED = ("FLOPs per sample", "numbers up", "numbers down")


def costs_of_runs(records: Sequence[Record], request: SuiteRequest) -> Drawn:
    """Table 5: what a client of each row computes per sample, and what it sends and receives per round."""
    rows: dict[str, list[Value]] = {}
    for record in records:
        if record.row in rows:
            continue
        results = request.work / "jobs" / record.job / "results.json"
        if not results.is_file():
            continue
        found = json.loads(results.read_text())
        clients, rounds = len(found["per_target"]), found["rounds"]
        rows[record.row] = [
            flops_per_sample(make_config(read_config(results.with_name("config.yaml")))),
            found["bytes"]["up"] / 4 / clients / rounds,
            found["bytes"]["down"] / 4 / clients / rounds,
        ]
    return [Sheet("cost of a client", COUNTED, rows)], []


EXPERIMENTS = (
    Experiment(
        "dualadapt/table1",
        f"{PAPER}, Table 1",
        "One labelled look of digits, four clients without labels: how well does each method serve the clients?",
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
        "What does each part of DualAdapt contribute, and what does it cost a client?",
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
            Row("source only", "source-only"),
            ADABN,
            *with_own_statistics(Row("Fed-MCD", "fed-mcd"), Row("DualAdapt", "dualadapt")),
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
        "How much client data does each method need? (Dashed in the paper: all data in one place.)",
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

# --- Table 4: counted, not trained -----------------------------------------------------------------------------------

COUNTED_ROWS = (
    Row("Fed-DAN", "fed-dan"),
    Row("Fed-DANN", "fed-dann"),
    Row("Fed-MCD", "fed-mcd"),
    Row("DualAdapt", "dualadapt"),
)

NETS = {
    "Digit-Five": ("digits-dualadapt-large", 10, 4, 28),
    "DomainNet": ("resnet101", 345, 5, 224),
    "GTA5-to-CrossCity": ("deeplab_mobilenet_v2_half", 13, 4, 512),
}
"""Experiment -> network, classes, clients, image size in pixels."""

SMALL = {"Digit-Five": NETS["Digit-Five"], "streets": ("segnet-small", 8, 4, 64)}

PRINTED = {
    "Digit-Five": {
        "Fed-DAN": (314.0e6, 493e3, 493e3),
        "Fed-DANN": (314.3e6, 493e3, 493e3),
        "Fed-MCD": (314.6e6, 510e3, 510e3),
        "DualAdapt": (78.7e6, 18e3, 494e3),
    },
    "DomainNet": {
        "Fed-DAN": (36.1e9, 2.5e6, 2.5e6),
        "Fed-DANN": (36.1e9, 2.5e6, 2.5e6),
        "Fed-MCD": (36.1e9, 2.5e6, 2.5e6),
        "DualAdapt": (9.0e9, 0.02e6, 2.5e6),
    },
    "GTA5-to-CrossCity": {
        "Fed-DAN": (31.5e9, 45.4e6, 45.4e6),
        "Fed-DANN": (32.0e9, 45.4e6, 45.4e6),
        "Fed-MCD": (32.6e9, 46.1e6, 46.1e6),
        "DualAdapt": (8.4e9, 1.6e6, 46.2e6),
    },
}
"""As printed: operations per sample, parameters up, parameters down."""

HEADINGS = {"DomainNet": "GTA5-to-CrossCity", "GTA5-to-CrossCity": "DomainNet"}
"""Experiment -> the heading under which its numbers are printed, where it is another. 46.1 M parameters are those of a
ResNet-101, which is DomainNet's network, and 2.5 M those of a MobileNetV2 of half width, which is that of the streets:
the paper's two headings are swapped."""


def printed_costs(title: str) -> dict[str, tuple[float, float, float]]:
    """What the paper counts for the network of an experiment, by row; empty if it has no such experiment."""
    return PRINTED.get(HEADINGS.get(title, title), {})


BY_FORMULA = "FLOPs by the paper's formula"


def table4(request: SuiteRequest) -> SuiteResult:
    """Counted on random data, which is exact at any scale. Mini leaves out the large networks."""
    nets = NETS if request.scale == "paper" else SMALL
    if request.settings:
        raise InputError(
            "config-key", f"--set {request.settings[0]}: this suite trains nothing, and no key changes a count"
        )
    wanted = {row.label: row.method for row in chosen_rows(COUNTED_ROWS, request.methods)}
    sheets = []
    for number, (title, (arch, classes, clients, side)) in enumerate(nets.items()):
        rows: dict[str, list[Value]] = {}
        for label, method in wanted.items():
            found = cost(method, arch, classes, sites=clients, image_size=side)
            published = found.published[1] if found.published else None
            site = found.round
            rows[label] = [site.flops_per_sample, site.upload.numbers, site.broadcast.numbers, published]
            request.progress(f"{label}, {title}", number * len(wanted) + len(rows), len(nets) * len(wanted), 0.0)
        theirs = {
            label: {BY_FORMULA: flops, COUNTED[1]: up, COUNTED[2]: down}
            for label, (flops, up, down) in printed_costs(title).items()
            if label in rows
        }
        sheets.append(Sheet(f"{title}: {arch}", (*COUNTED, BY_FORMULA), rows, theirs))
    notes = ["Counted on a network built from the paper's description; its own is not published. Brackets: the paper."]
    if any(title in HEADINGS for title in nets):
        notes.append(
            "The paper's headings DomainNet and GTA5-to-CrossCity are swapped: each of its numbers is shown beside the"
            " network that it fits."
        )
    return SuiteResult(sheets=tuple(sheets), notes=tuple(notes))


SUITES = (
    Suite(
        name="dualadapt/table4",
        paper=f"{PAPER}, Table 4",
        question="What does each method cost a client: operations, numbers up and down?",
        needs={"mini": "nothing: counted on random images", "paper": "nothing: counted on random images"},
        estimate=lambda: {"mini": "about a minute", "paper": "some minutes on 2 cores"},
        run=table4,
        rows=COUNTED_ROWS,
    ),
)
