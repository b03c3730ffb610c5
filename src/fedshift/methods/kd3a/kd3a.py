"""KD3A: sources teach a target without showing it their data. The target learns what confident teachers agree on, and
teachers that add to the agreement have more weight.

H. Feng, Z. You, M. Chen, T. Zhang, M. Zhu, F. Wu, C. Wu, W. Chen: KD3A: Unsupervised Multi-Source Decentralized Domain
Adaptation via Knowledge Distillation. ICML 2021. The vote is in functional/consensus.py, BatchNorm MMD in
functional/moments.py, what the target does with them in kd3a/target.py.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, cast

import torch
from torch import Tensor, nn

from fedshift.errors import InputError, nearest
from fedshift.federation.federation import Federation
from fedshift.federation.labels import label_loss
from fedshift.federation.plan import Plan
from fedshift.federation.releases import Count, Metric, Release, Weights
from fedshift.federation.site import Labelled, Unlabelled
from fedshift.federation.step import Step, step
from fedshift.functional.averaging import weighted_mean
from fedshift.functional.consensus import MOST_FOR_ALL_SUBSETS, Consensus, Rule, knowledge_vote
from fedshift.functional.moments import anchors, recorded_moments
from fedshift.methods.base import SHARED, About
from fedshift.methods.cost import PLAIN
from fedshift.methods.kd3a.keys import Hyper
from fedshift.methods.kd3a.target import Heard, Lesson, align, distil, first_visits, hear, lasting_momentum, passes_of
from fedshift.methods.kd3a.weights import normalised, round_weights, smoothed
from fedshift.methods.local import (
    all_finite,
    augmentation,
    network_with,
    plain_network,
    random_like,
    require_target,
    sgd,
    train_batches,
    weights_of,
)
from fedshift.nn.network import Network
from fedshift.nn.taps import norm_layers
from fedshift.rng import Rng


@dataclass(frozen=True)
class State:
    """The target's model; `heads` of the sources if they keep their own; `weights` of each source in the last round it
    took part in, and of the target."""

    model: Weights
    heads: Mapping[str, Weights]
    weights: Mapping[str, float]


@dataclass(frozen=True)
class Trained(Release):
    """A teacher. Each one votes, so a sum over sites, as in secure aggregation, is not enough."""

    model: Weights
    samples: Count
    loss: Metric


# --- Algorithm 1, lines 2-6: at the sources -----------------------------------------------------------------------


@step
def train(site: Labelled, model: Weights, rng: Rng) -> Trained:
    """Trains a teacher with cross-entropy."""
    training = site.plan.training
    net = network_with(site.plan, model, site.device).train()
    begin, end, order = passes_of(site)
    batches = site.train.stretch(begin, end, order, training.batch_size, rng, augmentation(site.plan))
    optimizer = sgd(site, net)
    with lasting_momentum(net, optimizer, site, site.hyper(Hyper).choices().keep_momentum):
        loss = train_batches(batches, lambda b: label_loss(net(b.x), b.y), optimizer, training.precision)
    return Trained(model=weights_of(net), samples=site.train.used, loss=loss)


# --- Lines 7-17: at the target --------------------------------------------------------------------------------------


class KD3A:
    """Teachers vote on the target's samples, the target learns from the vote, and all models are averaged."""

    hyper_type: ClassVar[type[Hyper]] = Hyper
    state_type: ClassVar[type[State]] = State
    steps: ClassVar[tuple[Step[Any], ...]] = (train,)

    def __init__(self, hyper: Hyper) -> None:
        self.hyper = hyper
        self.choices = hyper.choices()

    def init(self, base: Network, fed: Federation) -> State:
        self._check(base, fed)
        model = weights_of(base)
        heads = {}
        if self.choices.average == "backbone":
            for site in self._sources(fed):
                drawn = random_like(base.head, Rng.of(fed.plan.seed, site, "kd3a.head"))
                heads[site] = {f"head.{key}": value for key, value in drawn.items()}
        return State(model, heads, {})

    def round(self, state: State, fed: Federation) -> State:
        each = {site: {"model": {**state.model, **head}} for site, head in state.heads.items()}
        replies = fed.ask(self._sources(fed), train, each=each, model=state.model)
        for site, trained in replies:
            fed.note("train_loss", trained.loss, site)
        home = cast(Unlabelled, fed.home)
        order = home.train.stretch(*passes_of(home))
        samples = first_visits(order)
        choices = self.choices
        sites = replies.answered
        started = {site: {**state.model, **state.heads.get(site, {})} for site in sites}
        model_of = fed.clipped(sites, lambda site: replies[site].model, started)
        heard = fed.at_home(
            hear,
            teachers=sites,
            model_of=model_of,
            samples=samples,
            mode=choices.teachers,
            distance=choices.weighting if choices.weighting in ("h-divergence", "info-gain") else None,
        )
        if heard.silent:
            fed.count("kd3a.teacher-not-finite", len(heard.silent))
        if not heard.sites:
            fed.count("kd3a.no-teacher")
            return state
        rule = Rule(self.hyper.gate_at(fed.round, fed.plan.training.rounds), choices.ballot, choices.doubt)
        votes = knowledge_vote(heard.probabilities, rule)  # line 8
        self._tell(votes, rule, heard, fed)
        student, loss = fed.at_home(  # line 9
            distil,
            model=state.model,
            order=order,
            lesson=Lesson(samples, *self._labels(votes)),
            choices=choices,
        )
        stated = [max(1, replies[site].samples) for site in heard.sites]
        sizes = dict(zip(heard.sites, fed.believable(stated, heard.sites), strict=True))
        weights = round_weights(heard, votes, rule, sizes, self.hyper, fed)  # line 11
        weights = smoothed(weights, state.weights, choices.smoothing)
        is_usable = all_finite(student)
        if is_usable:
            fed.note("train_loss", loss, home.name)
        return self._aggregate(state, model_of, heard, student if is_usable else None, weights, samples, fed)

    # --- Knowledge vote, sec. 3.2 ---

    def _labels(self, votes: Consensus) -> tuple[Tensor, Tensor]:
        """p and n_p of each sample, according to the choices."""
        choices, p = self.choices, votes.probabilities
        if choices.label == "one-hot":
            p = torch.zeros_like(p).scatter_(1, votes.classes[:, None], 1.0)
        supporters = votes.supporters if choices.support == "count" else votes.supporters.clamp(max=1)
        return p, torch.where(supporters > 0, supporters.float(), choices.doubt)

    def _tell(self, votes: Consensus, rule: Rule, heard: Heard, fed: Federation) -> None:
        fed.note("gate", rule.gate)
        fed.note("voted_samples", len(votes.supporters))
        fed.note("unsupported_samples", int((votes.supporters == 0).sum()))
        if not bool((votes.supporters > 0).any()):
            fed.count("kd3a.nobody-confident")
        fed.note("consensus_quality", float(votes.quality(rule.doubt).mean()))
        if len(heard.sites) == 1:
            fed.count("kd3a.one-teacher")

    # --- Model aggregation and BatchNorm MMD, sec. 3.4 ---

    def _aggregate(
        self,
        state: State,
        model_of: Callable[[str], Weights],
        heard: Heard,
        student: Weights | None,
        weights: Mapping[str, float],
        samples: Tensor,
        fed: Federation,
    ) -> State:
        target = fed.home.name
        used = dict(weights)
        if student is None:
            fed.count("kd3a.student-not-finite")
            used = normalised({site: weights[site] for site in heard.sites})

        def members() -> Iterator[tuple[Weights, float]]:
            for site in heard.sites:
                yield {**model_of(site), **heard.statistics.get(site, {})}, used[site]
            if student is not None:
                yield student, used[target]

        for name in (*heard.sites, target):
            fed.note("weight", used.get(name, 0.0), name)
        model = weighted_mean((model, weight) for model, weight in members() if weight > 0)  # line 13
        if self.choices.average == "backbone":
            model |= _head(student or state.model)
        if self.choices.mmd:
            model = self._aligned(model, members(), samples, fed)
        heads = {**state.heads, **{site: _head(model_of(site)) for site in heard.sites if site in state.heads}}
        return State(model, heads, {**state.weights, **weights})

    def _aligned(
        self, model: dict[str, Tensor], members: Iterator[tuple[Weights, float]], samples: Tensor, fed: Federation
    ) -> dict[str, Tensor]:
        """Lines 15 and 16: the model after BatchNorm MMD."""
        layers = list(norm_layers(plain_network(fed.plan)))
        if not layers:
            fed.count("kd3a.no-batchnorm")
            return model
        sources = anchors((recorded_moments(member, layers), weight) for member, weight in members)
        aligned, loss = fed.at_home(align, model=model, samples=samples, sources=sources, hyper=self.hyper)
        if not all_finite(aligned):
            fed.count("kd3a.mmd-not-finite")
            return model
        fed.note("mmd_loss", loss, fed.home.name)
        return aligned

    def models(self, state: State) -> Mapping[str, Weights]:
        return {SHARED: state.model}

    @staticmethod
    def network(plan: Plan) -> nn.Module:
        return plain_network(plan)

    # --- Who takes part ---

    def _sources(self, fed: Federation) -> tuple[str, ...]:
        return tuple(site for site in fed.labelled if site not in self.hyper.drop)

    def _check(self, base: Network, fed: Federation) -> None:
        """Refuses before the first round what would fail in it."""
        for name in self.hyper.drop:
            if name not in fed.labelled:
                raise InputError("config-value", f"kd3a.drop: {name!r} is no source. {nearest(name, fed.labelled)}")
        count = len(self._sources(fed))
        if not count:
            raise InputError("config-value", "kd3a.drop: no source is left to learn from")
        if self.choices.weighting == "shapley" and count > MOST_FOR_ALL_SUBSETS:
            message = f"exact Shapley values take 2^{count} votes with {count} sources (at most {MOST_FOR_ALL_SUBSETS})"
            raise InputError("config-value", f"kd3a.weighting: {message}; use focus or shapley-sampled")
        if self.choices.weighting == "h-divergence" and not norm_layers(base):
            message = "kd3a.weighting=h-divergence reads BatchNorm statistics, and this network has none: use focus"
            raise InputError("method-needs", message)
        require_target(fed)


