"""FADA: adversaries align the features of target and sources, and sources that help the target have more weight.

X. Peng, Z. Huang, Y. Zhu, K. Saenko: Federated Adversarial Domain Adaptation. ICLR 2020. Without its disentangler.
"""

from __future__ import annotations

import copy
import math
import statistics
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fedshift.data.augment import build_augment
from fedshift.data.batches import LabelledBatch
from fedshift.federation.checks import Between
from fedshift.federation.federation import Federation, Replies
from fedshift.federation.labels import label_loss
from fedshift.federation.plan import Plan
from fedshift.federation.releases import Features, Metric, Release, Tally, Weights
from fedshift.federation.site import Labelled, Site, Unlabelled
from fedshift.federation.step import Step, isolated_randomness, step
from fedshift.functional.clusters import gap_statistic, kmeans
from fedshift.methods.base import SHARED, About
from fedshift.methods.cost import Formula
from fedshift.methods.local import (
    all_finite,
    augmentation,
    autocast,
    descend,
    network_with,
    plain_network,
    require_target,
    sgd,
    train_batches,
    weights_of,
)
from fedshift.nn.network import Network, seeded_init
from fedshift.rng import Rng

FEATURES = "features"
HIDDEN = 256
"""Width of a domain identifier."""
LARGEST = 1e4
"""No feature that a source sends may be larger: an identifier that learned from it would be NaN from then on."""


@dataclass(frozen=True)
class Hyper:
    adversarial: float = 0.1
    """Weight of the adversarial losses of the extractor."""
    attention: bool = True
    """Whether sources are weighted by what their gradient does to the target's clusters; false: equal weights."""
    sync_batches: int = 1
    """Batches that a site trains on between two exchanges."""

    def __post_init__(self) -> None:
        if not 0 <= self.adversarial < float("inf"):
            raise ValueError(f"adversarial must be 0 or more, not {self.adversarial}")
        if self.sync_batches < 1:
            raise ValueError(f"sync_batches must be 1 or more, not {self.sync_batches}")


@dataclass(frozen=True)
class State:
    """The target's model {G_t, C_t} and a domain identifier DI_i for each source."""

    model: Weights
    identifiers: Mapping[str, Weights]


@dataclass(frozen=True)
class Trained(Release):
    model: Weights
    features: Features
    exchanges: Tally
    loss: Metric


# --- Domain identifiers ---------------------------------------------------------------------------------------------


def domain_identifier(features: int) -> nn.Module:
    """DI: features `(B, d)` to logits `(B, 1)`, high for the source's features."""
    return nn.Sequential(nn.Linear(features, HIDDEN), nn.ReLU(), nn.Linear(HIDDEN, 1))


def identification_loss(on_source: Tensor, on_target: Tensor) -> Tensor:
    """L_adv_DI = -E log DI(G_i(x_s)) - E log(1 - DI(G_t(x_t))), from logits."""
    return F.softplus(-on_source).mean() + F.softplus(on_target).mean()


def confusion_loss(on_features: Tensor) -> Tensor:
    """A term of L_adv_G: -E log DI(G(x)), from logits. It is low when DI takes the features for the source's."""
    return F.softplus(-on_features).mean()


# --- At a source: one exchange's batches ----------------------------------------------------------------------------


@step(numbered_by=("exchange",))
def train(site: Labelled, model: Weights, identifier: Weights, exchange: int, rng: Rng) -> Trained:
    """Cross-entropy and the source's term of L_adv_G on the next batches. SGD without momentum, because momentum is
    kept at the coordinator. The features that leave are those of these forward passes."""
    hyper, training = site.hyper(Hyper), site.plan.training
    drawn = rng.child("exchange", exchange)
    net = network_with(site.plan, model, site.device).train()
    judge = _with_identifier(net, identifier, site.device).requires_grad_(False)
    seen: list[Tensor] = []

    def loss_of(batch: LabelledBatch) -> Tensor:
        features = net.features(batch.x)
        seen.append(features.detach().float())
        return label_loss(net.head(features), batch.y) + hyper.adversarial * confusion_loss(judge(features))

    optimizer = sgd(site, net)
    for group in optimizer.param_groups:
        group["momentum"] = 0.0
    # One pass per batch is enough, because every pass has at least one batch. Batches are drawn when needed.
    batches = site.train.batches(training.batch_size, drawn, hyper.sync_batches, augmentation(site.plan))
    with isolated_randomness(drawn):
        loss = train_batches(islice(batches, hyper.sync_batches), loss_of, optimizer, training.precision)
    features = torch.cat(seen).cpu()
    # A site with fewer samples than a batch repeats its features: the coordinator expects a fixed shape.
    repeated = features[torch.arange(training.batch_size * hyper.sync_batches) % len(features)]
    exchanges = full_exchanges(len(site.train), site.plan, hyper)
    return Trained(model=weights_of(net), features={FEATURES: repeated}, exchanges=exchanges, loss=loss)


