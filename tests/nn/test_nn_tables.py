"""The standardising layer against numpy's statistics over present values."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from fedshift.nn.backbones.tables import Standardise


def rows(seed: int, count: int = 40, missing: float = 0.3) -> np.ndarray:
    generator = np.random.default_rng(seed)
    values = generator.normal(loc=[240.0, -3.0, 0.02], scale=[50.0, 2.0, 0.001], size=(count, 3))
    values[generator.random(values.shape) < missing] = np.nan
    return values.astype(np.float32)


def test_training_uses_the_present_values_of_the_batch() -> None:
    x = rows(0)
    got = Standardise(3).train()(torch.from_numpy(x)).numpy()
    wanted = (x - np.nanmean(x, axis=0)) / np.nanstd(x, axis=0)
    assert np.allclose(got, np.nan_to_num(wanted, nan=0.0), atol=2e-2)
    assert (got[np.isnan(x)] == 0).all()


def test_running_values_match_numpy_batch_by_batch() -> None:
    layer = Standardise(3, momentum=0.25).train()
    mean, var = np.zeros(3), np.ones(3)
    for number in range(1, 8):
        x = rows(number)
        layer(torch.from_numpy(x))
        weight = max(1 / number, 0.25)
        mean += weight * (np.nanmean(x, axis=0, dtype=np.float64) - mean)
        var += weight * (np.nanvar(x, axis=0, ddof=1, dtype=np.float64) - var)
    assert np.allclose(layer.running_mean, mean, rtol=1e-4)
    assert np.allclose(layer.running_var, var, rtol=1e-3)


def test_evaluation_uses_running_values_and_changes_nothing() -> None:
    layer = Standardise(3).train()
    layer(torch.from_numpy(rows(1)))
    before = {key: value.clone() for key, value in layer.state_dict().items()}
    x = torch.tensor([[290.0, float("nan"), 0.02]])
    got = layer.eval()(x)
    mean, var = before["running_mean"][0].item(), before["running_var"][0].item()
    assert got[0, 0].item() == pytest.approx((290 - mean) / var**0.5, rel=1e-5)
    assert got[0, 1] == 0
    assert all(torch.equal(value, before[key]) for key, value in layer.state_dict().items())


def test_a_column_without_two_values_waits() -> None:
    nan = float("nan")
    layer = Standardise(3).train()
    layer(torch.tensor([[1.0, 7.0, nan], [3.0, nan, nan]]))
    assert layer.running_mean.tolist() == [2.0, 0.0, 0.0]
    assert layer.running_var.tolist() == [2.0, 1.0, 1.0]
    assert layer.batches_seen.tolist() == [1, 0, 0]
    # Its first usable batch counts in full, although the layer has seen one before.
    layer(torch.tensor([[2.0, 10.0, nan], [2.0, 14.0, nan]]))
    assert layer.running_mean.tolist() == [2.0, 12.0, 0.0]
    assert layer.running_var.tolist() == [1.0, 8.0, 1.0]


def test_a_column_that_never_varied_cannot_blow_up_elsewhere() -> None:
    layer = Standardise(1).train()
    assert layer(torch.zeros(4, 1)).tolist() == [[0.0]] * 4
    assert layer.eval()(torch.tensor([[1.0], [-1.0]])).tolist() == [[10.0], [-10.0]]


def test_without_missing_values_it_is_batch_norm() -> None:
    x = torch.randn(50, 4, generator=torch.Generator().manual_seed(0)) * 3 + 5
    reference = torch.nn.BatchNorm1d(4, affine=False, momentum=None).train()
    layer = Standardise(4, momentum=0.1).train()
    assert torch.allclose(layer(x), reference(x), atol=1e-4)
    assert torch.allclose(layer.running_mean, reference.running_mean, atol=1e-5)
    assert torch.allclose(layer.running_var, reference.running_var, atol=1e-4)


def test_gradients_pass_missing_values_without_becoming_nan() -> None:
    x = torch.from_numpy(rows(2)).requires_grad_()
    Standardise(3).train()(x).square().sum().backward()
    assert x.grad is not None and x.grad.isfinite().all()
    assert (x.grad[x.isnan()] == 0).all()
