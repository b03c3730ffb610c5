"""COPA for domains that nobody has seen: one shared extractor, one classifier a domain.

Guile Wu, Shaogang Gong: Collaborative Optimization and Aggregation for Decentralized Domain Generalization and
Adaptation. ICCV 2021. Steps 1, 3 and 5 of its Fig. 1; hybrid normalisation, Eq. (2)-(4), is in nn/hybrid.py.
"""

from __future__ import annotations

import copy
import secrets
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, cast

import torch
from torch import Tensor, nn

from fedshift.data.augment import cutout, rand_augment
from fedshift.data.batches import LabelledBatch
from fedshift.data.randaugment import MAX_MAGNITUDE
from fedshift.errors import InputError
from fedshift.federation import codec
from fedshift.federation.federation import Federation
from fedshift.federation.kinds import Metric, Release, Weights
from fedshift.federation.plan import Plan
from fedshift.federation.site import Labelled
from fedshift.federation.step import Step, step
from fedshift.functional.averaging import weighted_mean
from fedshift.functional.ensembles import equal_shares, inconsistency
from fedshift.functional.losses import cross_entropy
from fedshift.functional.noise import add_noise
from fedshift.methods.base import SHARED, About
from fedshift.methods.local import augmentation, plain_network, sgd, train_batches, weights_of, with_weights
from fedshift.nn.ensembles import Ensemble, Rule
from fedshift.nn.hybrid import Variant, Where, convert_norms
from fedshift.nn.network import Network
from fedshift.rng import Rng

PHOTOGRAPH = 40
"""Images with a longer side than this, in pixels, are taken for photographs."""


@dataclass(frozen=True)
class Hyper:
    norm: Variant = "hbin"
    """What replaces batch normalisation (Fig. 3)."""
    norm_where: Where = "auto"
    """Which layers: see nn.hybrid.convert_norms."""
    collaboration: Literal["frozen", "none", "enlarge", "consistency"] = "frozen"
    """The other domains' frozen classifiers, nothing, augmented copies for the own classifier, or consistency of the
    others' with the own (Fig. 2)."""
    augment: bool = True
    """Whether the others see an augmented copy of the batch (RandAugment, Cutout)."""
    ops: int = 2
    """RandAugment's operations an image."""
    magnitude: float = 9.0
    """RandAugment's strength, up to 10."""
    cutout: bool | Literal["auto"] = "auto"
    """Whether the augmented copy gets Cutout too; auto: on images larger than 40 pixels."""
    iterate: bool = True
    """False: every site trains on its own to the end and the aggregate is for scoring only (Table 6)."""
    noise: float = 0.0
    """Standard deviation of Gaussian noise on the aggregated extractor (sec. 3.3)."""
    predict: Rule = "probabilities"
    """Whether classifiers are averaged after or before the softmax."""

    def __post_init__(self) -> None:
        if self.ops < 1:
            raise ValueError(f"ops must be 1 or more, not {self.ops}; augment=false turns RandAugment off")
        if not 0 <= self.magnitude <= MAX_MAGNITUDE:
            raise ValueError(f"magnitude must be from 0 to {MAX_MAGNITUDE}, not {self.magnitude}")
        if not 0 <= self.noise < float("inf"):
            raise ValueError(f"noise must be 0 or more, not {self.noise}")
        if self.collaboration == "consistency" and not self.iterate:
            raise ValueError("collaboration=consistency trains all classifiers together and needs iterate=true")
        if self.collaboration == "enlarge" and not self.augment:
            raise ValueError("collaboration=enlarge adds augmented copies and needs augment=true")


@dataclass(frozen=True)
class State:
    """The global model {F_t, {C_i}}. `trained` says whose classifier has been trained yet, `first_head` is what all
    start from; `apart` has each site's extractor where they are not brought together (iterate=false)."""

    extractor: Weights
    heads: Mapping[str, Weights]
    trained: Mapping[str, bool]
    first_head: Weights
    apart: Mapping[str, Weights]


@dataclass(frozen=True)
class Trained(Release):
    extractor: Weights
    head: Weights
    loss: Metric
    summed = frozenset({"extractor"})
    passed_on = frozenset({"head"})


@dataclass(frozen=True)
class TrainedTogether(Release):
    extractor: Weights
    heads: Weights
    loss: Metric
    summed = frozenset({"extractor", "heads"})


# --- Step 1: local optimisation, where the data is ----------------------------------------------------------------


@step
def train(site: Labelled, extractor: Weights, head: Weights, frozen: Mapping[str, Weights], rng: Rng) -> Trained:
    """Trains {F_i, C_i} on Eq. (5); `frozen` are the other domains' classifiers {C'_j}."""
    hyper = site.hyper(Hyper)
    net = _loaded(site, extractor, head)
    others = [_copy(net.head, weights).requires_grad_(False) for _, weights in sorted(frozen.items())]
    judges = [net.head] if hyper.collaboration == "enlarge" else others
    look_again = _second_look(hyper, site.plan, rng)

    def loss_of(batch: LabelledBatch) -> Tensor:
        features = net.features(batch.x)
        loss = cross_entropy(net.head(features), batch.y)  # Eq. (1)
        if not judges:
            return loss
        if look_again:
            # A pass of its own: in one batch, plain and augmented images would be normalised by common statistics.
            # The first term's gradient is taken now, so that its maps make room for the second's.
            loss.backward()
            loss, features = loss.detach(), net.features(look_again(batch.x))
        return loss + sum_of_losses(judges, features, batch.y)  # Eq. (5)

    loss = _optimise(site, net.parameters(), loss_of, rng)
    return Trained(extractor=weights_of(net.backbone), head=weights_of(net.head), loss=loss)


