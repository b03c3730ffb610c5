"""Whether a model is any good: intervals of its scores, and warnings with something to try.

Rules are simple and know how many samples a score comes from. They look at what a run has released anyway: confusion
matrices, validation by round, losses. Scores of segmentation have no interval, because pixels of one picture are not
independent samples.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor

from fedshift.functional.metrics import (
    accuracy,
    guessing_accuracy,
    mean_iou,
    per_class_dice,
    per_class_iou,
    wilson_interval,
)
from fedshift.runs.record import Scores

FEW = 50
"""Test samples below which a score says little: one sample is two points or more."""

PREDICT_RULE = (
    "predict uses the model of the last round: nothing was chosen for it. --select source-val uses that of the round"
    " with the best validation at the sources."
)
"""One rule, in these words in the documentation and in what commands print."""

CODES: Mapping[str, str] = {
    "chance": "a score that guessing would reach",
    "majority": "a score that always giving the most frequent answer would reach",
    "few-samples": "too few samples to tell the score from guessing",
    "never-predicted": "a class that the model never predicts",
    "site-below": "a site far below the others",
    "target-below": "a target far below the validation of the sources",
    "val-flat": "validation that did not rise",
    "val-fell": "validation that was better in an earlier round",
    "still-rising": "validation that was still rising at the end",
    "loss-flat": "a training loss that did not fall",
    "barely-adapted": "a target from which the method learned little",
}
"""Every code of a warning, and what it warns of."""

_FLAT = 0.05
"""Validation that rises by less than this has not risen."""
_FAR_SITE, _FAR_TARGET = 0.1, 0.2
"""How far below the others a site, and below the sources a target, is far."""
_LEAST_SURE = 0.1
"""Where models are sure of the labels of fewer of a target's samples, the method has little to learn from there."""
_LEAST_CHANGE = 0.02
"""Smaller changes are not spoken of, however many samples there are."""
_SEEN = 5
"""A class with fewer samples may be missed by a good model: one that finds every second misses five in a row in 3 of
100 cases."""
_RARE = 1e-4
"""The share of the pixels below which a class is too rare to speak of."""

Interval = tuple[float, float]


@dataclass(frozen=True)
class Finding:
    """A warning: one of `CODES`, the site it is about (empty: the run), what was found and what to try."""

    code: str
    site: str
    text: str
    advice: str


def interval_of(score: float, samples: int, task: str) -> Interval | None:
    """The 95 % interval of an accuracy on so many samples; None for segmentation, or where there are none."""
    if task != "classification" or samples <= 0 or not math.isfinite(score):
        return None
    return wilson_interval(score, samples)


def in_percent(score: float, samples: int, task: str, *, unit: str = " %") -> str:
    """`63.0 % (57.4-68.3)`: a score and its interval. Without the interval in segmentation."""
    found = interval_of(score, samples, task)
    text = f"{100 * score:.1f}{unit}"
    return f"{text} ({100 * found[0]:.1f}-{100 * found[1]:.1f})" if found else text


def class_overlaps(matrix: Sequence[Sequence[int]]) -> list[str]:
    """`41.0 / 58.2` for each class: IoU and Dice in percent; `-` for a class that is neither there nor predicted."""
    counts = torch.tensor(matrix, dtype=torch.int64)
    pairs = zip(per_class_iou(counts).tolist(), per_class_dice(counts).tolist(), strict=True)
    return ["-" if math.isnan(iou) else f"{100 * iou:.1f} / {100 * dice:.1f}" for iou, dice in pairs]


def intervals(results: Mapping[str, Any]) -> dict[str, dict[str, list[float]]]:
    """Target -> rule -> interval. The oracle's round is chosen by the same samples, so that it has none."""
    found: dict[str, dict[str, list[float]]] = {}
    for site, scores in results["per_target"].items():
        count = results["samples"].get(site, {}).get("test", 0)
        own = {rule: interval_of(scores[rule], count, results["task"]) for rule in ("last", "source_val")}
        found[site] = {rule: [round(end, 6) for end in interval] for rule, interval in own.items() if interval}
    return found


