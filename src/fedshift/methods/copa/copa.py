"""COPA for unseen domains: one shared extractor, one classifier per domain.

Guile Wu, Shaogang Gong: Collaborative Optimization and Aggregation for Decentralized Domain Generalization and
Adaptation. ICCV 2021. Steps 1, 3 and 5 of its Fig. 1; hybrid normalisation, Eq. (2)-(4), is in nn/normalisation.py.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, TypeVar

import torch
from torch import Tensor, nn

from fedshift.data.batches import LabelledBatch
from fedshift.errors import InputError, SiteError
from fedshift.federation.federation import Federation, Replies
from fedshift.federation.labels import label_loss
from fedshift.federation.plan import Plan
from fedshift.federation.releases import Metric, Release, Weights
from fedshift.federation.site import Labelled
from fedshift.federation.step import Step, step
from fedshift.functional.agreement import inconsistency
from fedshift.methods.base import SHARED, About
from fedshift.methods.copa.parts import (
    PRETRAINED_KEYS,
    TABLE_KEYS,
    CollaborativeLoss,
    Hyper,
    aggregated,
    assembled,
    below,
    collaborative_loss,
    converted_network,
    copy_of,
    ensemble_network,
    hyper_of,
    is_shared,
    judges_of,
    loaded,
    numbered,
    second_features,
    second_look,
)
from fedshift.methods.cost import MODEL, Formula
from fedshift.methods.local import augmentation, sgd, train_batches, weights_of
from fedshift.methods.private import train_privately
from fedshift.nn.network import Network
from fedshift.nn.normalisation import convert_norms
from fedshift.rng import Rng


@dataclass(frozen=True)
class State:
    """The global model {F_t, {C_i}}. `trained` says whose classifier has been trained; `first_head` is the classifier
    that all start from; `apart` has each site's extractor if sites do not share one (iterate=false)."""

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


T = TypeVar("T", bound=Trained)


@dataclass(frozen=True)
class TrainedTogether(Release):
    extractor: Weights
    heads: Weights
    loss: Metric
    summed = frozenset({"extractor", "heads"})


# --- Step 1: local optimisation, where the data is ----------------------------------------------------------------


@step(by_sample=True)
def train(site: Labelled, extractor: Weights, head: Weights, frozen: Mapping[str, Weights], rng: Rng) -> Trained:
    """Trains {F_i, C_i} on Eq. (5); `frozen` are the other domains' classifiers {C'_j}."""
    hyper = hyper_of(site.plan)
    net = loaded(converted_network(site.plan, hyper), extractor, head, site.device)
    judges, look_again = judges_of(net, frozen, hyper), second_look(hyper, site.plan, rng)
    if site.private is not None:

        def looks(x: Tensor) -> tuple[Tensor, ...]:
            return (look_again(x),) if judges and look_again else ()

        train_privately(site, CollaborativeLoss(net, judges, hyper), sgd(site, net), rng, looks)
        return Trained(extractor=weights_of(net.backbone), head=weights_of(net.head), loss=0.0)
    loss = _optimise(site, [net], collaborative_loss(net, judges, look_again, hyper), rng)
    return Trained(extractor=weights_of(net.backbone), head=weights_of(net.head), loss=loss)


@step(by_sample=True)
def train_together(site: Labelled, extractor: Weights, heads: Weights, rng: Rng) -> TrainedTogether:
    """Fig. 2, consistency: the mean prediction of the other domains' classifiers for the augmented copy moves towards
    the own classifier's for the plain batch; all classifiers learn (Zhou, Yang, Qiao, Xiang: Domain Adaptive Ensemble
    Learning, TIP 2021)."""
    if site.private is not None:
        raise SiteError("method-needs", "copa.collaboration=consistency does not train by DP-SGD")
    hyper = hyper_of(site.plan)
    own = site.plan.sources.index(site.name)
    each = [below(f"{number}.", heads) for number in range(len(site.plan.sources))]
    net = loaded(converted_network(site.plan, hyper), extractor, each[own], site.device)
    members = [net.head if number == own else copy_of(net.head, weights) for number, weights in enumerate(each)]
    others = [member for member in members if member is not net.head]
    look_again = second_look(hyper, site.plan, rng)

    def loss_of(batch: LabelledBatch) -> Tensor:
        features = net.features(batch.x)
        scores = net.head(features)
        loss = label_loss(scores, batch.y)
        if not others:
            return loss
        again = second_features(net, look_again(batch.x), hyper) if look_again else features
        return loss + inconsistency(torch.stack([other(again) for other in others]), scores)

    loss = _optimise(site, [net, *others], loss_of, rng)
    trained = numbered([weights_of(member) for member in members])
    return TrainedTogether(extractor=weights_of(net.backbone), heads=trained, loss=loss)


