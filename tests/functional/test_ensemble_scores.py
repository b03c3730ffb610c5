"""One prediction from several models, and noise on a model, against numbers worked out by hand."""

from __future__ import annotations

import math

import pytest
import torch

from fedshift.functional.agreement import equal_shares, inconsistency, mean_probability, mean_score
from fedshift.functional.averaging import add_noise

# Two members, one sample, two classes: probabilities (0.8, 0.2) and (0.4, 0.6).
SCORES = torch.tensor([[[math.log(4.0), 0.0]], [[math.log(2 / 3), 0.0]]])


def test_mean_probability_is_the_mean_of_the_softmaxes() -> None:
    log_probabilities = mean_probability(SCORES, equal_shares([True, True]))
    torch.testing.assert_close(log_probabilities.exp(), torch.tensor([[0.6, 0.4]]))
    # What comes out are scores: their softmax is the prediction again.
    torch.testing.assert_close(log_probabilities.softmax(1), torch.tensor([[0.6, 0.4]]))


def test_mean_score_is_the_mean_of_the_logits() -> None:
    expected = (math.log(4.0) + math.log(2 / 3)) / 2
    torch.testing.assert_close(mean_score(SCORES, equal_shares([True, True])), torch.tensor([[expected, 0.0]]))


def test_the_two_rules_may_disagree() -> None:
    """One sure member outvotes two mildly opposed ones in logits, not in probabilities."""
    scores = torch.tensor([[[9.0, 0.0]], [[0.0, 1.5]], [[0.0, 1.5]]])
    shares = equal_shares([True] * 3)
    assert mean_score(scores, shares).argmax(1).item() == 0
    assert mean_probability(scores, shares).argmax(1).item() == 1


def test_a_member_without_a_share_has_no_say() -> None:
    shares = equal_shares([True, False])
    assert shares.tolist() == [1.0, 0.0]
    torch.testing.assert_close(mean_probability(SCORES, shares).exp(), torch.tensor([[0.8, 0.2]]))
    torch.testing.assert_close(mean_score(SCORES, shares), SCORES[0])
    assert equal_shares([False, False]).tolist() == [0.5, 0.5]


def test_probabilities_that_underflow_still_have_an_order() -> None:
    scores = torch.tensor([[[500.0, 0.0, 1.0]], [[500.0, 0.0, 2.0]]])
    log_probabilities = mean_probability(scores, equal_shares([True, True]))
    assert bool(torch.isfinite(log_probabilities).all()) and log_probabilities.argsort(1).tolist() == [[1, 2, 0]]


def test_maps_are_averaged_pixel_by_pixel() -> None:
    scores = torch.randn(3, 2, 4, 5, 6, generator=torch.Generator().manual_seed(0))
    shares = equal_shares([True, False, True])
    expected = (scores[0].softmax(1) + scores[2].softmax(1)) / 2
    torch.testing.assert_close(mean_probability(scores, shares).exp(), expected)
    torch.testing.assert_close(mean_score(scores, shares), (scores[0] + scores[2]) / 2)


def test_inconsistency_by_hand_and_its_gradient_spares_the_target() -> None:
    scores, target = SCORES.clone().requires_grad_(), torch.tensor([[0.0, 0.0]], requires_grad=True)
    loss = inconsistency(scores, target)
    # Means (0.6, 0.4) against (0.5, 0.5).
    assert loss.item() == pytest.approx(0.1**2 + 0.1**2)
    loss.backward()
    assert target.grad is None and scores.grad is not None and scores.grad.abs().min() > 0


def test_noise_is_gaussian_of_the_given_deviation_and_spares_integers() -> None:
    weights = {
        "w": torch.zeros(200, 100),
        "running_var": torch.zeros(1000),
        "num_batches_tracked": torch.tensor(7),
    }
    noisy = add_noise(weights, 0.5, torch.Generator().manual_seed(0))
    assert noisy["w"].std().item() == pytest.approx(0.5, rel=0.02) and abs(noisy["w"].mean().item()) < 0.02
    assert noisy["running_var"].min().item() == 0 and noisy["running_var"].max().item() > 0.5
    assert noisy["num_batches_tracked"].item() == 7 and weights["w"].abs().max() == 0
