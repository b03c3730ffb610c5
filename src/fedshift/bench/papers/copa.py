"""COPA: G. Wu, S. Gong, Collaborative Optimization and Aggregation for Decentralized Domain Generalization and
Adaptation, ICCV 2021. Printed numbers are those of the paper."""

from __future__ import annotations

from typing import Any

from fedshift.bench import recipes
from fedshift.bench.columns import each_target
from fedshift.bench.figures import bars
from fedshift.bench.grid import Experiment, printed
from fedshift.bench.jobs import Row
from fedshift.bench.papers.controls import ADABN, POOLED, with_own_statistics

PAPER = "Wu and Gong, ICCV 2021"

PACS = ("art_painting", "cartoon", "photo", "sketch")
OFFICE_HOME = ("art", "clipart", "product", "real_world")
DIGITS_DG = ("mnist", "mnist_m", "svhn", "syn")
DIGIT_FIVE = ("mnist", "mnist_m", "svhn", "syn", "usps")
OFFICE_CALTECH = ("amazon", "caltech", "dslr", "webcam")

COPA_ON_PACS = printed(PACS, 83.3, 79.8, 94.6, 82.5, 85.1)


def generalizing(copa: dict[str, float], backbone: dict[str, float]) -> tuple[Row, ...]:
    """The methods that the library has for Tables 1 to 3. The centralized backbone is DeepAll."""
    return (
        Row("FedAvg", "fedavg"),
        Row("COPA", "copa", theirs=copa),
        Row("CSAC", "csac"),
        Row("FedSR", "fedsr"),
        Row("FedDG", "feddg"),
        Row("FedADG", "fedadg"),
        Row("DeepAll", "deepall", theirs=backbone),
    )


def adapting(**numbers: dict[str, float]) -> tuple[Row, ...]:
    copa = Row("COPA", "copa-uda", theirs=numbers["copa"])
    kd3a = Row("KD3A", "kd3a", theirs=numbers["kd3a"])
    shot = Row("SHOT", "shot", theirs=numbers["shot"])
    fada = Row("FADA", "fada", theirs=numbers["fada"])
    return (
        Row("source-only", "source-only", theirs=numbers["source_only"]),
        POOLED,
        ADABN,
        copa,
        kd3a,
        shot,
        fada,
        *with_own_statistics(copa, kd3a, shot, fada),
        Row("oracle", "oracle", theirs=numbers["oracle"]),
    )


def variant(label: str, theirs: dict[str, float] | None = None, **keys: Any) -> Row:
    """COPA with some of its keys changed."""
    return Row(label, "copa", {"copa": keys}, theirs or {})


