"""Convolutions and the norms behind them, computed together where that is faster."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F


class Conv2d(nn.Conv2d):
    """torch's convolution. In bfloat16 on a CPU, a depthwise one with a stride has no fast gradient there (it took 20
    times as long as in float32): so it is computed at every pixel, and those in between are left out."""

    def _conv_forward(self, input: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        is_strided = self.groups > 1 and self.stride[0] > 1 and self.stride[0] == self.stride[1]
        if not is_strided or input.device.type != "cpu" or not torch.is_autocast_enabled("cpu"):
            plain: Tensor = super()._conv_forward(input, weight, bias)
            return plain
        everywhere = F.conv2d(input, weight, bias, 1, self.padding, self.dilation, self.groups)
        return everywhere[:, :, :: self.stride[0], :: self.stride[1]]


class ConvNorm(nn.Sequential):
    """A convolution, its norm, and any layers after them."""

    def forward(self, x: Tensor) -> Tensor:
        conv, norm, *others = self
        x = normed(conv, norm, x)
        for layer in others:
            x = layer(x)
        return x


def normed(conv: Any, norm: Any, x: Tensor) -> Tensor:
    """`norm(conv(x))`. A BatchNorm that normalises by its running statistics scales and shifts channels, which the
    convolution then does itself, with gradients for all weights: without maps that only wait to be scaled."""
    can_join = isinstance(conv, nn.Conv2d) and isinstance(norm, nn.BatchNorm2d) and not norm.training
    out: Tensor
    if not can_join or _is_watched(conv) or _is_watched(norm):
        out = norm(conv(x))
        return out
    scale = norm.weight * (norm.running_var + norm.eps).rsqrt()
    mean = norm.running_mean if conv.bias is None else norm.running_mean - conv.bias
    shift = torch.addcmul(norm.bias, mean, scale, value=-1)
    out = conv._conv_forward(x, conv.weight * scale[:, None, None, None], shift)
    return out


def _is_watched(layer: nn.Module) -> bool:
    """Whether a hook waits for what the layer is given or gives."""
    return bool(layer._forward_hooks or layer._forward_pre_hooks)
