"""What the methods for one labelled home and many unlabelled clients share."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from fedshift.data.batches import LabelledBatch, UnlabelledBatch, UnlabelledData
from fedshift.errors import SiteError
from fedshift.federation.federation import Federation, Replies
from fedshift.federation.plan import Plan
from fedshift.federation.releases import Count, Metric, Release, Weights
from fedshift.federation.site import WithSource
from fedshift.federation.step import Step
from fedshift.methods.local import augmentation, plain_network
from fedshift.nn.backbones.segmentation import with_light_head
from fedshift.nn.network import Ensemble, Network
from fedshift.rng import Rng


def split_network(plan: Plan) -> Network:
    """The plan's net as an extractor G, its backbone, and a classifier F, its head."""
    return with_light_head(plain_network(plan))


def paired_network(plan: Plan) -> Network:
    """G and two classifiers, whose mean probability is the prediction."""
    net = split_network(plan)
    net.head = Ensemble(net.head, 2, "probabilities")
    return net


def paired_weights(extractor: Weights, first: Weights, second: Weights | None, share: float = 0.5) -> dict[str, Tensor]:
    """Weights for `paired_network`. The second classifier has `share` of the prediction; without a second one the first
    predicts alone."""
    members = {"0": first, "1": first if second is None else second}
    weights = {f"backbone.{key}": value for key, value in extractor.items()}
    weights |= {f"head.members.{name}.{key}": value for name, head in members.items() for key, value in head.items()}
    return weights | {"head.shares": torch.tensor([1.0, 0.0] if second is None else [1 - share, share])}


def frozen_copy(head: nn.Module, weights: Weights) -> nn.Module:
    """A frozen copy of `head` with `weights`."""
    twin = copy.deepcopy(head)
    twin.load_state_dict(dict(weights))
    return twin.eval().requires_grad_(False)


class FrozenFeatures:
    """Features by a network that does not change. Each sample's are computed once and kept, if those of all samples
    fit into `most_bytes`."""

    def __init__(self, net: Network, samples: int, most_bytes: int = 2**29) -> None:
        self._net, self._samples, self._most = net, samples, most_bytes
        self._rows: dict[int, Tensor] = {}

    @torch.no_grad()
    def __call__(self, x: Tensor, index: Tensor) -> Tensor:
        """Features `(B, D, ...)` of the inputs x `(B, ...)`, whose sample numbers are `index` `(B,)`."""
        numbers = [int(number) for number in index]
        new = [place for place, number in enumerate(numbers) if number not in self._rows]
        if not new:
            return torch.stack([self._rows[number] for number in numbers])
        found = self._net.features(x[new])
        if len(new) == len(x) and found[0].nbytes * self._samples > self._most:
            return found
        self._rows |= {numbers[place]: row for place, row in zip(new, found, strict=True)}
        return torch.stack([self._rows[number] for number in numbers])


def endless_batches(data: UnlabelledData, size: int, rng: Rng) -> Iterator[UnlabelledBatch]:
    """Shuffled batches of `data`, which must not be empty, without end."""
    for epoch in itertools.count():
        yield from data.batches(size, rng.child(epoch))


@dataclass(frozen=True)
class Trained(Release):
    """What a client with a copy of the source data sends. `gap` is the distance it measured between its data and the
    source's."""

    model: Weights
    samples: Count
    loss: Metric
    gap: Metric
    summed = frozenset({"model"})


def paired_batches(site: WithSource, rng: Rng) -> Iterator[tuple[LabelledBatch, UnlabelledBatch]]:
    """`local_epochs` passes over the copied source data, each batch together with a batch of the client's own data."""
    if not len(site.train):
        raise SiteError("data-empty", f"client {site.name!r} has no training data")
    training = site.plan.training
    size, augment = training.batch_size, augmentation(site.plan)
    labelled = site.source.batches(size, rng.child("source"), training.local_epochs, augment)
    return zip(labelled, endless_batches(site.train, size, rng.child("target")), strict=False)


def average_of_clients(fed: Federation, train: Step[Trained], model: Weights) -> dict[str, Tensor]:
    """A round of FedAvg over the clients."""
    part = fed.taking_part(fed.targets)
    replies = fed.ask(part.sites, train, model=model)
    count_absent(fed, replies)
    for site, trained in replies:
        fed.note("train_loss", trained.loss, site)
        fed.note("gap", trained.gap, site)
    return fed.average(
        lambda: ((trained.model, part.weight(site, trained.samples)) for site, trained in replies),
        since=model,
        sites=replies.answered,
    )


def mean_of(values: Sequence[float]) -> float:
    """The mean of `values`; 0 if there are none."""
    return sum(values) / max(len(values), 1)


def count_absent(fed: Federation, replies: Replies[Any]) -> None:
    """Counts each client that gave no usable answer, by its name and the reason."""
    for site, why in sorted(replies.absent().items()):
        fed.count(f"skipped.{site}.{why}")


SOURCE_COPIES = "a copy of the home's labelled training data at every client"
