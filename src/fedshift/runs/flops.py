"""Counting floating-point operations as they happen."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch.utils.flop_counter import FlopCounterMode


def flop_counter() -> FlopCounterMode:
    """Counts matrix products and convolutions executed inside it, two operations for each multiplication. Norms,
    activations, losses and optimizer steps, a few operations a value, are not counted."""
    return FlopCounterMode(display=False, custom_mapping={torch.ops.aten.convolution_backward: _convolution_backward})


def _convolution_backward(
    grad_out: Sequence[int],
    x: Sequence[int],
    weight: Sequence[int],
    bias: Any,
    stride: Any,
    padding: Any,
    dilation: Any,
    transposed: bool,
    output_padding: Any,
    groups: int,
    wanted: Sequence[bool],
    **results: Any,
) -> int:
    """From shapes. Either gradient, of the input and of the weight, multiplies as often as the forward pass.

    torch's own count forgets `groups` in the weight's gradient: 96 times too much for 96 depthwise channels.
    """
    positions = x if transposed else grad_out
    forward = 2 * math.prod(positions) * math.prod(weight[1:])
    return forward * (bool(wanted[0]) + bool(wanted[1]))
