"""FedLooks where no labels are: the target learns what it is sure of, from its images and random looks of them. No
source has to take part."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import cast

import torch
import torch.nn.functional as F
from torch import Tensor

from fedshift.data.augment import build_augment
from fedshift.data.batches import UnlabelledBatch
from fedshift.federation.releases import Weights
from fedshift.federation.site import Unlabelled
from fedshift.functional.information import diversity, entropy
from fedshift.methods.fedlooks.source import Hyper, looks_network, looks_of
from fedshift.methods.local import over_target, sgd, train_batches, weights_of, with_weights
from fedshift.nn.network import Network
from fedshift.nn.normalisation import remembering
from fedshift.rng import Rng


@dataclass(frozen=True)
class Adapted:
    model: Weights
    loss: float
    sure: float
    """The share of samples with a confident label in the last epoch."""


def adapt(home: Unlabelled, model: Weights, lr: float, rng: Rng) -> Adapted:
    """One round at the target: all of the network but its head learns. Each epoch begins with new labels."""
    hyper, training = home.hyper(Hyper), home.plan.training
    net = cast(Network, with_weights(looks_network(home.plan), model, home.device))
    net.head.requires_grad_(False)
    optimizer, generator = sgd(home, net.backbone, lr=lr), rng.child("looks").torch()
    augment = build_augment(training.augment) if training.augment else None
    total, sure = 0.0, torch.zeros(())
    for epoch in range(math.ceil(training.local_epochs)):
        share = min(1.0, training.local_epochs - epoch)  # The last epoch may be a part of one.
        labels, sure = confident_labels(net, home, hyper)
        net.train()
        batches = home.train.batches(training.batch_size, rng.child(epoch), share, augment)
        loss_of = loss_of_labels(net, labels, sure, hyper, generator)
        total += share * train_batches(batches, loss_of, optimizer, training.precision)
    return Adapted(weights_of(net), total / training.local_epochs, float(sure.mean()))


def confident_labels(net: Network, site: Unlabelled, hyper: Hyper) -> tuple[Tensor, Tensor]:
    """The most likely class of each sample or pixel `(N, ...)`, and 1 where its probability reaches the gate, else 0.
    The network normalises by the target's own statistics, unless it is to keep those that it came with."""
    net.eval()
    if not site.plan.model.freeze_norm and len(site.train) > 1:
        with torch.no_grad(), remembering(net):
            for batch in site.train.evenly(site.plan.training.batch_size):
                net(batch.x)
    found = over_target(site, lambda x: torch.stack(net(x).float().softmax(1).max(1), dim=1))
    return found[:, 1].long(), (found[:, 0] >= hyper.gate).float()


def loss_of_labels(
    net: Network, labels: Tensor, sure: Tensor, hyper: Hyper, generator: torch.Generator
) -> Callable[[UnlabelledBatch], Tensor]:
    """Cross-entropy of images and their looks with the confident labels, and information maximisation on images."""

    def loss_of(batch: UnlabelledBatch) -> Tensor:
        x, images = batch.x, len(batch.x)
        if hyper.depth > 0:
            x = torch.cat([x, looks_of(x, hyper, generator)])
        scores, copies = net(x), len(x) // images
        index = batch.index.repeat(copies)
        y, weight = labels[index].to(x.device), sure[index].to(x.device)
        terms = F.cross_entropy(scores.float(), y, reduction="none", label_smoothing=hyper.smoothing)
        loss = (terms * weight).mean()
        if hyper.information > 0:
            own = scores[:images].transpose(0, 1).flatten(1).T  # a row for each image or pixel
            loss = loss + hyper.information * (entropy(own) + diversity(own))
        return loss

    return loss_of
