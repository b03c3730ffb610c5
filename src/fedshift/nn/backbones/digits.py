"""Small networks for digits, as the papers describe them, for images of at least 16 x 16 pixels."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence

from torch import Tensor, nn

from fedshift.nn.convolution import ConvNorm
from fedshift.nn.network import Backbone, DenseBlock, he_init

LARGEST_MAP = 8
"""Side of the largest map. Larger ones (inputs beyond 32 pixels in most networks) are averaged down to keep heads
small."""


class ConvBlock(ConvNorm):
    """A convolution that keeps the size, normalisation, ReLU and, unless `pool` is 0, max pooling by 2.

    The pooling comes before the ReLU: outputs and gradients are the same to the last bit, of a quarter of the values.
    """

    def __init__(self, inputs: int, outputs: int, kernel: int, pool: int = 2) -> None:
        layers: OrderedDict[str, nn.Module] = OrderedDict()
        layers["conv"] = nn.Conv2d(inputs, outputs, kernel, padding=kernel // 2)
        layers["norm"] = nn.BatchNorm2d(outputs)
        if pool == 2:
            layers["pool"] = nn.MaxPool2d(2)
        elif pool == 3:  # overlapping windows that still halve the map
            layers["pool"] = nn.MaxPool2d(3, stride=2, padding=1)
        layers["relu"] = nn.ReLU()
        super().__init__(layers)


class ConvNet(Backbone):
    """Conv blocks `block1..n`, then dense blocks `dense1..m` with dropout between them.

    `pools[i]` is 0, 2 or 3 (see ConvBlock); `input_shape` is (3, H, W). Output `(B, out_features)`.
    """

    def __init__(
        self,
        input_shape: tuple[int, ...],
        channels: Sequence[int],
        kernel: int,
        pools: Sequence[int],
        dense: Sequence[int] = (),
        dropout: float = 0.0,
        largest_map: int = LARGEST_MAP,
    ) -> None:
        super().__init__()
        inputs, height, width = input_shape
        blocks: list[str] = []
        for number, (outputs, pool) in enumerate(zip(channels, pools, strict=True), start=1):
            blocks.append(f"block{number}")
            self.add_module(blocks[-1], ConvBlock(inputs, outputs, kernel, pool))
            height, width = _halved(height, pool), _halved(width, pool)
            inputs = outputs
        self.shrink, side_h, side_w = _shrink(height, width, largest_map)
        features = inputs * side_h * side_w
        self.dropout = nn.Dropout(dropout) if dropout else nn.Identity()
        denses: list[str] = []
        for number, outputs in enumerate(dense, start=1):
            denses.append(f"dense{number}")
            self.add_module(denses[-1], DenseBlock(features, outputs))
            features = outputs
        self.out_features = features
        self.stages = (*blocks, *denses)
        self.taps = tuple(blocks[-2:])
        self._blocks, self._dense = tuple(blocks), tuple(denses)
        he_init(self)

    def forward(self, x: Tensor) -> Tensor:
        for name in self._blocks:
            x = getattr(self, name)(x)
        x = self.shrink(x).flatten(1)
        for number, name in enumerate(self._dense):
            x = getattr(self, name)(self.dropout(x) if number else x)
        return x


class MnistNet(Backbone):
    """CSAC's network for MNIST: two 5x5 convolutions and a dense layer, without normalisation."""

    def __init__(self, input_shape: tuple[int, ...]) -> None:
        super().__init__()
        _, height, width = input_shape
        # Tapped after ReLU and pooling, like the blocks of the other nets: a quarter of the positions to align.
        self.conv1 = _pooled_conv(input_shape[0], 32)
        self.conv2 = _pooled_conv(32, 64)
        self.relu = nn.ReLU()
        self.shrink, side_h, side_w = _shrink(height // 4, width // 4)
        self.fc1 = nn.Linear(64 * side_h * side_w, 128)
        self.out_features = 128
        self.stages = ("conv1", "conv2", "fc1")
        self.taps = ("conv1", "conv2")
        he_init(self)

    def forward(self, x: Tensor) -> Tensor:
        x = self.conv2(self.conv1(x))
        x = self.fc1(self.shrink(x).flatten(1))
        out: Tensor = self.relu(x)
        return out


def _pooled_conv(channels: int, width: int) -> nn.Module:
    return nn.Sequential(
        OrderedDict(conv=nn.Conv2d(channels, width, 5, padding=2), pool=nn.MaxPool2d(2), relu=nn.ReLU())
    )


def two_layer_head(features: int, classes: int, hidden: int = 128) -> nn.Module:
    """DualAdapt's classifier: `(B, features)` to `(B, classes)` through a hidden layer."""
    return nn.Sequential(OrderedDict(fc1=nn.Linear(features, hidden), relu=nn.ReLU(), fc2=nn.Linear(hidden, classes)))


def narrow_two_layer_head(features: int, classes: int) -> nn.Module:
    """The same with 64 hidden units: 17,098 parameters for the 256 features of `dualadapt_large` and 10 classes."""
    return two_layer_head(features, classes, hidden=64)


def copa(input_shape: tuple[int, ...]) -> Backbone:
    """COPA on Digits-DG (sec. 4.1): four 3x3 convolutions of 64, each with norm, ReLU and pooling."""
    return ConvNet(input_shape, channels=(64, 64, 64, 64), kernel=3, pools=(2, 2, 2, 2))


def copa_five(input_shape: tuple[int, ...]) -> Backbone:
    """COPA on Digit-Five (sec. 4.2): three convolutions and two dense layers, each with norm.

    The paper gives no widths. The network that it cites is `kd3a_large`; this one is sized for a CPU.
    """
    return ConvNet(input_shape, channels=(64, 64, 128), kernel=5, pools=(2, 2, 2), dense=(512, 256))


def kd3a(input_shape: tuple[int, ...]) -> Backbone:
    """KD3A on Digit-5 (Table 4): 5x5 convolutions of 64, 64 and 128; pooling after the first two."""
    return ConvNet(input_shape, channels=(64, 64, 128), kernel=5, pools=(2, 2, 0))


def kd3a_large(input_shape: tuple[int, ...]) -> Backbone:
    """The network of KD3A's authors: overlapping pooling, dense layers of 3072 and 2048, dropout 0.5 between."""
    return ConvNet(input_shape, channels=(64, 64, 128), kernel=5, pools=(3, 3, 0), dense=(3072, 2048), dropout=0.5)


def dualadapt(input_shape: tuple[int, ...]) -> Backbone:
    """DualAdapt on Digit-Five (sec. 4.1): four convolutions. The paper gives neither widths nor norms.

    Half the size of the paper's extractor, for a CPU: `dualadapt_large` has the size of Table 4.
    """
    return ConvNet(input_shape, channels=(32, 64, 128, 128), kernel=3, pools=(2, 2, 2, 2), largest_map=1)


def dualadapt_large(input_shape: tuple[int, ...]) -> Backbone:
    """DualAdapt on Digit-Five at the size of Table 4: |G| + |F| is 493 K and |G| + 2|F| is 510 K.

    Only "4 convolutional layers" is stated. Inferred: of the widths that are powers of two with one kernel size, these
    and a head of 64 hidden units give every printed number of parameters. The pooling is that which comes closest to
    the printed operations, at 28 pixels.
    """
    return ConvNet(input_shape, channels=(16, 32, 64, 256), kernel=5, pools=(0, 2, 2, 2), largest_map=1)


def _halved(side: int, pool: int) -> int:
    if pool == 0:
        return side
    return side // 2 if pool == 2 else (side + 1) // 2


def _shrink(height: int, width: int, largest: int = LARGEST_MAP) -> tuple[nn.Module, int, int]:
    """A layer that averages a map down to at most `largest` per side, and the sides of its output."""
    if max(height, width) <= largest:
        return nn.Identity(), height, width
    side_h, side_w = min(height, largest), min(width, largest)
    return nn.AdaptiveAvgPool2d((side_h, side_w)), side_h, side_w
