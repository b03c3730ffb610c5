"""Networks for segmentation: the backbone returns a map, the head logits of the map's size."""

from __future__ import annotations

from collections import OrderedDict

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fedshift.nn.backbones.mobilenet import MobileNetV2
from fedshift.nn.convolution import ConvNorm
from fedshift.nn.network import Backbone, Network, he_init

RATES = (6, 12, 18)
"""Dilations of DeepLabv3's pyramid at output stride 16."""


class AtrousPyramid(nn.Module):
    """DeepLabv3's head without decoder. Chen et al., "Rethinking Atrous Convolution", 2017, sec. 3.3.

    `(B, inputs, h, w)` to logits `(B, classes, h, w)`: a 1x1 convolution, three dilated 3x3 convolutions and the
    image's mean, concatenated.
    """

    def __init__(self, inputs: int, classes: int, width: int) -> None:
        super().__init__()
        self.branches = nn.ModuleList(
            [_conv_norm(inputs, width, 1), *(_conv_norm(inputs, width, 3, dilation=rate) for rate in RATES)]
        )
        self.image = _conv_norm(inputs, width, 1)
        self.project = _conv_norm((len(RATES) + 2) * width, width, 1)
        self.classify = nn.Conv2d(width, classes, 1)
        he_init(self)

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.classify(self.context(x))
        return logits

    def context(self, x: Tensor) -> Tensor:
        """Everything before the last layer: `(B, inputs, h, w)` to `(B, width, h, w)`."""
        pyramid = [branch(x) for branch in self.branches]
        pyramid.append(self.image(x.mean((2, 3), keepdim=True)).expand(-1, -1, *x.shape[2:]))
        context: Tensor = self.project(torch.cat(pyramid, dim=1))
        return context


class PyramidFeatures(Backbone):
    """A backbone with the pyramid on top: `(B, 3, H, W)` to `(B, width, h, w)`."""

    def __init__(self, backbone: Backbone, pyramid: AtrousPyramid) -> None:
        super().__init__()
        self.backbone, self.pyramid = backbone, pyramid
        self.out_features = pyramid.classify.in_channels
        self.stages = tuple(f"backbone.{name}" for name in backbone.stages)
        self.taps = tuple(f"backbone.{name}" for name in backbone.taps)

    def forward(self, x: Tensor) -> Tensor:
        features: Tensor = self.pyramid.context(self.backbone(x))
        return features


class SmallSegNet(Backbone):
    """For scenes of about 64 pixels on a CPU: `(B, 3, H, W)` to `(B, 64, H/4, W/4)`."""

    out_features = 64
    stages = ("stem", "down1", "down2", "context")
    taps = ("down1", "down2", "context")

    def __init__(self, input_shape: tuple[int, ...]) -> None:
        super().__init__()
        self.stem = _conv_norm(3, 16, 3)
        self.down1 = nn.Sequential(_conv_norm(16, 32, 3, stride=2), _conv_norm(32, 32, 3))
        self.down2 = nn.Sequential(_conv_norm(32, 64, 3, stride=2), _conv_norm(64, 64, 3))
        self.context = nn.Sequential(_conv_norm(64, 64, 3, dilation=2), _conv_norm(64, 64, 3, dilation=4))
        he_init(self)

    def forward(self, x: Tensor) -> Tensor:
        x = self.down2(self.down1(self.stem(x)))
        out: Tensor = x + self.context(x)
        return out


class SmallUNet(Backbone):
    """For structures as thin as a pixel: what is lost on the way down comes back beside it on the way up, as in U-Net
    (O. Ronneberger, P. Fischer, T. Brox, MICCAI 2015). `(B, 3, H, W)` to `(B, 16, H, W)`."""

    out_features = 16
    stages = ("top", "middle", "bottom", "up_middle", "up_top")
    taps = ("middle", "bottom", "up_top")

    def __init__(self, input_shape: tuple[int, ...]) -> None:
        super().__init__()
        self.top = nn.Sequential(_conv_norm(3, 16, 3), _conv_norm(16, 16, 3))
        self.middle = nn.Sequential(_conv_norm(16, 32, 3, stride=2), _conv_norm(32, 32, 3))
        self.bottom = nn.Sequential(_conv_norm(32, 64, 3, stride=2), _conv_norm(64, 64, 3), _conv_norm(64, 64, 3))
        self.up_middle = _conv_norm(64 + 32, 32, 3)
        self.up_top = _conv_norm(32 + 16, 16, 3)
        he_init(self)

    def forward(self, x: Tensor) -> Tensor:
        top = self.top(x)
        middle = self.middle(top)
        up = self.up_middle(_beside(self.bottom(middle), middle))
        out: Tensor = self.up_top(_beside(up, top))
        return out


def _beside(low: Tensor, high: Tensor) -> Tensor:
    """A map enlarged to the size of a finer one, and that one, as the channels of one map."""
    larger = F.interpolate(low, size=high.shape[2:], mode="bilinear", align_corners=False)
    return torch.cat([larger, high], dim=1)


def deeplab_mobilenet_v2(input_shape: tuple[int, ...]) -> Backbone:
    return MobileNetV2(as_map=True)


def deeplab_mobilenet_v2_half(input_shape: tuple[int, ...]) -> Backbone:
    return MobileNetV2(width=0.5, as_map=True)


def pyramid_head(features: int, classes: int) -> nn.Module:
    return AtrousPyramid(features, classes, width=256)


def with_light_head(network: Network) -> Network:
    """The same network, in place, with the pyramid in the backbone and a 1x1 convolution as the head, for methods that
    train or send heads separately. Networks with other heads stay as they are."""
    pyramid = network.head
    if isinstance(pyramid, AtrousPyramid):
        network.backbone = PyramidFeatures(network.backbone, pyramid)
        network.head = pyramid.classify
        del pyramid.classify
    return network


def pixel_head(features: int, classes: int) -> nn.Module:
    """`(B, features, h, w)` to `(B, classes, h, w)`."""
    return nn.Conv2d(features, classes, 1)


def _conv_norm(inputs: int, outputs: int, kernel: int, stride: int = 1, dilation: int = 1) -> ConvNorm:
    padding = dilation * (kernel // 2)
    conv = nn.Conv2d(inputs, outputs, kernel, stride, padding, dilation, bias=False)
    return ConvNorm(OrderedDict(conv=conv, norm=nn.BatchNorm2d(outputs), relu=nn.ReLU()))
