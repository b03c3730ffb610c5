"""MobileNetV2. Mark Sandler et al., "MobileNetV2: Inverted Residuals and Linear Bottlenecks", CVPR 2018.

Layer names are torchvision's, so that its published weights load.
"""

from __future__ import annotations

from torch import Tensor, nn

from fedshift.nn.convolution import Conv2d, ConvNorm, normed
from fedshift.nn.network import Backbone, he_init

BLOCKS = (  # expansion, channels, repeats, stride: Table 2 of the paper
    (1, 16, 1, 1),
    (6, 24, 2, 2),
    (6, 32, 3, 2),
    (6, 64, 4, 2),
    (6, 96, 3, 1),
    (6, 160, 3, 2),
    (6, 320, 1, 1),
)


class InvertedResidual(nn.Module):
    """A 1x1 convolution that widens, a depthwise one, a linear 1x1 one that narrows; a shortcut if sizes allow."""

    def __init__(self, inputs: int, outputs: int, expansion: int, stride: int, dilation: int) -> None:
        super().__init__()
        width = inputs * expansion
        widen = [_conv_norm(inputs, width, kernel=1)] if expansion > 1 else []
        filter_ = _conv_norm(width, width, kernel=3, stride=stride, groups=width, dilation=dilation)
        narrow = nn.Conv2d(width, outputs, 1, bias=False)
        self.conv = nn.Sequential(*widen, filter_, narrow, nn.BatchNorm2d(outputs))
        self.shortcut = stride == 1 and inputs == outputs

    def forward(self, x: Tensor) -> Tensor:
        *before, narrow, norm = self.conv
        out = x
        for layer in before:
            out = layer(out)
        out = normed(narrow, norm, out)
        return x + out if self.shortcut else out


class MobileNetV2(Backbone):
    """Images `(B, 3, H, W)` to features `(B, 1280)`; with `as_map`, to the last bottleneck's map.

    `width` multiplies all channels. With `as_map`, dilation replaces the last stride, so that maps stay at stride 16,
    and the layer of width 1280 is left out.
    """

    classifier_key = "classifier.1"

    def __init__(self, width: float = 1.0, as_map: bool = False) -> None:
        super().__init__()
        inputs = _multiple_of_8(32 * width)
        layers: list[nn.Module] = [_conv_norm(3, inputs, kernel=3, stride=2)]
        reached, dilation, ends = 2, 1, []
        for expansion, channels, repeats, first_stride in BLOCKS:
            outputs = _multiple_of_8(channels * width)
            stride, first_dilation = first_stride, dilation
            if as_map and reached * stride > 16:
                stride, dilation = 1, dilation * first_stride
            reached *= stride
            for repeat in range(repeats):
                # The layer that would have strided still sees undilated inputs.
                step, spread = (stride, first_dilation) if repeat == 0 else (1, dilation)
                layers.append(InvertedResidual(inputs, outputs, expansion, step, spread))
                inputs = outputs
            ends.append(f"features.{len(layers) - 1}")
        if as_map:
            self.classifier_key = ""
            self.unused_keys = (f"features.{len(layers)}.", "classifier.")
        else:
            layers.append(_conv_norm(inputs, 1280, kernel=1))
            inputs = 1280
        self.features = nn.Sequential(*layers)
        self.as_map = as_map
        self.out_features = inputs
        self.stages = tuple(ends)
        self.taps = (ends[2], ends[4], ends[6])  # the last of each resolution: strides 8, 16 and 32
        he_init(self)

    def forward(self, x: Tensor) -> Tensor:
        x = self.features(x)
        return x if self.as_map else x.mean((2, 3))


def mobilenet_v2(input_shape: tuple[int, ...]) -> Backbone:
    return MobileNetV2()


def _conv_norm(inputs: int, outputs: int, kernel: int, stride: int = 1, groups: int = 1, dilation: int = 1) -> ConvNorm:
    padding = dilation * (kernel // 2)
    return ConvNorm(
        Conv2d(inputs, outputs, kernel, stride, padding, dilation, groups, bias=False),
        nn.BatchNorm2d(outputs),
        nn.ReLU6(),  # In place, torch would copy the input first: its gradient needs it.
    )


def _multiple_of_8(channels: float) -> int:
    """The nearest multiple of 8, never more than 10 % below `channels`."""
    rounded = max(8, int(channels + 4) // 8 * 8)
    return rounded + 8 if rounded < 0.9 * channels else rounded