def find_warnings(
    results: Mapping[str, Any],
    history: Sequence[Scores],
    losses: Mapping[int, float],
    sure: Mapping[int, float] | None = None,
) -> list[dict[str, str]]:
    """What is wrong with a finished run, as `results.json` lists it. `results` are all others of its keys; `losses` is
    the mean training loss by round, `sure` the share of the target's samples whose label the models were sure of."""
    tests, vals = _matrices(results, "confusion", "test"), _matrices(results, "val_confusion", "val")
    classes, task = results["classes"], results["task"]
    pooled = _pooled(list(vals.values()))
    found = [
        *(finding for site, seen in tests.items() for finding in _of_scores(site, seen, classes, task)),
        *(_of_scores("", pooled, classes, task)[:1] if pooled else ()),
        *_of_sites(tests, "on its test data", task),
        *_of_sites(vals, "in validation", task),
        *(_of_targets(tests, pooled, results["setting"], task) if pooled else ()),
        *_of_rounds(history, pooled, losses, len(classes), task),
        *_of_adapting(results, sure or {}),
    ]
    return [asdict(finding) for finding in found]


@dataclass(frozen=True)
class _Seen:
    """A confusion matrix and how many samples it comes from: fewer than it counts, where several models were scored on
    the same samples or where pixels are counted."""

    matrix: Tensor
    samples: int


def _matrices(results: Mapping[str, Any], key: str, split: str) -> dict[str, _Seen]:
    found = {site: torch.tensor(rows, dtype=torch.int64) for site, rows in results.get(key, {}).items()}
    sizes = results["samples"]
    return {
        site: _Seen(matrix, min(sizes.get(site, {}).get(split, 0), int(matrix.sum())))
        for site, matrix in found.items()
        if int(matrix.sum()) > 0
    }


def _pooled(seen: Sequence[_Seen]) -> _Seen | None:
    if not seen:
        return None
    return _Seen(torch.stack([one.matrix for one in seen]).sum(0), sum(one.samples for one in seen))


def _score(seen: _Seen, task: str) -> float:
    return accuracy(seen.matrix) if task == "classification" else mean_iou(seen.matrix)


def _bounds(seen: _Seen, task: str) -> Interval:
    score = _score(seen, task)
    return interval_of(score, seen.samples, task) or (score, score)


def majority_control(matrix: Sequence[Sequence[int]], task: str) -> tuple[int, float]:
    """The most frequent class, and the score of a model that always predicts it. The matrix may not be empty."""
    counts = [sum(row) for row in matrix]
    most = counts.index(max(counts))
    share = counts[most] / sum(counts)
    return most, share if task == "classification" else share / sum(count > 0 for count in counts)


def _of_scores(site: str, seen: _Seen, classes: Sequence[str], task: str) -> list[Finding]:
    """A score at the level of chance or of a control, and classes that are never predicted. Without a site: the
    sources' validation."""
    score, (low, high) = _score(seen, task), _bounds(seen, task)
    where = site or "validation at the sources"
    shown = f"{where}: {in_percent(score, seen.samples, task)}" + (
        f" on {seen.samples:,} samples" if task == "classification" else " mIoU"
    )
    guess = guessing_accuracy(seen.matrix) if task == "classification" else 0.0
    most, control = majority_control(seen.matrix.tolist(), task)
    findings = []
    if task == "classification" and low <= guess:
        if seen.samples < FEW and score > guess + _FLAT:
            findings.append(
                Finding(
                    "few-samples",
                    site,
                    f"{shown} cannot be told from guessing ({_percent(guess)}).",
                    "Label more samples for the test before you compare anything.",
                )
            )
        else:
            findings.append(
                Finding("chance", site, f"{shown} is what guessing gives ({_percent(guess)}).", _HELP_LEARN)
            )
    elif low <= control:
        verb = "is below" if high < control else "is no better than"
        findings.append(
            Finding(
                "majority",
                site,
                f"{shown} {verb} always answering {classes[most]!r} ({_percent(control)}).",
                "Look at the accuracy of each class, not at the mean: the classes are unbalanced. Add samples of rare"
                " classes, or leave out frequent ones (train_per_site).",
            )
        )
    missed = _never_predicted(seen.matrix, task)
    if missed:
        names = ", ".join(repr(classes[k]) for k in missed[:6]) + (f" and {len(missed) - 6} more" * (len(missed) > 6))
        only = int(seen.matrix.sum(dim=0).argmax())
        is_only = int(seen.matrix[:, only].sum()) == int(seen.matrix.sum())
        shrunk = " or on squares of the pictures (tile=auto): small structures vanish when pictures are shrunk."
        findings.append(
            Finding(
                "never-predicted",
                site,
                f"{where}: the model never predicts {names}" + (f", only {classes[only]!r}." if is_only else "."),
                "Check that the sources have enough training samples of it (fedshift check-data); train for more"
                " rounds," + (shrunk if task == "segmentation" else " or with a higher lr."),
            )
        )
    return findings


