"""Fed-DAN and Fed-DANN: clients with a copy of the source data align its features with their own.

DAN: M. Long, Y. Cao, J. Wang, M. Jordan: Learning Transferable Features with Deep Adaptation Networks. ICML 2015.
DANN: Y. Ganin, V. Lempitsky: Unsupervised Domain Adaptation by Backpropagation. ICML 2015.
Federated as in C.-H. Yao et al.: Federated Multi-Target Domain Adaptation. WACV 2022, sec. 4.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fedshift.data.batches import LabelledBatch, UnlabelledBatch
from fedshift.federation.federation import Federation
from fedshift.federation.labels import label_loss
from fedshift.federation.plan import Plan
from fedshift.federation.releases import Weights
from fedshift.federation.site import WithSource
from fedshift.federation.step import Step, step
from fedshift.functional.losses import reversal_strength, reverse_gradient
from fedshift.functional.mixtures import draw_rows
from fedshift.functional.mmd import mmd
from fedshift.methods.averaging import State
from fedshift.methods.base import SHARED, About
from fedshift.methods.clients import SOURCE_COPIES, Trained, average_of_clients, mean_of, paired_batches, split_network
from fedshift.methods.cost import MODEL, Formula
from fedshift.methods.local import sgd, train_batches, weights_of, with_weights
from fedshift.nn.backbones.segmentation import with_light_head
from fedshift.nn.network import Network, seeded_init
from fedshift.rng import Rng

DISCRIMINATOR = "discriminator"
ROWS = 256
"""Feature vectors, at most, that a batch of maps contributes to the comparison of domains."""


@dataclass(frozen=True)
class DanHyper:
    weight: float = 1.0
    """Weight of the MMD between source and client features."""

    def __post_init__(self) -> None:
        if not self.weight >= 0:
            raise ValueError(f"weight must be 0 or more, not {self.weight}")


@dataclass(frozen=True)
class DannHyper:
    weight: float = 1.0
    """Weight of the domain loss; for the extractor it grows from 0 to this over the run (Ganin and Lempitsky)."""
    hidden: int = 100
    """Width of the discriminator's hidden layer (100 on MNIST)."""

    def __post_init__(self) -> None:
        if not self.weight >= 0 or self.hidden < 1:
            raise ValueError("weight must be 0 or more and hidden 1 or more")


def domain_loss(source: Tensor, target: Tensor) -> Tensor:
    """Binary cross-entropy of logits `(n, 1)` of the source (label 1) and `(m, 1)` of the client (label 0); each domain
    has half of the weight."""
    return (F.softplus(-source).mean() + F.softplus(target).mean()) / 2


def discriminator(features: int, hidden: int) -> nn.Module:
    """D: features `(n, features)` to logits `(n, 1)`, high for the source's features."""
    return nn.Sequential(nn.Linear(features, hidden), nn.ReLU(), nn.Linear(hidden, 1))


@step
def train_dan(site: WithSource, model: Weights, rng: Rng) -> Trained:
    """Cross-entropy on the source copy, and MMD between its features and the client's."""
    hyper = site.hyper(DanHyper)
    generator = rng.child("rows").torch()
    net = _loaded(site, model)

    def gap(source: Tensor, target: Tensor, progress: float) -> Tensor:
        return mmd(_rows(source, generator), _rows(target, generator))

    return _train(site, net, sgd(site, net), gap, hyper.weight, rng)


@step
def train_dann(site: WithSource, model: Weights, rng: Rng) -> Trained:
    """Cross-entropy on the source copy, and a domain discriminator behind a gradient reversal. The discriminator stays
    at the client."""
    hyper = site.hyper(DannHyper)
    generator = rng.child("rows").torch()
    net = _loaded(site, model)
    judge = _own_discriminator(site, net.backbone.out_features, hyper, rng)

    def gap(source: Tensor, target: Tensor, progress: float) -> Tensor:
        strength = reversal_strength(progress)
        verdicts = [judge(reverse_gradient(_rows(part, generator), strength)) for part in (source, target)]
        return domain_loss(*verdicts)

    trained = _train(site, net, sgd(site, net, judge), gap, hyper.weight, rng)
    site.store.save(DISCRIMINATOR, weights_of(judge), site.round)
    return trained


