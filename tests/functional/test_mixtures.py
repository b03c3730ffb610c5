from __future__ import annotations

import dataclasses
import itertools
import math

import numpy as np
import pytest
import torch
from torch import Tensor

from fedshift.functional import mixtures
from fedshift.functional.mixtures import (
    Axes,
    Mixture,
    Sample,
    as_rows,
    density_levels,
    draw_rows,
    fit_mixture,
    interpolate_share,
    log_density,
    principal_axes,
    relative_density,
    share_of_batch,
    typicality,
)


def seeded(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def mixture(weights: list[float], means: list[list[float]], variances: list[list[float]]) -> Mixture:
    counts = torch.full((len(weights),), 10)
    return Mixture(torch.tensor(weights), torch.tensor(means), torch.tensor(variances), counts, torch.zeros(1))


def slow_log_density(point: Tensor, mixed: Mixture) -> float:
    """The textbook sum, one number at a time."""
    total = 0.0
    for weight, mean, variance in zip(mixed.weights, mixed.means, mixed.variances, strict=True):
        density = float(weight)
        for x, m, v in zip(point.tolist(), mean.tolist(), variance.tolist(), strict=True):
            density *= math.exp(-((x - m) ** 2) / (2 * v)) / math.sqrt(2 * math.pi * v)
        total += density
    return math.log(total)


def test_log_density_of_one_standard_gaussian_by_hand() -> None:
    found = log_density(torch.tensor([[0.0, 0.0], [3.0, 4.0]]), mixture([1.0], [[0.0, 0.0]], [[1.0, 1.0]]))
    assert found.tolist() == pytest.approx([-math.log(2 * math.pi), -math.log(2 * math.pi) - 12.5])


def test_log_density_is_the_textbook_sum() -> None:
    mixed = mixture([0.2, 0.8], [[0.0, 1.0, -1.0], [2.0, 0.5, 0.0]], [[1.0, 0.5, 2.0], [0.1, 0.3, 4.0]])
    points = torch.randn(20, 3, generator=seeded())
    assert log_density(points, mixed).tolist() == pytest.approx([slow_log_density(x, mixed) for x in points], rel=1e-6)


def slow_em(points: Tensor, shares: Tensor, floor: float, iterations: int) -> tuple[list[float], Tensor, Tensor]:
    """EM with loops over points, components and dimensions."""
    n, k, d = len(points), shares.shape[1], points.shape[1]
    weights, means, variances = [0.0] * k, torch.zeros(k, d).double(), torch.zeros(k, d).double()
    for _ in range(iterations):
        for c in range(k):
            total = sum(float(shares[i, c]) for i in range(n))
            weights[c] = total / n
            for j in range(d):
                means[c, j] = sum(float(shares[i, c] * points[i, j]) for i in range(n)) / total
                around = sum(float(shares[i, c] * (points[i, j] - means[c, j]) ** 2) for i in range(n)) / total
                variances[c, j] = max(around, floor)
        shares = shares.clone()
        for i in range(n):
            terms = []
            for c in range(k):
                term = weights[c]
                for j in range(d):
                    v = float(variances[c, j])
                    term *= math.exp(-(float(points[i, j] - means[c, j]) ** 2) / (2 * v)) / math.sqrt(2 * math.pi * v)
                terms.append(term)
            for c in range(k):
                shares[i, c] = terms[c] / sum(terms)
    return weights, means, variances


def test_em_is_its_slow_twin(monkeypatch: pytest.MonkeyPatch) -> None:
    points = torch.randn(25, 2, generator=seeded(), dtype=torch.float64)
    points[:10] += 3
    shares = torch.rand(25, 3, generator=seeded(1), dtype=torch.float64)
    shares /= shares.sum(1, keepdim=True)
    monkeypatch.setattr(mixtures, "ITERATIONS", 4)
    monkeypatch.setattr(mixtures, "TOLERANCE", -math.inf)
    weights, means, variances = mixtures._converge(points, shares, 0.05)
    slow_weights, slow_means, slow_variances = slow_em(points, shares, 0.05, 4)
    assert weights.tolist() == pytest.approx(slow_weights)
    assert torch.allclose(means, slow_means) and torch.allclose(variances, slow_variances)


def test_em_never_lowers_the_likelihood() -> None:
    points = torch.randn(200, 4, generator=seeded(), dtype=torch.float64)
    shares = torch.rand(200, 5, generator=seeded(1), dtype=torch.float64)
    shares /= shares.sum(1, keepdim=True)
    seen = []
    for _ in range(15):
        parts = mixtures._maximise(points, shares, 1e-9)
        terms = mixtures._log_terms(points, *parts)
        seen.append(float(terms.logsumexp(1).mean()))
        shares = terms.softmax(1)
    assert all(later >= earlier - 1e-12 for earlier, later in itertools.pairwise(seen))


def test_a_known_mixture_is_found_again() -> None:
    generator = seeded()
    truth = mixture([0.25, 0.75], [[-4.0, 0.0], [4.0, 1.0]], [[1.0, 0.25], [0.5, 2.0]])
    picked = torch.multinomial(truth.weights, 4000, replacement=True, generator=generator)
    noise = torch.randn(4000, 2, generator=generator)
    points = truth.means[picked] + truth.variances[picked].sqrt() * noise
    found = fit_mixture(points, torch.arange(4000), 2, 10, seeded(1))
    order = found.means[:, 0].argsort()
    assert torch.allclose(found.weights[order], truth.weights, atol=0.02)
    assert torch.allclose(found.means[order], truth.means, atol=0.1)
    assert torch.allclose(found.variances[order], truth.variances, rtol=0.1)
    assert abs(int(found.counts[order][0]) - 1000) < 60 and int(found.counts.sum()) == 4000


def test_a_component_of_few_samples_never_comes_out() -> None:
    """Two far outliers would be a component of their own: they join another one instead."""
    points = torch.cat([torch.randn(60, 3, generator=seeded()), torch.full((2, 3), 50.0)])
    free = fit_mixture(points, torch.arange(62), 2, 1, seeded(1))
    assert sorted(free.counts.tolist()) == [2, 60]
    kept = fit_mixture(points, torch.arange(62), 2, 5, seeded(1))
    assert int(kept.counts.min()) >= 5 and float(kept.weights.sum()) == pytest.approx(1, abs=1e-6)


@pytest.mark.parametrize("smallest", [1, 3, 10])
@pytest.mark.parametrize("samples", [1, 2, 7, 40])
def test_fewer_samples_than_components_give_fewer_components(samples: int, smallest: int) -> None:
    points = torch.randn(samples, 5, generator=seeded())
    found = fit_mixture(points, torch.arange(samples), 20, smallest, seeded(1))
    assert 1 <= len(found.weights) <= max(1, samples // smallest)
    assert len(found.weights) == 1 or int(found.counts.min()) >= smallest
    found.checked(5)


def test_pixels_of_one_picture_count_as_one_sample() -> None:
    points = torch.cat([torch.randn(40, 2, generator=seeded()), torch.randn(40, 2, generator=seeded(1)) + 20])
    owners = torch.cat([torch.arange(40) % 8, torch.full((40,), 8)])  # the far cluster is all from picture 8
    assert sorted(fit_mixture(points, owners, 2, 1, seeded(2)).counts.tolist()) == [1, 8]
    assert fit_mixture(points, owners, 2, 2, seeded(2)).counts.tolist() == [9]


def test_equal_points_are_one_component_and_stay_finite() -> None:
    found = fit_mixture(torch.ones(12, 4), torch.arange(12), 5, 2, seeded()).checked(4)
    assert len(found.weights) == 1 and found.means[0].tolist() == [1.0] * 4
    assert bool(log_density(torch.zeros(3, 4), found).isfinite().all())


@pytest.mark.parametrize("dimensions", [2, 20, 128, 512])
def test_weights_are_finite_and_in_0_to_1(dimensions: int) -> None:
    points = torch.randn(300, dimensions, generator=seeded())
    fitted = fit_mixture(points, torch.arange(300), 10, 5, seeded(1)).checked(dimensions)
    axes = Axes(torch.zeros(dimensions), torch.eye(dimensions))
    far = torch.cat([points, points * 100, torch.full((1, dimensions), 1e6), torch.zeros(1, dimensions)])
    for among in ("fitted", "batch"):
        weights = typicality(far, axes, fitted, among)  # type: ignore[arg-type]
        assert weights.dtype == torch.float32 and bool(weights.isfinite().all())
        assert float(weights.min()) >= 0 and float(weights.max()) <= 1
    weights = typicality(far, axes, fitted)
    assert float(weights[300:601].max()) == 0  # nothing that far out is like the points
    assert float(weights[:300].mean()) == pytest.approx(0.5, abs=0.02)


def test_w_is_the_share_of_fitted_points_that_are_less_dense() -> None:
    points = torch.randn(3200, 2, generator=seeded())
    fitted = fit_mixture(points, torch.arange(3200), 3, 10, seeded(1))
    inside = log_density(points, fitted)
    new = torch.randn(50, 2, generator=seeded(2))
    exact = torch.tensor([float((inside < density).double().mean()) for density in log_density(new, fitted)])
    assert torch.allclose(interpolate_share(log_density(new, fitted), fitted.levels), exact, atol=0.02)


def test_the_table_of_levels_by_hand() -> None:
    """Eight log-densities in four groups: means 0.5, 2.5, 4.5, 6.5 stand for 1/8, 3/8, 5/8, 7/8."""
    levels = density_levels(torch.tensor([7.0, 0, 1, 6, 2, 5, 4, 3]).double(), 4)
    assert levels.tolist() == [0.5, 2.5, 4.5, 6.5]
    at = torch.tensor([-9.0, -0.5, 0.5, 1.5, 2.5, 6.5, 7.5, 99.0]).double()
    assert interpolate_share(at, levels).tolist() == pytest.approx([0, 0, 0.125, 0.25, 0.375, 0.875, 1, 1])


def test_no_level_is_made_from_fewer_samples_than_asked() -> None:
    points = torch.randn(47, 2, generator=seeded())
    assert len(fit_mixture(points, torch.arange(47), 2, 10, seeded(1)).levels) == 4  # 47 // 10
    assert len(fit_mixture(points, torch.arange(47), 2, 1, seeded(1)).levels) == mixtures.LEVELS


def test_one_level_is_a_step_and_equal_levels_are_no_division_by_zero() -> None:
    at = torch.tensor([1.9, 2.0, 2.1]).double()
    assert interpolate_share(at, torch.tensor([2.0])).tolist() == [0, 1, 1]
    assert interpolate_share(at, torch.tensor([2.0, 2.0])).tolist() == [0, 0.25, 1]


def test_share_of_batch_by_hand() -> None:
    assert share_of_batch(torch.tensor([5.0, 1.0, 3.0, 3.0]).double()).tolist() == [0.875, 0.125, 0.375, 0.375]
    assert share_of_batch(torch.tensor([-7.0]).double()).tolist() == [0.5]


def test_relative_density_by_hand() -> None:
    """In d dimensions, (p / p_median)^(1/d): the median level is 4, and densities above it count as 1."""
    levels = torch.tensor([1.0, 4.0, 6.0])
    found = relative_density(torch.tensor([9.0, 4.0, 2.0, -196.0]).double(), levels, 2)
    assert found.tolist() == pytest.approx([1, 1, math.exp(-1), math.exp(-100)])


def test_relative_density_tells_how_far_away_a_batch_is_where_ranks_cannot() -> None:
    """A standard Gaussian in 30 dimensions, and batches 0, 1, 2 and 3 deviations away in each of them."""
    points = torch.randn(2000, 30, generator=seeded())
    fitted = fit_mixture(points, torch.arange(2000), 1, 10, seeded(1))
    axes = Axes(torch.zeros(30), torch.eye(30))
    means = {
        how: [float(typicality(points + away, axes, fitted, *how).mean()) for away in range(4)]
        for how in (("batch", "rank"), ("fitted", "rank"), ("batch", "density"))
    }
    assert means["batch", "rank"] == pytest.approx([0.5] * 4, abs=1e-3)
    assert means["fitted", "rank"][2] == means["fitted", "rank"][3] == 0  # all of them count nothing
    near, *further = means["batch", "density"]
    assert near > 0.9 and further == pytest.approx([math.exp(-n * n / 2) for n in (1, 2, 3)], rel=0.2)


def test_principal_axes_keep_just_enough_energy() -> None:
    """Variances 9, 4, 1 and 0 along the axes: 64 % in one, 93 % in two, 100 % in three."""
    corners = torch.tensor(np.array(np.meshgrid([-1, 1], [-1, 1], [-1, 1])).reshape(3, -1).T.astype(np.float32))
    features = torch.cat([corners * torch.tensor([2.0, 3.0, 1.0]), torch.zeros(8, 1)], dim=1) + 5
    for energy, dimensions in ((0.6, 1), (0.8, 2), (0.93, 3), (1.0, 3)):
        assert principal_axes(features, energy).axes.shape == (4, dimensions), energy
    axes = principal_axes(features, 0.8)
    assert axes.centre.tolist() == [5.0] * 4
    assert torch.allclose(axes.axes.abs(), torch.tensor([[0.0, 1], [1, 0], [0, 0], [0, 0]]), atol=1e-6)
    reduced = axes.reduce(features)
    assert reduced.var(0, correction=0).tolist() == pytest.approx([9, 4], rel=1e-6)


def test_principal_axes_of_one_point_or_equal_points_are_one_axis() -> None:
    assert principal_axes(torch.ones(1, 6), 0.8).axes.shape == (6, 1)
    assert principal_axes(torch.ones(9, 6), 1.0).axes.shape == (6, 1)


def test_rows_of_maps_and_back() -> None:
    maps = torch.arange(24.0).reshape(2, 3, 2, 2)
    rows = as_rows(maps)
    assert rows.shape == (8, 3) and rows[5].tolist() == maps[1, :, 0, 1].tolist()
    axes, one = Axes(torch.zeros(3), torch.eye(3)), mixture([1.0], [[0.0] * 3], [[1.0] * 3])
    spread = dataclasses.replace(one, levels=torch.linspace(-500, 0, 9))
    assert torch.equal(typicality(maps, axes, spread).flatten(), typicality(rows, axes, spread))
    assert typicality(maps, axes, spread).shape == (2, 2, 2)


def test_pixels_are_drawn_without_repeats_and_say_whose_they_are() -> None:
    maps = torch.arange(2 * 1 * 3 * 3.0).reshape(2, 1, 3, 3)
    rows, which = draw_rows(maps, 4, seeded())
    assert which.tolist() == [0] * 4 + [1] * 4 and len(rows.unique()) == 8
    assert torch.equal((rows[:, 0] >= 9).long(), which)
    vectors = torch.randn(5, 7)
    rows, which = draw_rows(vectors, 3, seeded())
    assert torch.equal(rows, vectors) and which.tolist() == [0, 1, 2, 3, 4]


def test_a_sample_takes_every_picture_once_and_stops_when_full() -> None:
    sample = Sample(6, most=5, generator=seeded())
    features = torch.arange(6.0)[:, None]
    sample.add(features[[4, 2]], torch.tensor([4, 2]))
    sample.add(features[[2, 0]], torch.tensor([2, 0]))  # 2 again
    sample.add(features[[1, 3, 5]], torch.tensor([1, 3, 5]))  # one too many
    rows, owners = sample.result()
    assert owners.tolist() == [4, 2, 0, 1, 3] and rows[:, 0].tolist() == [4, 2, 0, 1, 3]


@pytest.mark.parametrize(
    "changes",
    [
        {"weights": torch.tensor([0.5, -0.5])},
        {"weights": torch.tensor([0.9, 0.9])},
        {"weights": torch.tensor(1.0)},
        {"means": torch.zeros(2, 4)},
        {"means": torch.full((2, 3), torch.inf)},
        {"variances": torch.zeros(2, 3)},
        {"variances": torch.ones(2, 3).double()},
        {"counts": torch.tensor([4])},
        {"levels": torch.tensor([2.0, 1.0])},
        {"levels": torch.zeros(0)},
        {"levels": torch.zeros(mixtures.LEVELS + 1)},
    ],
    ids=lambda changes: f"{next(iter(changes))}-{tuple(next(iter(changes.values())).shape)}",
)
def test_what_is_no_mixture_is_refused(changes: dict[str, Tensor]) -> None:
    good = mixture([0.5, 0.5], [[0.0] * 3, [1.0] * 3], [[1.0] * 3, [2.0] * 3])
    assert good.checked(3) is good
    with pytest.raises(ValueError, match="mixture"):
        dataclasses.replace(good, **changes).checked(3)
