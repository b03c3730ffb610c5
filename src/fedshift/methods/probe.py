"""The key `probe_epochs`: before round 1, sites train the head alone, on features of the given backbone.

A. Kumar, A. Raghunathan, R. Jones, T. Ma, P. Liang: Fine-Tuning can Distort Pretrained Features and Underperform
Out-of-Distribution. ICLR 2022 (linear probing, then fine-tuning).
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from fedshift.errors import InputError
from fedshift.federation.federation import Federation
from fedshift.federation.labels import label_loss
from fedshift.federation.plan import Plan
from fedshift.federation.releases import Count, Release, Weights
from fedshift.federation.site import Labelled
from fedshift.federation.step import step
from fedshift.methods.local import augmentation, plain_network, sgd, weights_follow, weights_of, with_weights
from fedshift.nn.network import Network
from fedshift.rng import Rng

_BATCH = 128


@dataclass(frozen=True)
class Probed(Release):
    head: Weights
    samples: Count


@step
def probe(site: Labelled, backbone: Weights, head: Weights, rng: Rng) -> Probed:
    """SGD on the head, at the rate of round 1 falling as a cosine. Features are computed once: a passage of the images
    and nothing more."""
    training = site.plan.training
    given = {f"backbone.{key}": value for key, value in backbone.items()}
    given |= {f"head.{key}": value for key, value in head.items()}
    with weights_follow():
        net = _network(site.plan, given)
    with_weights(net, given, site.device).eval()
    with torch.no_grad():
        batches = site.train.batches(_BATCH, rng, 1.0, augmentation(site.plan))
        found = [(net.features(batch.x), batch.y) for batch in batches]
    features, labels = torch.cat([f for f, _ in found]), torch.cat([y for _, y in found])
    optimizer, generator = sgd(site, net.head, lr=training.lr), rng.child("head").torch()
    for epoch in range(training.probe_epochs):
        for group in optimizer.param_groups:
            group["lr"] = training.lr * 0.5 * (1 + math.cos(math.pi * epoch / training.probe_epochs))
        for index in torch.randperm(len(labels), generator=generator).to(labels.device).split(training.batch_size):
            _learn(net.head, features[index], labels[index], optimizer)
    return Probed(head=weights_of(net.head), samples=site.train.used)


def _learn(head: nn.Module, features: Tensor, labels: Tensor, optimizer: torch.optim.Optimizer) -> None:
    optimizer.zero_grad(set_to_none=True)
    label_loss(head(features), labels).backward()
    optimizer.step()


def _network(plan: Plan, weights: Weights) -> Network:
    """The method's own network where the weights before round 1 are for it, since it may treat images in its own way;
    else the plan's, which they are for."""
    from fedshift.methods import find_method

    own = find_method(plan.method).network(plan)
    return own if isinstance(own, Network) and own.state_dict().keys() == weights.keys() else plain_network(plan)


def with_probed_head(base: Network, fed: Federation) -> None:
    """Gives `base` the mean of the heads that the sites with labels find for its features."""
    if not any(True for _ in base.head.parameters()):
        raise InputError("method-needs", "probe_epochs: this network has no head of its own; set it to 0")
    head = weights_of(base.head)
    replies = fed.ask(fed.labelled, probe, backbone=weights_of(base.backbone), head=head, expect={"head": head})
    mean = fed.average(
        lambda: ((found.head, float(found.samples)) for _, found in replies), since=head, sites=replies.answered
    )
    fed.has_averaged = False  # By the run, not by the method.
    base.head.load_state_dict(mean)