def _head(model: Weights) -> dict[str, Tensor]:
    return {key: value for key, value in model.items() if key.startswith("head.")}


def _needs_statistics(hyper: Hyper) -> str:
    """Which choice works with the BatchNorm statistics of sources or target, and what to set instead."""
    choices = hyper.choices()
    if choices.mmd:
        return "kd3a works with what BatchNorm layers remember of each site, unless kd3a.mmd=false."
    if choices.weighting == "h-divergence":
        return "kd3a.weighting=h-divergence compares what BatchNorm layers remember of each site."
    if choices.teachers == "train":
        return "kd3a.teachers=train records statistics of the target; kd3a.teachers=eval does not."
    return ""


ABOUT = About(
    "kd3a",
    ("adapt",),
    "Feng et al., ICML 2021",
    all_because="every source votes on the target's samples",
    tasks=("classification",),
    uses_statistics=True,
    needs_statistics=_needs_statistics,
    aggregation="clipped",
    # Digit-5; lr is the architecture's (0.05 for digits-kd3a, 0.005 for resnet101). The weight decay is from the
    # authors' code, all else from the paper: docs/methods/kd3a.md.
    defaults={
        "batch_size": 100,
        "local_epochs": 1.0,
        "rounds": 40,
        "lr_min": 0.001,
        "momentum": 0.9,
        "weight_decay": 5e-4,
        "schedule": "cosine",
    },
    # While nobody is confident, the student has learned nothing, and with its share of the samples it would hold back
    # what the sources have learned.
    pretrained={
        "lr": 0.004,
        "lr_min": 0.0,
        "kd3a": {"mmd": False, "weighting": "samples", "target_share": "confident"},
    },
    counters={
        "kd3a.mmd-not-finite": (
            "BatchNorm MMD gave NaN or infinite weights and was undone: a lower kd3a.mmd_rate may help."
        ),
        "kd3a.no-batchnorm": "The network has no batch normalisation, so there was no BatchNorm MMD.",
        "kd3a.no-teacher": "No source gave usable predictions: the model stayed as it was.",
        "kd3a.nobody-confident": (
            "No teacher passed the gate for any sample: the target learned almost nothing, and weights mean little."
            " More rounds or a lower kd3a.gate may help."
        ),
        "kd3a.nobody-useful": "No source added to the consensus: sources were weighted by their number of samples.",
        "kd3a.one-teacher": "There was only one teacher: it agrees with itself and has all of the sources' weight.",
        "kd3a.student-not-finite": (
            "Distillation gave NaN or infinite weights: the student was left out of the average."
        ),
        "kd3a.teacher-not-finite": ("A source's model gave NaN or infinite predictions and was left out of the vote."),
    },
    time_factor=2.3,
    cost=PLAIN,
)
