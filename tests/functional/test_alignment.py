from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from fedshift.functional.alignment import alignment_loss, attention_weights, channel_similarity, position_similarity
from fedshift.functional.mmd import mmd

LAYERS, SAMPLES, POSITIONS, CHANNELS = 3, 4, 5, 2


def maps(seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(LAYERS, SAMPLES, POSITIONS, CHANNELS, generator=generator, dtype=torch.float64)


def slow_similarity(a: Tensor, b: Tensor, kind: str) -> Tensor:
    """The attention map of every pair of layers and every sample, built and averaged (Eq. 7 and 8 as printed)."""
    table = torch.zeros(len(a), len(b), dtype=a.dtype)
    for k in range(len(a)):
        for l in range(len(b)):
            for sample in range(a.shape[1]):
                big_a, big_b = a[k, sample].T, b[l, sample].T  # c x d, as in the paper
                attention_map = big_a.T @ big_b if kind == "position" else big_a @ big_b.T
                side = POSITIONS if kind == "position" else CHANNELS
                assert attention_map.shape == (side, side)
                table[k, l] += attention_map.mean() / a.shape[1]
    return table


def slow_softmax(scores: Tensor) -> Tensor:
    rows = [[math.exp(float(s)) for s in row] for row in scores]
    return torch.tensor([[value / sum(row) for value in row] for row in rows], dtype=torch.float64)


def test_similarities_equal_the_built_maps() -> None:
    a, b = maps(0), maps(1)
    assert torch.allclose(position_similarity(a, b), slow_similarity(a, b, "position"))
    assert torch.allclose(channel_similarity(a, b), slow_similarity(a, b, "channel"))


def test_one_sample_by_hand() -> None:
    # A = [1 2; 3 4] and B = [1 0; 0 1], rows are channels: A^T B = A^T, A B^T = A, both with mean 2.5.
    a = torch.tensor([[1.0, 2.0], [3.0, 4.0]]).T.reshape(1, 1, 2, 2)
    b = torch.eye(2).reshape(1, 1, 2, 2)
    assert float(position_similarity(a, b)) == float(channel_similarity(a, b)) == 2.5
    # Twice B doubles both: alpha = (1, e^2.5) / (1 + e^2.5).
    weights = attention_weights(a, torch.cat([b, 2 * b]))
    assert weights[0].tolist() == pytest.approx([1 / (1 + math.exp(2.5)), 1 / (1 + math.exp(-2.5))])


def test_weights_are_the_mean_of_two_softmaxes_over_the_second_models_layers() -> None:
    a, b = maps(0), maps(1)
    position = slow_softmax(slow_similarity(a, b, "position"))
    channel = slow_softmax(slow_similarity(a, b, "channel"))
    assert torch.allclose(attention_weights(a, b), (position + channel) / 2)
    assert torch.allclose(attention_weights(a, b, "position"), position)
    assert torch.allclose(attention_weights(a, b, "channel"), channel)
    assert torch.allclose(attention_weights(a, b).sum(1), torch.ones(LAYERS, dtype=torch.float64))
    assert torch.equal(attention_weights(a, b, "none"), torch.full((LAYERS, LAYERS), 1 / 3, dtype=torch.float64))


def test_no_gradient_through_the_weights() -> None:
    a = maps(0).requires_grad_()
    assert not attention_weights(a, maps(1)).requires_grad


@pytest.mark.parametrize("attention", ["both", "position", "channel", "none"])
def test_loss_and_gradient_equal_the_sum_over_pairs(attention: str) -> None:
    a, b = maps(0).requires_grad_(), maps(1).requires_grad_()
    loss = alignment_loss(a, b, attention=attention)  # type: ignore[arg-type]
    loss.backward()
    u, v = a.detach().clone().requires_grad_(), b.detach().clone().requires_grad_()
    alpha = attention_weights(u, v, attention)  # type: ignore[arg-type]
    slow = torch.zeros((), dtype=torch.float64)
    for k in range(LAYERS):
        for l in range(LAYERS):
            slow = slow + alpha[k, l] * mmd(u[k].reshape(SAMPLES, -1), v[l].reshape(SAMPLES, -1))
    slow.backward()
    assert torch.allclose(loss, slow, rtol=1e-10)
    assert torch.allclose(a.grad, u.grad) and torch.allclose(b.grad, v.grad)


def test_same_layer_pairs_alone_have_weight_one() -> None:
    a, b = maps(0), maps(1)
    expected = sum(mmd(a[k].flatten(1), b[k].flatten(1)) for k in range(LAYERS))
    assert torch.allclose(alignment_loss(a, b, pairs="same-layer"), torch.as_tensor(expected))


@pytest.mark.parametrize("pairs", ["cross-layer", "same-layer"])
def test_the_estimator_is_that_of_every_pair(pairs: str) -> None:
    a, b = maps(0), maps(1)
    loss = alignment_loss(a, b, attention="none", pairs=pairs, estimator="authors")  # type: ignore[arg-type]
    table = torch.stack([torch.stack([mmd(x.flatten(1), y.flatten(1), "authors") for y in b]) for x in a])
    assert torch.allclose(loss, table.diagonal().sum() if pairs == "same-layer" else table.sum() / LAYERS)


def test_mean_square_error_by_pairs() -> None:
    a, b = maps(0), maps(1)
    table = torch.tensor([[float((x - y).square().mean()) for y in b] for x in a], dtype=torch.float64)
    crossed = alignment_loss(a, b, attention="none", discrepancy="mse")
    assert float(crossed) == pytest.approx(float(table.sum()) / LAYERS)
    alike = alignment_loss(a, b, pairs="same-layer", discrepancy="mse")
    assert float(alike) == pytest.approx(float(table.diagonal().sum()))


def test_mean_square_error_has_the_gradient_of_finite_differences() -> None:
    a, b = maps(0)[:2].requires_grad_(), maps(1)[:2].requires_grad_()
    torch.autograd.gradcheck(lambda x, y: alignment_loss(x, y, attention="none", discrepancy="mse"), (a, b))


def test_aligned_layers_cost_nothing() -> None:
    a = maps(0)
    assert abs(float(alignment_loss(a, a, pairs="same-layer"))) < 1e-12
    assert float(alignment_loss(a, a)) > 0.01  # a layer and another one are not alike