def full_exchanges(samples: int, plan: Plan, hyper: Hyper) -> int:
    """As many exchanges as the local epochs of a source with so many samples have batches."""
    batches = plan.training.local_epochs * samples / plan.training.batch_size
    return max(1, math.ceil(batches / hyper.sync_batches))


def _with_identifier(net: Network, weights: Weights, device: torch.device) -> nn.Module:
    judge = domain_identifier(net.backbone.out_features)
    judge.load_state_dict(dict(weights))
    return judge.to(device)


# --- At the target: attention, identifiers, the target's model ------------------------------------------------------


class TargetSide:
    """What the coordinator keeps between the exchanges of a round: {G_t, C_t}, the identifiers, their optimizers."""

    def __init__(self, home: Site, state: State) -> None:
        self.net = network_with(home.plan, state.model, home.device).train()
        self.scratch = copy.deepcopy(self.net)
        self.sgd = sgd(home, self.net)
        for group in self.sgd.param_groups:
            group["weight_decay"] = 0.0  # The sites' steps include it.
        self.judges = {
            site: _with_identifier(self.net, weights, home.device)
            for site, weights in sorted(state.identifiers.items())
        }
        self.judge_sgd = {site: sgd(home, judge) for site, judge in self.judges.items()}


def attention(
    net: Network,
    models: Mapping[str, Weights],
    x: Tensor,
    clusters: int,
    is_dynamic: bool,
    precision: str = "float32",
) -> dict[str, float]:
    """alpha by source: the softmax of the gains. A gain is how much tighter the target's clusters are after a source's
    gradient than before. Models that give NaN or infinity are left out. `net` is overwritten."""
    spread: dict[str, float] = {}
    with torch.no_grad():
        for site, weights in models.items():
            net.load_state_dict(dict(weights))
            # A context for each model: inside one, torch remembers the first model's weights in bfloat16.
            with autocast(x.device, precision):
                features = net.features(x).float()
            if bool(torch.isfinite(features).all()):
                spread[site] = gap_statistic(features, kmeans(features, clusters))
    # All start from the same model: the spread before is common to all gains and cancels out of the softmax.
    gains = -torch.tensor(list(spread.values()), dtype=torch.float64)
    alpha = torch.softmax(gains if is_dynamic else torch.zeros_like(gains), dim=0)
    return dict(zip(spread, alpha.tolist(), strict=True))


@dataclass(frozen=True)
class Met:
    """The result of one exchange: the sources' weights, their identifiers' losses and the target's adversarial loss."""

    alpha: Mapping[str, float]
    identification: Mapping[str, float]
    confusion: float


def meet(
    home: Unlabelled,
    side: TargetSide,
    sent: Weights,
    models: Mapping[str, Weights],
    replies: Replies[Trained],
    exchange: int,
    rng: Rng,
) -> Met:
    """One step of {G_t, C_t}, from the `models` that the sites made of `sent` and from a batch of the target."""
    hyper, training = home.hyper(Hyper), home.plan.training
    drawn = rng.child("exchange", exchange)
    augment = build_augment(training.augment) if training.augment else None
    x = next(home.train.batches(training.batch_size, drawn, augment=augment)).x
    with isolated_randomness(drawn):
        classes = len(home.plan.model.classes)
        alpha = attention(side.scratch, models, x, classes, hyper.attention, training.precision)
        if not alpha:
            return Met({}, {}, 0.0)
        with autocast(home.device, training.precision):
            features = side.net.features(x).float()
        # Identifiers are small: they always work in float32.
        identification = {site: identify(side, site, replies[site], features.detach()) for site in alpha}
        confusion = torch.stack([alpha[site] * confusion_loss(side.judges[site](features)) for site in alpha]).sum()
    side.sgd.zero_grad(set_to_none=True)
    (hyper.adversarial * confusion).backward()
    for name, parameter in side.net.named_parameters():
        # The sites' steps as a gradient: momentum continues from exchange to exchange, as if all data were pooled.
        step = torch.stack([alpha[site] * (sent[name] - models[site][name]) for site in alpha]).sum(0)
        own = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
        parameter.grad = own + (step / training.lr_of(name, home.round)).to(own)
    side.sgd.step()
    return Met(alpha, identification, float(confusion.detach()))


