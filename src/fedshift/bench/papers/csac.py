"""CSAC: J. Yuan, X. Ma, D. Chen, F. Wu, L. Lin, K. Kuang, Collaborative Semantic Aggregation and Calibration for
Federated Domain Generalization, IEEE TKDE 2023. Printed numbers are those of its later version."""

from __future__ import annotations

import functools
import statistics
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from fedshift.bench import recipes
from fedshift.bench.columns import each_target, more_sources, values_of
from fedshift.bench.figures import lines_over_columns
from fedshift.bench.grid import Experiment, as_suite, printed
from fedshift.bench.jobs import Row
from fedshift.bench.papers.csac_figures import feature_maps, fig4, fusion_weights, run_local_models
from fedshift.bench.records import Record
from fedshift.bench.suite import Drawn, Suite, SuiteRequest
from fedshift.bench.tables import Sheet, Value

PAPER = "Yuan et al., TKDE 2023"

PACS = ("art_painting", "cartoon", "photo", "sketch")
VLCS = ("pascal", "labelme", "caltech", "sun")
ANGLES = ("M0", "M15", "M30", "M45", "M60", "M75")
SOURCES = ("amazon", "clipart", "product", "webcam", "art", "caltech")
LAMBDAS = (0.0, 0.2, 0.4, 0.6, 0.8, 1.0)


def pacs(*numbers: float) -> dict[str, float]:
    return printed(PACS, *numbers, dataset="pacs")


def vlcs(*numbers: float) -> dict[str, float]:
    return printed(VLCS, *numbers, dataset="vlcs")


def variant(label: str, on_pacs: dict[str, float], on_vlcs: dict[str, float], **keys: Any) -> Row:
    """CSAC with some of its keys changed."""
    return Row(label, "csac", {"csac": keys}, {**on_pacs, **on_vlcs})


FULL = variant("CSAC", pacs(81.98, 76.41, 95.20, 81.64, 83.81), vlcs(71.97, 63.45, 97.24, 72.06, 76.18))


def over_sources(*numbers: float) -> dict[str, float]:
    return printed([f"{count} source{'s' * (count > 1)}" for count in range(1, 7)], *numbers)


def on_vlcs(label: str, method: str, net: str, *numbers: float) -> Row:
    settings = {"arch": "{large}"} if net == "ResNet-18" else {"arch": "{small}", "lr": "{small_lr}"}
    return Row(f"{label}, {net}", method, settings, printed(VLCS, *numbers))


HOURS = {
    "pacs": {"FedAvg": 4.04, "FedDG": 11.86, "CSAC": 4.61},
    "vlcs": {"FedAvg": 3.08, "FedDG": 10.48, "CSAC": 3.60},
}
"""Hours per run as printed in the paper, mean over targets."""


def run_times(records: Sequence[Record], request: SuiteRequest, baseline: str = "FedAvg") -> Drawn:
    """One sheet per data set: seconds of a run by target, their mean, and its ratio to that of the baseline."""
    return [
        _time_sheet([r for r in records if r.dataset == dataset], dataset, baseline, request.scale == "paper")
        for dataset in dict.fromkeys(record.dataset for record in records)
    ], []


def _time_sheet(records: Sequence[Record], dataset: str, baseline: str, with_theirs: bool) -> Sheet:
    columns = list(dict.fromkeys(record.column for record in records))
    means: dict[str, list[float | None]] = {}
    for row in dict.fromkeys(record.row for record in records):
        own = [[r.seconds for r in records if (r.row, r.column) == (row, column)] for column in columns]
        means[row] = [statistics.fmean(values) if values else None for values in own]
    totals = {row: statistics.fmean(values) for row, own in means.items() if (values := [v for v in own if v])}
    rows: dict[str, list[Value]] = {
        row: [*own, totals.get(row), totals[row] / totals[baseline] if {row, baseline} <= set(totals) else None]
        for row, own in means.items()
    }
    ratio = f"x {baseline}"
    hours = HOURS.get(dataset, {}) if with_theirs else {}
    theirs = {row: {ratio: round(value / hours[baseline], 2)} for row, value in hours.items()}
    return Sheet(f"seconds per run on {dataset}", (*columns, "mean", ratio), rows, theirs)