def _train(
    site: WithSource,
    net: Network,
    optimizer: torch.optim.Optimizer,
    gap: Callable[[Tensor, Tensor, float], Tensor],
    weight: float,
    rng: Rng,
) -> Trained:
    """CE(source) + weight gap(source features, client features, progress of the run in [0, 1])."""
    training = site.plan.training
    gaps: list[float] = []
    steps = training.local_epochs * len(site.source) / training.batch_size

    def loss_of(pair: tuple[LabelledBatch, UnlabelledBatch]) -> Tensor:
        source, target = net.features(pair[0].x), net.features(pair[1].x)
        progress = (site.round - 1 + min(1.0, len(gaps) / steps)) / training.rounds
        apart = gap(source.float(), target.float(), progress)
        gaps.append(float(apart.detach()))
        return label_loss(net.scores(source, pair[0].x.shape[-2:]), pair[0].y) + weight * apart

    loss = train_batches(paired_batches(site, rng), loss_of, optimizer, training.precision)
    return Trained(model=weights_of(net), samples=site.train.used, loss=loss, gap=mean_of(gaps))


def _loaded(site: WithSource, model: Weights) -> Network:
    return cast(Network, with_weights(split_network(site.plan), model, site.device).train())


def _rows(features: Tensor, generator: torch.Generator) -> Tensor:
    """Features as rows; for maps a random part of their pixels."""
    return draw_rows(features, max(1, ROWS // len(features)), generator)[0]


def _own_discriminator(site: WithSource, features: int, hyper: DannHyper, rng: Rng) -> nn.Module:
    """The client's discriminator from its last round, or a new one: `(n, features)` to `(n, 1)`."""
    with seeded_init(rng.child(DISCRIMINATOR).seed()):
        judge = discriminator(features, hyper.hidden)
    judge.load_state_dict(site.store.load(DISCRIMINATOR) or judge.state_dict())
    return judge.to(site.device)


class FedDan:
    """FedAvg over clients that train with MMD."""

    hyper_type: ClassVar[type[DanHyper]] = DanHyper
    state_type: ClassVar[type[State]] = State
    steps: ClassVar[tuple[Step[Any], ...]] = (train_dan,)

    def __init__(self, hyper: DanHyper) -> None:
        self.hyper = hyper

    def init(self, base: Network, fed: Federation) -> State:
        return State(weights_of(with_light_head(copy.deepcopy(base))))

    def round(self, state: State, fed: Federation) -> State:
        return State(average_of_clients(fed, train_dan, state.model))

    def models(self, state: State) -> Mapping[str, Weights]:
        return {SHARED: state.model}

    @staticmethod
    def network(plan: Plan) -> nn.Module:
        return split_network(plan)


class FedDann:
    """FedAvg over clients that each train against their own discriminator."""

    hyper_type: ClassVar[type[DannHyper]] = DannHyper
    state_type: ClassVar[type[State]] = State
    steps: ClassVar[tuple[Step[Any], ...]] = (train_dann,)

    def __init__(self, hyper: DannHyper) -> None:
        self.hyper = hyper

    def init(self, base: Network, fed: Federation) -> State:
        return State(weights_of(with_light_head(copy.deepcopy(base))))

    def round(self, state: State, fed: Federation) -> State:
        return State(average_of_clients(fed, train_dann, state.model))

    def models(self, state: State) -> Mapping[str, Weights]:
        return {SHARED: state.model}

    @staticmethod
    def network(plan: Plan) -> nn.Module:
        return split_network(plan)


FED_DAN = About(
    "fed-dan",
    ("multi-adapt",),
    "Long et al., ICML 2015, federated",
    SOURCE_COPIES,
    draws_sites=True,
    data="source-copies",
    best_norm="own",
    time_factor=8.0,
    cost=Formula(
        flops={"G": 6, "F": 3, "dG": -2},
        upload=MODEL,
        broadcast=MODEL,
        published={"G": 4, "F": 2},
        note="For a target and a source sample together. The paper prints no formula: this is Fed-DANN's without D.",
    ),
)
FED_DANN = About(
    "fed-dann",
    ("multi-adapt",),
    "Ganin and Lempitsky, ICML 2015, federated",
    SOURCE_COPIES,
    draws_sites=True,
    data="source-copies",
    best_norm="own",
    time_factor=8.0,
    cost=Formula(
        flops={"G": 6, "F": 3, "D": 6, "dG": -2},
        upload=MODEL,
        broadcast=MODEL,
        published={"G": 4, "F": 2, "D": 4},
        discriminator=lambda features: discriminator(features, DannHyper.hidden),
        note="For a target and a source sample together. D, the discriminator, stays at its site.",
    ),
)
