"""Warnings on runs whose numbers were made by hand, and intervals where scores are shown."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch

from fedshift.functional.metrics import guessing_accuracy, per_class_dice, per_class_iou, wilson_interval
from fedshift.runs.health import CODES, PREDICT_RULE, find_warnings, in_percent, majority_control, sure_shares
from fedshift.runs.record import Scores

ROOT = Path(__file__).parent.parent.parent


def square(right: int, wrong: int, classes: int = 3) -> list[list[int]]:
    return [[right if i == j else wrong for j in range(classes)] for i in range(classes)]


def results(test: dict[str, list[list[int]]], val: dict[str, list[list[int]]], **more: Any) -> dict[str, Any]:
    sizes = {site: {"test": sum(map(sum, rows)), "val": 0} for site, rows in test.items()}
    sizes |= {site: {"test": 0, "val": sum(map(sum, rows))} for site, rows in val.items()}
    first = next(iter((test | val).values()))
    names = [f"c{k}" for k in range(len(first))]
    known = {"task": "classification", "setting": "generalize", "classes": names, "samples": sizes}
    return known | {"confusion": test, "val_confusion": val} | more


def history(*values: float) -> list[Scores]:
    return [Scores(number, {"a": value}, {}) for number, value in enumerate(values, start=1)]


def codes(found: list[dict[str, str]]) -> list[tuple[str, str]]:
    assert all(one["code"] in CODES and one["text"] and one["advice"] for one in found)
    return [(one["code"], one["site"]) for one in found]


GOOD = {"a": square(30, 1), "b": square(31, 1), "c": square(29, 1)}
RISING = history(0.4, 0.7, 0.9, 0.9, 0.9, 0.9)
FALLING = {1: 1.0, 2: 0.5, 3: 0.2}


def test_a_good_run_has_no_warnings() -> None:
    assert find_warnings(results({"t": square(28, 2)}, GOOD), RISING, FALLING) == []


@pytest.mark.parametrize(
    ("matrix", "expected"),
    [
        (square(12, 10), ["chance"]),  # 37.5 % of 96: Wilson from 28.5 %, and guessing gives 33.3 %
        (square(40, 28), []),  # 41.7 % of 288: from 36.1 %
        (square(4, 2), ["few-samples"]),  # 50 % of 24: from 31.4 %
        ([[0, 40, 0], [0, 40, 0], [0, 40, 0]], ["chance", "never-predicted"]),
        ([[60, 20, 0], [5, 15, 0], [0, 10, 0]], ["majority", "never-predicted"]),  # 68.2 % of 110; always c0: 72.7 %
        ([[30, 0, 0], [0, 30, 0], [2, 2, 0]], []),  # four of the last class: too few to miss it
    ],
)
def test_what_a_confusion_matrix_says(matrix: list[list[int]], expected: list[str]) -> None:
    assert codes(find_warnings(results({"t": matrix}, {}), [], {})) == [(code, "t") for code in expected]


def test_a_site_and_a_target_far_below_the_others() -> None:
    weak = {"t": square(40, 1), "u": square(41, 1), "v": square(20, 11)}
    assert codes(find_warnings(results(weak, {}), [], {})) == [("site-below", "v")]
    few = weak | {"v": [[2, 0, 0], [0, 2, 0], [0, 1, 1]]}  # 83.3 % of six: up to 97.0 %, and the others have 95.3 %
    assert codes(find_warnings(results(few, {}), [], {})) == []
    two = {"t": weak["t"], "v": weak["v"]}
    assert codes(find_warnings(results(two, {}), [], {})) == [], "of two, none is the odd one"
    assert codes(find_warnings(results({"v": weak["v"]}, GOOD), RISING, FALLING)) == [("target-below", "v")]


def test_curves_and_losses() -> None:
    chance = {"a": square(12, 10)}
    flat = find_warnings(results({}, chance), history(0.34, 0.36, 0.35), {1: 1.1, 2: 1.1, 3: 1.11})
    assert codes(flat) == [("chance", ""), ("val-flat", ""), ("loss-flat", "")]
    fell = find_warnings(results({}, GOOD), history(0.5, 0.9, 0.8, 0.6), {})
    assert codes(fell) == [("val-fell", "")] and "--select source-val" in fell[0]["advice"]
    assert "after round 2" in fell[0]["text"]
    rising = find_warnings(results({}, GOOD), history(0.2, 0.4, 0.6, 0.7, 0.8, 0.9), {})
    assert codes(rising) == [("still-rising", "")]
    noise = find_warnings(results({}, {"a": square(9, 1)}), history(0.5, 0.80, 0.82, 0.76), {})
    assert codes(noise) == [], "six points are nothing on 33 samples"
    high = find_warnings(results({}, GOOD), history(0.93, 0.94, 0.94), {1: 0.2, 2: 0.2, 3: 0.2})
    assert codes(high) == [], "what starts high need not rise"


def test_segmentation_is_never_judged_by_its_mean_alone() -> None:
    vessels = [[9300, 0], [700, 0]]
    found = find_warnings(results({"t": vessels}, {}, task="segmentation"), [], {})
    assert codes(found) == [("majority", "t"), ("never-predicted", "t")]
    assert "46.5 % mIoU" in found[0]["text"] and "'c1', only 'c0'" in found[1]["text"]
    assert in_percent(0.465, 10_000, "segmentation") == "46.5 %", "pixels are not independent samples"


def test_numbers_by_hand() -> None:
    assert wilson_interval(0.8, 10) == pytest.approx((0.4902, 0.9433), abs=1e-4)  # Newcombe (1998), by the formula
    assert wilson_interval(1.0, 5) == pytest.approx((0.5655, 1.0), abs=1e-4) and wilson_interval(0.5, 0) == (0, 1)
    assert guessing_accuracy(torch.tensor([[20, 5], [10, 15]])) == pytest.approx(0.5 * 0.6 + 0.5 * 0.4)
    assert majority_control([[8, 2], [1, 29]], "classification") == (1, 0.75)
    assert majority_control([[8, 2], [1, 29]], "segmentation") == (1, 0.375)
    counts = torch.tensor([[6, 2, 0], [1, 3, 0], [0, 0, 0]])
    assert per_class_iou(counts)[:2].tolist() == pytest.approx([6 / 9, 3 / 6])
    assert per_class_dice(counts)[:2].tolist() == pytest.approx([12 / 15, 6 / 9])
    assert math.isnan(per_class_iou(counts)[2]) and math.isnan(per_class_dice(counts)[2])
    assert in_percent(0.8, 10, "classification") == "80.0 % (49.0-94.3)"


def test_docs_name_every_code_and_state_the_rule_of_predict_in_the_same_words() -> None:
    reports = (ROOT / "docs" / "reports.md").read_text()
    assert not [code for code in CODES if f"`{code}`" not in reports]
    assert PREDICT_RULE in " ".join((ROOT / "docs" / "first-steps.md").read_text().replace("`", "").split())


def test_a_method_that_is_sure_of_too_little_has_barely_adapted() -> None:
    run = results({"t": square(28, 2)}, GOOD, setting="adapt", method="kd3a", target="t")
    assert codes(find_warnings(run, RISING, FALLING, {1: 0.0, 2: 0.0, 3: 0.1})) == []  # The last third counts.
    (found,) = find_warnings(run, RISING, FALLING, {1: 0.9, 2: 0.5, 3: 0.035})
    assert (found["code"], found["site"]) == ("barely-adapted", "t")
    assert "3.5 % of its samples" in found["text"] and "lower kd3a.gate" in found["advice"]
    other = results({"t": square(28, 2)}, GOOD, setting="adapt", method="mine", target="t")
    assert "lower" not in find_warnings(other, RISING, FALLING, {1: 0.0})[0]["advice"]


def test_how_sure_models_were_is_in_the_metrics() -> None:
    def row(round: int, name: str, value: float | None) -> dict[str, Any]:
        return {"round": round, "name": name, "value": value, "phase": "train", "site": ""}

    votes = [row(1, "voted_samples", 40), row(1, "unsupported_samples", 30), row(2, "voted_samples", 0)]
    assert sure_shares([*votes, row(2, "unsupported_samples", 0), row(3, "voted_samples", 40)]) == {1: 0.25}
    assert sure_shares([row(4, "pseudo_label_share", 0.5), row(5, "pseudo_label_share", None)]) == {4: 0.5}
    assert sure_shares([row(1, "train_loss", 2.0)]) == {}
