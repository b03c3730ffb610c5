"""DP-SGD: the gradients of single samples, their clipping and noise, and which samples take part."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

from fedshift.data.batches import LabelledBatch
from fedshift.errors import SiteError
from fedshift.federation.budget import RecordPrivacy
from fedshift.functional.losses import cross_entropy
from fedshift.methods.copa.parts import CollaborativeLoss, Hyper, collaborative_loss
from fedshift.methods.fedlooks.source import LossOfLook
from fedshift.methods.private import CrossEntropy, clipped_sum, mixing_layers, sampling, train_privately
from fedshift.nn.network import Network, WholeNet


def summed(net: nn.Module, x: torch.Tensor, y: torch.Tensor, clip: float) -> dict[str, torch.Tensor]:
    loss = CrossEntropy(net)
    found = clipped_sum(loss, dict(loss.named_parameters()), (x, y), clip)
    return {name.removeprefix("net."): value for name, value in found.items()}


def small_net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(3, 8, 3), nn.GroupNorm(2, 8), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(8 * 9, 5)
    )


def batch() -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    return torch.rand(12, 3, 8, 8, generator=generator), torch.randint(0, 5, (12,), generator=generator)


def test_the_sum_is_that_of_single_gradients_each_clipped() -> None:
    net, (x, y) = small_net(), batch()
    parameters = dict(net.named_parameters())
    found = summed(net, x, y, 0.7)
    wanted = {name: torch.zeros_like(value) for name, value in parameters.items()}
    clipped = 0
    for one in range(len(x)):
        own = torch.autograd.grad(cross_entropy(net(x[one : one + 1]), y[one : one + 1]), list(parameters.values()))
        length = float(torch.cat([value.flatten() for value in own]).norm())
        clipped += length > 0.7
        for name, value in zip(parameters, own, strict=True):
            wanted[name] += value * min(1.0, 0.7 / length)
    assert clipped
    for name in wanted:
        assert torch.allclose(found[name], wanted[name], atol=1e-5)


@pytest.mark.slow
def test_it_agrees_with_opacus() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        opacus = pytest.importorskip("opacus.grad_sample")
        net, (x, y) = small_net(), batch()
        found = summed(net, x, y, 0.5)
        theirs = opacus.GradSampleModule(net)
        nn.functional.cross_entropy(theirs(x), y, reduction="sum").backward()
    each = [parameter.grad_sample for parameter in theirs.parameters()]
    norms = torch.stack([value.flatten(1).norm(dim=1) for value in each]).norm(dim=0)
    factors = (0.5 / norms).clamp(max=1)
    for value, ours in zip(each, found.values(), strict=True):
        assert torch.allclose(torch.einsum("n,n...->...", factors, value), ours, atol=1e-5)


def test_one_sample_moves_the_sum_by_at_most_the_clip() -> None:
    net, (x, y) = small_net(), batch()
    x[3] *= 1e4
    whole, less = (summed(net, x[keep], y[keep], 0.3) for keep in (range(12), [*range(3), *range(4, 12)]))
    moved = torch.cat([(whole[name] - less[name]).flatten() for name in whole]).norm()
    assert 0 < float(moved) <= 0.3 * (1 + 1e-5)
    assert all(not bool(value.any()) for value in summed(net, x[:0], y[:0], 0.3).values())


def test_layers_that_mix_samples_are_found() -> None:
    net = nn.Sequential(nn.BatchNorm1d(3), nn.GroupNorm(1, 3)).train()
    assert mixing_layers(net) == ["0"]
    net[0].eval()
    assert not mixing_layers(net)


def test_batches_have_their_size_on_average_and_every_sample_the_same_chance() -> None:
    assert sampling(800, 64, 1.0) == (0.08, 13)
    assert sampling(10, 64, 2.0) == (1.0, 1)
    private = RecordPrivacy(1.0, 1.0, b"k" * 32)
    drawn = np.stack([private.uniforms(400) < 0.1 for _ in range(300)])
    assert abs(drawn.mean() - 0.1) < 0.003 and drawn.sum(1).std() == pytest.approx(6.0, abs=0.8), "binomial sizes"
    assert drawn.mean(0).min() > 0.03 and drawn.mean(0).max() < 0.19


def test_a_site_trains_with_that_noise_and_says_what_it_cost(tmp_path: Path) -> None:
    from types import SimpleNamespace

    from fedshift.data.batches import LabelledData
    from fedshift.data.domain import Split
    from fedshift.rng import Rng

    images = np.random.default_rng(0).integers(0, 256, (40, 8, 8, 3)).astype(np.uint8)
    data = LabelledData(Split(images, np.arange(40) % 5), torch.device("cpu"))
    training = SimpleNamespace(batch_size=8, local_epochs=1.0, augment=())
    plan = SimpleNamespace(training=training)
    changes = []
    for noise in (1e-9, 50.0):
        net = small_net().train()
        before = torch.cat([value.detach().flatten().clone() for value in net.parameters()])
        private = RecordPrivacy(1.0, noise, b"k" * 32)
        site = SimpleNamespace(private=private, plan=plan, train=data, device=torch.device("cpu"))
        train_privately(site, CrossEntropy(net), torch.optim.SGD(net.parameters(), lr=0.1), Rng.of(0))  # type: ignore[arg-type]
        after = torch.cat([value.detach().flatten() for value in net.parameters()])
        changes.append(after - before)
        assert (private.rate, private.steps) == (0.2, 5)
    # 5 steps at a rate of 0.1, each with noise of 50 over batches of 8.
    assert float((changes[1] - changes[0]).std()) == pytest.approx(5**0.5 * 0.1 * 50 / 8, rel=0.15)
    net = nn.Sequential(nn.Flatten(), nn.BatchNorm1d(192), nn.Linear(192, 5)).train()
    with pytest.raises(SiteError, match="normalises by the batch"):
        train_privately(site, CrossEntropy(net), torch.optim.SGD(net.parameters(), lr=0.1), Rng.of(0))  # type: ignore[arg-type]


def single_gradients(loss_of: Callable[[int], torch.Tensor], net: nn.Module, count: int) -> list[torch.Tensor]:
    each = [torch.autograd.grad(loss_of(one), list(net.parameters())) for one in range(count)]
    return [torch.stack(parts).sum(0) for parts in zip(*each, strict=True)]


def test_fedlooks_and_copa_are_learned_sample_by_sample() -> None:
    """Without clipping, the sum over samples is the gradient of the losses that the methods use without a budget."""
    x, y = batch()
    net = Network(WholeNet(small_net()[:-1], 72), small_net()[-1], (0.5,) * 3, (0.5,) * 3, "small")
    looks = torch.rand(x.shape, generator=torch.Generator().manual_seed(2))
    judges = [nn.Linear(72, 5).requires_grad_(False) for _ in range(2)]
    for hyper in (Hyper(), Hyper(judges="mean")):
        loss: nn.Module = CollaborativeLoss(net, judges, hyper)
        trained = {name: value for name, value in loss.named_parameters() if value.requires_grad}
        found = clipped_sum(loss, trained, (x, y, looks), 1e9)
        own, others = collaborative_loss(net, judges, lambda one: looks[_place(one, x)][None], hyper)
        ones = [LabelledBatch(x[i : i + 1], y[i : i + 1], torch.arange(1)) for i in range(len(x))]
        wanted = single_gradients(lambda i: own(ones[i]) + others(ones[i]), net, len(x))  # noqa: B023
        for value, other in zip(found.values(), wanted, strict=True):
            assert torch.allclose(value, other, atol=1e-4)
    loss = LossOfLook(net, 0.1)
    found = clipped_sum(loss, dict(loss.named_parameters()), (x, y, looks), 1e9)
    both, labels = torch.cat([x, looks]), torch.cat([y, y])
    whole = cross_entropy(net(both), labels, smoothing=0.1)
    for value, other in zip(found.values(), torch.autograd.grad(whole, list(net.parameters())), strict=True):
        assert torch.allclose(value, len(x) * other, atol=1e-4)


def _place(one: torch.Tensor, x: torch.Tensor) -> int:
    return int((x - one).abs().flatten(1).sum(1).argmin())
