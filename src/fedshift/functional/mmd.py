"""Maximum mean discrepancy (MMD): how far apart two sets of samples are as distributions.

A. Gretton et al.: A Kernel Two-Sample Test. JMLR 2012. Several kernels at once: M. Long, Y. Cao, J. Wang, M. Jordan:
Learning Transferable Features with Deep Adaptation Networks. ICML 2015.

All functions return the squared MMD for the sum of five Gaussian kernels, as one of two estimators, for sets of n and m
samples. A kernel's width is a multiple of the mean squared distance s between samples of both sets together, without
gradient.

- `biased`: kernels exp(-||u - v||^2 / (3^k s)), k = -3 ... 1. s is over different samples, the means of the kernels are
  over all pairs, including a sample with itself: it is never negative, and 0 for equal sets.
- `authors`: that of CSAC's authors. Kernels exp(-||u - v||^2 / (2 3^k s)). s is over all pairs, also of a sample with
  itself; within a set, means of the kernels are over different samples. To that they add 2 / (n - 1). For equal sets it
  is not 0: it lies between -8 / n and 2 / (n - 1).
"""

from __future__ import annotations

from typing import Any, Literal

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

Estimator = Literal["authors", "biased"]

BANDWIDTHS = (1 / 27, 1 / 9, 1 / 3, 1.0, 3.0)


def mmd(x: Tensor, y: Tensor, estimator: Estimator = "biased") -> Tensor:
    """Samples `(..., n, d)` and `(..., m, d)` to `(...)`: one number for each pair of sets."""
    return _from_products(x @ x.mT, y @ y.mT, x @ y.mT, estimator)


def pairwise_mmd(x: Tensor, y: Tensor, estimator: Estimator = "biased") -> Tensor:
    """Sets `(K, n, d)` and `(L, m, d)` to `(K, L)`: every one of the first with every one of the second."""
    xx, yy, xy = _Products.apply(x, y)  # type: ignore[no-untyped-call]
    return _from_products(xx[:, None], yy[None], xy, estimator)


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


def _from_products(xx: Tensor, yy: Tensor, xy: Tensor, estimator: Estimator) -> Tensor:
    """MMD from the inner products `(..., n, n)`, `(..., m, m)` and `(..., n, m)` of the samples."""
    norms_x, norms_y = xx.diagonal(dim1=-2, dim2=-1), yy.diagonal(dim1=-2, dim2=-1)
    within_x, within_y = _distances(norms_x, norms_x, xx), _distances(norms_y, norms_y, yy)
    between = _distances(norms_x, norms_y, xy)
    n, m = xy.shape[-2:]
    is_authors = estimator == "authors"
    with torch.no_grad():
        samples = n + m
        total = _sum(within_x) + _sum(within_y) + 2 * _sum(between)
        pairs = samples * samples if is_authors else samples * (samples - 1)
        # Distances below the rounding error of the products are noise and must not set the scale.
        number = torch.finfo(xy.dtype)
        noise = number.eps * (norms_x.sum(-1) + norms_y.sum(-1)) / samples + number.tiny**0.5
        unit = torch.maximum(total / pairs, noise)[..., None, None]
        if is_authors:
            unit = 2 * unit
    mean_x, mean_y, mean_between = (
        _kernel(distances / unit).mean((-2, -1)) for distances in (within_x, within_y, between)
    )
    if is_authors and min(n, m) > 1:  # A single sample has no other to be compared with.
        mean_x, mean_y = _without_diagonal(mean_x, n), _without_diagonal(mean_y, m)
        return mean_x + mean_y - 2 * mean_between + 1 / (n - 1) + 1 / (m - 1)
    return mean_x + mean_y - 2 * mean_between


def _kernel(distances: Tensor) -> Tensor:
    return torch.stack([torch.exp(distances / -bandwidth) for bandwidth in BANDWIDTHS]).sum(0)


def _without_diagonal(mean: Tensor, n: int) -> Tensor:
    """The mean over pairs of different samples, from that over all n^2 pairs: a sample and itself have kernels of 1."""
    return (mean * n - len(BANDWIDTHS)) / (n - 1)


def _distances(norms_x: Tensor, norms_y: Tensor, products: Tensor) -> Tensor:
    """||u - v||^2 = ||u||^2 + ||v||^2 - 2 <u, v>, which rounding may push below 0."""
    return (norms_x[..., :, None] + norms_y[..., None, :] - 2 * products).clamp(min=0)


def _sum(matrices: Tensor) -> Tensor:
    return matrices.sum((-2, -1))
