"""Convolutions that take over the work of a frozen norm, and strided depthwise ones in bfloat16."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from fedshift.methods.local import autocast
from fedshift.nn.archs import build_network
from fedshift.nn.convolution import Conv2d, normed
from fedshift.nn.network import Network
from fedshift.nn.normalisation import freeze_norms, tracking_layers
from fedshift.nn.taps import norm_inputs

ARCHS = ("mobilenet_v2", "efficientnet_lite0", "resnet18", "digits-copa", "segnet-small")


class Called(TorchDispatchMode):
    """Which operations ran, each with its arguments."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[str, tuple[Any, ...]]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.calls.append((func.overloadpacket.__name__, args))
        return func(*args, **(kwargs or {}))

    def count(self, part: str) -> int:
        return sum(part in name for name, _ in self.calls)


def drawn(*shape: int) -> Tensor:
    return torch.rand(shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64)


def frozen_network(arch: str) -> Network:
    """In double precision, with statistics, scales and shifts that are not those of a new network."""
    net = build_network(arch, (3, 32, 32), 4, generator_seed=0)
    freeze_norms(net)
    generator = torch.Generator().manual_seed(1)
    for layer in tracking_layers(net).values():
        for values in (layer.weight, layer.bias, layer.running_mean, layer.running_var):
            with torch.no_grad():
                values += 0.2 * torch.rand(values.shape, generator=generator)
    return net.double().train()


def trained(net: Network, x: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
    """Scores, and the gradient of each weight."""
    net.zero_grad()
    scores = net(x)
    (scores * drawn(*scores.shape)).sum().backward()
    return scores.detach(), {name: weight.grad.clone() for name, weight in net.named_parameters()}


@pytest.mark.parametrize("arch", ARCHS)
def test_a_frozen_norm_is_a_part_of_its_convolution_with_the_same_gradients(arch: str) -> None:
    net, x = frozen_network(arch), drawn(2, 3, 32, 32)
    with Called() as joined:
        scores, gradients = trained(net, x)
    with Called() as apart, norm_inputs(net):  # Whoever looks at the inputs of norms gets them.
        others, other_gradients = trained(net, x)
    assert joined.count("batch_norm") == 0
    assert apart.count("batch_norm") >= len(tracking_layers(net))
    assert torch.allclose(scores, others, rtol=1e-9)
    for name, gradient in gradients.items():
        largest = other_gradients[name].abs().max()
        assert largest > 0
        assert (gradient - other_gradients[name]).abs().max() <= 1e-9 * largest


@pytest.mark.parametrize("arch", ARCHS)
def test_in_evaluation_every_norm_is_a_part_of_its_convolution(arch: str) -> None:
    net = build_network(arch, (3, 32, 32), 4, generator_seed=0).eval()
    with torch.no_grad(), Called() as called:
        net(drawn(2, 3, 32, 32).float())
    assert called.count("batch_norm") == 0


def test_a_norm_that_uses_the_batch_stays_what_it_is() -> None:
    conv, norm = nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4)
    x = drawn(5, 3, 6, 6).float()
    out = normed(conv, norm, x)
    assert int(norm.num_batches_tracked) == 1
    assert out.mean((0, 2, 3)).abs().max() < 1e-6


def test_a_bias_before_a_frozen_norm_counts() -> None:
    conv, norm = nn.Conv2d(1, 1, 1), nn.BatchNorm2d(1).eval()
    with torch.no_grad():
        conv.weight.fill_(3.0)
        conv.bias.fill_(5.0)
        norm.running_mean.fill_(1.0)
        norm.running_var.fill_(4.0 - norm.eps)
        norm.weight.fill_(10.0)
        norm.bias.fill_(7.0)
    # (2 * 3 + 5 - 1) / 2 * 10 + 7
    assert normed(conv, norm, torch.full((1, 1, 1, 1), 2.0)).item() == pytest.approx(57.0)


def strides_of(work: Callable[[], object]) -> set[int]:
    """Strides of the depthwise convolutions that ran, forward and backward."""
    found = set()
    with Called() as called:
        work()
    for name, args in called.calls:
        if name == "convolution":
            weight, stride, groups = args[1], args[3], args[8]
        elif name == "convolution_backward":
            weight, stride, groups = args[2], args[4], args[9]
        else:
            continue
        if groups > 1 and weight.shape[1] == 1:
            found.add(stride[0])
    return found


@pytest.mark.parametrize("arch", ["mobilenet_v2", "efficientnet_lite0"])
@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
def test_no_strided_depthwise_convolution_is_trained_in_bfloat16(arch: str, precision: str) -> None:
    net, x = build_network(arch, (3, 64, 64), 4, generator_seed=0).train(), drawn(2, 3, 64, 64).float()

    def step() -> None:
        with autocast(torch.device("cpu"), precision):
            scores = net(x)
        scores.float().square().sum().backward()

    assert strides_of(step) == ({1} if precision == "bfloat16" else {1, 2})


@pytest.mark.parametrize("side", [7, 8])
def test_the_pixels_in_between_are_left_out(side: int) -> None:
    conv = Conv2d(6, 6, 3, stride=2, padding=1, groups=6)
    x = drawn(2, 6, side, side).float().requires_grad_()
    plain = conv(x)
    (slope,) = torch.autograd.grad(plain.square().sum(), x)
    with autocast(torch.device("cpu"), "bfloat16"):
        found = conv(x)
    (other,) = torch.autograd.grad(found.float().square().sum(), x)
    assert found.shape == plain.shape and found.dtype == torch.bfloat16
    assert torch.allclose(found.float(), plain, atol=0.02)
    assert torch.allclose(other, slope, atol=0.05)
