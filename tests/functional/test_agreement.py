"""Pseudo labels and aggregation weights, by numbers that can be recomputed by hand."""

from __future__ import annotations

import math
from collections import Counter

import pytest
import torch
from torch import Tensor

from fedshift.functional.agreement import Opinions, Rule, aggregation_weights, agreements, pseudo_labels

# Three models, four samples, three classes.
MODELS = torch.tensor(
    [
        [[0.98, 0.01, 0.01], [0.60, 0.30, 0.10], [0.50, 0.30, 0.20], [0.2, 0.2, 0.6]],
        [[0.97, 0.02, 0.01], [0.10, 0.90, 0.00], [0.20, 0.60, 0.20], [0.7, 0.2, 0.1]],
        [[0.96, 0.02, 0.02], [0.55, 0.40, 0.05], [0.00, 0.05, 0.95], [0.1, 0.8, 0.1]],
    ]
)


def opinions(models: Tensor) -> Opinions:
    found = Opinions()
    for probabilities in models:
        found.add(probabilities)
    return found


@pytest.mark.parametrize(
    ("rule", "labels", "confidences"),
    [
        # Means: (.97, ...), (1.25/3, 1.6/3, ...), (.7/3, .95/3, 1.35/3), (1/3, 1.2/3, .8/3).
        ("mean", [0, 1, 2, 1], [0.97, 1.6 / 3, 0.45, 0.4]),
        ("max", [0, 1, 2, 1], [0.98, 0.90, 0.95, 0.8]),
        # Sample 1: two of three for class 0, (.60 + .55) / 2. Samples 2 and 3: one each, the surest wins.
        ("most", [0, 0, 2, 1], [0.97, 0.575, 0.95, 0.8]),
    ],
)
def test_pseudo_labels_by_hand(rule: Rule, labels: list[int], confidences: list[float]) -> None:
    found, sure = pseudo_labels(opinions(MODELS), rule)
    assert found.tolist() == labels
    assert sure.tolist() == pytest.approx(confidences, abs=1e-6)


def test_full_ties_go_to_the_lower_class_and_the_first_model() -> None:
    tied = torch.tensor([[[0.2, 0.8, 0.0]], [[0.8, 0.2, 0.0]]])
    rules: dict[Rule, int] = {"mean": 0, "max": 1, "most": 0}
    for rule, label in rules.items():
        found, sure = pseudo_labels(opinions(tied), rule)
        assert found.tolist() == [label]
        assert sure.item() == pytest.approx(0.5 if rule == "mean" else 0.8)


def by_loop(models: Tensor, rule: str) -> tuple[list[int], list[float]]:
    """The rules read out aloud, one sample at a time."""
    labels, sure = [], []
    for sample in models.unbind(1):
        rows = sample.tolist()
        if rule == "mean":
            means = [sum(column) / len(rows) for column in zip(*rows, strict=True)]
            label, confidence = means.index(max(means)), max(means)
        elif rule == "max":
            row = max(rows, key=max)
            label, confidence = row.index(max(row)), max(row)
        else:
            chosen = [row.index(max(row)) for row in rows]
            most = max(Counter(chosen).values())
            average = {
                c: sum(row[c] for row, k in zip(rows, chosen, strict=True) if k == c) / most
                for c, count in Counter(chosen).items()
                if count == most
            }
            label = max(sorted(average), key=lambda c: average[c])
            confidence = average[label]
        labels.append(label)
        sure.append(confidence)
    return labels, sure


@pytest.mark.parametrize("rule", ["mean", "max", "most"])
@pytest.mark.parametrize("models", [1, 2, 5])
def test_pseudo_labels_are_those_of_a_loop(rule: Rule, models: int) -> None:
    drawn = torch.randn(models, 200, 4, generator=torch.Generator().manual_seed(3)).softmax(2)
    labels, sure = by_loop(drawn, rule)
    found, confidence = pseudo_labels(opinions(drawn), rule)
    assert found.tolist() == labels
    assert confidence.tolist() == pytest.approx(sure, abs=1e-6)


def test_one_model_agrees_with_itself_under_every_rule() -> None:
    given = opinions(MODELS[:1])
    rules: tuple[Rule, ...] = ("mean", "max", "most")
    for rule in rules:
        labels, sure = pseudo_labels(given, rule)
        assert labels.tolist() == [0, 0, 0, 2]
        assert sure.tolist() == pytest.approx([0.98, 0.6, 0.5, 0.6])
        assert aggregation_weights(agreements(given.choices, labels, sure > 0.95)).tolist() == [1.0]


def test_agreements_count_kept_samples_only() -> None:
    given = opinions(MODELS)
    labels, confidence = pseudo_labels(given, "mean")  # 0, 1, 2, 1
    assert agreements(given.choices, labels, torch.ones(4, dtype=torch.bool)).tolist() == [1, 2, 3]
    assert agreements(given.choices, labels, confidence > 0.5).tolist() == [1, 2, 1]
    assert agreements(given.choices, labels, confidence > 0.99).tolist() == [0, 0, 0]


def test_weights_are_the_softmax_of_shares() -> None:
    """Z = (1, 2, 1): shares .25, .5, .25."""
    total = 2 * math.exp(0.25) + math.exp(0.5)
    expected = [math.exp(0.25) / total, math.exp(0.5) / total, math.exp(0.25) / total]
    assert aggregation_weights(torch.tensor([1, 2, 1])).tolist() == pytest.approx(expected, abs=1e-12)


def test_nobody_agreeing_means_equal_weights() -> None:
    assert aggregation_weights(torch.tensor([0, 0, 0, 0])).tolist() == [0.25] * 4


def test_one_model_with_all_agreement_is_never_alone() -> None:
    """softmax(1, 0): e / (e + 1), not 1."""
    found = aggregation_weights(torch.tensor([500, 0])).tolist()
    assert found == pytest.approx([math.e / (math.e + 1), 1 / (math.e + 1)])
