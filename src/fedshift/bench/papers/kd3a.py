"""KD3A: H. Feng et al., KD3A: Unsupervised Multi-Source Decentralized Domain Adaptation via Knowledge Distillation,
ICML 2021. Numbers are those printed there. (Its Tables 4 and 5 are its network and its recipes.)"""

from __future__ import annotations

import json
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fedshift.audit.leakage.fig5 import Leakage, leakage
from fedshift.bench import recipes
from fedshift.bench.columns import bad_sites, each_target, rounds_per_epoch
from fedshift.bench.figures import bars, draw_lines, new_figure, saved
from fedshift.bench.grid import Experiment, printed
from fedshift.bench.jobs import Row
from fedshift.bench.papers.controls import ADABN, POOLED, with_own_statistics
from fedshift.bench.recipes import KD3A_DOMAINNET, RESNET_101, named_workload
from fedshift.bench.records import Record
from fedshift.bench.suite import Drawn, Suite, SuiteRequest, SuiteResult, only_seed, options_of, with_time_left
from fedshift.bench.tables import Sheet, Value
from fedshift.files import write_atomically
from fedshift.functional.inversion import Search
from fedshift.runs.config import apply_settings

PAPER = "Feng et al., ICML 2021"

DOMAINNET = ("clipart", "infograph", "painting", "quickdraw", "real", "sketch")
DIGIT_FIVE = ("mnist", "mnist_m", "svhn", "syn", "usps")
OFFICE_CALTECH = ("amazon", "caltech", "dslr", "webcam")
BAD = ("irrelevant", "15% wrong", "30% wrong", "50% wrong")
RATES = (0.2, 0.5, 1.0, 2.0, 10.0, 100.0)

BAD_SITES = bad_sites("quickdraw", "real", (0.15, 0.3, 0.5))
WITHOUT_MIXUP: dict[str, Any] = {"kd3a": {"mixup": 0.0}}

WEIGHTINGS = (
    Row("H-divergence", "kd3a", {"kd3a": {"weighting": "h-divergence"}}, printed(BAD, 57.9, 50.5, 49.8, 47.6)),
    Row("info gain", "kd3a", {"kd3a": {"weighting": "info-gain"}}, printed(BAD, 57.7, 50.5, 48.9, 46.3)),
    Row("consensus focus", "kd3a", {"kd3a": {"weighting": "focus"}}, printed(BAD, 58.1, 52.1, 51.1, 50.6)),
)


def adapting(
    source_only: dict[str, float],
    kd3a: dict[str, float],
    shot: dict[str, float],
    fada: dict[str, float],
    oracle: dict[str, float],
    without_mixup: dict[str, float] | None = None,
) -> tuple[Row, ...]:
    plain = (Row("KD3A w/o augmentation", "kd3a", WITHOUT_MIXUP, without_mixup),) if without_mixup else ()
    rivals = (
        Row("KD3A", "kd3a", theirs=kd3a),
        *plain,
        Row("SHOT", "shot", theirs=shot),
        Row("FADA", "fada", theirs=fada),
    )
    return (
        Row("source-only", "source-only"),
        replace(POOLED, theirs=source_only),  # what this paper calls source-only
        ADABN,
        *rivals,
        *with_own_statistics(*rivals),
        Row("oracle", "oracle", theirs=oracle),
    )


def weight_of_bad_site(records: Sequence[Record], request: SuiteRequest) -> Drawn:
    """KD3A, Fig. 4: the weight of the bad site in each round, mean over targets and seeds."""
    columns = list(dict.fromkeys(record.column for record in records))
    rounds = records[0].rounds
    found: dict[str, dict[str, list[float | None]]] = {column: {} for column in columns}
    for column in columns:
        for row in dict.fromkeys(record.row for record in records):
            curves = [
                record.notes.get("weight", {}).get(_bad_site(record), [])
                for record in records
                if (record.row, record.column) == (row, column)
            ]
            found[column][row] = [_mean_at(curves, index) for index in range(len(rounds))]
    sheet = Sheet(
        "weight of the bad site, by round",
        tuple(str(number) for number in rounds),
        {f"{column}: {row}": values for column, own in found.items() for row, values in own.items()},
    )
    return [sheet], [draw_lines(request.out / "kd3a-fig4.png", found, rounds, "weight of the bad site")]


def _bad_site(record: Record) -> str:
    """The attacked site; without an attack, the irrelevant domain of the paper."""
    attacks = record.settings.get("attack") or ["irrelevant:quickdraw"]
    return str(attacks[0]).split(":")[1]


def _mean_at(curves: Sequence[Sequence[float | None]], index: int) -> float | None:
    values = [value for curve in curves if index < len(curve) and (value := curve[index]) is not None]
    return statistics.fmean(values) if values else None


