"""Counts of confidence and what follows from them, against numbers that a person can recompute."""

from __future__ import annotations

import math

import pytest
import torch

from fedshift.functional.calibration import (
    BINS,
    TEMPERATURES,
    area_interval,
    area_under_curve,
    best_temperature,
    calibration_error,
    confidence_counts,
    quantile_of_counts,
    share_counts,
)

PLAIN = TEMPERATURES.index(1.0)


def test_confidence_is_counted_at_every_temperature() -> None:
    """Two classes: a difference of logits of log 9 is a confidence of 0.9, of log 3 one of 0.75."""
    scores = torch.tensor([[math.log(9.01), 0.0], [0.0, math.log(3.01)], [math.log(3.01), 0.0]], dtype=torch.float64)
    counts = confidence_counts(scores, torch.tensor([0, 0, 0]))
    assert counts.shape == (len(TEMPERATURES), BINS, 2)
    assert counts.sum((1, 2)).tolist() == [3] * len(TEMPERATURES)
    assert counts[PLAIN, 18].tolist() == [0, 1] and counts[PLAIN, 15].tolist() == [1, 1]
    two = TEMPERATURES.index(2.0)  # log 9.01 / 2 is log 3.0017: again 0.75
    assert counts[two, 15].tolist() == [0, 1] and counts[two, 12].tolist() == [1, 1]  # 1 / (1 + 3.01 ** -0.5) = 0.634


def test_the_temperature_undoes_what_made_scores_too_sure() -> None:
    generator = torch.Generator().manual_seed(0)
    truth = torch.randn(4000, 3, generator=generator)
    labels = torch.multinomial(truth.softmax(1), 1, generator=generator)[:, 0]
    for factor in (0.5, 2.0, 4.0):
        counts = confidence_counts(factor * truth, labels)
        assert best_temperature(counts) == pytest.approx(factor, rel=0.2)
        best = TEMPERATURES.index(best_temperature(counts))
        assert calibration_error(counts[best]) < 0.03
        if factor > 1:
            assert calibration_error(counts[PLAIN]) > 0.1


def test_the_error_is_the_mean_distance_of_confidence_and_accuracy() -> None:
    counts = torch.zeros(BINS, 2, dtype=torch.int64)
    counts[19] = torch.tensor([5, 5])  # middle 0.975, accuracy 0.5
    counts[9] = torch.tensor([1, 1])  # middle 0.475, accuracy 0.5
    assert calibration_error(counts) == pytest.approx((10 * 0.475 + 2 * 0.025) / 12)
    assert math.isnan(calibration_error(torch.zeros(BINS, 2)))


def test_the_area_under_the_curve_counts_pairs() -> None:
    generator = torch.Generator().manual_seed(1)
    labels = torch.randint(0, 2, (200,), generator=generator)
    scores = torch.stack([torch.zeros(200), torch.randn(200, generator=generator) + labels], dim=1)
    share = (scores.softmax(1)[:, 1] * 500).long()
    pairs = share[labels == 1][:, None] - share[labels == 0][None]
    wanted = ((pairs > 0).double() + 0.5 * (pairs == 0).double()).mean().item()
    assert area_under_curve(share_counts(scores, labels, 500)) == pytest.approx(wanted)
    assert math.isnan(area_under_curve(torch.tensor([[1, 0]])))
    # Hanley and McNeil's own example: 0.893 from 58 normal and 51 abnormal pictures has one of about 0.032.
    low, high = area_interval(0.893, 58, 51)
    assert (high - low) / 2 / 1.959964 == pytest.approx(0.032, abs=1e-3) and high < 1


def test_a_quantile_is_the_part_that_reaches_it() -> None:
    counts = torch.tensor([5, 0, 4, 1])
    assert [quantile_of_counts(counts, share) for share in (0.5, 0.51, 0.9, 0.91)] == [0, 2, 2, 3]
