"""What the coordinator and every site agree on before the first round."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from fedshift.data.domain import Task
from fedshift.errors import InputError

Setting = Literal["generalize", "adapt", "multi-adapt"]


@dataclass(frozen=True)
class ModelSpec:
    """The network every site builds: names and sizes only, the weights travel separately."""

    arch: str
    task: Task
    classes: tuple[str, ...]
    input_shape: tuple[int, ...]
    columns: tuple[str, ...] = ()
    freeze_norm: bool = False
    """Whether BatchNorm layers keep the statistics that the run starts with."""


@dataclass(frozen=True)
class Training:
    """How a site trains, for methods that train with SGD: all of them."""

    rounds: int
    batch_size: int
    lr: float
    lr_min: float
    momentum: float
    weight_decay: float
    local_epochs: float
    schedule: str
    precision: str
    augment: tuple[str, ...]
    backbone_lr_factor: float = 1.0
    """Times the learning rate: the backbone's. All else of the network, and beside it, learns at the rate itself."""

    def lr_of(self, key: str, round: int) -> float:
        """The learning rate in a round of what a network's state dict has under `key`."""
        return self.lr_at(round) * (self.backbone_lr_factor if key.startswith("backbone.") else 1.0)

    def lr_at(self, round: int) -> float:
        """The learning rate of a round (1 .. rounds). Schedules: constant, cosine, step:EVERY:FACTOR."""
        name, *arguments = self.schedule.split(":")
        if name == "constant" and not arguments:
            return self.lr
        if name == "cosine" and not arguments:
            share = (round - 1) / max(self.rounds, 1)
            lowest = min(self.lr, self.lr_min)  # A method's lowest rate may be above the first one of another network.
            return lowest + 0.5 * (self.lr - lowest) * (1 + math.cos(math.pi * share))
        if name == "step" and len(arguments) == 2:
            return max(self.lr * float(arguments[1]) ** ((round - 1) // int(arguments[0])), self.lr_min)
        raise InputError(
            "config-value", f"schedule: {self.schedule!r} is not one of constant, cosine, step:EVERY:FACTOR"
        )


@dataclass(frozen=True)
class Plan:
    """One run, as every site knows it. `sources` names everyone with labels, sorted; `hyper` holds the method's own
    keys, `threads` the torch threads a step uses."""

    version: str
    method: str
    setting: Setting
    sources: tuple[str, ...]
    seed: int
    threads: int
    model: ModelSpec
    training: Training
    hyper: Mapping[str, Any]
