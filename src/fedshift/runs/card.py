"""MODEL_CARD.md: what a model is, what it was trained on, and its scores."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Any

from fedshift.federation.plan import Plan
from fedshift.methods import find_about
from fedshift.runs.config import RunConfig
from fedshift.runs.health import PREDICT_RULE, class_overlaps, in_percent
from fedshift.runs.privacy import OUTSIDE, privacy_lines, read_promised


def skipped_throughout(results: Mapping[str, Any]) -> list[str]:
    """Clients that gave no usable answer in any round. Their scores are of a model that learned without them."""
    skipped: Counter[str] = Counter()
    for name, count in results["counters"].items():
        group, _, rest = name.partition(".")
        if group == "skipped":
            skipped[rest.rpartition(".")[0]] += count
    return [target for target in results["per_target"] if skipped[target] >= results["rounds"]]


def model_card(config: RunConfig, plan: Plan, results: Mapping[str, Any]) -> str:
    """The text of MODEL_CARD.md."""
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
            *_warned(results),
            *_privacy(results),
            "## Limits",
            "",
            "The scores hold for data like the test splits they come from. A site that looks different from all",
            "sources may do worse: check with labelled samples of that site before relying on the model. Model weights",
            "can reveal something about the data they were trained on: treat the file as a summary of that data.",
            "",
        ]
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


def _warned(results: Mapping[str, Any]) -> list[str]:
    found = [f"- **{one['code']}**: {one['text']} {one['advice']}" for one in results.get("warnings", ())]
    return ["## Warnings", "", *(found or ["None of the checks of docs/reports.md found anything."]), ""]


def _privacy(results: Mapping[str, Any]) -> list[str]:
    lines = privacy_lines(read_promised(results))
    return ["## Differential privacy", "", *(f"- {line}" for line in lines), "", OUTSIDE, ""] if lines else []


def _percent(value: float) -> str:
    return f"{100 * value:.1f} %"
