"""Gradient reversal: what follows learns to tell domains apart, what comes before learns to prevent it.

Y. Ganin, V. Lempitsky: Unsupervised Domain Adaptation by Backpropagation. ICML 2015.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor


def reverse_gradient(x: Tensor, strength: float) -> Tensor:
    """x as it is; its gradient is multiplied by -`strength`."""
    reversed_: Tensor = _Reverse.apply(x, strength)  # type: ignore[no-untyped-call]
    return reversed_


def reversal_strength(progress: float, sharpness: float = 10.0) -> float:
    """2 / (1 + exp(-sharpness p)) - 1: from 0 at the beginning (p = 0) to almost 1 at the end (p = 1)."""
    return 2 / (1 + math.exp(-sharpness * progress)) - 1


class _Reverse(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, strength: float) -> Tensor:
        ctx.strength = strength
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return -ctx.strength * gradient, None
