from __future__ import annotations

import math

import pytest
import torch

from fedshift.functional.losses import discrepancy, pseudo_label_loss, reversal_strength, reverse_gradient


def logits(*rows: tuple[float, ...]) -> torch.Tensor:
    return torch.tensor(rows).log()


def test_discrepancy_by_hand() -> None:
    ours, theirs = logits((0.7, 0.2, 0.1), (0.5, 0.25, 0.25)), logits((0.2, 0.2, 0.6), (0.5, 0.25, 0.25))
    assert discrepancy(ours, theirs).tolist() == pytest.approx([1.0, 0.0], abs=1e-6)


def test_discrepancy_is_2_where_classifiers_are_sure_of_different_classes() -> None:
    assert float(discrepancy(torch.tensor([[99.0, 0]]), torch.tensor([[0.0, 99]]))) == pytest.approx(2)


def test_pixels_are_compared_one_by_one() -> None:
    ours, theirs = torch.randn(2, 4, 3, 5), torch.randn(2, 4, 3, 5)
    found = discrepancy(ours, theirs)
    assert found.shape == (2, 3, 5)
    assert float(found[1, 2, 3]) == pytest.approx(float(discrepancy(ours[1:, :, 2, 3], theirs[1:, :, 2, 3])))


def test_pseudo_labels_are_the_teachers_most_likely_classes() -> None:
    scores, teacher = logits((0.5, 0.4, 0.1), (0.2, 0.3, 0.5)), logits((0.3, 0.6, 0.1), (0.8, 0.1, 0.1))
    assert pseudo_label_loss(scores, teacher).tolist() == pytest.approx([-math.log(0.4), -math.log(0.2)])


def test_no_gradient_reaches_the_teacher() -> None:
    scores, teacher = torch.randn(3, 4, requires_grad=True), torch.randn(3, 4, requires_grad=True)
    pseudo_label_loss(scores, teacher).sum().backward()
    assert scores.grad is not None and teacher.grad is None


def test_one_sample_is_never_compared_with_all() -> None:
    with pytest.raises(ValueError, match="cannot be compared"):
        discrepancy(torch.randn(4, 3), torch.randn(1, 3))
    with pytest.raises(ValueError, match="cannot be compared"):
        pseudo_label_loss(torch.randn(4, 3), torch.randn(1, 3))


def test_reversal_turns_the_gradient_around() -> None:
    x = torch.tensor([1.0, -2.0], requires_grad=True)
    y = reverse_gradient(x, 0.5)
    assert torch.equal(y, x)
    (y * torch.tensor([3.0, 4.0])).sum().backward()
    assert x.grad is not None and x.grad.tolist() == [-1.5, -2.0]


def test_the_reversal_grows_over_the_run() -> None:
    assert reversal_strength(0.0) == 0
    assert reversal_strength(0.1) == pytest.approx(2 / (1 + math.exp(-1)) - 1)
    assert reversal_strength(1.0) == pytest.approx(0.99990920)
