"""Maximum mean discrepancy (MMD): how far apart two sets of samples are as distributions.

A. Gretton et al.: A Kernel Two-Sample Test. JMLR 2012. Several kernels at once: M. Long, Y. Cao, J. Wang, M. Jordan:
Learning Transferable Features with Deep Adaptation Networks. ICML 2015.

All functions return the squared MMD for the sum of the Gaussian kernels exp(-||u - v||^2 / (b s)), b in `bandwidths`.
s is the mean squared distance between two different samples of both sets together, without gradient. The mean is over
all pairs, including a sample with itself: it is never negative, and 0 for equal sets.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

BANDWIDTHS = (1 / 27, 1 / 9, 1 / 3, 1.0, 3.0)


def mmd(x: Tensor, y: Tensor, bandwidths: Sequence[float] = BANDWIDTHS) -> Tensor:
    """Samples `(..., n, d)` and `(..., m, d)` to `(...)`: one number for each pair of sets."""
    return _from_products(x @ x.mT, y @ y.mT, x @ y.mT, bandwidths)


def pairwise_mmd(x: Tensor, y: Tensor, bandwidths: Sequence[float] = BANDWIDTHS) -> Tensor:
    """Sets `(K, n, d)` and `(L, m, d)` to `(K, L)`: every one of the first with every one of the second."""
    xx, yy, xy = _Products.apply(x, y)  # type: ignore[no-untyped-call]
    return _from_products(xx[:, None], yy[None], xy, bandwidths)


def squared_distances(x: Tensor, y: Tensor) -> Tensor:
    """Rows `(..., n, d)` and `(..., m, d)` to `(..., n, m)`, by one matrix product."""
    return _distances(x.square().sum(-1), y.square().sum(-1), x @ y.mT)


class _Products(torch.autograd.Function):
    """Inner products of sets `(K, n, d)` and `(L, m, d)`: `(K, n, n)`, `(L, m, m)` and `(K, L, n, m)`.

    They are the most expensive part of an alignment. Autograd's backward pass would take twice as long: it multiplies
    once for each factor of x x^T and adds up full-sized gradients.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        ctx.save_for_backward(x, y)
        (sets_x, n, _), (sets_y, m, _) = x.shape, y.shape
        xy = (x.flatten(0, 1) @ y.flatten(0, 1).mT).view(sets_x, n, sets_y, m).transpose(1, 2)
        return x @ x.mT, y @ y.mT, xy

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, to_xx: Tensor, to_yy: Tensor, to_xy: Tensor) -> tuple[Tensor, Tensor]:
        x, y = ctx.saved_tensors
        between = to_xy.transpose(1, 2).reshape(x.shape[0] * x.shape[1], -1)
        to_x = (between @ y.flatten(0, 1)).view_as(x).baddbmm_(to_xx + to_xx.mT, x)
        to_y = (between.mT @ x.flatten(0, 1)).view_as(y).baddbmm_(to_yy + to_yy.mT, y)
        return to_x, to_y


def _from_products(xx: Tensor, yy: Tensor, xy: Tensor, bandwidths: Sequence[float]) -> Tensor:
    """MMD from the inner products `(..., n, n)`, `(..., m, m)` and `(..., n, m)` of the samples."""
    norms_x, norms_y = xx.diagonal(dim1=-2, dim2=-1), yy.diagonal(dim1=-2, dim2=-1)
    within_x, within_y = _distances(norms_x, norms_x, xx), _distances(norms_y, norms_y, yy)
    between = _distances(norms_x, norms_y, xy)
    with torch.no_grad():
        samples = xy.shape[-2] + xy.shape[-1]
        total = _sum(within_x) + _sum(within_y) + 2 * _sum(between)
        # Distances below the rounding error of the products are noise and must not set the scale.
        number = torch.finfo(xy.dtype)
        noise = number.eps * (norms_x.sum(-1) + norms_y.sum(-1)) / samples + number.tiny**0.5
        unit = torch.maximum(total / (samples * (samples - 1)), noise)[..., None, None]
    mean_x, mean_y, mean_between = (
        _kernel(distances / unit, bandwidths).mean((-2, -1)) for distances in (within_x, within_y, between)
    )
    return mean_x + mean_y - 2 * mean_between


def _kernel(distances: Tensor, bandwidths: Sequence[float]) -> Tensor:
    return torch.stack([torch.exp(distances / -bandwidth) for bandwidth in bandwidths]).sum(0)


def _distances(norms_x: Tensor, norms_y: Tensor, products: Tensor) -> Tensor:
    """||u - v||^2 = ||u||^2 + ||v||^2 - 2 <u, v>, which rounding may push below 0."""
    return (norms_x[..., :, None] + norms_y[..., None, :] - 2 * products).clamp(min=0)


def _sum(matrices: Tensor) -> Tensor:
    return matrices.sum((-2, -1))