_HELP_LEARN = (
    "Try --method fedavg as a baseline, --weights imagenet for pictures, and an lr ten times as high and as low; if a"
    " baseline does well, the method or its keys do not suit these data."
)


def _never_predicted(matrix: Tensor, task: str) -> list[int]:
    there, predicted = matrix.sum(dim=1), matrix.sum(dim=0)
    least = _SEEN if task == "classification" else max(_SEEN, math.ceil(_RARE * int(matrix.sum())))
    return [k for k in range(len(matrix)) if int(there[k]) >= least and int(predicted[k]) == 0]


def _of_sites(seen: Mapping[str, _Seen], where: str, task: str) -> list[Finding]:
    """Sites that are far below all others together. With two sites there is no telling which one is odd."""
    findings = []
    for site, own in seen.items() if len(seen) > 2 else ():
        others = _pooled([one for name, one in seen.items() if name != site])
        assert others is not None
        score, rest = _score(own, task), _score(others, task)
        if rest - score >= _FAR_SITE and _bounds(own, task)[1] < _bounds(others, task)[0]:
            findings.append(
                Finding(
                    "site-below",
                    site,
                    f"{site}: {in_percent(score, own.samples, task)} {where}, the others {_percent(rest)}.",
                    "Look at its pictures and labels first (fedshift check-data): another labelling habit or camera is"
                    " the usual reason. If it only looks different, a method that adapts to it may help.",
                )
            )
    return findings


def _of_targets(tests: Mapping[str, _Seen], pooled: _Seen, setting: str, task: str) -> list[Finding]:
    advice = {
        "generalize": "If it has unlabelled data, adapt to it: --method kd3a or fedavg with --setting adapt. Otherwise"
        " try --weights imagenet and augment=[standard].",
    }.get(setting, "Check that it has the same classes and labels as the sources; compare with --method adabn.")
    findings = []
    score = _score(pooled, task)
    for site, own in tests.items():
        here = _score(own, task)
        if score - here >= _FAR_TARGET and _bounds(own, task)[1] < _bounds(pooled, task)[0]:
            findings.append(
                Finding(
                    "target-below",
                    site,
                    f"{site}: {in_percent(here, own.samples, task)}, far below the {_percent(score)} of validation at"
                    " the sources: it looks different from them.",
                    advice,
                )
            )
    return findings


