"""Means and variances of feature maps, and normalising by them.

Maps are `(B, E, P)`: P pixels of E channels of B samples, in any memory layout; a vector's features are maps of one
pixel. Written for few passes over them, because they are large and everything computed from their moments is small.
Gradients of gradients are not supported.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor


class _Moments(torch.autograd.Function):
    """Mean and variance over pixels. torch.var_mean takes ten times as long on a CPU."""

    @staticmethod
    def forward(ctx: Any, maps: Tensor) -> tuple[Tensor, Tensor]:
        mean = maps.mean(2)
        # Centred first: E[x^2] - E[x]^2 loses all digits where the mean is large.
        var = (maps - mean[..., None]).square_().mean(2)
        ctx.save_for_backward(maps, mean)
        return mean, var

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        maps, mean = ctx.saved_tensors
        grad_mean, grad_var = grads
        slope = grad_var * (2 / maps.shape[2])
        offset = grad_mean / maps.shape[2] - mean * slope
        return torch.addcmul(offset[..., None], maps, slope[..., None])


class _ScaleShift(torch.autograd.Function):
    """maps scale + shift, the latter two `(B, E)`; one new set of maps forth and one back."""

    @staticmethod
    def forward(ctx: Any, maps: Tensor, scale: Tensor, shift: Tensor) -> Tensor:
        ctx.save_for_backward(maps, scale)
        return torch.addcmul(shift[..., None], maps, scale[..., None])

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        maps, scale = ctx.saved_tensors
        (grad,) = grads
        product = grad * maps
        grad_scale = product.sum(2)
        return torch.mul(grad, scale[..., None], out=product), grad_scale, grad.sum(2)


_moments: Callable[[Tensor], tuple[Tensor, Tensor]] = _Moments.apply
_scale_shift: Callable[[Tensor, Tensor, Tensor], Tensor] = _ScaleShift.apply


def moments(maps: Tensor) -> tuple[Tensor, Tensor]:
    """Mean and variance (biased) of each sample's channels: maps `(B, E, P)` to twice `(B, E)`."""
    return _moments(maps)


def batch_moments(mean: Tensor, var: Tensor) -> tuple[Tensor, Tensor]:
    """Mean and variance of each channel over a batch, `(E,)`, from those of its samples, `(B, E)`."""
    # Variance within plus variance between: never negative, unlike the equal E[x^2] - E[x]^2.
    between, pooled = torch.var_mean(mean, dim=0, correction=0)
    return pooled, var.mean(0) + between


def layer_moments(mean: Tensor, var: Tensor) -> tuple[Tensor, Tensor]:
    """Mean and variance of each sample over its channels, `(B, 1)`, from those of the channels, `(B, E)`."""
    between, pooled = torch.var_mean(mean, dim=1, correction=0, keepdim=True)
    return pooled, var.mean(1, keepdim=True) + between


def normalise(maps: Tensor, mean: Tensor, var: Tensor, weight: Tensor, bias: Tensor, eps: float) -> Tensor:
    """weight (maps - mean) / sqrt(var + eps) + bias: maps `(B, E, P)`, moments `(B, E)`, weight and bias `(E,)`."""
    scale = weight * torch.rsqrt(var + eps)
    return _scale_shift(maps, scale, torch.addcmul(bias, mean, scale, value=-1))
