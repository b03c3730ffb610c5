from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from fedshift.functional.losses import (
    IGNORE,
    cross_entropy,
    kl_divergence,
    soft_cross_entropy,
    symmetric_cross_entropy,
)
from fedshift.functional.losses import SYMMETRIC_MISS as MISS
from fedshift.functional.losses import SYMMETRIC_SHARE as SHARE


def logits(*probabilities: list[float]) -> Tensor:
    """Scores whose softmax is exactly these probabilities."""
    return torch.tensor(probabilities, dtype=torch.float64).log()


def test_cross_entropy_by_hand() -> None:
    scores = logits([0.5, 0.25, 0.25], [0.1, 0.2, 0.7])
    loss = cross_entropy(scores, torch.tensor([0, 1]))
    assert float(loss) == pytest.approx((math.log(2) + math.log(5)) / 2, abs=1e-12)


def test_smoothing_by_hand() -> None:
    # Target with s = 0.3 over 3 classes: 0.8, 0.1, 0.1.
    loss = cross_entropy(logits([0.5, 0.25, 0.25]), torch.tensor([0]), smoothing=0.3)
    assert float(loss) == pytest.approx(0.8 * math.log(2) + 0.2 * math.log(4), abs=1e-12)


def test_symmetric_cross_entropy_by_hand() -> None:
    scores = logits([0.5, 0.25, 0.25], [0.1, 0.2, 0.7])
    loss = symmetric_cross_entropy(scores, torch.tensor([0, 1]))
    expected = SHARE * (math.log(2) + math.log(5)) / 2 + MISS * (0.5 + 0.8) / 2
    assert float(loss) == pytest.approx(expected, abs=1e-12)
    masks = scores.T[None, :, :, None]  # Two pixels, and one without a label.
    masks = torch.cat([masks, masks[:, :, :1]], dim=2)
    loss = symmetric_cross_entropy(masks, torch.tensor([[[0], [1], [IGNORE]]], dtype=torch.uint8))
    assert float(loss) == pytest.approx(expected, abs=1e-12)
    void = torch.full((1, 3, 1), IGNORE, dtype=torch.uint8)
    assert float(symmetric_cross_entropy(masks, void)) == 0.0


@pytest.mark.parametrize(("loss", "surest"), [(cross_entropy, 0.7), (symmetric_cross_entropy, 0.924)])
def test_how_sure_a_model_gets_where_three_of_ten_labels_are_wrong(loss: Any, surest: float) -> None:
    labels = torch.tensor([0] * 7 + [1] * 3)
    grid = [step / 1000 for step in range(1, 1000)]
    values = [float(loss(logits([p, 1 - p]).expand(10, 2), labels)) for p in grid]
    assert grid[values.index(min(values))] == pytest.approx(surest, abs=0.002)


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_pixels_without_label_do_not_count(smoothing: float) -> None:
    generator = torch.Generator().manual_seed(0)
    scores = torch.randn(2, 4, 3, 5, generator=generator, dtype=torch.float64)
    labels = torch.randint(0, 4, (2, 3, 5), generator=generator, dtype=torch.uint8)
    labels[0, :2] = IGNORE
    rows = scores.permute(0, 2, 3, 1)[labels != IGNORE]
    expected = cross_entropy(rows, labels[labels != IGNORE], smoothing=smoothing)
    assert float(cross_entropy(scores, labels, smoothing=smoothing)) == pytest.approx(float(expected), abs=1e-12)


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_all_void_batch_is_zero_with_zero_gradients(smoothing: float) -> None:
    scores = torch.randn(2, 3, 4, 4, generator=torch.Generator().manual_seed(0), requires_grad=True)
    loss = cross_entropy(scores, torch.full((2, 4, 4), IGNORE), smoothing=smoothing)
    loss.backward()
    assert loss.item() == 0.0
    assert scores.grad is not None
    assert torch.equal(scores.grad, torch.zeros_like(scores))


def test_void_among_image_labels_does_not_count() -> None:
    scores = logits([0.5, 0.5], [0.9, 0.1])
    assert float(cross_entropy(scores, torch.tensor([0, IGNORE]))) == pytest.approx(math.log(2), abs=1e-12)


def test_class_255_counts_when_there_are_more_classes() -> None:
    # A data set of 345 classes has a class 255; leaving it out would go unnoticed.
    scores = torch.zeros(1, 345, dtype=torch.float64)
    assert float(cross_entropy(scores, torch.tensor([255]))) == pytest.approx(math.log(345), abs=1e-12)


def test_soft_cross_entropy_by_hand() -> None:
    scores = logits([0.5, 0.5], [0.25, 0.75])
    probabilities = torch.tensor([[0.2, 0.8], [1.0, 0.0]], dtype=torch.float64)
    loss = soft_cross_entropy(scores, probabilities)
    assert float(loss) == pytest.approx((math.log(2) + math.log(4)) / 2, abs=1e-12)


