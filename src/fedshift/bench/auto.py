"""`method: auto`: tries methods under a time budget and takes the one that does best at sites it has not learned from.

Every labelled site is held out in turn (in adapt: used without its labels), each method is trained without it, and the
mean of the scores there decides. The target takes no part in that: neither its labels nor its inputs are read. A
method other than FedAvg has to be better by `MARGIN`, because the others cost more and this is one seed.
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from fedshift.bench.api import cores
from fedshift.bench.jobs import Column, Job
from fedshift.bench.own import (
    BASELINE,
    Comparison,
    OwnData,
    held_out_columns,
    open_own,
    own_jobs,
    train_all,
    write_tables,
)
from fedshift.bench.records import Record
from fedshift.bench.run import Launcher, OnProgress, silent
from fedshift.errors import InputError
from fedshift.federation import codec
from fedshift.federation.plan import Setting
from fedshift.files import read_json, write_atomically
from fedshift.methods import find_about
from fedshift.runs.planning import prepare
from fedshift.runs.record import CHOICE

CANDIDATES: dict[Setting, tuple[str, ...]] = {
    "generalize": (BASELINE, "fedlooks", "feddg-ga", "csac", "copa"),
    "adapt": (BASELINE, "fedlooks", "shot", "kd3a", "copa-uda"),
}
"""Tried in this order; those that are too much for the budget are left out from the most expensive on."""
MARGIN = 0.01
DEFAULT_MINUTES = 30.0
MOST_ROUNDS, FEWEST_ROUNDS = 20, 5
_START_SECONDS = 4.0


@dataclass(frozen=True)
class Trial:
    """What the budget is spent on, decided once, so that a stopped search goes on as it began. `seconds` is how long a
    round of FedAvg took in the pilot."""

    setting: Setting
    methods: tuple[str, ...]
    sites: tuple[str, ...]
    rounds: int
    seconds: float
    minutes: float
    left_out: Mapping[str, str]


@dataclass(frozen=True)
class Choice:
    """The method, why, and the score of each method at each held-out site. `comparison` is None where there was nothing
    to choose by."""

    method: str
    reason: str
    rounds: int | None
    scores: Mapping[str, Mapping[str, float]]
    left_out: Mapping[str, str]
    comparison: Comparison | None = None

    def as_json(self) -> dict[str, Any]:
        return {key: value for key, value in codec.plain(asdict(self)).items() if key != "comparison"}


def choose_method(
    values: Mapping[str, Any],
    out: Path,
    *,
    minutes: float = DEFAULT_MINUTES,
    jobs: int | None = None,
    progress: OnProgress = silent,
    say: Callable[[str], None] = lambda text: None,
    launcher: Launcher | None = None,
) -> Choice:
    """The method for the data and target that the configuration keys `values` name. Trainings are kept below `out`."""
    if minutes <= 0:
        raise InputError("config-value", f"--budget {minutes:g}: minutes, more than 0")
    if values.get("home") or values.get("setting") == "multi-adapt":
        raise InputError(
            "config-roles",
            "method auto is for generalize and adapt: with one labelled home, no other site has labels to choose by."
            " Use adabn (only normalisation adapts) or dualadapt.",
        )
    own, setting = open_own(values), _setting(values)
    sources = [site for site in values.get("sources") or own.labelled if site != values.get("target")]
    without = OwnData(own.dataset, tuple(site for site in sources if site in own.labelled))
    if len(without.labelled) < 2:
        reason = f"only {len(without.labelled)} labelled site besides the target: nothing to choose by"
        return Choice(BASELINE, reason, None, {}, {})
    columns = held_out_columns(without, [], setting)
    workers = jobs or cores()
    trial = _trial(values, out, columns, setting, own, minutes, workers, progress, launcher)
    wanted = _jobs(trial.methods, [c for c in columns if c.label in trial.sites], values, trial.rounds)
    say(
        f"auto: {len(trial.methods)} methods x {len(trial.sites)} held-out sites, {trial.rounds} rounds each, in about"
        f" {trial.minutes:.0f} min, then the best one on all sources"
    )
    for method, why in trial.left_out.items():
        say(f"auto: {method} is left out: {why}")
    found = train_all(wanted, own.dataset.name, out, jobs, progress, launcher)
    write_tables(found)
    scores = scores_of(found.records, trial.sites)
    if not scores:
        failure = found.failures[0]
        raise InputError("method-needs", f"auto: no method could be trained: {failure.message} (log: {failure.log})")
    best, reason = best_of(scores)
    left = {**trial.left_out, **{failure.job.row: failure.message for failure in found.failures}}
    return Choice(best, reason, trial.rounds, scores, left, found)


def best_of(scores: Mapping[str, Mapping[str, float]]) -> tuple[str, str]:
    """The method with the best mean, or FedAvg where that is nearly as good, and a sentence on why."""
    means = {method: statistics.fmean(by_site.values()) for method, by_site in scores.items()}
    best = max(means, key=lambda method: means[method])
    over = f"the mean over {len(scores[best])} held-out sites is {100 * means[best]:.1f} %"
    if best == BASELINE or BASELINE not in means:
        return best, f"{over}, the best of {len(means)}"
    gain = 100 * (means[best] - means[BASELINE])
    if means[best] - means[BASELINE] < MARGIN:
        return BASELINE, (
            f"{best} is better by only {gain:.1f} points at held-out sites, which one seed cannot tell from chance"
        )
    return best, f"{over}, {gain:.1f} points above {BASELINE}"


def scores_of(records: Sequence[Record], sites: Sequence[str]) -> dict[str, dict[str, float]]:
    """Method -> held-out site -> score of the last round; only methods that have all sites."""
    found: dict[str, dict[str, float]] = {}
    for record in records:
        for scores in record.scores.values():
            found.setdefault(record.row, {})[record.column] = scores["last"]
    return {method: own for method, own in found.items() if set(own) == set(sites)}


def affordable(
    factors: Mapping[str, float], sites: int, seconds: float, budget: float, workers: int, most: int
) -> tuple[list[str], int, int, float]:
    """Which methods at how many sites, with how many rounds, fit into `budget` seconds, and how long that takes.
    `factors`: how many times as long as FedAvg's a method's round takes, `seconds`. The final training on all sources
    is part of it."""
    methods, held = list(factors), sites

    def taken(rounds: int) -> float:
        each = [_START_SECONDS + rounds * seconds * factors[method] for method in methods]
        last = rounds * seconds * max(factors[method] for method in methods) * (sites + 1) / sites
        return held * sum(each) / workers + last / workers

    fewest = min(FEWEST_ROUNDS, most)
    while taken(fewest) > budget and (len(methods) > 2 or held > 2 or len(methods) > 1):
        if len(methods) > 2:
            methods.remove(max(methods[1:], key=lambda method: factors[method]))
        elif held > 2:
            held -= 1
        else:
            methods.pop()
    rounds = next((rounds for rounds in range(most, 0, -1) if taken(rounds) <= budget), 1)
    return methods, held, rounds, taken(rounds)


def _setting(values: Mapping[str, Any]) -> Setting:
    return "adapt" if values.get("setting") == "adapt" else "generalize"


def _jobs(methods: Sequence[str], columns: Sequence[Column], values: Mapping[str, Any], rounds: int) -> list[Job]:
    return own_jobs(methods, columns, {**values, "rounds": rounds}, (int(values.get("seed") or 0),))


def _trial(
    values: Mapping[str, Any],
    out: Path,
    columns: Sequence[Column],
    setting: Setting,
    own: OwnData,
    minutes: float,
    workers: int,
    progress: OnProgress,
    launcher: Launcher | None,
) -> Trial:
    file = out / "trial.json"
    if file.exists():
        return codec.restore(Trial, read_json(file))
    usable, left_out = _usable(values, columns[0], setting, own)
    (pilot,) = _jobs([BASELINE], columns[:1], values, 1)
    piloted = train_all([pilot], own.dataset.name, out, 1, progress, launcher)
    if not piloted.records:
        failure = piloted.failures[0]
        raise InputError("method-needs", f"auto: the first training failed: {failure.message} (log: {failure.log})")
    seconds = max(piloted.records[0].seconds, 0.01)
    factors = {method: find_about(method).time_factor for method in usable}
    most = int(values.get("rounds") or MOST_ROUNDS)
    methods, held, rounds, taken = affordable(factors, len(columns), seconds, 60 * minutes, workers, most)
    left_out |= {m: "its trainings do not fit into the budget (--budget)" for m in usable if m not in methods}
    sites = tuple(column.label for column in columns[:held])
    trial = Trial(setting, tuple(methods), sites, rounds, seconds, taken / 60, left_out)
    write_atomically(file, json.dumps(codec.plain(trial), indent=2).encode())
    return trial


def _usable(
    values: Mapping[str, Any], column: Column, setting: Setting, own: OwnData
) -> tuple[list[str], dict[str, str]]:
    """The methods that can do this task with these keys, and why others cannot."""
    usable, left_out = [], {}
    for method in CANDIDATES[setting]:
        (job,) = _jobs([method], [column], values, 1)
        try:
            prepare(job.config, own.dataset)
            usable.append(method)
        except InputError as error:
            if method == BASELINE:
                raise
            left_out[method] = error.message
    return usable, left_out


def keep_choice(choice: Choice, folder: Path) -> None:
    """Beside the run that was trained with it, for its report."""
    write_atomically(folder / CHOICE, json.dumps(choice.as_json(), indent=2).encode())
