"""Rules that a few bad models cannot ruin, by numbers that can be recomputed by hand."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from fedshift.functional import robust
from fedshift.functional.averaging import weighted_mean
from fedshift.functional.robust import Parts, clip_factors, coordinate_median, trimmed_mean, update_lengths


def model(weight: float, mean: float = 0.0, variance: float = 1.0, tracked: int = 3) -> dict[str, Tensor]:
    return {
        "layer.weight": torch.tensor([weight, 0.0]),
        "bn.running_mean": torch.tensor([mean]),
        "bn.running_var": torch.tensor([variance]),
        "bn.num_batches_tracked": torch.tensor(tracked),
    }


def numbers(*values: float) -> robust.Models:
    return lambda: [{"w": torch.tensor([value, -value]), "n": torch.tensor(3)} for value in values]


def test_an_update_is_measured_in_two_parts() -> None:
    old, new = model(1.0, mean=2.0, variance=4.0), model(4.0, mean=8.0, variance=20.0, tracked=1000)
    found = update_lengths(new, old)
    assert found.parameters == 3.0
    # The mean moves by 6, three standard deviations of 2; the variance by 16, four times itself.
    assert found.statistics == pytest.approx(5.0, rel=1e-5)


def test_a_variance_of_0_is_a_unit_too() -> None:
    assert math.isfinite(update_lengths(model(1.0, mean=1.0), model(1.0, variance=0.0)).statistics)


def test_up_to_the_bound_nothing_changes_and_beyond_it_the_longer_the_less() -> None:
    lengths = [Parts(length, 1.0) for length in (1.0, 2.0, 3.0, 9.0, 60.0)]
    # The median is 3, so that the bound is 6: 60 is ten times as long and counts for a hundredth.
    found = clip_factors(lengths, 2.0)
    assert [own.parameters for own in found] == pytest.approx([1.0, 1.0, 1.0, (6 / 9) ** 2, 0.01])
    # Its statistics count no more than its parameters, whatever they are.
    assert [own.statistics for own in found] == [own.parameters for own in found]


def test_statistics_that_are_far_off_do_not_take_the_parameters_with_them() -> None:
    found = clip_factors([Parts(1.0, 1.0), Parts(1.0, 1.0), Parts(1.0, 20.0)], 2.0)
    assert (found[2].parameters, found[2].statistics) == (1.0, pytest.approx(0.01))


def test_sites_that_change_nothing_do_not_lower_the_bound() -> None:
    lengths = [Parts(length, 0.0) for length in (0.0, 0.0, 0.0, 1.0, 1.5)]
    assert clip_factors(lengths, 2.0) == [robust.WHOLE] * 5
    assert clip_factors([Parts(0.0, 0.0)] * 3, 2.0) == [robust.WHOLE] * 3


def test_of_two_updates_the_shorter_one_sets_the_bound() -> None:
    assert clip_factors([Parts(1.0, 1.0), Parts(1e6, 1.0)], 2.0)[1].parameters == pytest.approx(4e-12)


def test_a_shortened_update_by_hand() -> None:
    old, new = model(1.0, variance=4.0), model(5.0, mean=2.0, variance=8.0)
    half = robust.shortened(new, old, Parts(0.5, 0.25))
    assert half["layer.weight"].tolist() == [3.0, 0.0]
    assert (half["bn.running_mean"].item(), half["bn.running_var"].item()) == (0.5, 5.0)
    assert half["bn.num_batches_tracked"] == 3
    assert robust.shortened(new, old, robust.WHOLE) is new


def test_the_mean_of_parts_by_hand() -> None:
    models = [model(1.0, mean=1.0), model(5.0, mean=7.0)]
    found = robust.mean_of_parts(models, [1.0, 2.0], [robust.WHOLE, Parts(0.5, 0.25)])
    assert found["layer.weight"].tolist() == [3.0, 0.0]  # (1 * 1 + 2 * 0.5 * 5) / 2
    assert found["bn.running_mean"].item() == pytest.approx(3.0)  # (1 * 1 + 2 * 0.25 * 7) / 1.5
    assert list(found) == list(models[0])


def test_where_nothing_is_clipped_it_is_the_mean_to_the_last_bit() -> None:
    generator = torch.Generator().manual_seed(0)
    models = [
        {name: value + torch.rand(value.shape, generator=generator) for name, value in model(0.0).items() if value.ndim}
        for _ in range(4)
    ]
    weights = [3.0, 7.0, 11.0, 13.0]
    found, mean = (
        robust.mean_of_parts(models, weights, [robust.WHOLE] * 4),
        weighted_mean(zip(models, weights, strict=True)),
    )
    assert all(torch.equal(found[name], value) for name, value in mean.items())


def test_negative_variances_become_0_and_others_are_left_alone() -> None:
    good, bad = model(1.0), model(1.0, mean=-3.0, variance=-2.0)
    assert robust.with_variances_from_zero(good) is good
    found = robust.with_variances_from_zero(bad)
    assert found["bn.running_var"].item() == 0.0 and found["bn.running_mean"].item() == -3.0


def test_no_weight_is_far_above_the_median() -> None:
    assert robust.capped([100.0, 300.0, 400.0, 10.0**12], 4.0) == [100.0, 300.0, 400.0, 1200.0]
    assert robust.capped([100.0, 10.0**12], 4.0) == [100.0, 400.0]
    assert robust.capped([], 4.0) == []


def test_the_median_by_hand_and_one_site_cannot_move_it() -> None:
    assert coordinate_median(numbers(1.0, 2.0, 4.0))["w"].tolist() == [2.0, -2.0]
    assert coordinate_median(numbers(1.0, 2.0, 4.0, 1e30))["w"].tolist() == [3.0, -3.0]
    assert coordinate_median(numbers(5.0))["n"] == 3
    with pytest.raises(ValueError, match="no models"):
        coordinate_median(lambda: [])


def test_the_trimmed_mean_by_hand() -> None:
    # 100 and -9 are left out; of -w: -100 and 9.
    assert trimmed_mean(numbers(1.0, 2.0, 6.0, 100.0, -9.0), 1)["w"].tolist() == [3.0, -3.0]
    assert trimmed_mean(numbers(1.0, 2.0, 6.0, 100.0, -9.0), 2)["w"].tolist() == [2.0, -2.0]
    assert trimmed_mean(numbers(1.0, 2.0, 6.0), 0)["w"].tolist() == [3.0, -3.0]
    with pytest.raises(ValueError, match="2 models are too few to leave out 1"):
        trimmed_mean(numbers(1.0, 2.0), 1)


def test_numbers_are_looked_at_in_groups_with_the_same_result(monkeypatch: pytest.MonkeyPatch) -> None:
    generator = torch.Generator().manual_seed(1)
    models = [{name: torch.rand(3, 5, generator=generator) for name in "abcdef"} for _ in range(5)]
    at_once = trimmed_mean(lambda: models, 1)
    read = []
    monkeypatch.setattr(robust, "_GROUP_BYTES", 5 * 8 * 30)  # two tensors of five models

    def again() -> list[dict[str, Tensor]]:
        read.append(1)
        return models

    in_groups = trimmed_mean(again, 1)
    assert len(read) == 1 + 3
    assert all(torch.equal(in_groups[name], value) for name, value in at_once.items())


def test_krum_chooses_those_that_are_close_together() -> None:
    models = [model(weight) for weight in (1.0, 1.1, 50.0, 0.9, 1.2)]
    assert robust.chosen_by_krum(lambda: models, None, 1) == [0, 1, 3, 4]


def test_krum_by_hand() -> None:
    """n = 5, one bad: scores are sums of the squared distances to 2 others, in units of the median distance. On the
    line 0, 1, 2, 4, 8 they are 5, 2, 5, 13 and 52."""
    models = [{"w": torch.tensor([place])} for place in (8.0, 0.0, 1.0, 2.0, 4.0)]
    assert robust.chosen_by_krum(lambda: models, None, 1) == [1, 2, 3, 4]
    assert robust.chosen_by_krum(lambda: models[1:], None, 1) == [0, 1, 2]
    with pytest.raises(ValueError, match="3 models are too few"):
        robust.chosen_by_krum(lambda: models[2:], None, 1)


def test_krum_sees_statistics_that_are_far_off() -> None:
    models = [model(1.0 + place / 10, mean=9.0 if place == 2 else 0.1 * place) for place in range(5)]
    assert 2 not in robust.chosen_by_krum(lambda: models, model(0.0), 1)