EXPERIMENTS = (
    Experiment(
        "copa/table1",
        f"{PAPER}, Table 1",
        "How well does each method generalize to an unseen style of PACS?",
        generalizing(COPA_ON_PACS, printed(PACS, 77.0, 75.9, 96.0, 69.2, 79.5)),
        each_target,
        (recipes.COPA_PACS,),
        recipes.DIGITS,
        baseline="FedAvg",
        cited={
            "Epi-FCR (centralized)": printed(PACS, 82.1, 77.0, 93.9, 73.0, 81.5),
            "JiGen (centralized)": printed(PACS, 79.4, 75.3, 96.0, 71.4, 80.5),
            "MASF (centralized)": printed(PACS, 80.3, 77.2, 95.0, 71.7, 81.0),
            "DGER (centralized)": printed(PACS, 80.7, 76.4, 96.7, 71.8, 81.4),
            "DAEL (centralized)": printed(PACS, 84.6, 74.4, 95.6, 78.9, 83.4),
            "L2A-OT (centralized)": printed(PACS, 83.3, 78.2, 96.2, 73.6, 82.8),
            "DDAIG (centralized)": printed(PACS, 84.2, 78.1, 95.3, 74.7, 83.1),
            "EISNet (centralized)": printed(PACS, 81.9, 76.4, 95.9, 74.3, 82.2),
            "DSON (centralized)": printed(PACS, 84.7, 77.7, 95.9, 82.2, 85.1),
            "MixStyle (centralized)": printed(PACS, 84.1, 78.8, 96.1, 75.9, 83.7),
        },
    ),
    Experiment(
        "copa/table2",
        f"{PAPER}, Table 2",
        "How well does each method generalize to an unseen domain of Office-Home?",
        generalizing(
            printed(OFFICE_HOME, 59.4, 55.1, 74.8, 75.0, 66.1),
            printed(OFFICE_HOME, 58.9, 49.4, 74.3, 76.2, 64.7),
        ),
        each_target,
        (recipes.COPA_OFFICE_HOME,),
        recipes.DIGITS,
        baseline="FedAvg",
        cited={
            "CCSA (centralized)": printed(OFFICE_HOME, 59.9, 49.9, 74.1, 75.7, 64.9),
            "CrossGrad (centralized)": printed(OFFICE_HOME, 58.4, 49.4, 73.9, 75.8, 64.4),
            "JiGen (centralized)": printed(OFFICE_HOME, 53.0, 47.5, 71.5, 72.8, 61.2),
            "DAEL (centralized)": printed(OFFICE_HOME, 59.4, 55.1, 74.0, 75.7, 66.1),
            "L2A-OT (centralized)": printed(OFFICE_HOME, 60.6, 50.1, 74.8, 77.0, 65.6),
            "DDAIG (centralized)": printed(OFFICE_HOME, 59.2, 52.3, 74.6, 76.0, 65.5),
            "DSON (centralized)": printed(OFFICE_HOME, 59.4, 45.7, 71.8, 74.7, 62.9),
            "MixStyle (centralized)": printed(OFFICE_HOME, 58.7, 53.4, 74.2, 75.9, 65.5),
        },
    ),
    Experiment(
        "copa/table3",
        f"{PAPER}, Table 3",
        "How well does each method generalize to an unseen look of digits?",
        generalizing(
            printed(DIGITS_DG, 97.0, 66.5, 71.6, 90.7, 81.5), printed(DIGITS_DG, 95.8, 58.8, 61.7, 78.6, 73.7)
        ),
        each_target,
        (recipes.COPA_DIGITS_DG,),
        recipes.DIGITS,
        baseline="FedAvg",
        cited={
            "CCSA (centralized)": printed(DIGITS_DG, 95.2, 58.2, 65.5, 79.1, 74.5),
            "CrossGrad (centralized)": printed(DIGITS_DG, 96.7, 61.1, 65.3, 80.2, 75.8),
            "JiGen (centralized)": printed(DIGITS_DG, 96.5, 61.4, 63.7, 74.0, 73.9),
            "L2A-OT (centralized)": printed(DIGITS_DG, 96.7, 63.9, 68.6, 83.2, 78.1),
            "DDAIG (centralized)": printed(DIGITS_DG, 96.6, 64.1, 68.6, 81.0, 77.6),
            "MixStyle (centralized)": printed(DIGITS_DG, 96.5, 63.5, 64.7, 81.2, 76.5),
        },
    ),
    Experiment(
        "copa/table4",
        f"{PAPER}, Table 4",
        "How well does each method adapt to an unlabelled look of digits?",
        adapting(
            source_only=printed(DIGIT_FIVE, 99.1, 68.1, 84.6, 89.9, 97.2, 87.8),
            copa=printed(DIGIT_FIVE, 99.4, 89.8, 91.0, 97.5, 99.2, 95.4),
            kd3a=printed(DIGIT_FIVE, 99.2, 87.3, 85.6, 89.4, 98.5, 92.0),
            shot=printed(DIGIT_FIVE, 98.2, 80.2, 84.5, 91.1, 97.1, 90.2),
            fada=printed(DIGIT_FIVE, 91.4, 62.5, 50.5, 71.8, 91.7, 73.6),
            oracle=printed(DIGIT_FIVE, 99.5, 95.4, 92.3, 98.7, 99.2, 97.0),
        ),
        each_target,
        (recipes.COPA_DIGIT_FIVE,),
        recipes.ADAPT_DIGITS,
        baseline="source-only",
        cited={
            "MDAN (centralized)": printed(DIGIT_FIVE, 98.0, 69.5, 69.2, 87.4, 92.5, 83.3),
            "DCTN (centralized)": printed(DIGIT_FIVE, 96.2, 70.5, 77.6, 86.8, 92.8, 84.8),
            "MCD (centralized)": printed(DIGIT_FIVE, 99.2, 80.7, 81.9, 95.4, 98.3, 91.1),
            "M3SDA (centralized)": printed(DIGIT_FIVE, 98.4, 72.8, 81.3, 89.6, 96.1, 87.7),
            "MME (centralized)": printed(DIGIT_FIVE, 99.4, 83.1, 86.4, 95.8, 98.6, 92.7),
            "DSBN (centralized)": printed(DIGIT_FIVE, 97.2, 71.6, 77.9, 88.7, 96.1, 86.3),
            "MDDA (centralized)": printed(DIGIT_FIVE, 98.8, 78.6, 79.3, 89.7, 93.9, 88.1),
            "LtCMSDA (centralized)": printed(DIGIT_FIVE, 99.0, 85.6, 83.2, 93.0, 98.3, 91.8),
            "CMSS (centralized)": printed(DIGIT_FIVE, 99.0, 75.3, 88.4, 93.7, 97.7, 90.8),
            "DAEL (centralized)": printed(DIGIT_FIVE, 99.5, 93.8, 92.5, 97.9, 98.7, 96.5),
        },
    ),
    Experiment(
        "copa/table5",
        f"{PAPER}, Table 5",
        "How well does each method adapt to an unlabelled domain of Office-Caltech10?",
        adapting(
            source_only=printed(OFFICE_CALTECH, 86.1, 87.8, 98.3, 99.0, 92.8),
            copa=printed(OFFICE_CALTECH, 95.8, 94.6, 99.6, 99.8, 97.5),
            kd3a=printed(OFFICE_CALTECH, 97.4, 96.4, 98.4, 99.7, 97.9),
            shot=printed(OFFICE_CALTECH, 96.4, 96.2, 98.5, 99.7, 97.7),
            fada=printed(OFFICE_CALTECH, 84.2, 88.7, 87.1, 88.1, 87.1),
            oracle=printed(OFFICE_CALTECH, 99.7, 98.4, 99.8, 99.7, 99.4),
        ),
        each_target,
        (recipes.COPA_OFFICE_CALTECH,),
        recipes.ADAPT_DIGITS,
        baseline="source-only",
        cited={
            "MDAN (centralized)": printed(OFFICE_CALTECH, 95.4, 91.8, 98.6, 98.9, 96.1),
            "DCTN (centralized)": printed(OFFICE_CALTECH, 92.7, 90.2, 99.0, 99.4, 95.3),
            "MCD (centralized)": printed(OFFICE_CALTECH, 92.1, 91.5, 99.1, 99.5, 95.6),
            "M3SDA (centralized)": printed(OFFICE_CALTECH, 94.5, 92.2, 99.2, 99.5, 96.4),
            "DSBN (centralized)": printed(OFFICE_CALTECH, 93.2, 91.6, 98.9, 99.3, 95.8),
            "CMSS (centralized)": printed(OFFICE_CALTECH, 96.0, 93.7, 99.3, 99.6, 97.2),
            "SImpAI (centralized)": printed(OFFICE_CALTECH, 95.6, 94.6, 100.0, 100.0, 97.5),
        },
    ),
    Experiment(
        "copa/table6",
        f"{PAPER}, Table 6",
        "What does each part of COPA contribute?",
        (
            Row("sequential", "sequential", theirs=printed(PACS, 43.4, 65.0, 54.6, 60.8, 55.9)),
            Row("centralized (DeepAll)", "deepall", theirs=printed(PACS, 77.0, 75.9, 96.0, 69.2, 79.5)),
            Row("FedAvg", "fedavg", theirs=printed(PACS, 76.2, 73.8, 92.6, 68.9, 77.9)),
            Row("FedAvg w/o iteration", "ind-paramavg", theirs=printed(PACS, 68.9, 61.4, 92.2, 51.7, 68.6)),
            Row("COPA", "copa", theirs=COPA_ON_PACS),
            variant("COPA w/o HBIN", printed(PACS, 81.4, 75.3, 95.1, 78.5, 82.6), norm="bn"),
            variant("COPA w/o CoFC", printed(PACS, 80.3, 77.9, 94.9, 77.8, 82.7), collaboration="none"),
            variant("COPA w/o iteration", printed(PACS, 76.0, 72.5, 94.3, 75.4, 79.6), iterate=False),
            variant(
                "COPA w/o all three",
                printed(PACS, 69.9, 64.6, 92.4, 51.9, 69.7),
                norm="bn",
                collaboration="none",
                iterate=False,
            ),
        ),
        each_target,
        (recipes.COPA_PACS,),
        recipes.DIGITS,
        baseline="COPA",
    ),
    Experiment(
        "copa/table7",
        f"{PAPER}, Table 7",
        "Is COPA better than an ensemble of separately trained models?",
        (
            Row("COPA", "copa", theirs=COPA_ON_PACS),
            Row("Ind-Ensemble", "ind-ensemble", theirs=printed(PACS, 72.3, 55.2, 94.7, 60.2, 70.6)),
            Row("Ind-ParamAvg", "ind-paramavg", theirs=printed(PACS, 68.9, 61.4, 92.2, 51.7, 68.6)),
        ),
        each_target,
        (recipes.COPA_PACS,),
        recipes.DIGITS.with_seeds(0, 1, 2),
        baseline="COPA",
        cited={"DAEL (centralized)": printed(PACS, 84.6, 74.4, 95.6, 78.9, 83.4)},
    ),
    Experiment(
        "copa/fig2",
        f"{PAPER}, Figure 2",
        "Which way of using the other sites' classifiers is best?",
        (
            Row("CoFC", "copa"),
            variant("w/o CoFC", collaboration="none"),
            variant("CoFC w/o RandAugment", augment=False),
            variant("w/o CoFC + RandAugment", collaboration="enlarge"),
            variant("w/o CoFC + consistency", collaboration="consistency"),
        ),
        each_target,
        (recipes.COPA_PACS,),
        recipes.DIGITS,
        baseline="CoFC",
        draw=bars("copa-fig2.png"),
    ),
    Experiment(
        "copa/fig3",
        f"{PAPER}, Figure 3",
        "Which normalisation is best?",
        tuple(
            variant(label, norm=norm)
            for label, norm in (
                ("HBIN", "hbin"),
                ("BN", "bn"),
                ("IN", "in"),
                ("IBN-a", "ibn-a"),
                ("IBN-b", "ibn-b"),
                ("SwitchNorm", "switch"),
            )
        ),
        each_target,
        (recipes.COPA_PACS,),
        recipes.DIGITS,
        baseline="HBIN",
        draw=bars("copa-fig3.png"),
    ),
    Experiment(
        "copa/fig4",
        f"{PAPER}, Figure 4",
        "How should local models agree on pseudo labels and on their weights?",
        tuple(Row(rule, "copa-uda", {"copa-uda": {"agreement": rule}}) for rule in ("mean", "max", "most", "none")),
        each_target,
        (recipes.COPA_DIGIT_FIVE,),
        recipes.ADAPT_DIGITS,
        baseline="mean",
        draw=bars("copa-fig4.png"),
    ),
)