def identify(side: TargetSide, site: str, reply: Trained, target: Tensor) -> float:
    """One step of DI_i on L_adv_DI; returns the loss before the step."""
    judge = side.judges[site]
    loss = identification_loss(judge(reply.features[FEATURES].to(target.device)), judge(target))
    descend(loss, side.judge_sgd[site])
    return float(loss.detach())


# --- The coordinator ------------------------------------------------------------------------------------------------


class Fada:
    """A round has as many exchanges as an epoch has batches. In each, every source sends a model and features."""

    hyper_type: ClassVar[type[Hyper]] = Hyper
    state_type: ClassVar[type[State]] = State
    steps: ClassVar[tuple[Step[Any], ...]] = (train,)

    def __init__(self, hyper: Hyper) -> None:
        self.hyper = hyper

    def init(self, base: Network, fed: Federation) -> State:
        require_target(fed)
        identifiers = {}
        for site in fed.labelled:
            with seeded_init(fed.rng("identifier", site).seed()):
                identifiers[site] = weights_of(domain_identifier(base.backbone.out_features))
        return State(weights_of(base), identifiers)

    def round(self, state: State, fed: Federation) -> State:
        side = TargetSide(fed.home, state)
        template = torch.zeros(fed.plan.training.batch_size * self.hyper.sync_batches, side.net.backbone.out_features)
        recorded: dict[tuple[str, str], list[float]] = defaultdict(list)
        exchange, exchanges = 0, 1
        while exchange < exchanges:
            sent = weights_of(side.net)
            each = {site: {"identifier": weights_of(judge)} for site, judge in side.judges.items()}
            expect = {"features": Between({FEATURES: template}, -LARGEST, LARGEST)}
            replies = fed.ask(fed.labelled, train, each=each, expect=expect, model=sent, exchange=exchange)
            if exchange == 0:
                exchanges = exchanges_of([reply.exchanges for _, reply in replies])
            models = clipped_models(fed, replies, sent)
            met = fed.at_home(meet, side=side, sent=sent, models=models, replies=replies, exchange=exchange)
            if len(met.alpha) < len(replies):
                fed.count("fada.unusable-model", len(replies) - len(met.alpha))
            if not all_finite(weights_of(side.net)):
                fed.count("fada.step-diverged")
                side.net.load_state_dict(sent)
                side.sgd.state.clear()
            for site, reply in replies:
                recorded["train_loss", site].append(reply.loss)
            for site, weight in met.alpha.items():
                recorded["weight", site].append(weight)
                recorded["identification_loss", site].append(met.identification[site])
            recorded["confusion_loss", fed.home.name].append(met.confusion)
            exchange += 1
        for (name, who), values in recorded.items():
            fed.note(name, statistics.fmean(values), who)
        return State(weights_of(side.net), {site: weights_of(judge) for site, judge in side.judges.items()})

    def models(self, state: State) -> Mapping[str, Weights]:
        return {SHARED: state.model}

    @staticmethod
    def network(plan: Plan) -> nn.Module:
        return plain_network(plan)


def clipped_models(fed: Federation, replies: Replies[Trained], sent: Weights) -> dict[str, Weights]:
    """What the sites made of the model `sent`, long updates clipped."""
    sites = replies.answered
    model_of = fed.clipped(sites, lambda site: replies[site].model, dict.fromkeys(sites, sent))
    return {site: model_of(site) for site in sites}


def exchanges_of(wanted: Sequence[int]) -> int:
    """Exchanges per round, from what each source says that its data fill. The median decides, so that no single site
    can make a round endless."""
    return statistics.median_low(wanted)


FADA = About(
    "fada",
    ("adapt",),
    "Peng et al., ICLR 2020",
    "sites that let features of single samples go to the coordinator, batch by batch",
    all_because="it compares the features of all sites in every batch",
    tasks=("classification",),
    aggregation="clipped",
    counters={
        "fada.step-diverged": "An adversarial step gave NaN or infinite weights and was undone.",
        "fada.unusable-model": "A site's model gave NaN or infinite features and was left out of the exchange.",
    },
    time_factor=2.7,
    cost=Formula(
        # The gradient passes through D, the frozen domain identifier.
        flops={"G": 3, "F": 3, "D": 2, "dG": -1},
        upload=None,
        broadcast=None,
        discriminator=domain_identifier,
        note="D is the domain identifier. Sites are asked once per batch, and here they have one: a round of n batches"
        " sends n times as much.",
    ),
)