EXPERIMENTS = (
    Experiment(
        "kd3a/table1",
        f"{PAPER}, Table 1",
        "How well does each method adapt to an unlabelled style of DomainNet?",
        adapting(
            source_only=printed(DOMAINNET, 52.1, 23.1, 47.7, 13.3, 60.7, 46.5, 40.6),
            kd3a=printed(DOMAINNET, 72.5, 23.4, 60.9, 16.4, 72.7, 60.6, 51.1),
            shot=printed(DOMAINNET, 61.7, 22.2, 52.6, 12.2, 67.7, 48.6, 44.2),
            fada=printed(DOMAINNET, 45.3, 16.3, 38.9, 7.9, 46.7, 26.8, 30.3),
            oracle=printed(DOMAINNET, 69.3, 34.5, 66.3, 66.8, 80.1, 60.7, 63.0),
        ),
        each_target,
        (recipes.KD3A_DOMAINNET,),
        recipes.ADAPT_DIGITS,
        baseline="source-only",
        cited={
            "MDAN": printed(DOMAINNET, 60.3, 25.0, 50.3, 8.2, 61.5, 51.3, 42.8),
            "M3SDA": printed(DOMAINNET, 58.6, 26.0, 52.3, 6.3, 62.7, 49.5, 42.6),
            "DAEL": printed(DOMAINNET, 70.8, 26.5, 57.4, 12.2, 65.0, 60.6, 48.7),
            "CMSS": printed(DOMAINNET, 64.2, 28.0, 53.6, 16.0, 63.4, 53.8, 46.5),
            "DSBN (their rerun)": printed(DOMAINNET, 60.3, 22.6, 52.3, 9.1, 62.7, 47.6, 42.4),
            "FADA (their rerun)": printed(DOMAINNET, 59.1, 21.7, 47.9, 8.8, 60.8, 50.4, 41.5),
        },
    ),
    Experiment(
        "kd3a/table2",
        f"{PAPER}, Table 2",
        "Does the weighting protect the target from an irrelevant or a poisoned site?",
        (
            *WEIGHTINGS,
            Row("domain drop", "kd3a", {"kd3a": {"drop": ["{bad}"]}}, printed(BAD, 58.3, 50.7, 50.7, 50.7)),
        ),
        BAD_SITES,
        (recipes.KD3A_DOMAINNET,),
        recipes.ADAPT_DIGITS.at("photo", "street"),
        baseline="consensus focus",
    ),
    Experiment(
        "kd3a/table3",
        f"{PAPER}, Table 3",
        "How often do sites have to communicate?",
        (
            Row(
                "FADA",
                "fada",
                {"rounds": "{rounds}", "local_epochs": "{epochs}", "fada": {"sync_batches": "{sync}"}},
                printed([f"r {rate:g}" for rate in RATES], 39.2, 40.3, 40.5, 40.5, 40.8, 41.5),
            ),
            Row("KD3A", "kd3a", {}, printed([f"r {rate:g}" for rate in RATES], 50.5, 50.9, 51.1, 51.3, 51.3, 52.0)),
        ),
        # A source of medium size has about 50,000 images, 1,000 batches.
        rounds_per_epoch(40, 1000, *RATES),
        (recipes.KD3A_DOMAINNET,),
        recipes.ADAPT_DIGITS.at("street").with_layout(rounds_per_epoch(10, 19, *RATES)),
        baseline="FADA",
    ),
    Experiment(
        "kd3a/table6",
        f"{PAPER}, Table 6",
        "What does mixup contribute?",
        (
            Row("KD3A", "kd3a", theirs=printed(DOMAINNET, 72.5, 23.4, 60.9, 16.4, 72.7, 60.6, 51.1)),
            Row(
                "KD3A w/o augmentation",
                "kd3a",
                WITHOUT_MIXUP,
                printed(DOMAINNET, 70.2, 23.2, 58.8, 16.1, 70.4, 59.5, 49.7),
            ),
        ),
        each_target,
        (recipes.KD3A_DOMAINNET,),
        recipes.ADAPT_DIGITS.with_seeds(0, 1, 2),
        baseline="KD3A w/o augmentation",
    ),
    Experiment(
        "kd3a/table7",
        f"{PAPER}, Table 7",
        "How well does each method adapt to an unlabelled look of digits?",
        adapting(
            source_only=printed(DIGIT_FIVE, 92.3, 63.7, 71.5, 83.4, 90.71, 80.3),
            kd3a=printed(DIGIT_FIVE, 99.2, 87.3, 85.6, 89.4, 98.5, 92.0),
            without_mixup=printed(DIGIT_FIVE, 99.1, 86.9, 82.2, 89.2, 98.4, 91.2),
            shot=printed(DIGIT_FIVE, 98.2, 80.2, 84.5, 91.1, 97.1, 90.2),
            fada=printed(DIGIT_FIVE, 91.4, 62.5, 50.5, 71.8, 91.7, 73.6),
            oracle=printed(DIGIT_FIVE, 99.5, 95.4, 92.3, 98.7, 99.2, 97.0),
        ),
        each_target,
        (recipes.KD3A_DIGIT_FIVE,),
        recipes.ADAPT_DIGITS,
        baseline="source-only",
        cited={
            "MDAN": printed(DIGIT_FIVE, 97.2, 75.7, 82.2, 85.2, 93.3, 86.7),
            "M3SDA": printed(DIGIT_FIVE, 98.4, 72.8, 81.3, 89.6, 96.2, 87.7),
            "CMSS": printed(DIGIT_FIVE, 99.0, 75.3, 88.4, 93.7, 97.7, 90.8),
            "DSBN (their rerun)": printed(DIGIT_FIVE, 97.2, 71.6, 77.9, 88.7, 96.1, 86.3),
            "FADA (their rerun)": printed(DIGIT_FIVE, 92.5, 64.5, 72.1, 82.8, 91.7, 80.8),
        },
    ),
    Experiment(
        "kd3a/table8",
        f"{PAPER}, Table 8",
        "How well does each method adapt to an unlabelled domain of Office-Caltech10?",
        adapting(
            source_only=printed(OFFICE_CALTECH, 86.1, 87.8, 98.3, 99.0, 92.8),
            kd3a=printed(OFFICE_CALTECH, 97.4, 96.4, 98.4, 99.7, 97.9),
            without_mixup=printed(OFFICE_CALTECH, 96.0, 95.2, 97.9, 99.6, 97.2),
            shot=printed(OFFICE_CALTECH, 96.4, 96.2, 98.5, 99.7, 97.7),
            fada=printed(OFFICE_CALTECH, 84.2, 88.7, 87.1, 88.1, 87.1),
            oracle=printed(OFFICE_CALTECH, 99.7, 98.4, 99.8, 99.7, 99.4),
        ),
        each_target,
        (recipes.KD3A_OFFICE_CALTECH,),
        recipes.ADAPT_DIGITS,
        baseline="source-only",
        cited={
            "MDAN": printed(OFFICE_CALTECH, 98.9, 98.6, 91.8, 95.4, 96.1),
            "M3SDA": printed(OFFICE_CALTECH, 94.5, 92.2, 99.2, 99.5, 96.4),
            "CMSS": printed(OFFICE_CALTECH, 96.0, 93.7, 99.3, 99.6, 97.2),
            "DSBN (their rerun)": printed(OFFICE_CALTECH, 93.2, 91.6, 98.9, 99.3, 95.8),
        },
    ),
    Experiment(
        "kd3a/fig3",
        f"{PAPER}, Figure 3",
        "What does each part of KD3A contribute?",
        (
            Row("source-only", "source-only"),
            POOLED,
            ADABN,
            Row("knowledge vote", "kd3a", {"kd3a": {"weighting": "samples", "mmd": False}}),
            Row("+ consensus focus", "kd3a", {"kd3a": {"mmd": False}}),
            Row("+ BatchNorm MMD", "kd3a"),
            # BatchNorm MMD does two things: its steps, and running statistics that become those of the target.
            Row("+ BatchNorm MMD: loss alone", "kd3a", {"kd3a": {"mmd_mode": "eval"}}),
            Row("+ own statistics instead of MMD", "kd3a", {"norm": "own", "kd3a": {"mmd": False}}),
        ),
        each_target,
        (recipes.KD3A_DOMAINNET,),
        recipes.ADAPT_DIGITS,
        baseline="source-only",
        draw=bars("kd3a-fig3.png"),
    ),
    Experiment(
        "kd3a/fig4",
        f"{PAPER}, Figure 4",
        "How much weight does the bad site get in each round?",
        WEIGHTINGS,
        BAD_SITES,
        (recipes.KD3A_DOMAINNET,),
        recipes.ADAPT_DIGITS.at("photo", "street"),
        tables=False,
        draw=weight_of_bad_site,
    ),
)

