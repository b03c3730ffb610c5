"""What the coordinator and every site agree on before the first round."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from fedshift.data.domain import Task
from fedshift.errors import InputError
from fedshift.federation.labels import LabelLoss

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
    tiled: bool = False
    """Whether inputs are squares of larger pictures, which are scored and predicted as a whole."""
    scaled_to: int | None = None
    """With `tiled`: how long the shorter side of a picture is made first. None: pictures keep their own size."""


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
    probe_epochs: int = 0
    """Passes of the head alone over features of the initial backbone, before round 1."""
    loss: LabelLoss = "cross-entropy"
    """By which sites learn from their labels."""

    def lr_of(self, key: str, round: int) -> float:
        """The learning rate in a round of what a network's state dict has under `key`."""
        return self.lr_at(round) * (self.backbone_lr_factor if key.startswith("backbone.") else 1.0)

    def lr_at(self, round: int) -> float:
        """The learning rate of a round (1 .. rounds). Schedules: constant, cosine, cosine:DELAY (begins DELAY rounds
        later and ends where it is by then), step:EVERY:FACTOR."""
        match self.schedule.split(":"):
            case ["constant"]:
                return self.lr
            case ["cosine", *delay] if not delay or (len(delay) == 1 and delay[0].isdecimal()):
                share = max(round - 1 - int(delay[0] if delay else 0), 0) / max(self.rounds, 1)
                lowest = min(self.lr, self.lr_min)  # A method's lowest rate may be above the first of another network.
                return lowest + 0.5 * (self.lr - lowest) * (1 + math.cos(math.pi * share))
            case ["step", every, factor] if _is_step(every, factor):
                return max(self.lr * float(factor) ** ((round - 1) // int(every)), self.lr_min)
        raise InputError(
            "config-value",
            f"schedule: {self.schedule!r} is not one of constant, cosine, cosine:DELAY, step:EVERY:FACTOR",
        )


def _is_step(every: str, factor: str) -> bool:
    try:
        return int(every) >= 1 and 0 <= float(factor) < math.inf
    except ValueError:
        return False


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
    secure_aggregation: bool = False
    """Whether sites keep back what is only summed, and send it masked."""
