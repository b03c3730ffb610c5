"""Training waits for no device and mixes no two. Tensors of the device `meta` have no values: to read one or to copy
it to the CPU is an error, and so is computing with one of the CPU. What runs there leaves a GPU alone."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from fedshift.data.batches import LabelledBatch
from fedshift.functional.losses import cross_entropy
from fedshift.methods.kd3a.keys import Choices
from fedshift.methods.kd3a.target import mixed
from fedshift.methods.local import autocast
from fedshift.nn.archs import build_network
from fedshift.nn.network import Network
from fedshift.nn.normalisation import convert_norms, freeze_norms

META = torch.device("meta")


def network(arch: str, norms: str) -> Network:
    net = build_network(arch, (3, 32, 32), 4, generator_seed=0)
    if norms == "frozen":
        freeze_norms(net)
    elif norms != "batch":
        convert_norms(net.backbone, norms)  # type: ignore[arg-type]
    return net.to(META).train()


def batch() -> LabelledBatch:
    index = torch.arange(4)
    return LabelledBatch(torch.empty(4, 3, 32, 32, device=META), torch.empty(4, dtype=torch.int64, device=META), index)


def all_have_gradients(net: nn.Module) -> bool:
    return all(weight.grad is not None and weight.grad.device == META for weight in net.parameters())


@pytest.mark.parametrize("norms", ["batch", "frozen", "hbin", "switch"])
@pytest.mark.parametrize("arch", ["digits-copa", "mobilenet_v2", "resnet18"])
@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
def test_a_pass_through_a_network_reads_nothing_back(arch: str, norms: str, precision: str) -> None:
    net, own = network(arch, norms), batch()
    with autocast(torch.device("cpu"), precision):
        loss = cross_entropy(net(own.x), own.y)
    loss.backward()
    assert all_have_gradients(net)


@pytest.mark.parametrize("draw", ["sample", "batch"])
def test_kd3a_mixes_images_where_they_are(draw: str) -> None:
    p, weights = torch.full((4, 5), 0.2), torch.ones(4)
    choices = Choices(mixup_draw=draw)  # type: ignore[arg-type]
    images, labels, share = mixed(batch().x, p, weights, choices, torch.Generator().manual_seed(0))
    assert images.device == META and images.shape == (4, 3, 32, 32)
    assert torch.allclose(labels, p) and torch.allclose(share, weights)


def test_a_copy_to_the_cpu_would_be_noticed() -> None:
    with pytest.raises(NotImplementedError):
        torch.ones(1, device=META).cpu()
    with pytest.raises(RuntimeError):
        torch.ones(1, device=META).tolist()
