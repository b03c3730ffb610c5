"""Training under a budget for single samples: DP-SGD.

M. Abadi, A. Chu, I. Goodfellow, B. McMahan, I. Mironov, K. Talwar, L. Zhang: Deep Learning with Differential Privacy.
CCS 2016, Algorithm 1: each sample's gradient is clipped, and noise is added to their sum. Batches are Poisson samples,
as the accountant assumes (functional/accountant.py): in each step every sample takes part with the same chance,
independently of the others, so batches differ in size and may be empty.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call, grad, vmap
from torch.nn.modules.batchnorm import _BatchNorm

from fedshift.errors import SiteError
from fedshift.federation.labels import label_loss
from fedshift.federation.site import Labelled
from fedshift.methods.local import augmentation
from fedshift.nn.normalisation import HybridNorm
from fedshift.rng import Rng

_MOST_NUMBERS = 2**26
"""Of gradients of single samples that are in memory at a time."""


def mixing_layers(net: nn.Module) -> list[str]:
    """Layers that would normalise by the batch and remember it."""
    kinds = (_BatchNorm, HybridNorm)
    return [name for name, layer in net.named_modules() if isinstance(layer, kinds) and layer.training]


class CrossEntropy(nn.Module):
    """FedAvg's loss of samples `x` `(B, ...)` with labels `(B, ...)`. What trains by DP-SGD says what its loss is in a
    module like this one, which is called with one sample at a time."""

    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.net = net

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return label_loss(self.net(x), y)


def sampling(samples: int, batch_size: int, epochs: float) -> tuple[float, int]:
    """The chance of a sample to be in a batch, so that one has `batch_size` on average, and the number of steps."""
    return min(1.0, batch_size / samples), max(1, math.ceil(epochs * samples / batch_size))


def train_privately(
    site: Labelled,
    loss: nn.Module,
    optimizer: torch.optim.Optimizer,
    rng: Rng,
    looks: Callable[[Tensor], Sequence[Tensor]] = lambda x: (),
) -> None:
    """Trains what can be trained in `loss` by DP-SGD with the site's own noise, and notes in `site.private` what it
    costs. `loss(x, y, *looks(x))` is that of a batch of one. `looks` change every sample by itself, at random."""
    private, training = site.private, site.plan.training
    assert private is not None
    if mixed := mixing_layers(loss):
        raise SiteError("method-needs", f"{mixed[0]} normalises by the batch, which allows no DP-SGD: use norm=frozen")
    samples = len(site.train)
    rate, steps = sampling(samples, training.batch_size, training.local_epochs)
    before = {name: buffer.clone() for name, buffer in loss.named_buffers()}
    parameters = {name: value for name, value in loss.named_parameters() if value.requires_grad}

    def batches() -> Iterator[Tensor]:
        for _ in range(steps):
            yield torch.from_numpy(private.uniforms(samples) < rate).nonzero()[:, 0]

    for batch in site.train.chosen(batches(), rng, augmentation(site.plan)):
        given = (batch.x, batch.y, *(looks(batch.x) if len(batch.y) else ()))
        summed = clipped_sum(loss, parameters, given, private.clip)
        for name, parameter in parameters.items():
            noise = torch.from_numpy(private.normals(parameter.numel())).reshape(parameter.shape).to(site.device)
            noised = summed[name].double() + private.noise * private.clip * noise
            parameter.grad = (noised / (rate * samples)).to(parameter.dtype)
        optimizer.step()
    if any(not torch.equal(buffer, before[name]) for name, buffer in loss.named_buffers()):
        raise SiteError("method-needs", "a layer's buffers changed in training, which no noise hides: use norm=frozen")
    private.rate, private.steps = rate, steps


def clipped_sum(
    loss: nn.Module, parameters: Mapping[str, Tensor], given: Sequence[Tensor], clip: float
) -> dict[str, Tensor]:
    """The sum over samples of the gradients of their losses, each at most `clip` long over all parameters. `given` are
    the arguments of `loss`, a row for each sample."""
    constant = {name: value.detach() for name, value in loss.named_parameters() if name not in parameters}
    constant |= dict(loss.named_buffers())

    def loss_of(own: Mapping[str, Tensor], *one: Tensor) -> Tensor:
        found: Tensor = functional_call(loss, {**constant, **own}, tuple(value[None] for value in one))
        return found

    each: Any = vmap(grad(loss_of), in_dims=(None, *(0 for _ in given)), randomness="different")
    trained = {name: value.detach() for name, value in parameters.items()}
    summed = {name: torch.zeros_like(value) for name, value in trained.items()}
    size = max(1, _MOST_NUMBERS // max(1, sum(value.numel() for value in trained.values())))
    for start in range(0, len(given[0]), size):
        gradients: dict[str, Tensor] = each(trained, *(value[start : start + size] for value in given))
        norms = torch.stack([value.flatten(1).norm(dim=1) for value in gradients.values()]).norm(dim=0)
        # A gradient that is not finite is none.
        is_finite = torch.isfinite(norms)
        factors = torch.where(is_finite, (clip / norms.clamp_min(1e-12)).clamp_max(1.0), 0.0)
        for name, value in gradients.items():
            known = torch.where(is_finite.reshape(-1, *[1] * (value.dim() - 1)), value, 0.0)
            summed[name] += torch.einsum("n,n...->...", factors, known)
    return summed
