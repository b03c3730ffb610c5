from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from fedshift.functional.mmd import BANDWIDTHS, mmd, pairwise_mmd, squared_distances


def sets(*sizes: int, dims: int = 4, seed: int = 0) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [
        torch.randn(size, dims, generator=generator, dtype=torch.float64) + 0.3 * number
        for number, size in enumerate(sizes)
    ]


def mean_distance(x: Tensor, y: Tensor) -> float:
    """The mean squared distance between two different samples, pair by pair."""
    everything = [*x, *y]
    pairs = [(u, v) for i, u in enumerate(everything) for j, v in enumerate(everything) if i != j]
    return sum(float((u - v).square().sum()) for u, v in pairs) / len(pairs)


def slow_mmd(x: Tensor, y: Tensor, unit: float | None = None) -> Tensor:
    """The definition, one pair of samples at a time."""
    unit = mean_distance(x, y) if unit is None else unit

    def mean_kernel(a: Tensor, b: Tensor) -> Tensor:
        total = torch.zeros((), dtype=torch.float64)
        for u in a:
            for v in b:
                for power in range(-3, 2):
                    total = total + torch.exp(-(u - v).square().sum() / (3.0**power * unit))
        return total / (len(a) * len(b))

    return mean_kernel(x, x) + mean_kernel(y, y) - 2 * mean_kernel(x, y)


def test_two_single_samples_by_hand() -> None:
    # One apart, and the mean distance is that same 1: 5 + 5 - 2 (e^-27 + e^-9 + e^-3 + e^-1 + e^-1/3).
    expected = 10 - 2 * sum(math.exp(-z) for z in (27, 9, 3, 1, 1 / 3))
    assert expected == pytest.approx(7.731358, abs=1e-6)
    assert float(mmd(torch.tensor([[0.0]]), torch.tensor([[1.0]]))) == pytest.approx(expected, rel=1e-6)


def test_the_authors_estimator_of_two_equal_sets_by_hand() -> None:
    # 0 and 1 in both sets: 8 of 16 pairs are one apart: s = 1/2. The kernels of 0 and 1 are e^-(1 / 3^k), together S.
    # Within a set, without a sample's pair with itself: S. Between: (5 + S) / 2.
    # 2 S - (5 + S) + 2 / (2 - 1) = S - 3.
    x = torch.tensor([[0.0], [1.0]])
    expected = sum(math.exp(-z) for z in (27, 9, 3, 1, 1 / 3)) - 3
    assert expected == pytest.approx(-1.865679, abs=1e-6)
    assert float(mmd(x, x, "authors")) == pytest.approx(expected, rel=1e-5)
    assert abs(float(mmd(x, x, "biased"))) < 1e-6


def slow_authors(x: Tensor, y: Tensor) -> float:
    """The authors' estimator, one pair of samples at a time."""
    everything = [*x, *y]
    far = [[float((u - v).square().sum()) for v in everything] for u in everything]
    s = sum(map(sum, far)) / len(everything) ** 2
    n, m = len(x), len(y)

    def mean(rows: range, columns: range) -> float:
        pairs = [(i, j) for i in rows for j in columns if i != j]
        return sum(math.exp(-far[i][j] / (2 * 3.0**k * s)) for i, j in pairs for k in range(-3, 2)) / len(pairs)

    first, second = range(n), range(n, n + m)
    added = 1 / (n - 1) + 1 / (m - 1)  # 2 / (n - 1) for sets of one size
    return mean(first, first) + mean(second, second) - 2 * mean(first, second) + added


@pytest.mark.parametrize("sizes", [(5, 5), (3, 6), (2, 2)])
def test_the_authors_estimator_equals_the_double_loop(sizes: tuple[int, int]) -> None:
    x, y = sets(*sizes)
    assert float(mmd(x, y, "authors")) == pytest.approx(slow_authors(x, y), rel=1e-10)
    assert float(pairwise_mmd(x[None], y[None], "authors")) == pytest.approx(slow_authors(x, y), rel=1e-10)


def test_the_authors_estimator_of_single_samples_keeps_their_own_pairs() -> None:
    # One apart, s = 1/2: the kernels' widths 2 3^k s are those of `biased`, and so is the number.
    one = mmd(torch.tensor([[0.0]]), torch.tensor([[1.0]]), "authors")
    assert float(one) == pytest.approx(7.731358, abs=1e-5)


def test_bandwidths_are_powers_of_three() -> None:
    assert pytest.approx([3.0**k for k in range(-3, 2)]) == BANDWIDTHS