def _optimise(
    site: Labelled,
    modules: Iterable[nn.Module],
    loss_of: Callable[[LabelledBatch], Tensor] | Sequence[Callable[[LabelledBatch], Tensor]],
    rng: Rng,
) -> float:
    training = site.plan.training
    batches = site.train.batches(training.batch_size, rng, training.local_epochs, augmentation(site.plan))
    return train_batches(batches, loss_of, sgd(site, *modules), training.precision)


# --- Steps 3 and 5: aggregation and broadcast, at the coordinator -------------------------------------------------


class Copa:
    """Sites train with each other's classifiers; extractors are averaged, classifiers collected."""

    hyper_type: ClassVar[type[Hyper]] = Hyper
    state_type: ClassVar[type[State]] = State
    steps: ClassVar[tuple[Step[Any], ...]] = (train, train_together)

    def __init__(self, hyper: Hyper) -> None:
        self.hyper = hyper

    def init(self, base: Network, fed: Federation) -> State:
        return first_state(base, fed, self.hyper, fed.labelled)

    def round(self, state: State, fed: Federation) -> State:
        if is_shared(self.hyper, fed):
            return shared_round(state, fed, self.hyper, train)
        if len(state.heads) == 1 and self.hyper.collaboration in ("frozen", "consistency"):
            fed.count("copa.no-other-classifiers")
        return (
            self._round_together(state, fed) if self.hyper.collaboration == "consistency" else self._round(state, fed)
        )

    def _round(self, state: State, fed: Federation) -> State:
        replies = train_locally(state, fed, self.hyper, train)
        state = collected(state, replies, fed)
        apart = state.apart
        if apart:
            sites = [site for site in sorted(apart) if state.trained[site]]
            # Sites that never share a model have nothing in common to measure updates from.
            return dataclasses.replace(state, extractor=self._aggregate(fed, apart.__getitem__, sites, None))
        return dataclasses.replace(state, extractor=self._aggregate_replies(fed, replies, state.extractor))

    def _aggregate_replies(
        self, fed: Federation, replies: Replies[Trained] | Replies[TrainedTogether], since: Weights
    ) -> dict[str, Tensor]:
        return self._aggregate(fed, lambda site: replies[site].extractor, replies.answered, since)

    def _aggregate(
        self, fed: Federation, extractor_of: Callable[[str], Weights], sites: Sequence[str], since: Weights | None
    ) -> dict[str, Tensor]:
        # Eq. (6), alpha_i = 1/n
        return aggregated(fed, lambda: ((extractor_of(site), 1.0) for site in sites), since, sites, self.hyper.noise)

    def _round_together(self, state: State, fed: Federation) -> State:
        sites = sorted(state.heads)
        heads = numbered([state.heads[site] for site in sites])
        replies = fed.ask(fed.labelled, train_together, extractor=state.extractor, heads=heads)
        for site, reply in replies:
            fed.note("train_loss", reply.loss, site)
        mean = fed.average(
            lambda: ((reply.heads, 1.0) for _, reply in replies), since=heads, sites=replies.answered, stated=False
        )
        return State(
            extractor=self._aggregate_replies(fed, replies, state.extractor),
            heads={site: below(f"{number}.", mean) for number, site in enumerate(sites)},
            trained={**state.trained, **dict.fromkeys(replies.answered, True)},
            first_head=state.first_head,
            apart={},
        )

    def models(self, state: State) -> Mapping[str, Weights]:
        return {SHARED: assembled(state.extractor, state.heads, state.trained)}

    @staticmethod
    def network(plan: Plan) -> nn.Module:
        return ensemble_network(plan, len(plan.sources))


