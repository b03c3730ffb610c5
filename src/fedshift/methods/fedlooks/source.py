"""FedLooks where labels are: every image is normalised by itself and learned twice, as it is and with a random look."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from fedshift.data.batches import LabelledBatch
from fedshift.federation import codec
from fedshift.federation.labels import label_loss
from fedshift.federation.plan import Plan
from fedshift.federation.releases import Weights
from fedshift.federation.site import Labelled
from fedshift.federation.step import step
from fedshift.functional.looks import random_looks
from fedshift.methods.averaging import Trained
from fedshift.methods.local import augmentation, plain_network, sgd, train_batches, weights_of, with_weights
from fedshift.methods.private import train_privately
from fedshift.nn.network import Network
from fedshift.rng import Rng


@dataclass(frozen=True)
class Hyper:
    by_image: bool = True
    """Whether images are normalised by their own means and deviations, in training and afterwards."""
    depth: int = 3
    """How often a look's random filter is applied at most; 0: no looks."""
    spread: float = 0.5
    """Deviation of a look's random contrasts and brightnesses."""
    blended: bool = False
    """Whether a look is mixed with its image, by a share that each image draws."""
    replaced: float = 0.0
    """How many of the images are learned as looks instead, as a share; 0: every image is learned twice."""
    smoothing: float = 0.1
    """Label smoothing."""
    source_rounds: float = 1.0
    """adapt: the share of the rounds in which sources train; then the target adapts. 1: it takes its own statistics and
    nothing else, which was measured to be better."""
    target_rate: float = 0.4
    """adapt: the learning rate of the target, times `lr`."""
    gate: float = 0.5
    """adapt: how likely a class has to be to be learned."""
    information: float = 1.0
    """adapt: weight of information maximisation on the target's own images."""

    def __post_init__(self) -> None:
        if self.depth < 0:
            raise ValueError(f"depth must be 0 or more, not {self.depth}")
        if not 0 <= self.smoothing < 1:
            raise ValueError(f"smoothing must be at least 0 and below 1, not {self.smoothing}")
        if not 0 < self.source_rounds <= 1:
            raise ValueError(f"source_rounds is a share above 0 and at most 1, not {self.source_rounds}")
        for key in ("gate", "replaced"):
            if not 0 <= getattr(self, key) <= 1:
                raise ValueError(f"{key} must be from 0 to 1, not {getattr(self, key)}")
        for key in ("spread", "target_rate", "information"):
            if not 0 <= getattr(self, key) < float("inf"):
                raise ValueError(f"{key} must be 0 or more, not {getattr(self, key)}")


def looks_network(plan: Plan) -> Network:
    """The plan's network, normalising images by themselves. Its initial weights do not matter."""
    net = plain_network(plan)
    net.by_image = codec.restore(Hyper, dict(plan.hyper)).by_image
    return net


def source_rounds(plan: Plan) -> int:
    """In how many rounds sources train: all; in adapt at least 1, and fewer than all if there are two or more, unless
    `source_rounds` is 1. They have a whole schedule of learning rates."""
    rounds, share = plan.training.rounds, codec.restore(Hyper, dict(plan.hyper)).source_rounds
    if plan.setting != "adapt" or share == 1:
        return rounds
    return max(1, min(round(share * rounds), rounds - 1))


@step(by_sample=True)
def train(site: Labelled, model: Weights, rng: Rng) -> Trained:
    """Local epochs of SGD on `loss_of_looks`."""
    hyper, training = site.hyper(Hyper), site.plan.training
    net = with_weights(looks_network(site.plan), model, site.device).train()
    generator = rng.child("looks").torch()
    optimizer = sgd(site, net, lr=replace(training, rounds=source_rounds(site.plan)).lr_at(site.round))
    if site.private is not None:

        def looks(x: Tensor) -> tuple[Tensor, ...]:
            return (looks_of(x, hyper, generator),) if hyper.depth else ()

        train_privately(site, LossOfLook(net, hyper.smoothing), optimizer, rng, looks)
        return Trained(model=weights_of(net), samples=site.train.used, loss=0.0)
    batches = site.train.batches(training.batch_size, rng, training.local_epochs, augmentation(site.plan))
    loss = train_batches(batches, loss_of_looks(net, hyper, generator), optimizer, training.precision)
    return Trained(model=weights_of(net), samples=site.train.used, loss=loss)


class LossOfLook(torch.nn.Module):
    """`loss_of_looks` for images that share no statistics: the mean cross-entropy of an image and its look."""

    def __init__(self, net: torch.nn.Module, smoothing: float) -> None:
        super().__init__()
        self.net, self.smoothing = net, smoothing

    def forward(self, x: Tensor, y: Tensor, *looks: Tensor) -> Tensor:
        both = torch.cat([x, *looks])
        return label_loss(self.net(both), y.repeat(1 + len(looks), *(1,) * (y.ndim - 1)), smoothing=self.smoothing)


def loss_of_looks(net: torch.nn.Module, hyper: Hyper, generator: torch.Generator) -> Callable[[LabelledBatch], Tensor]:
    """Mean cross-entropy of all images and their looks.

    With `replaced`, an image passes once: as it is, or as a look. Otherwise all pass in two halves, each as large as
    the batch and each with images and looks of these, which BatchNorm normalises together. Two batches take less time
    than one that is twice as large.
    """

    def loss_of(batch: LabelledBatch) -> Tensor:
        if hyper.depth == 0:
            return label_loss(net(batch.x), batch.y, smoothing=hyper.smoothing)
        if hyper.replaced > 0:
            return label_loss(net(replaced(batch.x, hyper, generator)), batch.y, smoothing=hyper.smoothing)
        looks = looks_of(batch.x, hyper, generator)
        loss = torch.zeros((), device=looks.device)
        for half in (slice(0, None, 2), slice(1, None, 2)):
            own, y = batch.x[half], batch.y[half]
            if len(y):
                both = torch.cat([own, looks[half]]).contiguous(memory_format=torch.channels_last)
                part = label_loss(net(both), torch.cat([y, y]), smoothing=hyper.smoothing)
                loss = loss + part * (len(y) / len(batch.y))
        return loss

    return loss_of


def looks_of(x: Tensor, hyper: Hyper, generator: torch.Generator) -> Tensor:
    """A random look of each image; with `blended`, mixed with the image."""
    looks = random_looks(x, generator, hyper.depth, hyper.spread)
    if not hyper.blended:
        return looks
    return torch.lerp(x, looks, torch.rand(len(x), 1, 1, 1, generator=generator).to(x.device, x.dtype))


def replaced(x: Tensor, hyper: Hyper, generator: torch.Generator) -> Tensor:
    """The images, of which each has become a look of itself with the probability `replaced`."""
    chosen = (torch.rand(len(x), generator=generator) < hyper.replaced).nonzero().squeeze(1).to(x.device)
    return x if not len(chosen) else x.index_copy(0, chosen, looks_of(x[chosen], hyper, generator))