@pytest.mark.parametrize("sizes", [(5, 5), (3, 6), (1, 4)])
def test_equals_the_double_loop(sizes: tuple[int, int]) -> None:
    x, y = sets(*sizes)
    assert torch.allclose(mmd(x, y), slow_mmd(x, y), rtol=1e-12)


def test_single_precision_is_precise_enough_for_long_features() -> None:
    x, y = sets(16, 16, dims=5000)
    assert float(mmd(x.float(), y.float())) == pytest.approx(float(mmd(x, y)), rel=1e-4)


def test_every_pair_of_sets_is_one_entry() -> None:
    x, y = torch.stack(sets(5, 5, 5)), torch.stack(sets(4, 4, seed=1))
    table = pairwise_mmd(x, y)
    assert table.shape == (3, 2)
    for k in range(3):
        for l in range(2):
            assert torch.allclose(table[k, l], slow_mmd(x[k], y[l]), rtol=1e-12)


def test_leading_dimensions_are_independent_pairs() -> None:
    x, y = torch.stack(sets(5, 5)), torch.stack(sets(4, 4, seed=1))
    assert torch.allclose(mmd(x, y), pairwise_mmd(x, y).diagonal(), rtol=1e-12)


def test_a_set_is_no_distance_from_itself_in_any_order() -> None:
    (x,) = sets(7)
    assert abs(float(mmd(x, x.flip(0)))) < 1e-12


def test_the_unit_of_length_does_not_matter() -> None:
    x, y = sets(6, 6)
    assert torch.allclose(mmd(x, y), mmd(1000 * x, 1000 * y), rtol=1e-9)


def test_grows_with_the_distance_between_the_sets() -> None:
    x, y = sets(30, 30)
    values = [float(mmd(x, y + shift)) for shift in (0.0, 1.0, 2.0, 4.0)]
    assert values == sorted(set(values))


@pytest.mark.parametrize("joint", [False, True], ids=["mmd", "pairwise_mmd"])
def test_gradients_equal_finite_differences_with_the_bandwidth_held(joint: bool) -> None:
    x, y = sets(4, 3, dims=3)
    x.requires_grad_()
    y.requires_grad_()
    (pairwise_mmd(x[None], y[None])[0, 0] if joint else mmd(x, y)).backward()
    unit = mean_distance(x.detach(), y.detach())
    for tensor in (x, y):
        assert tensor.grad is not None
        for place in range(tensor.numel()):
            step = torch.zeros(tensor.numel(), dtype=torch.float64)
            step[place] = 1e-5
            step = step.view_as(tensor)
            moved = [
                slow_mmd(x.detach() + sign * step, y.detach(), unit)
                if tensor is x
                else slow_mmd(x.detach(), y.detach() + sign * step, unit)
                for sign in (1, -1)
            ]
            slope = float(moved[0] - moved[1]) / 2e-5
            assert float(tensor.grad.flatten()[place]) == pytest.approx(slope, rel=1e-5, abs=1e-9)


def test_gradients_of_all_pairs_add_up() -> None:
    x, y = torch.stack(sets(5, 5)).requires_grad_(), torch.stack(sets(4, 4, 4, seed=1)).requires_grad_()
    weights = torch.arange(6, dtype=torch.float64).view(2, 3)
    (weights * pairwise_mmd(x, y)).sum().backward()
    u, v = x.detach().clone().requires_grad_(), y.detach().clone().requires_grad_()
    sum(weights[k, l] * mmd(u[k], v[l]) for k in range(2) for l in range(3)).backward()
    assert torch.allclose(x.grad, u.grad, rtol=1e-10) and torch.allclose(y.grad, v.grad, rtol=1e-10)


@pytest.mark.parametrize("value", [0.0, 7.3, 1e4])
def test_samples_that_are_all_the_same_give_zero_and_no_wild_gradient(value: float) -> None:
    x = torch.full((2, 4, 300), value, requires_grad=True)
    y = torch.full((2, 4, 300), value)
    table = pairwise_mmd(x, y)
    table.sum().backward()
    assert table.abs().max() < 1e-3
    assert x.grad is not None and bool(torch.isfinite(x.grad).all()) and x.grad.abs().max() <= 1


def test_squared_distances_by_hand() -> None:
    found = squared_distances(torch.tensor([[0.0, 0.0], [3.0, 4.0]]), torch.tensor([[0.0, 1.0]]))
    assert found.tolist() == [[1.0], [18.0]]
