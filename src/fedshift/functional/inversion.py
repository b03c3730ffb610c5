"""Reconstruction of inputs from their gradient, and how close it comes.

L. Zhu, Z. Liu, S. Han: Deep Leakage from Gradients. NeurIPS 2019: search for inputs whose gradient is the observed one.
The distance and the search are those of J. Geiping, H. Bauermeister, H. Dröge, M. Moeller: Inverting Gradients - How
easy is it to break privacy in federated learning? NeurIPS 2020. They also work for networks with ReLU and max pooling,
while the second-order search of the first paper needs a smooth network.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import avg_pool2d

_TINY = 1e-12


@dataclass(frozen=True)
class Search:
    """`steps` of Adam on the signs of the gradient, at `rate`, which is divided by 10 after 3/8, 5/8 and 7/8 of the
    steps. `smoothness` is the weight of total variation. The best result of several `starts` is used."""

    steps: int = 400
    rate: float = 0.1
    smoothness: float = 0.01
    starts: int = 1


def cosine_distance(found: Sequence[Tensor], seen: Sequence[Tensor]) -> Tensor:
    """1 - cosine of the angle between two gradients, each given as tensors. Their lengths do not matter."""
    dot = torch.stack([(a * b).sum() for a, b in zip(found, seen, strict=True)]).sum()
    squares = [torch.stack([part.square().sum() for part in gradient]).sum() for gradient in (found, seen)]
    return 1 - dot / (squares[0] * squares[1]).sqrt().clamp_min(_TINY)


def total_variation(images: Tensor) -> Tensor:
    """The mean absolute difference between horizontal neighbours plus that between vertical ones, in images
    `(n, channels, height, width)`."""
    across = (images[..., 1:] - images[..., :-1]).abs().mean()
    down = (images[..., 1:, :] - images[..., :-1, :]).abs().mean()
    return across + down


def infer_labels(bias_gradient: Tensor, predicted: Tensor, count: int) -> Tensor:
    """The labels `(count,)`, ascending, of the samples behind the gradient `(classes,)` of the last layer's bias.

    With cross-entropy that gradient is the mean prediction minus the share of each class. So a rough idea of the mean
    prediction, `predicted` `(classes,)`, gives the shares. Counts are rounded by largest remainder to add up to
    `count`.
    """
    wanted = (predicted - bias_gradient).clamp_min(0).to(torch.float64)
    wanted = wanted * count / wanted.sum().clamp_min(_TINY)
    counts = wanted.floor()
    left = count - int(counts.sum())
    counts[(wanted - counts).argsort(descending=True, stable=True)[:left]] += 1
    return torch.repeat_interleave(torch.arange(len(counts)), counts.to(torch.int64))


def momentum_total(steps: int, momentum: float) -> float:
    """How often gradients count in an update of `steps` of SGD, summed over steps: the t-th gradient counts
    1 + m + ... + m^(steps - t) times. An update divided by the rate and by this is the mean gradient of its steps."""
    return sum(sum(momentum**power for power in range(steps - step)) for step in range(steps))


def invert(
    gradient_of: Callable[[Tensor], Sequence[Tensor]],
    seen: Sequence[Tensor],
    shape: tuple[int, ...],
    search: Search,
    generator: torch.Generator,
) -> Tensor:
    """Images of `shape` in [0, 1] whose gradient has the direction of `seen`: those with the lowest objective in the
    search. `gradient_of` must be differentiable in its argument."""

    return search_images(lambda images: cosine_distance(gradient_of(images), seen), shape, search, generator)


def search_images(
    distance: Callable[[Tensor], Tensor], shape: tuple[int, ...], search: Search, generator: torch.Generator
) -> Tensor:
    """Images of `shape` in [0, 1] for which `distance` and the total variation are least together."""

    def objective(images: Tensor) -> Tensor:
        return distance(images) + search.smoothness * total_variation(images)

    ends = [_descend(objective, shape, search, generator) for _ in range(search.starts)]
    return min(ends, key=lambda end: end[0])[1]


def _descend(
    objective: Callable[[Tensor], Tensor], shape: tuple[int, ...], search: Search, generator: torch.Generator
) -> tuple[float, Tensor]:
    """The lowest objective on the way from random grey images, and the images that have it."""
    images = torch.rand(shape, generator=generator).mul_(0.2).add_(0.4).requires_grad_()
    optimizer = torch.optim.Adam([images], lr=search.rate)
    turns = [math.ceil(search.steps * part / 8) for part in (3, 5, 7)]
    schedule = torch.optim.lr_scheduler.MultiStepLR(optimizer, turns, gamma=0.1)
    lowest, best = math.inf, images.detach().clone()
    for _ in range(search.steps):
        value = objective(images)
        if float(value.detach()) < lowest:
            lowest, best = float(value.detach()), images.detach().clone()
        (slope,) = torch.autograd.grad(value, [images])
        images.grad = slope.sign()
        optimizer.step()
        schedule.step()
        with torch.no_grad():
            images.clamp_(0, 1)
    return lowest, best


def psnr(found: Tensor, original: Tensor) -> Tensor:
    """Peak signal-to-noise ratio in dB, `(n,)`, of images in [0, 1]: 10 log10(1 / mean squared error)."""
    return -10 * (found - original).square().flatten(1).mean(1).log10()


def ssim(found: Tensor, original: Tensor, window: int = 7) -> Tensor:
    """Structural similarity `(n,)` of images `(n, channels, height, width)` in [0, 1]: 1 for equal ones, about 0 for
    unrelated ones (Z. Wang, A. Bovik, H. Sheikh, E. Simoncelli: Image Quality Assessment. TIP 2004, Eq. 13), with
    means, variances and covariances over square windows."""

    def mean(x: Tensor) -> Tensor:
        return avg_pool2d(x, min(window, *x.shape[2:]), 1)

    a, b = found.double(), original.double()
    mean_a, mean_b = mean(a), mean(b)
    variances = mean(a * a) - mean_a**2 + mean(b * b) - mean_b**2
    covariance = mean(a * b) - mean_a * mean_b
    first, second = 0.01**2, 0.03**2
    above = (2 * mean_a * mean_b + first) * (2 * covariance + second)
    return (above / ((mean_a**2 + mean_b**2 + first) * (variances + second))).flatten(1).mean(1)
