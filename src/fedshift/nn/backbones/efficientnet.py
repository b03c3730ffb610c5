"""EfficientNet-Lite0. Mingxing Tan and Quoc Le, "EfficientNet", ICML 2019.

The Lite variant has no squeeze-and-excite layers and uses ReLU6.
Layer names are those of the registry package `efficientnet_lite_pytorch`, so that its ImageNet weights load.
"""

from __future__ import annotations

from torch import Tensor, nn
from torch.nn import functional as F

from fedshift.nn.convolution import Conv2d, normed
from fedshift.nn.network import Backbone, he_init

BLOCKS = (  # expansion, channels, repeats, stride, kernel
    (1, 16, 1, 1, 3),
    (6, 24, 2, 2, 3),
    (6, 40, 2, 2, 5),
    (6, 80, 3, 2, 3),
    (6, 112, 3, 1, 5),
    (6, 192, 4, 2, 5),
    (6, 320, 1, 1, 3),
)


class SameConv2d(Conv2d):
    """A convolution with TensorFlow's padding: the output has `ceil(size / stride)` pixels per side, and an odd pixel
    of padding is on the right and at the bottom.

    The published weights were trained with it; symmetric padding would shift every strided map by a pixel.
    """

    def __init__(self, inputs: int, outputs: int, kernel: int, stride: int = 1, groups: int = 1) -> None:
        # Without a stride it is the usual padding.
        super().__init__(inputs, outputs, kernel, stride, kernel // 2 if stride == 1 else 0, groups=groups, bias=False)

    def _conv_forward(self, input: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        (kernel, _), (stride, _) = self.kernel_size, self.stride
        if stride > 1:
            height, width = (_same_padding(side, kernel, stride) for side in input.shape[2:])
            input = F.pad(input, (*width, *height))
        return super()._conv_forward(input, weight, bias)


class MBConv(nn.Module):
    """A 1x1 convolution that widens, a depthwise one, a linear 1x1 one that narrows; a shortcut if sizes allow."""

    def __init__(self, inputs: int, outputs: int, expansion: int, stride: int, kernel: int) -> None:
        super().__init__()
        width = inputs * expansion
        self.expands = expansion > 1
        if self.expands:
            self._expand_conv = SameConv2d(inputs, width, 1)
            self._bn0 = _norm(width)
        self._depthwise_conv = SameConv2d(width, width, kernel, stride, groups=width)
        self._bn1 = _norm(width)
        self._project_conv = SameConv2d(width, outputs, 1)
        self._bn2 = _norm(outputs)
        self.shortcut = stride == 1 and inputs == outputs

    def forward(self, x: Tensor) -> Tensor:
        out = F.relu6(normed(self._expand_conv, self._bn0, x)) if self.expands else x
        out = F.relu6(normed(self._depthwise_conv, self._bn1, out))
        out = normed(self._project_conv, self._bn2, out)
        return x + out if self.shortcut else out


class EfficientNetLite0(Backbone):
    """Images `(B, 3, H, W)` to features `(B, 1280)`."""

    classifier_key = "_fc"
    out_features = 1280

    def __init__(self, input_shape: tuple[int, ...]) -> None:
        super().__init__()
        self._conv_stem = SameConv2d(3, 32, 3, 2)
        self._bn0 = _norm(32)
        blocks: list[nn.Module] = []
        inputs, ends = 32, []
        for expansion, outputs, repeats, stride, kernel in BLOCKS:
            for repeat in range(repeats):
                blocks.append(MBConv(inputs, outputs, expansion, stride if repeat == 0 else 1, kernel))
                inputs = outputs
            ends.append(f"_blocks.{len(blocks) - 1}")
        self._blocks = nn.Sequential(*blocks)
        self._conv_head = SameConv2d(inputs, self.out_features, 1)
        self._bn1 = _norm(self.out_features)
        self.stages = tuple(ends)
        self.taps = (ends[2], ends[4], ends[6])  # the last of each resolution: strides 8, 16 and 32
        he_init(self)

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu6(normed(self._conv_stem, self._bn0, x))
        x = F.relu6(normed(self._conv_head, self._bn1, self._blocks(x)))
        return x.mean((2, 3))


def _norm(channels: int) -> nn.BatchNorm2d:
    # DIFFERS: momentum 0.01 in the published net, which took 100,000s of steps; a site takes a few dozen a
    # round, and its running statistics must follow.
    return nn.BatchNorm2d(channels, eps=1e-3, momentum=0.1)


def _same_padding(size: int, kernel: int, stride: int) -> tuple[int, int]:
    steps = -(-size // stride) - 1
    total = max(steps * stride + kernel - size, 0)
    return total // 2, total - total // 2
