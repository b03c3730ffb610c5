"""Pieces that several nets share."""

from __future__ import annotations

from collections import OrderedDict

from torch import nn


class DenseBlock(nn.Sequential):
    """Linear layer, normalisation, ReLU."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__(OrderedDict(fc=nn.Linear(inputs, outputs), norm=nn.BatchNorm1d(outputs), relu=nn.ReLU()))


def he_init(module: nn.Module) -> None:
    """He et al. (2015), fan-out, for convolutions that a normalisation or ReLU follows; biases start at 0."""
    for layer in module.modules():
        if isinstance(layer, nn.Conv2d):
            nn.init.kaiming_normal_(layer.weight, mode="fan_out", nonlinearity="relu")
            if layer.bias is not None:
                nn.init.zeros_(layer.bias)


def linear_head(features: int, classes: int) -> nn.Module:
    """`(B, features)` to `(B, classes)`."""
    return nn.Linear(features, classes)
