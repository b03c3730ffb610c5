"""Features of several layers of two networks, brought to one size so that they can be compared."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fedshift.nn.network import Network
from fedshift.nn.taps import Taps

_REMEMBERED_BYTES = 256 * 1024 * 1024


class Projections(nn.Module):
    """One 1x1 convolution for each layer of one network (`first`) and of another (`second`), all to as many channels.
    On maps with the channels last it is a linear layer."""

    def __init__(self, widths: Sequence[int], channels: int) -> None:
        super().__init__()
        self.first = nn.ModuleList(nn.Linear(width, channels) for width in widths)
        self.second = nn.ModuleList(nn.Linear(width, channels) for width in widths)

    def forward(self, first: Sequence[Tensor], second: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
        """Maps `(B, d, c_l)` of R layers of each network to two `(R, B, d, channels)`."""
        a = torch.stack([project(x) for project, x in zip(self.first, first, strict=True)])
        b = torch.stack([project(x) for project, x in zip(self.second, second, strict=True)])
        return a, b


class FrozenMaps:
    """What the named layers of a frozen network give, in eval mode and at the size of the last of them.

    Samples are numbered. With `remember` they come again unchanged, and what was computed once is kept for the next
    time if it fits into memory.
    """

    def __init__(
        self, net: Network, layers: Sequence[str], input_shape: Sequence[int], samples: int, *, remember: bool
    ) -> None:
        self._net = net.eval().requires_grad_(False)
        self._taps = Taps(net.backbone, layers)
        like = next(net.parameters())
        maps = [as_map(features) for features in self._features(like.new_zeros(1, *input_shape))]
        self.size = (maps[-1].shape[2], maps[-1].shape[3])
        self.widths = tuple(features.shape[1] for features in maps)
        shapes = [(samples, maps[-1][0, 0].numel(), width) for width in self.widths]
        fits = sum(n * d * c for n, d, c in shapes) * like.element_size() <= _REMEMBERED_BYTES
        self._kept = [like.new_empty(shape) for shape in shapes] if remember and fits else []
        self._known = torch.zeros(samples, dtype=torch.bool)

    def __call__(self, x: Tensor, index: Tensor) -> list[Tensor]:
        """Maps `(B, d, c_l)` of each layer for inputs `x`, the samples numbered `index` `(B,)`."""
        if self._kept and bool(self._known[index].all()):
            return [kept[index] for kept in self._kept]
        maps = [resized(features, self.size) for features in self._features(x)]
        for kept, features in zip(self._kept, maps, strict=False):
            kept[index] = features
        self._known[index] = True
        return maps

    @torch.no_grad()
    def _features(self, x: Tensor) -> list[Tensor]:
        with self._taps as taps:
            self._net.features(x)
        return list(taps.outputs.values())


def as_map(features: Tensor) -> Tensor:
    """Features `(B, c)` of a dense layer as a map of one position; maps `(B, c, h, w)` as they are."""
    return features if features.ndim == 4 else features[:, :, None, None]


def resized(features: Tensor, size: tuple[int, int]) -> Tensor:
    """Features averaged to `size` = (h, w), as float32 `(B, h w, c)`. Averaging before a 1x1 convolution is the same as
    after it, and leaves less to convolve."""
    maps = as_map(features)
    if maps.shape[2:] != size:
        maps = F.adaptive_avg_pool2d(maps, size)
    return maps.permute(0, 2, 3, 1).flatten(1, 2).float()