def sum_of_losses(heads: Sequence[nn.Module], features: Tensor, labels: Tensor) -> Tensor:
    """sum_j CE(C'_j(features), labels). Frozen classifiers take no gradient and hand it on to the features."""
    scores = torch.cat([head(features) for head in heads])
    return len(heads) * cross_entropy(scores, labels.repeat(len(heads)))


@step
def train_together(site: Labelled, extractor: Weights, heads: Weights, rng: Rng) -> TrainedTogether:
    """Fig. 2, consistency: what the other domains' classifiers say of the augmented copy, on average, is drawn to what
    the site's own says of the plain one; all of them learn (Zhou, Yang, Qiao, Xiang: Domain Adaptive Ensemble
    Learning, TIP 2021)."""
    own = site.plan.sources.index(site.name)
    each = [_below(f"{number}.", heads) for number in range(len(site.plan.sources))]
    net = _loaded(site, extractor, each[own])
    members = [net.head if number == own else _copy(net.head, weights) for number, weights in enumerate(each)]
    others = [member for member in members if member is not net.head]
    look_again = _second_look(site.hyper(Hyper), site.plan, rng)

    def loss_of(batch: LabelledBatch) -> Tensor:
        features = net.features(batch.x)
        scores = net.head(features)
        loss = cross_entropy(scores, batch.y)
        if not others:
            return loss
        again = net.features(look_again(batch.x)) if look_again else features
        return loss + inconsistency(torch.stack([other(again) for other in others]), scores)

    parameters = [*net.parameters(), *(parameter for other in others for parameter in other.parameters())]
    loss = _optimise(site, parameters, loss_of, rng)
    trained = _numbered([weights_of(member) for member in members])
    return TrainedTogether(extractor=weights_of(net.backbone), heads=trained, loss=loss)


def converted_network(plan: Plan, hyper: Hyper) -> Network:
    """The plan's net with its norms converted. Its initial weights do not matter."""
    net = plain_network(plan)
    convert_norms(net.backbone, hyper.norm, hyper.norm_where)
    return net


def _loaded(site: Labelled, extractor: Weights, head: Weights) -> Network:
    net = converted_network(site.plan, site.hyper(Hyper))
    weights = {f"backbone.{key}": value for key, value in extractor.items()}
    weights |= {f"head.{key}": value for key, value in head.items()}
    return cast(Network, with_weights(net, weights, site.device).train())


def _copy(head: nn.Module, weights: Weights) -> nn.Module:
    """Another classifier like `head`, on its device."""
    other = copy.deepcopy(head)
    other.load_state_dict(dict(weights))
    return other


