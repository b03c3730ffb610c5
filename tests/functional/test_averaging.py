from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from fedshift.functional.averaging import WeightedMean, mean_so_far, update_norm, weighted_mean

positive = st.floats(min_value=1e-3, max_value=1e6)
values = st.floats(min_value=-100, max_value=100, width=32)


def model(value: float, tracked: int = 0) -> dict[str, Tensor]:
    return {
        "layer.weight": torch.full((2, 3), value),
        "bn.running_mean": torch.full((3,), 10 * value),
        "bn.num_batches_tracked": torch.tensor(tracked),
        "mask": torch.tensor([True, False]),
    }


def test_mean_weighs_parameters_and_statistics_by_hand() -> None:
    mean = weighted_mean([(model(1.0, tracked=7), 1.0), (model(5.0, tracked=9), 3.0)])
    assert torch.equal(mean["layer.weight"], torch.full((2, 3), 4.0))  # (1*1 + 3*5) / 4
    assert torch.equal(mean["bn.running_mean"], torch.full((3,), 40.0))


def test_integer_and_boolean_buffers_are_the_first_models() -> None:
    mean = weighted_mean([(model(1.0, tracked=7), 1.0), (model(5.0, tracked=9), 100.0)])
    assert mean["bn.num_batches_tracked"].dtype == torch.int64
    assert int(mean["bn.num_batches_tracked"]) == 7
    assert torch.equal(mean["mask"], torch.tensor([True, False]))


def test_key_order_is_the_first_models() -> None:
    second = dict(reversed(model(2.0).items()))
    assert list(weighted_mean([(model(1.0), 1), (second, 1)])) == list(model(1.0))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_result_keeps_the_dtype(dtype: torch.dtype) -> None:
    mean = weighted_mean([({"w": torch.ones(3, dtype=dtype)}, 1), ({"w": torch.full((3,), 2.0, dtype=dtype)}, 1)])
    assert mean["w"].dtype == dtype
    assert mean["w"].tolist() == [1.5, 1.5, 1.5]


def test_half_precision_does_not_overflow_on_the_way() -> None:
    # float16 ends at 65,504: a sum or a weighted product in it would be infinite.
    large = {"w": torch.tensor([60_000.0], dtype=torch.float16)}
    assert weighted_mean([(large, 1000.0)] * 3)["w"].item() == 60_000.0


def test_many_small_terms_are_not_lost() -> None:
    # In float32, 2**24 + 1 == 2**24: after that sum further ones would disappear.
    mean = WeightedMean()
    mean.add({"w": torch.tensor([1.0])}, 2.0**24)
    for _ in range(64):
        mean.add({"w": torch.tensor([1.0 + 2**18])}, 1.0)
    assert mean.result()["w"].item() == pytest.approx(1 + 64 * 2**18 / (2**24 + 64), rel=1e-7)


def test_result_can_be_read_midway_and_shares_no_memory() -> None:
    first = model(1.0, tracked=3)
    mean = WeightedMean()
    mean.add(first, 1.0)
    midway = mean.result()
    midway["layer.weight"].zero_()
    midway["bn.num_batches_tracked"].fill_(99)
    first["bn.num_batches_tracked"].fill_(50)
    mean.add(model(3.0), 1.0)
    assert torch.equal(mean.result()["layer.weight"], torch.full((2, 3), 2.0))
    assert int(mean.result()["bn.num_batches_tracked"]) == 3


def test_memory_does_not_grow_with_the_number_of_models() -> None:
    mean = WeightedMean()
    for i in range(1, 4):
        mean.add(model(float(i)), 1.0)
    held = [t for store in (mean._sums, mean._first) for t in store.values()]
    assert sum(t.untyped_storage().nbytes() for t in held) == (6 + 3) * 8 + 2 * 4 + 8 + 2


def test_parameters_that_require_grad_are_accepted() -> None:
    mean = weighted_mean([({"w": torch.nn.Parameter(torch.ones(2))}, 1.0)])
    assert not mean["w"].requires_grad


@pytest.mark.parametrize("weight", [0.0, -2.0, math.nan, math.inf, -math.inf])
def test_bad_weight_is_refused(weight: float) -> None:
    with pytest.raises(ValueError, match="finite and above 0"):
        weighted_mean([(model(1.0), weight)])


def test_total_that_overflows_is_refused() -> None:
    with pytest.raises(ValueError, match="total weight"):
        weighted_mean([(model(1.0), 1e308), (model(1.0), 1e308)])


def test_nothing_to_average_is_refused() -> None:
    with pytest.raises(ValueError, match="no models"):
        weighted_mean([])
    with pytest.raises(ValueError, match="without tensors"):
        weighted_mean([({}, 1.0)])


def test_complex_tensors_are_refused() -> None:
    with pytest.raises(ValueError, match="complex"):
        weighted_mean([({"w": torch.ones(2, dtype=torch.complex64)}, 1.0)])


