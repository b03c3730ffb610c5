"""What BatchNorm layers remember of the data they saw."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Self

from torch import Tensor, nn

from fedshift.nn.taps import norm_layers

STATISTICS = ("running_mean", "running_var")


def statistics_of(module: nn.Module) -> dict[str, Tensor]:
    """A copy of it, by the names of the state dict."""
    state = module.state_dict()
    return {
        f"{layer}.{name}": state[f"{layer}.{name}"].cpu().clone()
        for layer in norm_layers(module)
        for name in STATISTICS
    }


@contextmanager
def remembering(module: nn.Module) -> Iterator[None]:
    """While the block lasts, BatchNorm layers normalise by batches; after it they remember these batches, all alike,
    and nothing before. All else stays as it was."""
    layers = list(norm_layers(module).values())
    before = [(layer.training, layer.momentum) for layer in layers]
    for layer in layers:
        layer.reset_running_stats()
        layer.momentum = None  # a plain mean over batches
        layer.train()
    try:
        yield
    finally:
        for layer, (training, momentum) in zip(layers, before, strict=True):
            layer.momentum = momentum
            layer.train(training)


@contextmanager
def forgetting(module: nn.Module) -> Iterator[None]:
    """While the block lasts, BatchNorm layers remember nothing of what they see."""
    layers = list(norm_layers(module).values())
    before = [layer.momentum for layer in layers]
    for layer in layers:
        layer.momentum = 0.0
    try:
        yield
    finally:
        for layer, momentum in zip(layers, before, strict=True):
            layer.momentum = momentum


class Frozen(nn.Module):
    """What such a norm remembers never changes, and it normalises by that in training too."""

    def train(self, mode: bool = True) -> Self:
        return super().train(False)


class FrozenBatchNorm1d(Frozen, nn.BatchNorm1d):
    """For vectors."""


class FrozenBatchNorm2d(Frozen, nn.BatchNorm2d):
    """For maps."""


def freeze_norms(module: nn.Module) -> None:
    """From now on BatchNorm layers normalise by what they remember, in training too. Scale and shift still learn."""
    for name, layer in norm_layers(module).items():
        kind = FrozenBatchNorm2d if isinstance(layer, nn.BatchNorm2d) else FrozenBatchNorm1d
        frozen = kind(layer.num_features, layer.eps, layer.momentum).eval()
        frozen.load_state_dict(layer.state_dict())
        parent, _, own = name.rpartition(".")
        setattr(module.get_submodule(parent), own, frozen)
