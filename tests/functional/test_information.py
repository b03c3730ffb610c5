"""Information maximisation and centroid labels against loops and numbers made by hand."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from fedshift.functional.information import centroid_labels, diversity, entropy


def softmax(row: list[float]) -> list[float]:
    total = sum(math.exp(value) for value in row)
    return [math.exp(value) / total for value in row]


@pytest.fixture
def scores() -> Tensor:
    return torch.randn(9, 4, generator=torch.Generator().manual_seed(1)) * 3


def test_losses_are_those_of_a_loop(scores: Tensor) -> None:
    rows = [softmax(row) for row in scores.tolist()]
    each = [-sum(p * math.log(p) for p in row) for row in rows]
    assert entropy(scores).item() == pytest.approx(sum(each) / 9, rel=1e-5)
    means = [sum(column) / 9 for column in zip(*rows, strict=True)]
    assert diversity(scores).item() == pytest.approx(sum(p * math.log(p) for p in means), rel=1e-5)


def test_the_best_is_sure_of_each_and_even_over_all() -> None:
    sure_and_even = torch.eye(3) * 100
    assert entropy(sure_and_even).item() == pytest.approx(0, abs=1e-6)
    assert diversity(sure_and_even).item() == pytest.approx(-math.log(3), rel=1e-6)
    nothing_known = torch.zeros(3, 3)
    assert entropy(nothing_known).item() == pytest.approx(math.log(3), rel=1e-6)
    one_class_for_all = torch.tensor([[100.0, 0.0, 0.0]] * 3)
    assert diversity(one_class_for_all).item() == pytest.approx(0, abs=1e-6)


@pytest.mark.parametrize("loss", [entropy, diversity])
def test_gradients_by_finite_differences(loss: object, scores: Tensor) -> None:
    at = scores.clone().requires_grad_()
    loss(at).backward()  # type: ignore[operator]
    step = 1e-2
    for place in ((0, 0), (3, 2), (8, 3)):
        moved = torch.zeros_like(scores)
        moved[place] = step
        with torch.no_grad():
            slope = (loss(scores + moved) - loss(scores - moved)).item() / (2 * step)  # type: ignore[operator]
        assert at.grad is not None and at.grad[place].item() == pytest.approx(slope, abs=1e-4)


def test_a_class_that_nobody_predicts_has_finite_gradients() -> None:
    """The softmax of -200 is exactly 0 in float32."""
    at = torch.tensor([[0.0, 1.0, -200.0], [1.0, 0.0, -200.0]], requires_grad=True)
    (entropy(at) + diversity(at)).backward()
    assert at.grad is not None and bool(torch.isfinite(at.grad).all())


def test_half_precision_scores_are_summed_in_full(scores: Tensor) -> None:
    assert entropy(scores.bfloat16()).dtype == diversity(scores.bfloat16()).dtype == torch.float32


# --- Centroids ------------------------------------------------------------------------------------------------------


def test_centroids_correct_what_the_classifier_gets_wrong() -> None:
    """Two bundles of directions. The classifier is unsure of the third sample and wrong about it: it points with the
    first two, whatever its length."""
    features = torch.tensor([[1.0, 0.0], [2.0, 0.2], [5.0, 0.5], [0.0, 1.0], [0.1, 2.0]])
    probabilities = torch.tensor([[0.9, 0.1], [0.8, 0.2], [0.4, 0.6], [0.1, 0.9], [0.2, 0.8]])
    # Centroids: class 0 (.9 + 1.6 + 2.0 + .02, .16 + .2 + .1 + .4) / 2.4 leans to (1, 0), class 1 is more even.
    assert probabilities.argmax(1).tolist() == [0, 0, 1, 1, 1]
    assert centroid_labels(features, probabilities).tolist() == [0, 0, 0, 1, 1]


def by_loop(features: Tensor, probabilities: Tensor) -> list[int]:
    """Both passes, one sample and one class at a time."""
    belonging = probabilities.double().tolist()
    rows = features.double()
    labels: list[int] = []
    for _ in range(2):
        centroids = {}
        for k in range(probabilities.shape[1]):
            total = sum(row[k] for row in belonging)
            if total > 0:
                centroids[k] = sum(row[k] * f for row, f in zip(belonging, rows, strict=True)) / total
        labels = [max(centroids, key=lambda k: float(torch.cosine_similarity(f, centroids[k], dim=0))) for f in rows]
        belonging = [[float(label == k) for k in range(probabilities.shape[1])] for label in labels]
    return labels


def test_centroid_labels_are_those_of_a_loop() -> None:
    drawn = torch.Generator().manual_seed(2)
    features = torch.randn(60, 5, generator=drawn)
    probabilities = torch.randn(60, 4, generator=drawn).softmax(1)
    found = centroid_labels(features, probabilities)
    assert found.tolist() == by_loop(features, probabilities)
    assert not torch.equal(found, probabilities.argmax(1))


def test_a_class_that_attracts_nothing_stays_empty() -> None:
    """All directions are opposite to where an empty class's centroid, the origin, would be most similar."""
    features = torch.tensor([[1.0, -1.0], [-1.0, 1.0], [1.0, -0.9]])
    probabilities = torch.tensor([[1.0, 0.0, 0.0], [0.0, 1.0, 0.0], [1.0, 0.0, 0.0]])
    assert centroid_labels(features, probabilities).tolist() == [0, 1, 0]
