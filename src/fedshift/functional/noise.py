"""Noise on models as dictionaries of tensors."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor


def add_noise(weights: Mapping[str, Tensor], deviation: float, generator: torch.Generator) -> dict[str, Tensor]:
    """Independent Gaussian noise on every number of every floating tensor; integer buffers stay.

    Running variances are kept at 0 or more, because a network takes their root.
    """
    noisy: dict[str, Tensor] = {}
    for name, value in weights.items():
        if not value.is_floating_point():
            noisy[name] = value
            continue
        drawn = torch.randn(value.shape, generator=generator, dtype=value.dtype)
        noisy[name] = value + deviation * drawn
        if name.endswith("running_var"):
            noisy[name].clamp_(min=0)
    return noisy
