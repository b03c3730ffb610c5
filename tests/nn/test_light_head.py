"""Segmentation nets whose pyramid belongs to the extractor, for methods that train and send classifiers apart."""

from __future__ import annotations

import copy

import pytest
import torch

from fedshift.nn.archs import build_network
from fedshift.nn.backbones.segmentation import with_light_head
from fedshift.nn.taps import Taps


def test_a_pyramid_moves_to_the_backbone_and_the_function_stays() -> None:
    net = build_network("deeplab_mobilenet_v2_half", (3, 64, 64), 5, 0).eval()
    light = with_light_head(copy.deepcopy(net))
    x = torch.rand(2, 3, 64, 64)
    with torch.no_grad():
        assert torch.equal(light(x), net(x))
        assert light.features(x).shape == (2, light.backbone.out_features, 4, 4)
        with Taps(light.backbone, light.backbone.taps) as taps:
            light.features(x)
    assert len(taps.outputs) == 3
    sizes = [sum(value.numel() for value in module.parameters()) for module in (light, light.backbone, light.head)]
    assert sizes[0] == sum(value.numel() for value in net.parameters()) == sizes[1] + sizes[2]
    # What a DualAdapt client sends: 256 x 5 + 5 numbers instead of the pyramid's million and more.
    assert sizes[2] == 1285 and sum(value.numel() for value in net.head.parameters()) > 1_000_000


@pytest.mark.parametrize("arch", ["segnet-small", "digits-dualadapt"])
def test_other_heads_are_light_already(arch: str) -> None:
    net = build_network(arch, (3, 32, 32), 5, 0)
    backbone, head = net.backbone, net.head
    assert with_light_head(net) is net and net.backbone is backbone and net.head is head
