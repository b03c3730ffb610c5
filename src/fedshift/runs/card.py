"""MODEL_CARD.md: what a model is, what it was trained on, and its scores."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from fedshift.data.formats.public import PUBLIC
from fedshift.federation.plan import Plan
from fedshift.methods import find_about
from fedshift.runs.calibrated import calibration_of, told, two_class_rows
from fedshift.runs.config import RunConfig
from fedshift.runs.health import PREDICT_RULE, class_overlaps, in_percent
from fedshift.runs.privacy import OUTSIDE, privacy_lines, read_promised
from fedshift.runs.record import LedgerLine

_MOST_LISTED = 50
"""Sites of which each has its own lines."""


def skipped_throughout(results: Mapping[str, Any]) -> list[str]:
    """Clients that gave no usable answer in any round. Their scores are of a model that learned without them."""
    skipped: Counter[str] = Counter()
    for name, count in results["counters"].items():
        group, _, rest = name.partition(".")
        if group == "skipped":
            skipped[rest.rpartition(".")[0]] += count
    return [target for target in results["per_target"] if skipped[target] >= results["rounds"]]


def model_card(
    config: RunConfig,
    plan: Plan,
    results: Mapping[str, Any],
    ledgers: Iterable[tuple[str, Sequence[LedgerLine]]] = (),
) -> str:
    """The text of MODEL_CARD.md. `ledgers`: those of the sites that were on this machine."""
    about = find_about(config.method)
    task = plan.model.task
    unit = "accuracy" if task == "classification" else "mIoU"
    skipped = skipped_throughout(results)
    rows = [
        f"| {target}{' (skipped)' if target in skipped else ''} | {(n := results['samples'][target]['test']):,}"
        f" | {in_percent(s['last'], n, task)} | {in_percent(s['source_val'], n, task)} | {_percent(s['oracle'])} |"
        for target, s in results["per_target"].items()
    ]
    unlabelled = {"adapt": (config.target or "",), "multi-adapt": config.targets or ()}.get(plan.setting, ())
    without = f"; without labels: {', '.join(unlabelled)}" if unlabelled and about.data == "federated" else ""
    attacks = [f"- **Trained under simulated attack:** {', '.join(config.attack)}"] if config.attack else []
    label = "Not to deploy" if about.is_bound else "Data is moved"
    warning = f"\n**{label}:** this method needs {about.needs}.\n" if about.data != "federated" else ""
    return "\n".join(
        [
            f"# {about.name} on {results['dataset']}",
            warning,
            f"- Method: {about.name} ({about.paper}), setting {plan.setting}",
            f"- Network: {plan.model.arch}, {len(plan.model.classes)} classes, input {list(plan.model.input_shape)},"
            f" initial weights: {config.weights or 'none (trained from scratch)'}",
            f"- Trained on: {', '.join(results['sources'])}{without}",
            f"- Rounds: {plan.training.rounds}, seed: {config.seed}",
            *attacks,
            f"- Classes: {', '.join(plan.model.classes)}",
            f"- SHA-256 of model.safetensors: `{results['model_sha256']}`",
            "",
            *_data(plan, results),
            f"## Measured {unit}",
            "",
            *(_HEAD + rows if rows else ["No score: no target has labels to test on."]),
            *([""] if skipped else []),
            *(
                f"{target} was skipped in every round: its score is of a model that learned without it."
                for target in skipped
            ),
            "",
            *(_by_class(results) if task == "segmentation" and rows else []),
            *(["In brackets: the 95 % interval (Wilson).", ""] if task == "classification" and rows else []),
            PREDICT_RULE,
            "",
            *_sureness(results),
            *_warned(results),
            *_what_left(results, ledgers),
            *_privacy(results),
            "## Licences",
            "",
            _licences(config),
            "",
            "## Limits",
            "",
            *_LIMITS,
            "",
        ]
    )


_LIMITS = (
    "- The scores hold for data like the test splits they come from. A site that looks different from all sources",
    "  may do worse: check with labelled samples of that site before relying on the model.",
    "- It is a research model. It has passed no approval as a medical device or for any other use that needs one;",
    "  a person who is responsible looks at what it says.",
    "- Nothing is known of groups of people or devices that the sites did not tell apart: compare its errors",
    "  between those that matter where it is used.",
    "- Model weights can reveal something about the data they were trained on: treat the file as a summary of",
    "  that data.",
)

_HEAD = [
    "| target | test samples | last round | round chosen on source validation | oracle round (with target labels) |",
    "|---|---|---|---|---|",
]


def _by_class(results: Mapping[str, Any]) -> list[str]:
    """IoU and Dice of each class: their mean alone hides a class that is never found."""
    scores = {target: class_overlaps(matrix) for target, matrix in results["confusion"].items()}
    rows = [
        f"| {name} | {' | '.join(found[number] for found in scores.values())} |"
        for number, name in enumerate(results["classes"])
    ]
    return [
        "Last round by class, IoU / Dice in %:",
        "",
        f"| class | {' | '.join(scores)} |",
        "|---|" + "---|" * len(scores),
        *rows,
        "",
    ]


def _data(plan: Plan, results: Mapping[str, Any]) -> list[str]:
    """Who took part, and with how many samples."""
    tested = set(results["per_target"])

    def part(site: str) -> str:
        roles = ["labels learned from"] * (site in results["sources"] or site == results.get("home"))
        roles += ["scored"] * (site in tested)
        return ", ".join(roles) or "inputs without labels"

    rows = [
        f"| {site} | {part(site)} | {sizes.get('train', 0):,} | {sizes.get('val', 0):,} | {sizes.get('test', 0):,} |"
        for site, sizes in results["samples"].items()
    ]
    return ["## Data", "", "| site | part | training | validation | test |", "|---|---|---|---|---|", *rows, ""]


def _sureness(results: Mapping[str, Any]) -> list[str]:
    found = calibration_of(results)
    lines = told(found)
    if not lines:
        return []
    table = [f"| {' | '.join(row)} |" for row in two_class_rows(found)]
    head = [
        f"Two classes, {found.positive} is the positive one (in %, with 95 % intervals):",
        "",
        "| site | positive / negative | AUC | sensitivity | specificity |",
        "|---|---|---|---|---|",
    ]
    return ["## How sure it may be", "", *(f"- {line}" for line in lines), "", *([*head, *table, ""] if table else [])]


def _what_left(results: Mapping[str, Any], ledgers: Iterable[tuple[str, Sequence[LedgerLine]]]) -> list[str]:
    """A summary of the ledgers: kinds, not values. Of many sites their sums."""
    up = results["bytes"].get("up", 0) + results["bytes"].get("scoring_up", 0)
    about = find_about(str(results["method"]))
    raw = "Raw data did not." if about.data == "federated" else f"**Raw data did**: this method needs {about.needs}."
    told_once = f"{raw} {up:,} bytes left in all; each site's own ledger lists them."
    found = {site: _by_kind(left) for site, left in ledgers}
    if len(found) > _MOST_LISTED:
        total: dict[str, tuple[int, int]] = {}
        for kinds in found.values():
            for kind, (times, values) in kinds.items():
                before = total.get(kind, (0, 0))
                total[kind] = before[0] + times, before[1] + values
        found = {f"all {len(found):,}": total}
    rows = [
        f"| {site} | {kind} | {times:,} | {values:,} |"
        for site, kinds in found.items()
        for kind, (times, values) in sorted(kinds.items())
    ]
    table = ["| site | kind | times | values |", "|---|---|---|---|", *rows, ""] if found else []
    return ["## What left the sites", "", told_once, "", *table]


def _by_kind(left: Sequence[LedgerLine]) -> dict[str, tuple[int, int]]:
    """Kind -> how often it left, and how many values in all."""
    found: dict[str, tuple[int, int]] = {}
    for line in left:
        times, values = found.get(line.kind, (0, 0))
        found[line.kind] = times + 1, values + line.values
    return found


def _licences(config: RunConfig) -> str:
    begun = {
        None: "It was trained from scratch: no one else's weights are in it.",
        "imagenet": "It began with weights that were trained on ImageNet: those of the package that brings them"
        " (docs/networks.md) have its licence, and ImageNet's pictures were collected for research.",
    }.get(
        config.weights,
        f"It began with the weights in {Path(str(config.weights)).name}: their licence holds for it too.",
    )
    return f"{begun} The licence of the data is that of each site's owner{_data_licence(config)}"


def _data_licence(config: RunConfig) -> str:
    row = PUBLIC.get(config.dataset or "")
    return f"; {config.dataset}: {row.licence}." if row else "."


def _warned(results: Mapping[str, Any]) -> list[str]:
    found = [f"- **{one['code']}**: {one['text']} {one['advice']}" for one in results.get("warnings", ())]
    return ["## Warnings", "", *(found or ["None of the checks of docs/reports.md found anything."]), ""]


def _privacy(results: Mapping[str, Any]) -> list[str]:
    lines = privacy_lines(read_promised(results))
    return ["## Differential privacy", "", *(f"- {line}" for line in lines), "", OUTSIDE, ""] if lines else []


def _percent(value: float) -> str:
    return f"{100 * value:.1f} %"
