"""Normalising feature maps by a mixture of batch, instance and layer statistics.

Maps are `(B, E, P)`: P pixels of E channels of B samples, in any memory layout; a vector's features are maps of one
pixel. Maps are large and everything computed from their moments is small, so there are few passes over maps and the
gradient is written out.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Literal

import torch
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
) -> tuple[Tensor, Tensor, Tensor]:
    """weight (maps - mean) / sqrt(var + eps) + bias, `(B, E, P)`, and the moments of each map, twice `(B, E)`.

    `mean` is the sum of the parts' means times `mean_ratios` `(len(parts),)`, `var` of their variances times
    `var_ratios`; `weight`, `bias` and the `running` moments, which stand in for the batch's where given, are `(E,)`.
    The moments returned are constants. First derivatives only.
    """
    return _mixed_norm(maps, weight, bias, mean_ratios, var_ratios, tuple(parts), running, eps)


def pooled_moments(moments: Moments, dim: int | None) -> Moments:
    """The moments of maps put together along `dim`, which keeps length 1, from those of each, `(B, E)`: over a batch
    (0), over channels (1), or of each as it is (None)."""
    mean, var = moments
    if dim is None:
        return moments
    together = mean.mean(dim, keepdim=True)
    # Variance within plus variance between: never negative, unlike the equal E[x^2] - E[x]^2.
    return together, var.mean(dim, keepdim=True) + (mean - together).square_().mean(dim, keepdim=True)


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
        # Centred first, for the digits; torch.var_mean takes ten times as long on a CPU.
        own_var = (maps - own_mean[..., None]).square_().mean(2)
        statistics = [
            running if part == "batch" and running else pooled_moments((own_mean, own_var), _POOLED_OVER[part])
            for part in parts
        ]
        mean = _weighted(mean_ratios, [part_mean for part_mean, _ in statistics])
        rstd = torch.rsqrt(_weighted(var_ratios, [part_var for _, part_var in statistics]) + eps)
        scale = weight * rstd
        shift = torch.addcmul(bias, mean, scale, value=-1)
        ctx.parts, ctx.running = parts, running is not None
        ctx.save_for_backward(maps, mean_ratios, var_ratios, own_mean, mean, rstd, scale, *sum(statistics, start=()))
        ctx.mark_non_differentiable(own_mean, own_var)
        return torch.addcmul(shift[..., None], maps, scale[..., None]), own_mean, own_var

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        maps, mean_ratios, var_ratios, own_mean, mean, rstd, scale, *statistics = ctx.saved_tensors
        means, variances, grad = statistics[::2], statistics[1::2], grads[0]
        product = grad * maps
        # The result is maps * scale + shift, where shift = bias - mean * scale and scale = weight * rstd.
        by_shift = grad.sum(2)
        by_scale = product.sum(2) - mean * by_shift
        by_mean = -scale * by_shift
        by_var = -0.5 * by_scale * scale * rstd.square()
        by_own_mean, by_own_var = torch.zeros_like(by_mean), torch.zeros_like(by_var)
        for number, part in enumerate(ctx.parts):
            if part == "batch" and ctx.running:
                continue
            dim = _POOLED_OVER[part]
            to_mean = by_mean if dim is None else by_mean.mean(dim, keepdim=True)
            to_var = by_var if dim is None else by_var.mean(dim, keepdim=True)
            to_var = var_ratios[number] * to_var
            by_own_var += to_var
            by_own_mean += mean_ratios[number] * to_mean
            if dim is not None:  # the variance between maps
                by_own_mean += 2 * to_var * (own_mean - means[number])
        slope = by_own_var * (2 / maps.shape[2])
        offset = by_own_mean / maps.shape[2] - own_mean * slope
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


def _weighted(ratios: Tensor, values: Sequence[Tensor]) -> Tensor:
    """The sum of `values`, broadcast to each other, times `ratios`."""
    total = ratios[0] * values[0]
    for ratio, value in zip(ratios[1:], values[1:], strict=True):
        total = total + ratio * value
    return total


_mixed_norm: Callable[..., tuple[Tensor, Tensor, Tensor]] = _MixedNorm.apply