def first_state(base: Network, fed: Federation, hyper: Hyper, domains: Iterable[str]) -> State:
    """The given network with its norms converted, and its classifier for each of `domains`."""
    if len(fed.plan.model.input_shape) != 3 and hyper.augment and hyper.collaboration != "none":
        name = fed.plan.method
        message = f"{name} augments images, and these are table rows: set {name}.augment=false and {name}.norm=bn"
        raise InputError("method-needs", message)
    net = copy.deepcopy(base)
    convert_norms(net.backbone, hyper.norm, hyper.norm_where, hyper.norm_start)
    extractor, head, names = weights_of(net.backbone), weights_of(net.head), list(domains)
    apart = {} if hyper.iterate else dict.fromkeys(fed.labelled, extractor)
    return State(extractor, dict.fromkeys(names, head), dict.fromkeys(names, False), head, apart)


def train_locally(state: State, fed: Federation, hyper: Hyper, work: Step[T], phase: str = "") -> Replies[T]:
    """Sends every site the global model, or its own, and has it train (steps 5 and 1). Its loss is noted under a name
    that begins with `phase`."""
    each: dict[str, dict[str, Any]] = {
        site: {"head": state.heads[site], "frozen": frozen_for(site, state, hyper)} for site in fed.labelled
    }
    for site, extractor in state.apart.items():
        each[site]["extractor"] = extractor
    replies = fed.ask(fed.labelled, work, extractor=state.extractor, each=each)
    for site, reply in replies:
        fed.note(f"{phase}train_loss", reply.loss, site)
    return replies


def shared_round(state: State, fed: Federation, hyper: Hyper, work: Step[T]) -> State:
    """A round of the shared start: as in FedAvg, with equal weights. No classifier judges, and the mean of the trained
    ones is everybody's. Its loss has another name: judges would be a part of it."""
    replies = train_locally(state, fed, dataclasses.replace(hyper, collaboration="none"), work, "shared_")
    sites = replies.answered
    head = fed.average(
        lambda: ((reply.head, 1.0) for _, reply in replies),
        since=next(iter(state.heads.values())),
        sites=sites,
        stated=False,
    )
    return dataclasses.replace(
        state,
        extractor=aggregated(
            fed, lambda: ((reply.extractor, 1.0) for _, reply in replies), state.extractor, sites, hyper.noise
        ),
        heads=dict.fromkeys(state.heads, head),
        trained={domain: was or domain in fed.labelled for domain, was in state.trained.items()},
    )


def frozen_for(site: str, state: State, hyper: Hyper) -> dict[str, Weights]:
    """{C'_j}, j != i, as last broadcast. Without iteration it is the initial classifier; before any domain has trained,
    that one or none (`first_judges`). Later, domains that never trained are left out."""
    if hyper.collaboration != "frozen":
        return {}
    others = [other for other in state.heads if other != site]
    is_first = not any(state.trained.values())
    if is_first and hyper.iterate and hyper.first_judges == "none":
        return {}
    if is_first or not hyper.iterate:
        return dict.fromkeys(others, state.first_head)
    return {other: state.heads[other] for other in others if state.trained[other]}


def collected(state: State, replies: Replies[T], fed: Federation, sites: Sequence[str] | None = None) -> State:
    """`state` with the classifiers, and without iteration the extractors, of the sites that answered (or of `sites`).
    Classifiers judge at other sites and predict: one that is far longer than the others' is clipped."""
    heads, trained, apart = dict(state.heads), dict(state.trained), dict(state.apart)
    answered = replies.answered if sites is None else sites
    head_of = fed.clipped(answered, lambda site: replies[site].head, state.heads)
    for site in answered:
        heads[site], trained[site] = head_of(site), True
        if apart:
            apart[site] = replies[site].extractor
    return dataclasses.replace(state, heads=heads, trained=trained, apart=apart)


COPA = About(
    "copa",
    ("generalize",),
    "Wu and Gong, ICCV 2021",
    "images and a net with convolutions",
    all_because="every site has a classifier of its own, and all of them train each extractor",
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
    pretrained={"lr": 0.004, "copa": PRETRAINED_KEYS},
    tables={"copa": TABLE_KEYS},
    counters={
        "copa.no-other-classifiers": (
            "There was only one source, so there were no other classifiers to collaborate with: this round was plain"
            " training."
        ),
    },
    time_factor=2.8,
    revision=1,  # Second looks move no running statistics.
    # A second pass through G, judged by K - 1 frozen classifiers.
    cost=Formula(flops={"G": 6, "F": 1, "KF": 2, "dG": -2}, upload=MODEL, broadcast={"G": 1, "KF": 1}),
)
