"""Normalising feature maps by a mixture of batch, instance and layer statistics.

Maps are `(B, E, P)`: P pixels of E channels of B samples, in any memory layout; feature vectors are maps of one pixel.
Maps are large and their moments are small, so the gradient is written out to need few passes over the maps.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor

Part = Literal["batch", "instance", "layer"]
Moments = tuple[Tensor, Tensor]
"""A mean and a biased variance, of one shape."""

_POOLED_OVER: dict[Part, int | None] = {"batch": 0, "instance": None, "layer": 1}


def mixed_norm(
    maps: Tensor,
    weight: Tensor,
    bias: Tensor,
    mean_ratios: Tensor,
    var_ratios: Tensor,
    parts: Sequence[Part],
    running: Moments | None = None,
    eps: float = 1e-5,
) -> tuple[Tensor, Moments]:
    """weight (maps - mean) / sqrt(var + eps) + bias, `(B, E, P)`, and the moments of the first part, without gradient.

    `mean` is the sum of the parts' means times `mean_ratios` `(len(parts),)`, `var` of their variances times
    `var_ratios`; `weight` and `bias` are `(E,)`. The moments of a batch are `(1, E)`, of instances `(B, E)`, of layers
    `(B, 1)`; `running` moments `(1, E)`, if given, replace the batch's. First derivatives only.
    """
    out, mean, var = _mixed_norm(maps, weight, bias, mean_ratios, var_ratios, tuple(parts), running, eps)
    return out, (mean, var)


class _MixedNorm(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        maps: Tensor,
        weight: Tensor,
        bias: Tensor,
        mean_ratios: Tensor,
        var_ratios: Tensor,
        parts: tuple[Part, ...],
        running: Moments | None,
        eps: float,
    ) -> tuple[Tensor, Tensor, Tensor]:
        own_mean = maps.mean(2)
        # Centred before squaring, for precision; torch.var_mean takes ten times as long on a CPU.
        own_var = F.mse_loss(maps, own_mean[..., None].expand_as(maps), reduction="none").mean(2)
        statistics = [
            running if part == "batch" and running else _pooled(own_mean, own_var, _POOLED_OVER[part]) for part in parts
        ]
        mean = _weighted(mean_ratios, [part_mean for part_mean, _ in statistics])
        rstd = _weighted(var_ratios, [part_var for _, part_var in statistics]).add_(eps).rsqrt_()
        scale = weight * rstd
        shift = torch.addcmul(bias, mean, scale, value=-1)
        ctx.parts, ctx.has_running = parts, running is not None
        flat = [tensor for moments in statistics for tensor in moments]
        ctx.save_for_backward(maps, mean_ratios, var_ratios, own_mean, mean, rstd, scale, *flat)
        ctx.mark_non_differentiable(*statistics[0])
        return torch.addcmul(shift[..., None], maps, scale[..., None]), *statistics[0]

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        maps, mean_ratios, var_ratios, own_mean, mean, rstd, scale, *statistics = ctx.saved_tensors
        means, variances, grad = statistics[::2], statistics[1::2], grads[0]
        product = grad * maps
        # The result is maps * scale + shift, where shift = bias - mean * scale and scale = weight * rstd.
        by_shift = grad.sum(2)
        by_scale = torch.addcmul(product.sum(2), mean, by_shift, value=-1)
        by_mean = (scale * by_shift).neg_()
        by_var = (by_scale * scale).mul_(rstd).mul_(rstd).mul_(-0.5)
        by_own_mean, by_own_var = torch.zeros_like(by_mean), torch.zeros_like(by_var)
        ratios = zip(mean_ratios, var_ratios, strict=True)  # as tensors: a GPU is not waited for
        for part, part_mean, (mean_ratio, var_ratio) in zip(ctx.parts, means, ratios, strict=True):
            if part == "batch" and ctx.has_running:
                continue
            dim = _POOLED_OVER[part]
            if dim is None:
                by_own_mean.addcmul_(by_mean, mean_ratio)
                by_own_var.addcmul_(by_var, var_ratio)
                continue
            by_part_var = by_var.mean(dim, keepdim=True)
            by_own_mean.addcmul_(by_mean.mean(dim, keepdim=True), mean_ratio)
            by_own_mean.addcmul_(own_mean - part_mean, by_part_var * (2 * var_ratio))  # variance between maps
            by_own_var.addcmul_(by_part_var, var_ratio)  # variance within
        slope = by_own_var.mul_(2 / maps.shape[2])
        offset = by_own_mean.div_(maps.shape[2]).addcmul_(own_mean, slope, value=-1)
        by_maps = torch.addcmul(offset[..., None], maps, slope[..., None], out=product)
        return (
            by_maps.addcmul_(grad, scale[..., None]),
            (by_scale * rstd).sum(0),
            by_shift.sum(0),
            torch.stack([(by_mean * part_mean).sum() for part_mean in means]),
            torch.stack([(by_var * part_var).sum() for part_var in variances]),
            None,
            None,
            None,
        )


_mixed_norm: Callable[..., tuple[Tensor, Tensor, Tensor]] = _MixedNorm.apply


def _pooled(mean: Tensor, var: Tensor, dim: int | None) -> Moments:
    """Moments over the batch (dim 0), over channels (dim 1) or unchanged (None), from those of each map `(B, E)`."""
    if dim is None:
        return mean, var
    together = mean.mean(dim, keepdim=True)
    # Variance within plus variance between: never negative, unlike the equal E[x^2] - E[x]^2.
    between = (mean - together).square_().mean(dim, keepdim=True)
    return together, between.add_(var.mean(dim, keepdim=True))


def _weighted(ratios: Tensor, values: Sequence[Tensor]) -> Tensor:
    """The sum of `values`, broadcast to each other, times `ratios`."""
    total = ratios[0] * values[0]
    for place, value in enumerate(values[1:], start=1):
        total = torch.addcmul(total, ratios[place], value)
    return total


def standardised(x: Tensor, eps: float = 1e-5) -> Tensor:
    """Every channel of every image `(B, C, H, W)` with mean 0 and variance 1; a flat channel is 0."""
    centred = x - x.mean((2, 3), keepdim=True)
    return centred * (centred.square().mean((2, 3), keepdim=True) + eps).rsqrt()