def test_broadcastable_shape_is_refused() -> None:
    with pytest.raises(ValueError, match=r"'w' has shape \(1, 3\), expected \(7, 3\)"):
        weighted_mean([({"w": torch.ones(7, 3)}, 1.0), ({"w": torch.ones(1, 3)}, 1.0)])


def test_other_dtype_is_refused() -> None:
    with pytest.raises(ValueError, match=r"dtype torch\.float64, expected torch\.float32"):
        weighted_mean([({"w": torch.ones(2)}, 1.0), ({"w": torch.ones(2).double()}, 1.0)])


def test_other_keys_are_refused_by_name() -> None:
    with pytest.raises(ValueError, match=r"missing \['b'\], unexpected \['c'\]"):
        weighted_mean(
            [
                ({"a": torch.ones(1), "b": torch.ones(1)}, 1.0),
                ({"a": torch.ones(1), "c": torch.ones(1)}, 1.0),
            ]
        )


def test_refused_model_leaves_the_mean_as_it_was() -> None:
    mean = WeightedMean()
    mean.add({"a": torch.tensor([1.0]), "b": torch.tensor([1.0, 1.0])}, 1.0)
    with pytest.raises(ValueError, match="shape"):
        mean.add({"a": torch.tensor([9.0]), "b": torch.tensor([9.0])}, 1.0)
    assert mean.result()["a"].item() == 1.0


@settings(deadline=None)
@given(value=values, weights=st.lists(positive, min_size=1, max_size=6))
def test_mean_of_identical_models_is_that_model(value: float, weights: list[float]) -> None:
    mean = weighted_mean([(model(value), w) for w in weights])
    torch.testing.assert_close(mean["layer.weight"], model(value)["layer.weight"], rtol=1e-6, atol=1e-6)


@settings(deadline=None)
@given(pairs=st.lists(st.tuples(values, positive), min_size=1, max_size=6))
def test_order_and_scale_of_weights_do_not_matter(pairs: list[tuple[float, float]]) -> None:
    mean = weighted_mean([(model(v), w) for v, w in pairs])["layer.weight"]
    reversed_and_scaled = weighted_mean([(model(v), 8.5 * w) for v, w in reversed(pairs)])["layer.weight"]
    torch.testing.assert_close(mean, reversed_and_scaled, rtol=1e-5, atol=1e-5)


@settings(deadline=None)
@given(pairs=st.lists(st.tuples(values, positive), min_size=1, max_size=6))
def test_mean_lies_between_the_smallest_and_largest_model(pairs: list[tuple[float, float]]) -> None:
    mean = weighted_mean([(model(v), w) for v, w in pairs])["layer.weight"]
    assert min(v for v, _ in pairs) - 1e-4 <= float(mean[0, 0]) <= max(v for v, _ in pairs) + 1e-4


def test_update_norm_by_hand() -> None:
    old = {"a": torch.zeros(2), "b": torch.ones(1), "n": torch.tensor(3)}
    new = {"a": torch.tensor([3.0, 0.0]), "b": torch.tensor([5.0]), "n": torch.tensor(1000)}
    assert update_norm(new, old) == 5.0  # sqrt(3^2 + 4^2); the counter does not count


def test_update_norm_does_not_overflow_half_precision() -> None:
    old = {"a": torch.full((4,), -60_000.0, dtype=torch.float16)}
    new = {"a": torch.full((4,), 60_000.0, dtype=torch.float16)}
    assert update_norm(new, old) == 2 * torch.tensor(60_000.0, dtype=torch.float16).item() * 2


def test_update_norm_of_a_poisoned_update_is_not_finite() -> None:
    assert not math.isfinite(update_norm({"a": torch.tensor([math.nan])}, {"a": torch.zeros(1)}))
    assert not math.isfinite(update_norm({"a": torch.tensor([math.inf])}, {"a": torch.zeros(1)}))


def test_update_norm_refuses_another_shape() -> None:
    with pytest.raises(ValueError, match="shape"):
        update_norm({"a": torch.ones(1, 3)}, {"a": torch.ones(7, 3)})


def test_the_mean_of_rounds_grows_one_model_at_a_time() -> None:
    mean: dict[str, Tensor] = {}
    for count, value in enumerate((1.0, 2.0, 6.0), start=1):
        mean = mean_so_far(mean, model(value, tracked=count), count)
    assert torch.equal(mean["layer.weight"], torch.full((2, 3), 3.0))  # (1 + 2 + 6) / 3
    assert torch.equal(mean["bn.running_mean"], torch.full((3,), 30.0))
    assert int(mean["bn.num_batches_tracked"]) == 3


def test_the_mean_of_rounds_refuses_another_layout() -> None:
    with pytest.raises(ValueError, match="shape"):
        mean_so_far({"w": torch.ones(3)}, {"w": torch.ones(1)}, 2)
