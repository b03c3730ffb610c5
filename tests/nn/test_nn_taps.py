"""Taps see what the stages give out; norm layers come in forward order."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from fedshift.errors import InputError
from fedshift.nn import ARCHS, Network, Taps, build_network, norm_layers
from fedshift.nn.taps import norm_inputs


def network_and_batch(name: str) -> tuple[Network, torch.Tensor]:
    shape = (5,) if ARCHS[name].kind == "table" else (3, 64, 64) if name == "alexnet" else (3, 32, 32)
    generator = torch.Generator().manual_seed(3)
    return build_network(name, shape, 4, 0).eval(), torch.rand(2, *shape, generator=generator)


def test_taps_match_a_forward_pass_by_hand() -> None:
    network, x = network_and_batch("resnet18")
    backbone = network.backbone
    with torch.no_grad(), Taps(backbone, ("layer3", "layer2")) as taps:
        network(x)
        normal = (x - network.mean) / network.std
        stem = backbone.maxpool(torch.relu(backbone.bn1(backbone.conv1(normal))))
        layer2 = backbone.layer2(backbone.layer1(stem))
        layer3 = backbone.layer3(layer2)
    assert list(taps.outputs) == ["layer3", "layer2"]
    assert torch.equal(taps.outputs["layer2"], layer2)
    assert torch.equal(taps.outputs["layer3"], layer3)


@pytest.mark.parametrize(
    ("name", "taps"),
    [
        ("resnet18", ("layer2", "layer3", "layer4")),
        ("alexnet", ("features.6", "features.8", "features.10")),
        ("digits-csac", ("conv1", "conv2")),
    ],
)
def test_default_taps_are_those_of_the_csac_paper(name: str, taps: tuple[str, ...]) -> None:
    with torch.device("meta"):
        assert build_network(name, (3, 64, 64), 4, 0).backbone.taps == taps


def test_a_block_is_tapped_after_its_pooling() -> None:
    network, x = network_and_batch("digits-csac")
    with torch.no_grad(), Taps(network.backbone, network.backbone.taps) as taps:
        network(x)
    first = network.backbone.conv1((x - network.mean) / network.std)
    assert torch.equal(taps.outputs["conv1"], first)
    assert taps.outputs["conv2"].min() >= 0


@pytest.mark.parametrize("name", [name for name in ARCHS if name not in {"resnet50", "resnet101", "digits-kd3a-large"}])
def test_every_stage_of_every_arch_can_be_tapped(name: str) -> None:
    network, x = network_and_batch(name)
    assert set(network.backbone.taps) <= set(network.backbone.stages)
    with torch.no_grad(), Taps(network.backbone, network.backbone.stages) as taps:
        network(x)
    assert list(taps.outputs) == list(network.backbone.stages)
    sides = [output.shape[-1] for output in taps.outputs.values() if output.ndim == 4]
    if name == "unet-small":
        assert sides == [32, 16, 8, 16, 32], "down and up again"
    else:
        assert sides == sorted(sides, reverse=True), "stages run from shallow to deep"


def test_losses_on_taps_train_the_backbone_and_hooks_are_gone_afterwards() -> None:
    network, x = network_and_batch("digits-copa")
    with Taps(network.backbone, ("block2",)) as taps:
        network(x)
        taps.outputs["block2"].square().sum().backward()
    assert network.backbone.block1.conv.weight.grad.abs().sum() > 0
    assert network.backbone.block3.conv.weight.grad is None
    seen = taps.outputs["block2"]
    network(x + 0.1)
    assert taps.outputs["block2"] is seen
    assert not network.backbone.block2._forward_hooks


def test_hooks_are_gone_after_an_error() -> None:
    network, x = network_and_batch("digits-copa")
    with pytest.raises(RuntimeError), Taps(network.backbone, ("block2",)):
        network(x[:, :2])
    assert not network.backbone.block2._forward_hooks


def test_an_unknown_stage_names_those_that_exist() -> None:
    network, _ = network_and_batch("digits-copa")
    with pytest.raises(InputError, match="block1, block2, block3, block4") as caught:
        Taps(network.backbone, ("layer4",))
    assert caught.value.code == "method-needs"


@pytest.mark.parametrize(
    "name", ["resnet18", "mobilenet_v2", "efficientnet_lite0", "digits-copa5", "mlp", "deeplab_mobilenet_v2"]
)
def test_norm_layers_come_in_forward_order(name: str) -> None:
    network, x = network_and_batch(name)
    met: list[str] = []
    layers = norm_layers(network)
    hooks = [
        layer.register_forward_hook(lambda module, inputs, output, key=key: met.append(key))
        for key, layer in layers.items()
    ]
    with torch.no_grad():
        network(x)
    for hook in hooks:
        hook.remove()
    assert met == list(layers)
    assert all(isinstance(layer, nn.BatchNorm1d | nn.BatchNorm2d) for layer in layers.values())


def test_norm_layers_by_count() -> None:
    with torch.device("meta"):
        counts = {
            name: len(norm_layers(build_network(name, (3, 32, 32), 4, 0)))
            for name in ("resnet18", "resnet50", "digits-kd3a-large", "digits-csac")
        }
    assert counts == {"resnet18": 20, "resnet50": 53, "digits-kd3a-large": 5, "digits-csac": 0}


def test_norm_inputs_are_what_layers_normalise() -> None:
    network, x = network_and_batch("digits-copa")
    with norm_inputs(network) as inputs:
        network(x)
    assert list(inputs) == list(norm_layers(network))
    first = network.backbone.block1.conv((x - network.mean) / network.std)
    assert torch.equal(inputs["backbone.block1.norm"], first) and first.requires_grad
    before = inputs["backbone.block1.norm"]
    network(x + 1)
    assert inputs["backbone.block1.norm"] is before  # after the block nobody listens any more
