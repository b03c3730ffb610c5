"""KD3A's keys: presets for the paper and for its authors' code, and a key for every difference between them.

The paper is named in kd3a.py.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Literal

from fedshift.functional.consensus import Ballot

Mode = Literal["eval", "train"]
Hearing = Literal["batch", "eval", "train"]
Auto = Literal["auto"]
Weighting = Literal["focus", "shapley", "shapley-sampled", "samples", "h-divergence", "info-gain", "equal"]


@dataclass(frozen=True)
class Choices:
    """Where the paper and its authors' code differ. Defaults are the paper's choices. Meanings: see `Hyper`."""

    teachers: Hearing = "batch"
    ballot: Ballot = "vector"
    label: Literal["mean", "one-hot"] = "mean"
    support: Literal["count", "one"] = "count"
    doubt: float = 0.001
    mixup: float = 0.2
    mixup_draw: Literal["sample", "batch"] = "sample"
    mixup_weight: Literal["joint", "first"] = "joint"
    weighting: Weighting = "focus"
    by_size: bool = True
    target_share: Literal["samples", "confident"] = "samples"
    smoothing: float = 0.0
    average: Literal["model", "backbone"] = "model"
    mmd: bool = True
    keep_momentum: bool = False


PRESETS = {
    "paper": Choices(),
    "reference": Choices(
        teachers="train",
        ballot="top",
        label="one-hot",
        support="one",
        doubt=0.0,
        mixup=2.0,
        mixup_draw="batch",
        mixup_weight="first",
        weighting="shapley",
        by_size=False,
        target_share="confident",
        smoothing=0.9,
        average="backbone",
        mmd=False,
        keep_momentum=True,
    ),
}


@dataclass(frozen=True)
class Hyper:
    preset: Literal["paper", "reference"] = "paper"
    """What `auto` stands for in the keys below: the paper, or its authors' code."""
    gate: float = 0.9
    """Confidence gate of the first round (0.8 on DomainNet)."""
    gate_end: float = 0.95
    """Confidence gate of the last round; in between it changes linearly."""
    teachers: Literal[Auto, Hearing] = "auto"
    """Statistics that teachers normalise with when they vote: `batch`, those of the target's batches; `eval`, those of
    their own site; `train`, those of the target's batches, which also move the running statistics, and with dropout."""
    ballot: Literal[Auto, Ballot] = "auto"
    """What a confident teacher adds to the vote: all its probabilities, or the highest one."""
    label: Literal[Auto, "mean", "one-hot"] = "auto"
    """What the target learns: the mean of the supporters, or the consensus class."""
    support: Literal[Auto, "count", "one"] = "auto"
    """The weight of a sample: how many teachers support its label, or 1."""
    doubt: float | Auto = "auto"
    """The weight of a sample whose label no teacher supports (0.001; reference: 0)."""
    mixup: float | Auto = "auto"
    """Alpha of mixup (0.2; reference: 2); 0: no mixup."""
    mixup_draw: Literal[Auto, "sample", "batch"] = "auto"
    """Whether mixup draws lambda for each sample or once per batch."""
    mixup_weight: Literal[Auto, "joint", "first"] = "auto"
    """Whether weights are mixed along with labels, or the first sample's weight is used."""
    weighting: Literal[Auto, Weighting] = "auto"
    """What sources are weighted by (paper: focus; reference: shapley)."""
    shapley_samples: int = 100
    """Number of random orders that `shapley-sampled` draws."""
    by_size: bool | Auto = "auto"
    """Whether the score is multiplied by the source's number of samples."""
    target_share: Literal[Auto, "samples", "confident"] = "auto"
    """The target's own weight: its share of all samples, or the share of its samples with a confident teacher, divided
    by K + 1."""
    smoothing: float | Auto = "auto"
    """How much of the previous round's weights is kept (0; reference: 0.9)."""
    average: Literal[Auto, "model", "backbone"] = "auto"
    """What is averaged; with `backbone` every source keeps its own head, drawn for it at the start, and the target's
    head predicts."""
    mmd: bool | Auto = "auto"
    """Whether the aggregated model is trained by BatchNorm MMD."""
    mmd_rate: float = 0.2
    """Learning rate of BatchNorm MMD, as a factor of the round's."""
    mmd_clip: float = 1.0
    """Largest L2 norm of its gradients: longer ones are shortened; 0: no limit."""
    mmd_mode: Mode = "train"
    """Whether BatchNorm layers normalise by batches or by running statistics in this training."""
    keep_momentum: bool | Auto = "auto"
    """Whether SGD's momentum is kept for the whole run; false: for a round."""
    drop: tuple[str, ...] = ()
    """Sources to leave out (Table 2, domain drop)."""

    def __post_init__(self) -> None:
        for name in ("gate", "gate_end"):
            if not 0 < getattr(self, name) < 1:
                raise ValueError(f"{name} must be between 0 and 1, not {getattr(self, name)}")
        for name in ("doubt", "mixup", "mmd_clip"):
            value = getattr(self, name)
            if value != "auto" and not (isinstance(value, float | int) and 0 <= value < float("inf")):
                raise ValueError(f"{name} must be 0 or more, not {value}")
        if self.smoothing != "auto" and not (isinstance(self.smoothing, float | int) and 0 <= self.smoothing < 1):
            raise ValueError(f"smoothing must be at least 0 and below 1, not {self.smoothing}")
        if self.shapley_samples < 1:
            raise ValueError(f"shapley_samples must be 1 or more, not {self.shapley_samples}")
        if not 0 < self.mmd_rate < float("inf"):
            raise ValueError(f"mmd_rate must be above 0, not {self.mmd_rate}; mmd=false turns BatchNorm MMD off")

    def choices(self) -> Choices:
        """The choices of the preset, replaced by those that are set."""
        names = [field.name for field in dataclasses.fields(Choices)]
        given = {name: getattr(self, name) for name in names if getattr(self, name) != "auto"}
        return dataclasses.replace(PRESETS[self.preset], **given)

    def gate_at(self, round: int, rounds: int) -> float:
        return self.gate + (self.gate_end - self.gate) * (round - 1) / max(rounds - 1, 1)
