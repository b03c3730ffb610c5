"""Means and variances of feature maps, and normalising by them.

Written for few passes over the maps: they are large, while everything computed from their moments is small.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

_TINY = 1e-5


class _Moments(torch.autograd.Function):
    """torch.var_mean takes twenty times as long on a CPU, and its gradient several passes more."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> tuple[Tensor, Tensor]:
        batch, channels, height, width = x.shape
        x = x.contiguous()
        _, mean, rstd = torch.native_group_norm(x, None, None, batch, channels, height * width, channels, _TINY)
        ctx.save_for_backward(x, mean)
        return mean, rstd.pow(-2).sub_(_TINY).clamp_(min=0)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        x, mean = ctx.saved_tensors
        grad_mean, grad_var = grads
        pixels = x.shape[2] * x.shape[3]
        slope = grad_var * (2 / pixels)
        offset = grad_mean / pixels - mean * slope
        grad: Tensor = (x * slope[..., None, None]).add_(offset[..., None, None])
        return grad


class _ScaleShift(torch.autograd.Function):
    """x scale + shift, with x `(B, E, H, W)` and the others `(B, E)`; one new map each way."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, scale: Tensor, shift: Tensor) -> Tensor:
        ctx.save_for_backward(x, scale)
        return (x * scale[..., None, None]).add_(shift[..., None, None])

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        x, scale = ctx.saved_tensors
        (grad,) = grads
        product = grad * x
        grad_scale = product.sum((2, 3))
        return torch.mul(grad, scale[..., None, None], out=product), grad_scale, grad.sum((2, 3))


_moments: Callable[[Tensor], tuple[Tensor, Tensor]] = _Moments.apply
_scale_shift: Callable[[Tensor, Tensor, Tensor], Tensor] = _ScaleShift.apply


def moments(x: Tensor) -> tuple[Tensor, Tensor]:
    """Mean and variance (biased) of each sample's channels: `(B, E, H, W)` or `(B, E)` to twice `(B, E)`.

    A feature of a vector is a map of one pixel: it is its own mean and does not vary.
    """
    if x.ndim == 2:
        return x, torch.zeros_like(x)
    return _moments(x)


def batch_moments(mean: Tensor, var: Tensor) -> tuple[Tensor, Tensor]:
    """Mean and variance of each channel over a batch, `(E,)`, from those of its samples, `(B, E)`."""
    return _pooled(mean, var, dim=0)


def layer_moments(mean: Tensor, var: Tensor) -> tuple[Tensor, Tensor]:
    """Mean and variance of each sample over its channels, `(B, 1)`, from those of the channels, `(B, E)`."""
    pooled_mean, pooled_var = _pooled(mean, var, dim=1)
    return pooled_mean[:, None], pooled_var[:, None]


def normalise(x: Tensor, mean: Tensor, var: Tensor, weight: Tensor, bias: Tensor, eps: float) -> Tensor:
    """weight (x - mean) / sqrt(var + eps) + bias, for x `(B, E, H, W)` or `(B, E)` and the others `(B, E)` or
    broadcast to it."""
    scale = weight * torch.rsqrt(var + eps)
    shift = bias - mean * scale
    if x.ndim == 2:
        return x * scale + shift
    return _scale_shift(x, scale.expand(x.shape[:2]), shift.expand(x.shape[:2]))


def _pooled(mean: Tensor, var: Tensor, dim: int) -> tuple[Tensor, Tensor]:
    """Moments of a union of equally large groups. Variance within plus variance between: never negative, unlike the
    equal E[x^2] - E[x]^2."""
    pooled = mean.mean(dim)
    return pooled, var.mean(dim) + (mean - pooled.unsqueeze(dim)).square().mean(dim)
