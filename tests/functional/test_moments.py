"""BatchNorm MMD and its neighbours, against moments taken directly from data."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor, nn

from fedshift.functional.moments import (
    Moments,
    anchors,
    batchnorm_mmd,
    channel_moments,
    recorded_moments,
    threshold_divergence,
    within_share,
)


def drawn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def moments(mean: list[float], square: list[float]) -> Moments:
    return Moments(torch.tensor(mean, dtype=torch.float64), torch.tensor(square, dtype=torch.float64))


def normal(mean: float, deviation: float) -> Moments:
    return moments([mean], [deviation**2 + mean**2])


@pytest.mark.parametrize("shape", [(7, 3), (7, 3, 4, 5)])
def test_moments_are_over_samples_and_pixels(shape: tuple[int, ...]) -> None:
    x = drawn(*shape)
    found = channel_moments(x)
    for channel in range(3):
        values = x[:, channel].flatten().tolist()
        assert float(found.mean[channel]) == pytest.approx(sum(values) / len(values))
        assert float(found.square[channel]) == pytest.approx(sum(v * v for v in values) / len(values))
    assert channel_moments(x.to(torch.bfloat16)).mean.dtype == torch.float32


def test_a_layer_remembers_the_moments_of_what_it_saw() -> None:
    """A BatchNorm layer that has seen one batch, with momentum 1: its variance is the unbiased one."""
    x = drawn(50, 4, 3, 3)
    net = nn.Sequential(nn.Conv2d(4, 4, 1), nn.BatchNorm2d(4, momentum=1.0)).double()
    seen = net[0](x)
    net(x)
    found = recorded_moments(net.state_dict(), ["1"])["1"]
    count = 50 * 9
    mean, var = seen.mean((0, 2, 3)), seen.var((0, 2, 3), unbiased=False) * count / (count - 1)
    assert torch.allclose(found.mean, mean) and torch.allclose(found.square, var + mean**2)
    assert torch.allclose(found.deviation, var.sqrt())


def test_the_loss_by_hand() -> None:
    """Two layers, two models with weights 1/4 and 3/4."""
    first = {"a": moments([1.0], [2.0]), "b": moments([0.0, 0.0], [1.0, 1.0])}
    second = {"a": moments([3.0], [10.0]), "b": moments([0.0, 2.0], [1.0, 5.0])}
    target = {"a": moments([2.0], [4.0]), "b": moments([1.0, 2.0], [1.0, 4.0])}
    a = 0.25 * ((2 - 1) ** 2 + (4 - 2) ** 2) + 0.75 * ((2 - 3) ** 2 + (4 - 10) ** 2)
    b = 0.25 * (1 + 4 + 0 + 9) + 0.75 * (1 + 0 + 0 + 1)
    assert float(batchnorm_mmd(target, anchors([(first, 1.0), (second, 3.0)]))) == pytest.approx(a + b)


def test_the_loss_is_the_weighted_sum_over_models_and_layers() -> None:
    """Eq. (11) as it is printed, for moments straight from data."""
    weights = [0.2, 0.5, 0.3]
    models = [
        {layer: channel_moments(drawn(20, 5, seed=10 * k + n)) for n, layer in enumerate("xyz")} for k in range(3)
    ]
    target = {layer: channel_moments(drawn(9, 5, 2, 2, seed=100 + n)) for n, layer in enumerate("xyz")}
    slow = 0.0
    for layer in "xyz":
        for weight, model in zip(weights, models, strict=True):
            slow += weight * float((target[layer].mean - model[layer].mean).square().sum())
            slow += weight * float((target[layer].square - model[layer].square).square().sum())
    assert float(batchnorm_mmd(target, anchors(zip(models, weights, strict=True)))) == pytest.approx(slow)


def test_a_target_like_its_sources_has_no_loss() -> None:
    own = {"a": channel_moments(drawn(30, 6))}
    assert float(batchnorm_mmd(own, anchors([(own, 0.3), (own, 0.7)]))) == pytest.approx(0.0, abs=1e-12)


def test_gradients_reach_the_features() -> None:
    sources = anchors(
        [({"a": channel_moments(drawn(30, 3, seed=1))}, 0.4), ({"a": channel_moments(drawn(30, 3))}, 0.6)]
    )
    x = drawn(4, 3, 2, 2, seed=2).requires_grad_()
    assert torch.autograd.gradcheck(lambda x: batchnorm_mmd({"a": channel_moments(x)}, sources), (x,))


def test_thresholds_tell_normal_distributions_apart_as_well_as_counted() -> None:
    """Deviations 1 and 3, means 2 apart: at the threshold 0.5 both are mistaken with probability Phi(-0.5)."""
    found = float(threshold_divergence(normal(0.0, 1.0), normal(2.0, 3.0)))
    assert found == pytest.approx(2 * math.erf(0.5 / math.sqrt(2)))
    a, b = drawn(200_000), 2 + 3 * drawn(200_000, seed=1)
    errors = float((a > 0.5).double().mean()), float((b < 0.5).double().mean())
    assert 2 * (1 - sum(errors)) == pytest.approx(found, abs=0.01)


def test_divergence_goes_from_0_to_2_whatever_the_variance() -> None:
    assert float(threshold_divergence(normal(1.0, 2.0), normal(1.0, 5.0))) == 0
    assert float(threshold_divergence(normal(0.0, 1.0), normal(100.0, 1.0))) == pytest.approx(2)
    assert float(threshold_divergence(normal(3.0, 0.0), normal(3.0, 0.0))) == 0
    assert float(threshold_divergence(normal(3.0, 0.0), normal(3.1, 0.0))) == pytest.approx(2)


def test_dispersion_is_that_of_pairs_within_clusters() -> None:
    """FADA's I = sum_r 1/(2 n_r) sum_ij ||f_i - f_j||^2, in units of that of a single cluster. Cluster 2 is empty."""
    features, clusters = drawn(12, 4), torch.tensor([0, 1, 0, 0, 3, 1, 3, 3, 0, 1, 1, 0])

    def pairs(rows: Tensor) -> float:
        return float(torch.cdist(rows, rows).square().sum()) / (2 * len(rows)) if len(rows) else 0.0

    expected = sum(pairs(features[clusters == r]) for r in range(4)) / pairs(features)
    sums = torch.zeros(4, 4, dtype=torch.float64).index_add(0, clusters, features)
    counts = torch.bincount(clusters, minlength=4).double()
    assert within_share(counts, sums, features.square().sum()) == pytest.approx(expected)


def test_features_that_do_not_vary_have_no_dispersion() -> None:
    ones = torch.ones(2, 3, dtype=torch.float64)
    assert within_share(torch.tensor([1.0, 1.0], dtype=torch.float64), ones, ones.square().sum()) == 0
