from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor

from fedshift.functional.fusion import fuse, layer_distance

Models = dict[str, dict[str, Tensor]]


def given(models: Models) -> Callable[[], Iterator[tuple[str, dict[str, Tensor]]]]:
    return lambda: iter(models.items())


def one_layer(*values: list[float]) -> Models:
    return {name: {"w": torch.tensor(value)} for name, value in zip("abcdef", values, strict=False)}


def test_the_outlier_weighs_most_by_hand() -> None:
    # Mean (1, 0); distances 1, 1, 2; weights 1/4, 1/4, 1/2; fused 3/2.
    fused = fuse(given(one_layer([0.0, 0.0], [0.0, 0.0], [3.0, 0.0])))
    assert fused.model["w"].tolist() == [1.5, 0.0]
    assert {site: layers["w"] for site, layers in fused.weights.items()} == {"a": 0.25, "b": 0.25, "c": 0.5}


def test_similarity_and_average_by_hand() -> None:
    models = given(one_layer([0.0], [0.0], [3.0]))
    # One over the distances 1, 1, 2: weights 0.4, 0.4, 0.2.
    similar = fuse(models, "similarity")
    assert similar.model["w"].item() == pytest.approx(0.6)
    assert [similar.weights[site]["w"] for site in "abc"] == pytest.approx([0.4, 0.4, 0.2])
    equal = fuse(models, "average")
    assert equal.model["w"].item() == 1.0 and equal.weights["c"]["w"] == pytest.approx(1 / 3)


def test_distances_by_hand() -> None:
    a, b = torch.tensor([[3.0, 0.0]]), torch.tensor([[0.0, 4.0]])
    assert layer_distance(a, b) == 5.0
    assert layer_distance(a, b, "l1") == 7.0
    assert layer_distance(a, b, "cosine") == 1.0
    assert layer_distance(a, a + b, "cosine") == pytest.approx(1 - 3 / 5)
    assert layer_distance(a, -a, "cosine") == pytest.approx(2.0)
    assert layer_distance(torch.zeros(2), torch.ones(2), "cosine") == 1.0


@pytest.mark.parametrize("metric", ["l1", "cosine"])
def test_other_distances_weigh_by_hand(metric: str) -> None:
    fused = fuse(given(one_layer([1.0, 0.0], [1.0, 0.0], [-1.0, 3.0])), "divergence", metric)  # type: ignore[arg-type]
    # The mean is (1/3, 1).
    cosine = [1 - (1 / 3) / (10 / 9) ** 0.5, 1 - (1 / 3) / (10 / 9) ** 0.5, 1 - (8 / 3) / (10 * 10 / 9) ** 0.5]
    distances = {"l1": [5 / 3, 5 / 3, 10 / 3], "cosine": cosine}[metric]
    expected = [distance / sum(distances) for distance in distances]
    assert [fused.weights[site]["w"] for site in "abc"] == pytest.approx(expected, rel=1e-6)
    assert fused.model["w"].tolist() == pytest.approx([1 - 2 * expected[2], 3 * expected[2]], abs=1e-6)


@pytest.mark.parametrize("rule", ["divergence", "similarity", "average"])
@pytest.mark.parametrize("metric", ["l2", "l1", "cosine"])
def test_identical_models_are_fused_to_themselves_exactly(rule: str, metric: str) -> None:
    model = {"w": torch.tensor([0.1, -0.7, 1e-8]), "zero": torch.zeros(3)}
    fused = fuse(given({site: dict(model) for site in "abc"}), rule, metric)  # type: ignore[arg-type]
    assert torch.equal(fused.model["w"], model["w"]) and torch.equal(fused.model["zero"], model["zero"])
    assert fused.weights["b"] == pytest.approx({"w": 1 / 3, "zero": 1 / 3})


@pytest.mark.parametrize("rule", ["divergence", "similarity", "average"])
def test_two_models_are_as_far_from_their_mean_and_weigh_the_same(rule: str) -> None:
    fused = fuse(given(one_layer([1.0, 5.0], [3.0, 1.0])), rule)  # type: ignore[arg-type]
    assert fused.model["w"].tolist() == pytest.approx([2.0, 3.0])


def test_one_model_is_itself() -> None:
    fused = fuse(given(one_layer([0.3, -2.0])))
    assert torch.equal(fused.model["w"], torch.tensor([0.3, -2.0])) and fused.weights == {"a": {"w": 1.0}}


def test_a_model_that_is_the_mean_takes_all_of_the_similarity() -> None:
    fused = fuse(given(one_layer([-1.0], [0.0], [1.0])), "similarity")
    assert fused.weights["b"]["w"] == pytest.approx(1.0) and abs(fused.model["w"].item()) < 1e-9


def test_every_tensor_has_weights_of_its_own_and_counters_are_copied() -> None:
    def model(weight: float, mean: float, seen: int) -> dict[str, Tensor]:
        return {
            "conv.weight": torch.full((2, 2), float(weight)),
            "bn.running_mean": torch.full((2,), float(mean)),
            "bn.num_batches_tracked": torch.tensor(seen),
            "mask": torch.tensor([True]),
        }

    fused = fuse(given({"a": model(0, 3, 7), "b": model(0, 0, 9), "c": model(3, 0, 9)}))
    assert fused.model["conv.weight"].tolist() == [[1.5, 1.5], [1.5, 1.5]]
    assert fused.model["bn.running_mean"].tolist() == [1.5, 1.5]
    assert fused.weights["c"] == {"conv.weight": 0.5, "bn.running_mean": 0.25}
    assert int(fused.model["bn.num_batches_tracked"]) == 7 and fused.model["mask"].dtype == torch.bool
    assert list(fused.model) == list(model(0, 0, 0))


def test_half_precision_stays_and_does_not_overflow() -> None:
    models = {site: {"w": torch.full((3,), value, dtype=torch.float16)} for site, value in (("a", 6e4), ("b", 5e4))}
    fused = fuse(given(models)).model["w"]
    assert fused.dtype == torch.float16 and fused.tolist() == pytest.approx([5.5e4] * 3, rel=1e-3)


def test_models_are_read_twice_and_never_held() -> None:
    living: list[weakref.ref[Tensor]] = []
    most = 0

    def models() -> Iterator[tuple[str, dict[str, Tensor]]]:
        nonlocal most
        for number in range(20):
            tensor = torch.full((4,), float(number))
            living.append(weakref.ref(tensor))
            most = max(most, sum(ref() is not None for ref in living))
            yield f"site{number:02}", {"w": tensor}

    fused = fuse(models)
    assert len(living) == 40 and most <= 2
    distances = [abs(number - 9.5) for number in range(20)]
    expected = sum(d * number for number, d in enumerate(distances)) / sum(distances)
    assert fused.model["w"].tolist() == pytest.approx([expected] * 4)
