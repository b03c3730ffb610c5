"""FedAvg and the baselines that are FedAvg over another choice of data.

B. McMahan, E. Moore, D. Ramage, S. Hampson, B. Aguera y Arcas: Communication-Efficient Learning of Deep Networks from
Decentralized Data. AISTATS 2017.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from torch import nn

from fedshift.federation.federation import Federation, Replies
from fedshift.federation.labels import label_loss
from fedshift.federation.plan import Plan, Setting
from fedshift.federation.releases import Count, Metric, Release, Weights
from fedshift.federation.site import Labelled
from fedshift.federation.step import Step, step
from fedshift.methods.base import SHARED, About
from fedshift.methods.clients import count_absent
from fedshift.methods.cost import PLAIN
from fedshift.methods.local import (
    augmentation,
    network_with,
    plain_network,
    sgd,
    train_batches,
    weights_of,
)
from fedshift.methods.private import CrossEntropy, train_privately
from fedshift.nn.network import Network
from fedshift.rng import Rng

EVERYWHERE: tuple[Setting, ...] = ("generalize", "adapt", "multi-adapt")


@dataclass(frozen=True)
class Hyper:
    """Nothing beyond the common keys."""


@dataclass(frozen=True)
class State:
    model: Weights


@dataclass(frozen=True)
class Trained(Release):
    model: Weights
    samples: Count
    loss: Metric
    summed = frozenset({"model"})


@step(by_sample=True)
def train(site: Labelled, model: Weights, rng: Rng) -> Trained:
    """ClientUpdate of Algorithm 1: local epochs of SGD on cross-entropy."""
    training = site.plan.training
    net = network_with(site.plan, model, site.device).train()
    optimizer = sgd(site, net)
    if site.private is not None:
        train_privately(site, CrossEntropy(net), optimizer, rng)
        return Trained(model=weights_of(net), samples=site.train.used, loss=0.0)
    batches = site.train.batches(training.batch_size, rng, training.local_epochs, augmentation(site.plan))
    loss = train_batches(batches, lambda b: label_loss(net(b.x), b.y), optimizer, training.precision)
    return Trained(model=weights_of(net), samples=site.train.used, loss=loss)


class Averaging:
    """Every site with labels trains the shared model; the mean of the results is the new shared model."""

    hyper_type: ClassVar[type[Hyper]] = Hyper
    state_type: ClassVar[type[State]] = State
    steps: ClassVar[tuple[Step[Any], ...]] = (train,)

    def __init__(self, hyper: Hyper) -> None:
        self.hyper = hyper

    def init(self, base: Network, fed: Federation) -> State:
        return State(weights_of(base))

    def round(self, state: State, fed: Federation) -> State:
        return State(train_and_average(fed, train, state.model))

    def models(self, state: State) -> Mapping[str, Weights]:
        return {SHARED: state.model}

    @staticmethod
    def network(plan: Plan) -> nn.Module:
        return plain_network(plan)


@dataclass(frozen=True)
class StateApart:
    """The models of sites that have answered at least once. The others start from `first`."""

    first: Weights
    models: Mapping[str, Weights]


class Apart:
    """Every site with labels trains its own model. Nothing is shared."""

    hyper_type: ClassVar[type[Hyper]] = Hyper
    state_type: ClassVar[type[StateApart]] = StateApart
    steps: ClassVar[tuple[Step[Any], ...]] = (train,)

    def __init__(self, hyper: Hyper) -> None:
        self.hyper = hyper

    def init(self, base: Network, fed: Federation) -> StateApart:
        return StateApart(weights_of(base), {})

    def round(self, state: StateApart, fed: Federation) -> StateApart:
        each = {site: {"model": state.models.get(site, state.first)} for site in fed.labelled}
        replies = fed.ask(fed.labelled, train, each=each)
        note_losses(fed, replies)
        count_absent(fed, replies)
        # A site that gave no answer keeps its model, if it has one.
        return StateApart(state.first, {**state.models, **{site: trained.model for site, trained in replies}})

    def models(self, state: StateApart) -> Mapping[str, Weights]:
        return state.models

    @staticmethod
    def network(plan: Plan) -> nn.Module:
        return plain_network(plan)


def train_and_average(fed: Federation, work: Step[Any], model: Weights, **payload: Any) -> Weights:
    """Sites with labels run `work` from `model`, and the mean of their models by samples comes back. The step's release
    has what `Trained` has."""
    part = fed.taking_part(fed.labelled)
    replies = fed.ask(part.sites, work, model=model, **payload)
    note_losses(fed, replies)
    # Algorithm 1, server: w <- sum_k n_k / n w_k.
    return fed.average(
        lambda: ((trained.model, part.weight(site, trained.samples)) for site, trained in replies),
        since=model,
        sites=replies.answered,
    )


def note_losses(fed: Federation, replies: Replies[Any]) -> None:
    for site, trained in replies:
        fed.note("train_loss", trained.loss, site)


_PRETRAINED = {"lr": 0.004}
_ALONE = "every site trains a model of its own"

FEDAVG = About(
    "fedavg",
    EVERYWHERE,
    "McMahan et al., AISTATS 2017",
    pretrained=_PRETRAINED,
    best_norm="own",
    cost=PLAIN,
    draws_sites=True,
)
DEEPALL = About(
    "deepall",
    EVERYWHERE,
    "baseline: centralized",
    "all labelled data in one place: a bound, not to deploy",
    data="pooled",
    pretrained=_PRETRAINED,
    cost=PLAIN,
)
SOURCE_ONLY = About(
    "source-only", EVERYWHERE, "baseline: no adaptation", pretrained=_PRETRAINED, cost=PLAIN, draws_sites=True
)
ADABN = About(
    "adabn",
    ("adapt", "multi-adapt"),
    "Li et al., ICLR workshops 2017; control: only normalisation adapts",
    pretrained=_PRETRAINED,
    norm="own",
    draws_sites=True,
)
SINGLE_SITE = About(
    "single-site",
    EVERYWHERE,
    "baseline: every site alone",
    pretrained=_PRETRAINED,
    aggregation="own",
    cost=PLAIN,
    all_because=_ALONE,
)
ORACLE = About(
    "oracle",
    EVERYWHERE,
    "baseline: target labels",
    "labels of the target: a bound, not to deploy",
    data="target-labels",
    pretrained=_PRETRAINED,
    aggregation="own",
    cost=PLAIN,
)