def test_soft_cross_entropy_of_one_hot_is_cross_entropy() -> None:
    scores = torch.randn(5, 3, generator=torch.Generator().manual_seed(0))
    labels = torch.tensor([0, 1, 2, 1, 0])
    one_hot = torch.nn.functional.one_hot(labels, 3).float()
    torch.testing.assert_close(soft_cross_entropy(scores, one_hot), cross_entropy(scores, labels))


def test_kl_divergence_by_hand() -> None:
    target = torch.tensor([[0.5, 0.5], [1.0, 0.0]], dtype=torch.float64)
    loss = kl_divergence(target, logits([0.25, 0.75], [0.5, 0.5]))
    first = 0.5 * math.log(0.5 / 0.25) + 0.5 * math.log(0.5 / 0.75)
    assert float(loss) == pytest.approx((first + math.log(2)) / 2, abs=1e-12)


@pytest.mark.parametrize("loss", [kl_divergence, lambda p, s, w: soft_cross_entropy(s, p, w)])
def test_sample_weights_multiply_before_the_mean_over_the_batch(loss) -> None:  # type: ignore[no-untyped-def]
    target = torch.tensor([[0.5, 0.5], [1.0, 0.0]], dtype=torch.float64)
    scores = logits([0.25, 0.75], [0.4, 0.6])
    one, two = (float(loss(target[i : i + 1], scores[i : i + 1], None)) for i in (0, 1))
    weighted = loss(target, scores, torch.tensor([3.0, 0.001], dtype=torch.float64))
    assert float(weighted) == pytest.approx((3 * one + 0.001 * two) / 2, abs=1e-12)


def test_sample_weights_hold_for_pixels() -> None:
    target = torch.tensor([1.0, 0.0], dtype=torch.float64).reshape(1, 2, 1, 1).expand(2, 2, 3, 3)
    scores = torch.zeros(2, 2, 3, 3, dtype=torch.float64)
    loss = kl_divergence(target, scores, torch.tensor([2.0, 4.0], dtype=torch.float64))
    assert float(loss) == pytest.approx(3 * math.log(2), abs=1e-12)


def test_kl_gradient_is_softmax_minus_target_even_at_zero_probabilities() -> None:
    scores = torch.randn(4, 3, generator=torch.Generator().manual_seed(0), requires_grad=True)
    target = torch.tensor([[1.0, 0.0, 0.0]]).expand(4, 3).clone().requires_grad_()
    kl_divergence(target, scores).backward()
    assert target.grad is None
    torch.testing.assert_close(scores.grad, (scores.softmax(dim=1) - target).detach() / 4)


def test_half_precision_scores_are_summed_in_float32() -> None:
    # 64 x 64 pixels: a running sum in bfloat16 stands still at 256 x its terms.
    scores = torch.zeros(1, 4, 64, 64, dtype=torch.bfloat16)
    labels = torch.zeros(1, 64, 64, dtype=torch.int64)
    one_hot = torch.nn.functional.one_hot(labels, 4).movedim(3, 1).float()
    for loss in (cross_entropy(scores, labels), soft_cross_entropy(scores, one_hot), kl_divergence(one_hot, scores)):
        assert loss.dtype == torch.float32
        assert loss.item() == pytest.approx(math.log(4), abs=1e-5)


def test_shapes_that_would_broadcast_are_refused() -> None:
    with pytest.raises(ValueError, match=r"shape \(4, 3\) and \(1, 3\) cannot be compared"):
        soft_cross_entropy(torch.zeros(4, 3), torch.ones(1, 3) / 3)
    with pytest.raises(ValueError, match=r"shape \(4, 3\) and \(4, 1\) cannot be compared"):
        kl_divergence(torch.ones(4, 1), torch.zeros(4, 3))
    with pytest.raises(ValueError, match=r"weights have shape \(4, 1\)"):
        kl_divergence(torch.ones(4, 3) / 3, torch.zeros(4, 3), torch.ones(4, 1))


row = st.lists(st.floats(min_value=-30, max_value=30), min_size=3, max_size=3)


@settings(deadline=None)
@given(p=row, q=row)
def test_kl_is_cross_entropy_minus_entropy_and_never_negative(p: list[float], q: list[float]) -> None:
    target = torch.tensor([p], dtype=torch.float64).softmax(dim=1)
    scores = torch.tensor([q], dtype=torch.float64)
    divergence = float(kl_divergence(target, scores))
    entropy = float(torch.special.entr(target).sum())
    assert divergence >= -1e-12
    assert divergence == pytest.approx(float(soft_cross_entropy(scores, target)) - entropy, abs=1e-9)
    assert float(kl_divergence(target, target.log())) == pytest.approx(0, abs=1e-12)