# --- Figure 5: images rebuilt from messages --------------------------------------------------------------------------

SHOWN = 6
"""Images per row of the picture."""

SMALL_SIDE = 32
"""Side in pixels to which images of the user's folders are scaled, at scale mini."""

LEAKAGE_COLUMNS = ("PSNR, mean", "PSNR, std", "plain grey", "SSIM", "random SSIM", "labels found", "steps", "images")

LEAKAGE_NOTES = (
    "The attacker knows the network, its weights before the message, the schedule, and how many images were used in"
    " what batches; not the images, their order or their labels. It treats an epoch as one large step: an attacker that"
    " replays the epoch may do better.",
    "PSNR in dB over images, beside that of a plain grey image, which needs no message.",
    "SSIM is the structural similarity, 1 for equal images, beside that of random images.",
)


@dataclass(frozen=True)
class LeakageOptions:
    """`--set leakage.KEY=VALUE`: sites per kind of message, steps of the attacker's search, starts of the search."""

    trials: int = 4
    steps: int = 300
    starts: int = 1


def fig5(request: SuiteRequest) -> SuiteResult:
    """DIFFERS: the paper shows two pictures and does not state the network, the images or the search. Scale paper uses
    its largest data set and the network it has there."""
    seed = only_seed(request, "kd3a/fig5", "leakage.trials")
    site, keys, usual = _fig5_data(request)
    options, keys = options_of("leakage", usual, apply_settings(keys, request.settings))
    search = Search(options.steps, starts=options.starts)
    found = leakage(
        site, trials=options.trials, search=search, seed=seed, progress=with_time_left(request.progress), **keys
    )
    files = write_leakage(found, request.out)
    note = f"{found.dataset}, site {found.site}, {found.arch} before round 1, {search.steps} steps per search."
    return SuiteResult(sheets=(leakage_sheet(found),), files=tuple(files), notes=(note, *LEAKAGE_NOTES))