EXPERIMENTS = (
    Experiment(
        "csac/table1",
        f"{PAPER}, Table 1",
        "How well does each method generalize to an unseen style of PACS?",
        (
            Row("FedAvg", "fedavg", theirs=printed(PACS, 77.49, 77.21, 93.56, 81.19, 82.36)),
            Row("CSAC", "csac", theirs=printed(PACS, 81.98, 76.41, 95.20, 81.64, 83.81)),
            Row("FedDG", "feddg", theirs=printed(PACS, 78.46, 75.98, 93.23, 80.92, 82.15)),
            Row("FedADG", "fedadg", theirs=printed(PACS, 77.8, 74.7, 92.9, 79.5, 81.2)),
            Row("FedSR", "fedsr", theirs=printed(PACS, 83.2, 76.0, 93.8, 81.9, 83.7)),
            Row("FedCMI", "fedcmi", theirs=printed(PACS, 80.8, 73.7, 92.8, 79.5, 81.7)),
            Row("FedL2R", "fedl2r", theirs=printed(PACS, 82.2, 75.8, 92.8, 81.6, 83.1)),
            Row("DeepAll", "deepall", theirs=printed(PACS, 78.95, 74.90, 94.08, 73.02, 80.24)),
        ),
        each_target,
        (recipes.CSAC_PACS,),
        recipes.DIGITS,
        baseline="FedAvg",
        cited={
            "JiGen (shared data)": printed(PACS, 79.42, 75.25, 96.03, 71.35, 80.51),
            "MASF (shared data)": printed(PACS, 80.29, 77.17, 94.99, 71.69, 81.04),
            "DGER (shared data)": printed(PACS, 80.70, 76.40, 96.65, 71.77, 81.38),
            "DMG (shared data)": printed(PACS, 76.90, 80.38, 92.35, 75.21, 81.46),
            "FACT (shared data)": printed(PACS, 85.37, 78.38, 95.15, 79.15, 84.51),
            "Epi-FCR (shared data)": printed(PACS, 82.1, 77.0, 93.9, 73.0, 81.5),
            "MixStyle (shared data)": printed(PACS, 84.1, 78.8, 96.1, 75.9, 83.7),
            "EISNet (shared data)": printed(PACS, 81.89, 76.44, 95.93, 74.33, 82.15),
        },
    ),
    Experiment(
        "csac/table2",
        f"{PAPER}, Table 2",
        "How well does each method generalize on VLCS, with a small and a larger network?",
        (
            on_vlcs("FedAvg", "fedavg", "AlexNet", 67.92, 60.23, 96.85, 66.88, 72.97),
            on_vlcs("FedDG", "feddg", "AlexNet", 67.27, 58.48, 96.83, 68.20, 72.69),
            on_vlcs("CSAC", "csac", "AlexNet", 70.21, 58.99, 97.13, 67.27, 73.40),
            on_vlcs("DeepAll", "deepall", "AlexNet", 71.67, 59.64, 97.48, 67.58, 74.09),
            on_vlcs("FedAvg", "fedavg", "ResNet-18", 71.95, 63.29, 96.48, 72.37, 76.02),
            on_vlcs("FedDG", "feddg", "ResNet-18", 72.59, 60.33, 96.70, 73.61, 75.81),
            on_vlcs("CSAC", "csac", "ResNet-18", 71.97, 63.45, 97.24, 72.06, 76.18),
            on_vlcs("COPA", "copa", "ResNet-18", 71.50, 61.00, 93.83, 71.72, 74.51),
            on_vlcs("DeepAll", "deepall", "ResNet-18", 71.40, 59.77, 97.54, 69.01, 74.43),
        ),
        each_target,
        (recipes.CSAC_VLCS.with_names(large="resnet18", small="alexnet", small_lr=0.001),),
        recipes.DIGITS.with_names(large="digits-copa", small="digits-csac", small_lr=0.05),
        baseline="FedAvg, ResNet-18",
        cited={
            "Epi-FCR, AlexNet (shared data)": printed(VLCS, 67.1, 64.3, 94.1, 65.9, 72.9),
            "JiGen, AlexNet (shared data)": printed(VLCS, 70.62, 60.90, 96.93, 64.30, 73.19),
            "MASF, AlexNet (shared data)": printed(VLCS, 69.14, 64.90, 94.78, 67.64, 74.11),
            "DGER, AlexNet (shared data)": printed(VLCS, 73.24, 58.26, 96.92, 69.10, 74.38),
            "EISNet, AlexNet (shared data)": printed(VLCS, 69.83, 63.49, 97.33, 68.02, 74.67),
            "JiGen, ResNet-18 (shared data)": printed(VLCS, 73.97, 61.94, 97.40, 66.90, 75.05),
        },
    ),
    Experiment(
        "csac/table3",
        f"{PAPER}, Table 3",
        "How well does each method generalize to an unseen angle?",
        (
            Row("FedAvg", "fedavg", theirs=printed(ANGLES, 82.60, 98.56, 98.97, 93.66, 95.78, 86.30, 92.65)),
            Row("CSAC", "csac", theirs=printed(ANGLES, 84.57, 98.87, 98.63, 95.06, 96.57, 90.73, 94.07)),
            Row("FedDG", "feddg", theirs=printed(ANGLES, 73.07, 94.37, 95.60, 89.43, 94.61, 84.50, 88.60)),
            Row("DeepAll", "deepall", theirs=printed(ANGLES, 86.73, 98.27, 98.63, 97.50, 97.47, 87.20, 94.30)),
        ),
        each_target,
        (recipes.CSAC_ROTATED,),
        recipes.ROTATED,
        baseline="FedAvg",
        cited={
            "CrossGrad (shared data)": printed(ANGLES, 86.03, 98.92, 98.60, 98.39, 98.68, 88.94, 94.93),
            "MetaReg (shared data)": printed(ANGLES, 85.70, 98.87, 98.32, 98.58, 98.93, 89.44, 94.97),
            "FeaCri (shared data)": printed(ANGLES, 87.04, 99.53, 99.41, 99.52, 99.23, 91.52, 96.04),
            "DGER (shared data)": printed(ANGLES, 90.09, 99.24, 99.27, 99.31, 99.45, 90.81, 96.36),
        },
    ),
    Experiment(
        "csac/table4",
        f"{PAPER}, Table 4",
        "Which rule and which distance should weight the layers of the sites' models?",
        (
            variant(
                "semantic similarity",
                pacs(79.22, 72.44, 93.00, 74.34, 79.75),
                vlcs(70.80, 62.86, 96.61, 69.49, 74.94),
                fusion="similarity",
            ),
            variant(
                "semantic average",
                pacs(80.25, 74.54, 93.74, 77.88, 81.85),
                vlcs(72.44, 61.20, 96.54, 70.83, 75.25),
                fusion="average",
            ),
            variant(
                "cosine distance",
                pacs(80.89, 73.57, 94.43, 76.59, 81.37),
                vlcs(72.27, 62.94, 97.05, 71.41, 75.92),
                distance="cosine",
            ),
            variant(
                "L1 distance",
                pacs(81.75, 74.93, 94.45, 77.63, 82.19),
                vlcs(72.16, 64.11, 96.64, 71.67, 76.15),
                distance="l1",
            ),
            FULL,
        ),
        each_target,
        (recipes.CSAC_PACS, recipes.CSAC_VLCS),
        recipes.ROTATED.at("M0", "M30", "M75"),
        baseline="CSAC",
    ),
    Experiment(
        "csac/table5",
        f"{PAPER}, Table 5",
        "What does each part of the calibration contribute?",
        (
            variant(
                "without alignment",
                pacs(80.34, 76.07, 95.45, 81.11, 83.24),
                vlcs(70.11, 65.73, 97.03, 71.39, 76.06),
                **{"lambda": 0.0},
            ),
            variant(
                "same-layer alignment",
                pacs(80.49, 74.19, 94.85, 80.34, 82.46),
                vlcs(73.51, 62.26, 97.38, 71.38, 76.14),
                pairs="same-layer",
            ),
            variant(
                "without attention (position)",
                pacs(79.57, 73.57, 94.46, 79.66, 81.82),
                vlcs(72.57, 63.85, 96.09, 69.16, 75.42),
                attention="channel",
            ),
            variant(
                "without attention (channel)",
                pacs(79.80, 73.77, 94.43, 79.32, 81.83),
                vlcs(72.40, 63.54, 95.92, 69.24, 75.27),
                attention="position",
            ),
            variant(
                "without attention",
                pacs(80.35, 76.27, 93.59, 77.88, 82.02),
                vlcs(71.63, 64.48, 96.27, 67.67, 75.01),
                attention="none",
            ),
            variant(
                "without label smoothing",
                pacs(81.78, 76.37, 95.00, 81.46, 83.65),
                vlcs(71.70, 63.33, 97.17, 71.34, 75.89),
                smoothing=0.0,
            ),
            variant(
                "without cross-entropy",
                pacs(81.35, 76.04, 94.98, 82.60, 83.74),
                vlcs(72.12, 62.70, 97.55, 71.76, 76.03),
                cross_entropy=False,
            ),
            variant(
                "mean square error",
                pacs(77.08, 71.05, 94.61, 75.99, 79.68),
                vlcs(72.10, 62.17, 96.47, 71.09, 75.46),
                discrepancy="mse",
            ),
            FULL,
        ),
        each_target,
        (recipes.CSAC_PACS, recipes.CSAC_VLCS),
        recipes.ROTATED.at("M0", "M30", "M75"),
        baseline="CSAC",
    ),
    Experiment(
        "csac/table6",
        f"{PAPER}, Table 6",
        "How long does a run of each method take, relative to FedAvg?",
        (
            Row("FedAvg", "fedavg"),
            Row("FedDG", "feddg"),
            Row("CSAC", "csac"),
        ),
        each_target,
        (recipes.CSAC_PACS, recipes.CSAC_VLCS),
        # A seed that no other suite has: trainings shared with them ran side by side, so their times do not count.
        recipes.DIGITS.at("street", "photo").with_seeds(10),
        tables=False,
        alone=True,
        draw=run_times,
    ),
    Experiment(
        "csac/fig5",
        f"{PAPER}, Figure 5",
        "Do more source domains help?",
        (
            Row("FedAvg", "fedavg", theirs=over_sources(91.32, 94.79, 94.79, 95.14, 95.18, 96.24)),
            Row("FedDG", "feddg", theirs=over_sources(91.23, 94.59, 95.14, 95.49, 95.66, 97.05)),
            Row("CSAC", "csac", theirs=over_sources(91.09, 94.87, 95.66, 95.93, 96.27, 97.91)),
        ),
        more_sources(SOURCES, "real_world"),
        (recipes.CSAC_SEVEN,),
        recipes.DIGITS.at("street").with_seeds(0, 1, 2),
        baseline="FedAvg",
        draw=lines_over_columns("csac-fig5.png"),
    ),
    Experiment(
        "csac/fig6",
        f"{PAPER}, Figure 6",
        "How much does the weight of the alignment matter?",
        (Row("CSAC", "csac"),),
        values_of("csac", "lambda", *LAMBDAS),
        (recipes.CSAC_VLCS, recipes.CSAC_PACS),
        recipes.ROTATED.at("M0", "M30", "M75"),
        draw=lines_over_columns("csac-fig6.png"),
    ),
    Experiment(
        "csac/fig7",
        f"{PAPER}, Figure 7",
        "How do the sites' weights in the fusion change over the rounds, layer by layer?",
        (Row("CSAC", "csac"),),
        each_target,
        (recipes.CSAC_VLCS, recipes.CSAC_PACS),
        recipes.DIGITS.at("street"),
        tables=False,
        draw=fusion_weights,
    ),
    Experiment(
        "csac/fig8",
        f"{PAPER}, Figure 8",
        "Do features separate classes, but not domains?",
        (Row("FedAvg", "fedavg"), Row("CSAC", "csac")),
        each_target,
        (recipes.CSAC_PACS.at("photo").with_seeds(0),),
        recipes.DIGITS.at("street"),
        draw=feature_maps,
    ),
)

LOCAL_MODELS = Experiment(
    "csac/fig9",
    f"{PAPER}, Figure 9",
    "How good is each site's model on every domain, before and after fusion?",
    (Row("CSAC", "csac"),),
    each_target,
    (recipes.CSAC_PACS.at("sketch").with_seeds(0),),
    recipes.DIGITS.at("street"),
)

SUITES = (
    replace(as_suite(LOCAL_MODELS), run=functools.partial(run_local_models, LOCAL_MODELS)),
    Suite(
        name="csac/fig4",
        paper=f"{PAPER}, Figure 4",
        question="Can the domain of a model be told from its parameters?",
        needs={"mini": "nothing: built-in digits", "paper": "Digits-DG, VLCS and ImageNet weights of resnet18"},
        estimate=lambda: {
            "mini": "about 5 minutes on 2 cores",
            "paper": "400 trainings of resnet18, days on a GPU",
        },
        run=fig4,
        seeds={"mini": (0,), "paper": (0,)},
    ),
)
