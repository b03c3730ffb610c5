"""ResNet. Kaiming He et al., "Deep Residual Learning for Image Recognition", CVPR 2016.

Layer names are torchvision's, so that its published weights load. As in torchvision, a bottleneck has its stride in the
3x3 convolution.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence

from torch import Tensor, nn

from fedshift.nn.convolution import ConvNorm, normed
from fedshift.nn.network import Backbone, DenseBlock, he_init


class BasicBlock(nn.Module):
    """Two 3x3 convolutions and a shortcut."""

    expansion = 1

    def __init__(self, inputs: int, width: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(inputs, width, 3, stride, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(width)
        self.relu = nn.ReLU()
        self.conv2 = nn.Conv2d(width, width, 3, 1, 1, bias=False)
        self.bn2 = nn.BatchNorm2d(width)
        self.downsample = _shortcut(inputs, width, stride)

    def forward(self, x: Tensor) -> Tensor:
        out = self.relu(normed(self.conv1, self.bn1, x))
        out = normed(self.conv2, self.bn2, out)
        joined: Tensor = self.relu(out + self.downsample(x))
        return joined


class Bottleneck(nn.Module):
    """1x1, 3x3 and 1x1 convolutions and a shortcut; four times as wide outside as inside."""

    expansion = 4

    def __init__(self, inputs: int, width: int, stride: int) -> None:
        super().__init__()
        outputs = width * self.expansion
        self.conv1 = nn.Conv2d(inputs, width, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(width)
        self.conv2 = nn.Conv2d(width, width, 3, stride, 1, bias=False)
        self.bn2 = nn.BatchNorm2d(width)
        self.conv3 = nn.Conv2d(width, outputs, 1, bias=False)
        self.bn3 = nn.BatchNorm2d(outputs)
        self.relu = nn.ReLU()
        self.downsample = _shortcut(inputs, outputs, stride)

    def forward(self, x: Tensor) -> Tensor:
        out = self.relu(normed(self.conv1, self.bn1, x))
        out = self.relu(normed(self.conv2, self.bn2, out))
        out = normed(self.conv3, self.bn3, out)
        joined: Tensor = self.relu(out + self.downsample(x))
        return joined


class ResNet(Backbone):
    """Images `(B, 3, H, W)` to features `(B, 512)` or `(B, 2048)`."""

    classifier_key = "fc"

    def __init__(self, block: type[BasicBlock] | type[Bottleneck], depths: Sequence[int]) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(3, 64, 7, 2, 3, bias=False)
        self.bn1 = nn.BatchNorm2d(64)
        self.relu = nn.ReLU()
        self.maxpool = nn.MaxPool2d(3, 2, 1)
        inputs, self.stages = 64, ("layer1", "layer2", "layer3", "layer4")
        for number, (name, depth) in enumerate(zip(self.stages, depths, strict=True)):
            width, stride = 64 * 2**number, 1 if number == 0 else 2
            blocks = [block(inputs, width, stride)]
            inputs = width * block.expansion
            blocks += [block(inputs, width, 1) for _ in range(depth - 1)]
            self.add_module(name, nn.Sequential(*blocks))
        self.avgpool = nn.AdaptiveAvgPool2d(1)
        self.out_features = inputs
        self.taps = self.stages[-3:]
        he_init(self)

    def forward(self, x: Tensor) -> Tensor:
        x = self.maxpool(self.relu(normed(self.conv1, self.bn1, x)))
        for name in self.stages:
            x = self.get_submodule(name)(x)
        features: Tensor = self.avgpool(x)
        return features.flatten(1)


def resnet18(input_shape: tuple[int, ...]) -> Backbone:
    return ResNet(BasicBlock, (2, 2, 2, 2))


def resnet50(input_shape: tuple[int, ...]) -> Backbone:
    return ResNet(Bottleneck, (3, 4, 6, 3))


def resnet101(input_shape: tuple[int, ...]) -> Backbone:
    return ResNet(Bottleneck, (3, 4, 23, 3))


def bottleneck_head(features: int, classes: int) -> nn.Module:
    """The classifier of CSAC's authors: `(B, features)` to `(B, classes)` through 256 hidden units with norm. It is not
    part of the backbone, so that published weights of a ResNet fit."""
    return nn.Sequential(OrderedDict(bottleneck=DenseBlock(features, 256), fc=nn.Linear(256, classes)))


def _shortcut(inputs: int, outputs: int, stride: int) -> nn.Module:
    if stride == 1 and inputs == outputs:
        return nn.Identity()
    return ConvNorm(nn.Conv2d(inputs, outputs, 1, stride, bias=False), nn.BatchNorm2d(outputs))