def _fig5_data(request: SuiteRequest) -> tuple[str | None, dict[str, Any], LeakageOptions]:
    """The attacked site, configuration keys, and the default effort of the attacker."""
    if request.scale == "paper":
        workload = named_workload(KD3A_DOMAINNET, request.data_dir)
        return (
            workload.roles.domains[0],
            {**RESNET_101, "weights": None, **workload.data_keys},
            LeakageOptions(steps=4800),
        )
    if request.data_dir is not None:
        return None, {"data_dir": str(request.data_dir), "image_size": SMALL_SIDE}, LeakageOptions()
    return "photo", {"dataset": "digits"}, LeakageOptions()


def leakage_sheet(found: Leakage) -> Sheet:
    rows: dict[str, list[Value]] = {
        row["message"]: [
            row["psnr_mean"],
            row["psnr_std"],
            row["psnr_of_plain_grey"],
            row["ssim_mean"],
            row["ssim_of_random_images"],
            row["labels_right"],
            row["steps"],
            len(row["psnr"]),
        ]
        for row in found.summary()
    }
    return Sheet("images rebuilt from a message", LEAKAGE_COLUMNS, rows)


def write_leakage(found: Leakage, out: Path) -> list[Path]:
    """Writes leakage.png (originals above rebuilt images) and leakage.json. Returns the path of the picture."""
    figure, axes = new_figure(1, rows=len(found.messages))
    figure.set_size_inches(SHOWN * 1.1 + 1.0, len(found.messages) * 2.7)
    for axis, message, row in zip(axes, found.messages, found.summary(), strict=True):
        own = found.of(message)
        originals = torch.cat([each.originals for each in own])[:SHOWN]
        rebuilt = torch.cat([each.rebuilt for each in own])[:SHOWN]
        axis.imshow(torch.cat([_strip(originals), _strip(rebuilt)], dim=0).numpy(), interpolation="nearest")
        axis.set_title(f"{message.name}: {row['psnr_mean']:.1f} ± {row['psnr_std']:.1f} dB", fontsize="medium")
        side = originals.shape[2]
        axis.set_yticks([side / 2, side * 1.5 + 2], ["original", "rebuilt"])
        axis.set_xticks([])
    write_atomically(out / "leakage.json", (json.dumps(found.plain(), indent=2) + "\n").encode())
    return [saved(figure, out / "leakage.png")]


def _strip(images: Tensor) -> Tensor:
    """Images side by side on white, `(height + 2, SHOWN * (width + 2), 3)`."""
    count, _, height, width = images.shape
    strip = torch.ones(height + 2, SHOWN * (width + 2), 3)
    for number in range(count):
        left = number * (width + 2)
        strip[:height, left : left + width] = images[number].permute(1, 2, 0)
    return strip


SUITES = (
    Suite(
        name="kd3a/fig5",
        paper=f"{PAPER}, Figure 5",
        question="Which images can be rebuilt from what a site sends after a batch, and after an epoch?",
        needs={"mini": "nothing: built-in digits", "paper": "DomainNet"},
        estimate=lambda: {
            "mini": "about 10 minutes on 2 cores",
            "paper": "days on a CPU: double gradients of resnet101",
        },
        run=fig5,
        seeds={"mini": (0,), "paper": (0,)},
    ),
)
