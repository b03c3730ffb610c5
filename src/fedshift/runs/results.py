"""What a run counts while it goes, and the results that it ends with."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from fedshift.federation.compression import Sent
from fedshift.federation.federation import Traffic
from fedshift.federation.handshake import Described
from fedshift.runs.health import FEW, intervals
from fedshift.runs.planning import Prepared
from fedshift.runs.record import Scores, chosen_round


@dataclass
class Replan:
    """The number of rounds was changed when `after` of them were done."""

    after: int
    before: int
    now: int


@dataclass
class Memory:
    """All that a checkpoint holds: where the run is and what has been counted. `states` are the files that sites on
    this machine have stored by then; `metrics_...` is how much of `metrics.jsonl` belongs to it;
    `planned` is how many rounds it was to have by then, and `replans` how that changed. `sent` is
    what sites have of models that cross as changes. `mean` is the mean of each model over its last `mean_of` rounds, if
    `average_rounds` asks for it. `backdoor` is each target's share of triggered images that the last scored models take
    for the class that an attack wants."""

    round: int
    state: Any
    history: list[Scores] = field(default_factory=list)
    counters: dict[str, int] = field(default_factory=dict)
    learning: Traffic = field(default_factory=Traffic)
    scoring: Traffic = field(default_factory=Traffic)
    seconds: float = 0.0
    confusions: dict[str, Tensor] = field(default_factory=dict)
    validation: dict[str, Tensor] = field(default_factory=dict)
    backdoor: dict[str, float] = field(default_factory=dict)
    mean: dict[str, dict[str, Tensor]] = field(default_factory=dict)
    mean_of: dict[str, int] = field(default_factory=dict)
    states: tuple[str, ...] = ()
    planned: int = 0
    replans: list[Replan] = field(default_factory=list)
    metrics_size: int = 0
    metrics_sha256: str = ""
    sent: Sent = field(default_factory=Sent)


def make_results(
    prepared: Prepared,
    memory: Memory,
    digest: str,
    tested: Sequence[str],
    described: Mapping[str, Described],
    say: Callable[[str], None],
) -> dict[str, Any]:
    """The content of `results.json`, but for warnings. `digest` is the model's."""
    config, plan, roles = prepared.config, prepared.plan, prepared.roles
    history = memory.history
    per_target = {site: found for site in tested if (found := _under_rules(history, site))}
    for site in tested:
        if site not in per_target:
            say(f"{site} did not answer when the last or the chosen round was scored: no score")
    rules = ("last", "source_val", "oracle")
    headline_scores = {rule: _mean(row[rule] for row in per_target.values()) for rule in rules} if per_target else {}
    total = memory.seconds
    results = {
        "method": config.method,
        "setting": plan.setting,
        "task": plan.model.task,
        "dataset": prepared.dataset.name,
        "sources": list(roles.source_domains),
        "target": config.target,
        "home": config.home,
        "seed": config.seed,
        "rounds": plan.training.rounds,
        "arch": plan.model.arch,
        "classes": list(plan.model.classes),
        "accuracy" if plan.model.task == "classification" else "miou": headline_scores,
        "per_target": per_target,
        "attack": list(config.attack),
        "source_val": history[-1].val,
        "chosen_round": chosen_round(history).round,
        "confusion": {site: matrix.tolist() for site, matrix in memory.confusions.items()},
        "val_confusion": {site: matrix.tolist() for site, matrix in memory.validation.items()},
        "samples": {site: dict(d.sizes) for site, d in described.items()},
        "bytes": {
            "up": memory.learning.up,
            "down": memory.learning.down,
            "scoring_up": memory.scoring.up,
            "scoring_down": memory.scoring.down,
        },
        "flops_client": None,  # counted on request: `fedshift cost`, `fedshift bench`
        "seconds": {
            "total": round_to(total),
            "sites": round_to(memory.learning.site_seconds + memory.scoring.site_seconds),
            "coordinator": round_to(max(0.0, total - memory.learning.waited - memory.scoring.waited)),
        },
        "counters": memory.counters,
        "replans": [dataclasses.asdict(replan) for replan in memory.replans],
        "model_sha256": digest,
    }
    if memory.backdoor:
        results["backdoor"] = memory.backdoor
    return results | {"intervals": intervals(results)}


def _under_rules(history: list[Scores], site: str) -> dict[str, float]:
    """A target's scores under the rules that choose a round; none where it gave no usable answer in one that counts."""
    last, chosen = history[-1].test, chosen_round(history).test
    if site not in last or site not in chosen:
        return {}
    oracle = max(scores.test[site] for scores in history if site in scores.test)
    return {"last": last[site], "source_val": chosen[site], "oracle": oracle}


def unscored(split: str, sizes: Mapping[str, int]) -> str:
    """Why a site is not scored. It does not tell how many of its samples have labels."""
    few = f", or fewer labelled ones than its policy asks for ({sizes[split]} samples in all)" * bool(sizes[split])
    return f"has no labels in a {split} split{few}: it is not scored"


def scored_on(site: str, sizes: Mapping[str, int]) -> str:
    """How many samples a score comes from. A site that has nothing else was not given a test split."""
    count = sizes["test"]
    if not sizes["train"] and not sizes["val"]:
        return f"{site} is scored on all its {count:,} labelled samples (its data has no test split of its own)"
    return f"{site} is scored on {count:,} test samples{' only' if count < FEW else ''}"


def round_to(value: float, digits: int = 6) -> float | None:
    return round(value, digits) if math.isfinite(value) else None


def _mean(values: Any) -> float:
    numbers = list(values)
    return sum(numbers) / len(numbers) if numbers else math.nan