def _second_look(hyper: Hyper, plan: Plan, rng: Rng) -> Callable[[Tensor], Tensor] | None:
    """A(x) of Eq. (5), or None where all classifiers see the same features."""
    if not hyper.augment:
        return None
    generator = rng.child("second-look").torch()
    is_cut = max(plan.model.input_shape) > PHOTOGRAPH if hyper.cutout == "auto" else hyper.cutout

    def augment(x: Tensor) -> Tensor:
        new = rand_augment(x.cpu(), generator, hyper.ops, hyper.magnitude)
        if is_cut:
            new = cutout(new, min(x.shape[2:]) // 2, generator)
        return new.to(x.device, memory_format=torch.channels_last)

    return augment


def _optimise(
    site: Labelled, parameters: Iterable[nn.Parameter], loss_of: Callable[[LabelledBatch], Tensor], rng: Rng
) -> float:
    training = site.plan.training
    batches = site.train.batches(training.batch_size, rng, training.local_epochs, augmentation(site.plan))
    return train_batches(batches, loss_of, sgd(parameters, site), training.precision)


# --- Steps 3 and 5: aggregation and broadcast, at the coordinator -------------------------------------------------


class Copa:
    """Sites train with each other's classifiers; extractors are averaged, classifiers collected."""

    hyper_type: ClassVar[type[Hyper]] = Hyper
    state_type: ClassVar[type[State]] = State
    steps: ClassVar[tuple[Step[Any], ...]] = (train, train_together)

    def __init__(self, hyper: Hyper) -> None:
        self.hyper = hyper

    def init(self, base: Network, fed: Federation) -> State:
        if len(fed.plan.model.input_shape) != 3 and self.hyper.augment and self.hyper.collaboration != "none":
            message = "copa augments images, and these are table rows: set copa.augment=false and copa.norm=bn"
            raise InputError("method-needs", message)
        net = copy.deepcopy(base)
        convert_norms(net.backbone, self.hyper.norm, self.hyper.norm_where)
        extractor, head, sites = weights_of(net.backbone), weights_of(net.head), fed.labelled
        apart = {} if self.hyper.iterate else dict.fromkeys(sites, extractor)
        return State(extractor, dict.fromkeys(sites, head), dict.fromkeys(sites, False), head, apart)

    def round(self, state: State, fed: Federation) -> State:
        if len(state.heads) == 1 and self.hyper.collaboration in ("frozen", "consistency"):
            fed.count("copa.no-other-classifiers")
        return (
            self._round_together(state, fed) if self.hyper.collaboration == "consistency" else self._round(state, fed)
        )

    def _round(self, state: State, fed: Federation) -> State:
        each: dict[str, dict[str, Any]] = {
            site: {"head": head, "frozen": self._frozen(state, site)} for site, head in state.heads.items()
        }
        for site, extractor in state.apart.items():
            each[site]["extractor"] = extractor
        replies = fed.ask(fed.labelled, train, extractor=state.extractor, each=each)
        for site, reply in replies:
            fed.note("train_loss", reply.loss, site)
        trained = {**state.trained, **dict.fromkeys(replies.answered, True)}
        apart = {**state.apart, **{site: reply.extractor for site, reply in replies}} if state.apart else {}
        latest = (reply.extractor for _, reply in replies)
        extractors = [apart[site] for site in sorted(apart) if trained[site]] if apart else latest
        heads = {**state.heads, **{site: reply.head for site, reply in replies}}
        return State(self._aggregate(extractors), heads, trained, state.first_head, apart)

    def _frozen(self, state: State, site: str) -> dict[str, Weights]:
        """{C'_j}, j != i, as last broadcast: before anyone has trained, and without iteration for good, what all start
        from. A site that never answered is left out later: an untrained classifier has nothing to say."""
        if self.hyper.collaboration != "frozen":
            return {}
        others = [other for other in state.heads if other != site]
        if not self.hyper.iterate or not any(state.trained.values()):
            return dict.fromkeys(others, state.first_head)
        return {other: state.heads[other] for other in others if state.trained[other]}

    def _aggregate(self, extractors: Iterable[Weights]) -> dict[str, Tensor]:
        mean = weighted_mean((extractor, 1.0) for extractor in extractors)  # Eq. (6), alpha_i = 1/n
        if self.hyper.noise == 0:
            return mean
        # Never from the run's seed: the noise is against the sites and whoever gets the model file, all of whom know
        # the seed and could subtract it again. The price is that such a run cannot be repeated bit for bit.
        return add_noise(mean, self.hyper.noise, torch.Generator().manual_seed(secrets.randbits(63)))

    def _round_together(self, state: State, fed: Federation) -> State:
        sites = sorted(state.heads)
        heads = _numbered([state.heads[site] for site in sites])
        replies = fed.ask(fed.labelled, train_together, extractor=state.extractor, heads=heads)
        for site, reply in replies:
            fed.note("train_loss", reply.loss, site)
        mean = weighted_mean((reply.heads, 1.0) for _, reply in replies)
        return State(
            extractor=self._aggregate(reply.extractor for _, reply in replies),
            heads={site: _below(f"{number}.", mean) for number, site in enumerate(sites)},
            trained={**state.trained, **dict.fromkeys(replies.answered, True)},
            first_head=state.first_head,
            apart={},
        )

    def models(self, state: State) -> Mapping[str, Weights]:
        sites = sorted(state.heads)  # the order of plan.sources
        heads = _numbered([state.heads[site] for site in sites])
        backbone = {f"backbone.{key}": value for key, value in state.extractor.items()}
        members = {f"head.members.{key}": value for key, value in heads.items()}
        shares = equal_shares([state.trained[site] for site in sites])
        return {SHARED: backbone | members | {"head.shares": shares}}

    @staticmethod
    def network(plan: Plan) -> nn.Module:
        hyper = codec.restore(Hyper, dict(plan.hyper))
        net = converted_network(plan, hyper)
        net.head = Ensemble(net.head, len(plan.sources), hyper.predict)  # Eq. (7)
        return net


def _numbered(heads: Sequence[Weights]) -> dict[str, Tensor]:
    """The state dict of a module list."""
    return {f"{number}.{key}": value for number, head in enumerate(heads) for key, value in head.items()}


def _below(prefix: str, weights: Weights) -> dict[str, Tensor]:
    return {key.removeprefix(prefix): value for key, value in weights.items() if key.startswith(prefix)}


COPA = About(
    "copa",
    ("generalize",),
    "Wu and Gong, ICCV 2021",
    "images and a net with convolutions",
    tasks=("classification",),
    # PACS and Office-Home; lr is the architecture's. The digit recipe's rounds and schedule: docs/methods/copa.md.
    defaults={
        "batch_size": 30,
        "local_epochs": 1.0,
        "rounds": 40,
        "momentum": 0.9,
        "weight_decay": 5e-4,
        "schedule": "cosine",
    },
)
