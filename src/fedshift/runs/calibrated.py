"""What `results.json` says of how sure a model may be, and how that is told to people."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any

from pydantic import BaseModel, Field

Share = Annotated[float, Field(ge=0, le=1)]
Count = Annotated[int, Field(ge=0, lt=2**63)]
Part = Annotated[list[Count], Field(min_length=2, max_length=2)]
Interval = Annotated[list[Share], Field(min_length=3, max_length=3)]
"""A value and its 95 % interval."""


class Reliability(BaseModel):
    """`parts`: wrong and right predictions in each part of the range of confidence. `error`: see
    `functional.calibration.calibration_error`."""

    error: float | None = None
    parts: list[Part] = Field(default_factory=list, max_length=1000)


class BeforeAfter(BaseModel):
    """Without and with the temperature. `far`: the share of inputs that are unlike the sources' data."""

    before: Reliability
    after: Reliability
    far: Share | None = None


class TwoClasses(BaseModel):
    """How well two classes are told apart at one site."""

    positives: Count = 0
    negatives: Count = 0
    auc: Interval | None = None
    sensitivity: Interval | None = None
    specificity: Interval | None = None


class Calibrated(BaseModel):
    """Empty where it was not measured: segmentation, no labelled validation, a budget of privacy, earlier versions."""

    temperature: float = 1.0
    far: float | None = None
    samples: Count = 0
    validation: BeforeAfter | None = None
    targets: dict[str, BeforeAfter] = Field(default_factory=dict)
    positive: str = ""
    two_classes: dict[str, TwoClasses] = Field(default_factory=dict)


def calibration_of(results: Mapping[str, Any]) -> Calibrated:
    return Calibrated.model_validate(results.get("calibration") or {})


def told(found: Calibrated) -> list[str]:
    """Sentences on it; none where nothing was measured."""
    lines = []
    if found.validation and found.temperature != 1.0:
        lines.append(
            f"Probabilities are calibrated: scores are divided by the temperature {found.temperature:.2f}, fitted on"
            f" {found.samples:,} validation samples of the sources. Their calibration error went from"
            f" {_points(found.validation.before)} to {_points(found.validation.after)}."
        )
    elif found.validation:
        lines.append(f"Probabilities are as they were trained: calibration error {_points(found.validation.after)}.")
    for site, one in found.targets.items():
        text = f"At {site} the calibration error is {_points(one.after)}"
        text += f" ({_points(one.before)} uncalibrated)" if found.temperature != 1.0 else ""
        if one.far is not None:
            text += f", and {100 * one.far:.0f} % of its samples are unlike the sources' data (1 % at the sources)"
        lines.append(f"{text}.")
    if found.targets and found.temperature != 1.0:
        lines.append(
            "A temperature from the sources knows no other site: where data look different, models are too sure."
        )
    return lines


def two_class_rows(found: Calibrated) -> list[tuple[str, str, str, str, str]]:
    """Site, samples of the positive and the negative class, AUC, sensitivity and specificity in percent."""
    return [
        (
            site,
            f"{one.positives:,} / {one.negatives:,}",
            _with_interval(one.auc),
            _with_interval(one.sensitivity),
            _with_interval(one.specificity),
        )
        for site, one in found.two_classes.items()
    ]


def _with_interval(value: list[float] | None) -> str:
    if value is None:
        return "-"
    return f"{100 * value[0]:.1f} ({100 * value[1]:.1f}-{100 * value[2]:.1f})"


def _points(one: Reliability) -> str:
    return "unknown" if one.error is None else f"{100 * one.error:.1f} points"
