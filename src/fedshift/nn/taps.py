"""Access to the features inside a network, and bringing features of several layers to one size."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from types import TracebackType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.utils.hooks import RemovableHandle

from fedshift.errors import InputError
from fedshift.nn.network import Backbone, Network


class Taps:
    """Collects the outputs of named stages of a backbone inside a `with` block.

    `outputs` maps each name, in the given order, to the stage's output in the latest forward pass, with gradient:
    losses on it train the backbone.
    """

    def __init__(self, backbone: Backbone, names: Iterable[str]) -> None:
        self.names = tuple(names)
        unknown = [name for name in self.names if name not in backbone.stages]
        if unknown:
            raise InputError(
                "method-needs",
                f"The network has no stage {unknown[0]!r}; it can be tapped at {', '.join(backbone.stages)}.",
            )
        self._backbone = backbone
        self._seen: dict[str, Tensor] = {}
        self._hooks: list[RemovableHandle] = []

    @property
    def outputs(self) -> dict[str, Tensor]:
        return {name: self._seen[name] for name in self.names}

    def __enter__(self) -> Taps:
        for name in self.names:
            self._hooks.append(self._backbone.get_submodule(name).register_forward_hook(self._collector(name)))
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()

    def _collector(self, name: str) -> Any:
        def collect(module: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> None:
            self._seen[name] = output

        return collect


def norm_layers(module: nn.Module) -> dict[str, _BatchNorm]:
    """BatchNorm layers by dotted name, in the order of a forward pass."""
    return {name: layer for name, layer in module.named_modules() if isinstance(layer, _BatchNorm)}


@contextmanager
def norm_inputs(module: nn.Module) -> Iterator[dict[str, Tensor]]:
    """Name of a BatchNorm layer -> its input in the latest forward pass inside the `with` block, with gradient."""
    seen: dict[str, Tensor] = {}

    def collector(name: str) -> Any:
        def collect(layer: nn.Module, inputs: tuple[Tensor, ...]) -> None:
            seen[name] = inputs[0]

        return collect

    hooks = [layer.register_forward_pre_hook(collector(name)) for name, layer in norm_layers(module).items()]
    try:
        yield seen
    finally:
        for hook in hooks:
            hook.remove()


_REMEMBERED_BYTES = 256 * 1024 * 1024


class Projections(nn.Module):
    """One 1x1 convolution to `channels` channels for each layer of one network (`first`) and of another (`second`); if
    they are `shared`, the second network's layers go through those of the first. For maps with channels last it is a
    linear layer."""

    def __init__(self, widths: Sequence[int], channels: int, *, shared: bool) -> None:
        super().__init__()
        self.first = nn.ModuleList(nn.Linear(width, channels) for width in widths)
        self.second = None if shared else nn.ModuleList(nn.Linear(width, channels) for width in widths)

    def forward(self, first: Sequence[Tensor], second: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
        """Maps `(B, d, c_l)` of R layers of each network to two `(R, B, d, channels)`."""
        a = torch.stack([project(x) for project, x in zip(self.first, first, strict=True)])
        b = torch.stack([project(x) for project, x in zip(self.second or self.first, second, strict=True)])
        return a, b


class FrozenMaps:
    """The outputs of the named layers of a frozen network, in eval mode, at the size of the last one.

    Samples are numbered. With `remember` (samples are never augmented), outputs are computed once and kept, if those of
    all samples fit into 256 MB.
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
        """Maps `(B, d, c_l)` of each layer for inputs `x`, whose sample numbers are `index` `(B,)`."""
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
    """Features `(B, c)` of a dense layer as a map of one position; maps `(B, c, h, w)` unchanged."""
    return features if features.ndim == 4 else features[:, :, None, None]


def resized(features: Tensor, size: tuple[int, int]) -> Tensor:
    """Features averaged to `size` = (h, w), as float32 `(B, h w, c)`. Averaging before a 1x1 convolution gives the same
    as after it, and is cheaper."""
    maps = as_map(features)
    if maps.shape[2:] != size:
        maps = F.adaptive_avg_pool2d(maps, size)
    return maps.permute(0, 2, 3, 1).flatten(1, 2).float()