def _of_rounds(
    history: Sequence[Scores], pooled: _Seen | None, losses: Mapping[int, float], classes: int, task: str
) -> list[Finding]:
    scored = [scores for scores in history if scores.val]
    values = [scores.source_val for scores in scored]
    guess = 1 / max(classes, 1)
    if pooled and task == "classification":
        guess = max(guess, majority_control(pooled.matrix.tolist(), task)[1])
    poor = not values or max(values) < (1 + guess) / 2
    findings = []
    if poor and len(values) >= 3 and max(values) - values[0] < _FLAT:
        findings.append(
            Finding(
                "val-flat",
                "",
                f"Validation at the sources did not rise: {_percent(values[0])} after round {scored[0].round},"
                f" {_percent(max(values))} at best in {scored[-1].round} rounds.",
                _HELP_LEARN,
            )
        )
    else:
        findings += _of_the_end(scored, values, pooled, task)
    by_round = [losses[number] for number in sorted(losses)]
    if poor and len(by_round) >= 3:
        first, last = by_round[0], statistics.fmean(by_round[-max(1, len(by_round) // 3) :])
        if last > (1 - _LEAST_CHANGE) * first and last > 0.5 * math.log(max(classes, 2)):
            findings.append(
                Finding(
                    "loss-flat",
                    "",
                    f"The training loss did not fall: {first:.3g} in the first round, {last:.3g} at the end.",
                    "Try an lr ten times as high, and one ten times as low; check that the labels belong to the"
                    " pictures.",
                )
            )
    return findings


def _of_adapting(results: Mapping[str, Any], sure: Mapping[int, float]) -> list[Finding]:
    """Whether a method that learns from what models are sure of had anything to learn from. Early rounds do not count:
    models become surer."""
    shares = [sure[number] for number in sorted(sure)]
    if not shares or statistics.fmean(shares[-max(1, len(shares) // 3) :]) >= _LEAST_SURE:
        return []
    share = statistics.fmean(shares[-max(1, len(shares) // 3) :])
    limit = {"kd3a": "kd3a.gate and kd3a.gate_end", "copa-uda": "copa-uda.threshold"}.get(results["method"])
    return [
        Finding(
            "barely-adapted",
            results["target"],
            f"{results['target']}: at the end models were sure of the labels of {_percent(share)} of its samples:"
            f" {results['method']} learned little there.",
            "Train for longer (--rounds, local_epochs), or with more samples at the sources"
            + (f", or lower {limit}." if limit else "."),
        )
    ]


def _of_the_end(scored: Sequence[Scores], values: Sequence[float], pooled: _Seen | None, task: str) -> list[Finding]:
    """Whether training went on for too long, or not for long enough."""
    if len(values) < 4:
        return []
    best = max(range(len(values)), key=lambda place: (values[place], place))
    before = values[(2 * len(values)) // 3 - 1]
    samples = pooled.samples if pooled and task == "classification" else 0
    if values[best] - values[-1] > _noise(values[best], values[-1], samples):
        return [
            Finding(
                "val-fell",
                "",
                f"Validation at the sources was {_percent(values[best])} after round {scored[best].round} and is"
                f" {_percent(values[-1])} at the end.",
                f"Use that round's model (fedshift predict --select source-val), train for {scored[best].round} rounds,"
                " or lower the lr.",
            )
        ]
    if best == len(values) - 1 and values[-1] - before > _noise(before, values[-1], samples):
        return [
            Finding(
                "still-rising",
                "",
                f"Validation at the sources was still rising at the end: {_percent(before)} after round"
                f" {scored[(2 * len(values)) // 3 - 1].round}, {_percent(values[-1])} after round {scored[-1].round}.",
                "More rounds will probably help (--rounds).",
            )
        ]
    return []


def _noise(one: float, other: float, samples: int) -> float:
    """By how much two scores on so many samples must differ to be called different."""
    if not samples:
        return _LEAST_CHANGE
    return max(_LEAST_CHANGE, 1.96 * math.sqrt((one * (1 - one) + other * (1 - other)) / samples))


def mean_losses(rows: Sequence[Mapping[str, Any]]) -> dict[int, float]:
    """The mean training loss over sites by round, from the rows of `metrics.jsonl`."""
    found: dict[int, list[float]] = {}
    for row in rows:
        if row["phase"] == "train" and row["name"] == "train_loss" and row["value"] is not None:
            found.setdefault(row["round"], []).append(row["value"])
    return {number: statistics.fmean(values) for number, values in found.items()}


def sure_shares(rows: Sequence[Mapping[str, Any]]) -> dict[int, float]:
    """The share of the target's samples whose label the models were sure of by round, from the rows of `metrics.jsonl`;
    empty for methods that note none."""
    noted: dict[str, dict[int, float]] = {"pseudo_label_share": {}, "voted_samples": {}, "unsupported_samples": {}}
    for row in rows:
        if row["name"] in noted and row["value"] is not None:
            noted[row["name"]][row["round"]] = row["value"]
    unsupported = noted["unsupported_samples"]
    voted = {number: count for number, count in noted["voted_samples"].items() if number in unsupported and count}
    votes = {number: 1 - unsupported[number] / count for number, count in voted.items()}
    return votes | noted["pseudo_label_share"]


def _percent(share: float) -> str:
    return f"{100 * share:.1f} %"
