"""Looking inside a network while it runs."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from types import TracebackType
from typing import Any

from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.utils.hooks import RemovableHandle

from fedshift.errors import InputError
from fedshift.nn.network import Backbone


class Taps:
    """Collects what named stages of a backbone give out, while the `with` block lasts.

    `outputs` maps each name, in the order asked for, to the stage's output in the latest forward pass,
    with its graph: losses on it train the backbone.
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
    """BatchNorm layers by dotted name, in the order in which a forward pass meets them."""
    return {name: layer for name, layer in module.named_modules() if isinstance(layer, _BatchNorm)}


@contextmanager
def norm_inputs(module: nn.Module) -> Iterator[dict[str, Tensor]]:
    """What each BatchNorm layer takes in, by its name, in the latest forward pass of the `with` block, with graph."""
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
