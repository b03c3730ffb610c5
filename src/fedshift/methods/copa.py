"""COPA for domains that nobody has seen: one shared extractor, one classifier a domain.

Guile Wu, Shaogang Gong: Collaborative Optimization and Aggregation for Decentralized Domain Generalization and
Adaptation. ICCV 2021. Steps 1, 3 and 5 of its Fig. 1; hybrid normalisation is in nn/hybrid.py.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn

from fedshift.data.batches import LabelledBatch
from fedshift.data.randaugment import MAX_MAGNITUDE
from fedshift.federation.kinds import Metric, Release, Weights
from fedshift.federation.site import Labelled
from fedshift.federation.step import step
from fedshift.functional.losses import cross_entropy
from fedshift.methods.local import weights_of
from fedshift.nn.hybrid import Variant, Where
from fedshift.rng import Rng

PHOTOGRAPH = 40
"""Images with a longer side (in pixels) are taken for photographs, which also get Cutout."""


@dataclass(frozen=True)
class Hyper:
    """`norm`: what stands in for batch normalisation (Fig. 3), and where (nn.hybrid.convert_norms).
    `collaboration` (Fig. 2): `frozen` classifiers of the other domains (CoFC), `none`, `enlarge` the data by augmented
    copies, or `consistency` with the other domains' classifiers as in DAEL.
    `augment`: whether the second copy of a batch is augmented by RandAugment (`ops`, `magnitude`) and Cutout.
    `iterate`: false trains every site on its own for all rounds and aggregates for scoring only (Table 6).
    `noise`: standard deviation of Gaussian noise on the aggregated extractor.
    `predict`: from the mean of the classifiers' probabilities, or of their logits."""

    norm: Variant = "hbin"
    norm_where: Where = "auto"
    collaboration: Literal["frozen", "none", "enlarge", "consistency"] = "frozen"
    augment: bool = True
    ops: int = 2
    magnitude: float = 9.0
    cutout: bool | Literal["auto"] = "auto"
    iterate: bool = True
    noise: float = 0.0
    predict: Literal["probabilities", "logits"] = "probabilities"

    def __post_init__(self) -> None:
        if self.ops < 1:
            raise ValueError(f"ops must be 1 or more, not {self.ops}; augment=false turns RandAugment off")
        if not 0 <= self.magnitude <= MAX_MAGNITUDE:
            raise ValueError(f"magnitude must be from 0 to {MAX_MAGNITUDE}, not {self.magnitude}")
        if not 0 <= self.noise < float("inf"):
            raise ValueError(f"noise must be 0 or more, not {self.noise}")
        if self.collaboration == "consistency" and not self.iterate:
            raise ValueError("collaboration=consistency trains all domains' classifiers together: it needs iterate")
        if self.collaboration == "enlarge" and not self.augment:
            raise ValueError("collaboration=enlarge adds augmented copies: it needs augment")


@dataclass(frozen=True)
class State:
    """The global model {F_t, {C_i}}. `answered` says whose classifier has been trained at all, `first_head` is what
    all of them started from; `apart` has each site's own extractor where they are not brought together (`iterate`)."""

    extractor: Weights
    heads: Mapping[str, Weights]
    answered: Mapping[str, bool]
    first_head: Weights
    apart: Mapping[str, Weights]


@dataclass(frozen=True)
class Trained(Release):
    extractor: Weights
    head: Weights
    loss: Metric
    summed = frozenset({"extractor"})


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
    net = _loaded(site, hyper, extractor, head)
    others = [_with_weights(net.head, weights).requires_grad_(False) for _, weights in sorted(frozen.items())]
    judges = [net.head] if hyper.collaboration == "enlarge" else others
    new_look = _second_look(hyper, site.plan, rng)

    def loss_of(batch: LabelledBatch) -> Tensor:
        features = net.features(batch.x)
        loss = cross_entropy(net.head(features), batch.y)  # Eq. (1)
        # Two passes: in one batch, plain and augmented images would be normalised by common statistics.
        new = net.features(new_look(batch.x)) if judges and new_look else features
        return loss + sum_of_losses(judges, new, batch.y)  # Eq. (5)

    loss = _optimise(site, net.parameters(), loss_of, rng)
    return Trained(extractor=weights_of(net.backbone), head=weights_of(net.head), loss=loss)


def sum_of_losses(heads: Sequence[nn.Module], features: Tensor, labels: Tensor) -> Tensor:
    """sum_j CE(C'_j(features), labels), Eq. (5). A frozen classifier takes no gradient but hands it on to `features`."""
    return sum((cross_entropy(head(features), labels) for head in heads), start=features.new_zeros(()))


@step
def train_together(site: Labelled, extractor: Weights, heads: Weights, rng: Rng) -> TrainedTogether:
    """Fig. 2, consistency: what the other domains' classifiers say of the augmented copy, on average, is drawn to what
    the site's own says of the plain one; all of them learn (Zhou, Yang, Qiao, Xiang: Domain Adaptive Ensemble
    Learning, TIP 2021)."""
    hyper = site.hyper(Hyper)
    net = _loaded(site, hyper, extractor, None)
    members = nn.ModuleList(copy.deepcopy(net.head) for _ in site.plan.sources)
    members.load_state_dict(dict(heads))
    own = members[site.plan.sources.index(site.name)]
    others = [member for member in members if member is not own]
    new_look = _second_look(hyper, site.plan, rng)

    def loss_of(batch: LabelledBatch) -> Tensor:
        features = net.features(batch.x)
        scores = own(features)
        loss = cross_entropy(scores, batch.y)
        if not others:
            return loss
        new = net.features(new_look(batch.x)) if new_look else features
        return loss + inconsistency(torch.stack([other(new) for other in others]), scores)

    loss = _optimise(site, [*net.backbone.parameters(), *members.parameters()], loss_of, rng)
    return TrainedTogether(extractor=weights_of(net.backbone), heads=weights_of(members), loss=loss)


def inconsistency(others: Tensor, own: Tensor) -> Tensor:
    """Mean over samples of ||mean_j softmax(others_j) - softmax(own)||^2, the latter a constant; `(M, B, C)`, `(B, C)`."""
    return (others.softmax(2).mean(0) - own.softmax(1).detach()).square().sum(1).mean()


def converted_network(plan: Plan, hyper: Hyper) -> Network:
    """The plan's net with its norms converted. Its initial weights do not matter."""
    net = plain_network(plan)
    convert_norms(net.backbone, hyper.norm, hyper.norm_where)
    return net


def _loaded(site: Labelled, hyper: Hyper, extractor: Weights, head: Weights | None) -> Network:
    net = converted_network(site.plan, hyper)
    net.backbone.load_state_dict(dict(extractor))
    if head is not None:
        net.head.load_state_dict(dict(head))
    return net.to(site.device).train()


def _with_weights(like: nn.Module, weights: Weights) -> nn.Module:
    module = copy.deepcopy(like)
    module.load_state_dict(dict(weights))
    return module


def _second_look(hyper: Hyper, plan: Plan, rng: Rng) -> Callable[[Tensor], Tensor] | None:
    """A(x) of Eq. (5): RandAugment, and Cutout on photographs; None where the same features are to be judged."""
    if not hyper.augment:
        return None
    generator = rng.child("second-look").torch()
    is_cut = max(plan.model.input_shape) > PHOTOGRAPH if hyper.cutout == "auto" else hyper.cutout

    def augment(x: Tensor) -> Tensor:
        new = rand_augment(x.cpu(), generator, hyper.ops, hyper.magnitude)
        return (cutout(new, min(new.shape[2:]) // 2, generator) if is_cut else new).to(x.device)

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
            raise InputError(
                "method-needs",
                "copa augments images, and table rows are none: set copa.augment=false and copa.norm=bn",
            )
        net = copy.deepcopy(base)
        convert_norms(net.backbone, self.hyper.norm, self.hyper.norm_where)
        extractor, head, sites = weights_of(net.backbone), weights_of(net.head), fed.labelled
        apart = {} if self.hyper.iterate else dict.fromkeys(sites, extractor)
        return State(extractor, dict.fromkeys(sites, head), dict.fromkeys(sites, False), head, apart)

    def round(self, state: State, fed: Federation) -> State:
        if len(state.heads) == 1 and self.hyper.collaboration in ("frozen", "consistency"):
            fed.count("copa.no-other-classifiers")
        if self.hyper.collaboration == "consistency":
            return self._round_together(state, fed)
        questions: dict[str, dict[str, Any]] = {
            site: {"head": head, "frozen": self._frozen(state, site)} for site, head in state.heads.items()
        }
        for site, extractor in state.apart.items():
            questions[site]["extractor"] = extractor
        replies = fed.ask(fed.labelled, train, extractor=state.extractor, each=questions)
        for site, trained in replies:
            fed.note("train_loss", trained.loss, site)
        answered = {**state.answered, **dict.fromkeys(replies.answered, True)}
        apart = {**state.apart, **{site: trained.extractor for site, trained in replies if state.apart}}
        # Eq. (6) with alpha_i = 1/n over the sites that answered; without iteration over all that ever have.
        parts = ((apart[s], 1.0) for s in apart if answered[s]) if apart else ((t.extractor, 1.0) for _, t in replies)
        return State(
            extractor=with_noise(weighted_mean(parts), self.hyper.noise),
            heads={**state.heads, **{site: trained.head for site, trained in replies}},
            answered=answered,
            first_head=state.first_head,
            apart=apart,
        )

    def _frozen(self, state: State, site: str) -> dict[str, Weights]:
        """{C'_j}, j != i, as last broadcast: at first, and for ever without iteration, the common initial one. Later a
        site that never answered is left out: nothing can be learned from an untrained classifier."""
        if self.hyper.collaboration != "frozen":
            return {}
        others = [other for other in state.heads if other != site]
        if not self.hyper.iterate or not any(state.answered.values()):
            return dict.fromkeys(others, state.first_head)
        return {other: state.heads[other] for other in others if state.answered[other]}

    def _round_together(self, state: State, fed: Federation) -> State:
        sites = sorted(state.heads)
        heads = _numbered([state.heads[site] for site in sites])
        replies = fed.ask(fed.labelled, train_together, extractor=state.extractor, heads=heads)
        for site, trained in replies:
            fed.note("train_loss", trained.loss, site)
        mean = weighted_mean((trained.heads, 1.0) for _, trained in replies)
        return State(
            extractor=with_noise(weighted_mean((t.extractor, 1.0) for _, t in replies), self.hyper.noise),
            heads={s: {key: mean[f"{n}.{key}"] for key in state.first_head} for n, s in enumerate(sites)},
            answered={**state.answered, **dict.fromkeys(replies.answered, True)},
            first_head=state.first_head,
            apart={},
        )

    def models(self, state: State) -> Mapping[str, Weights]:
        sites = sorted(state.heads)  # the order of plan.sources
        model = {f"backbone.{key}": value for key, value in state.extractor.items()}
        heads = _numbered([state.heads[site] for site in sites])
        model |= {f"head.members.{key}": value for key, value in heads.items()}
        return {SHARED: model | {"head.shares": equal_shares([state.answered[site] for site in sites])}}

    @staticmethod
    def network(plan: Plan) -> nn.Module:
        hyper = codec.restore(Hyper, dict(plan.hyper))
        net = converted_network(plan, hyper)
        net.head = HeadEnsemble(net.head, len(plan.sources), hyper.predict)
        return net


class HeadEnsemble(nn.Module):
    """All domains' classifiers as one: features `(B, F)` to scores `(B, classes)` whose softmax is the prediction."""

    shares: Tensor

    def __init__(self, head: nn.Module, members: int, predict: str) -> None:
        super().__init__()
        self.members = nn.ModuleList(copy.deepcopy(head) for _ in range(members))
        self.register_buffer("shares", equal_shares([True] * members))
        self.combine = mean_probability if predict == "probabilities" else mean_score

    def forward(self, features: Tensor) -> Tensor:
        return self.combine(torch.stack([member(features) for member in self.members]), self.shares)  # Eq. (7)


def with_noise(weights: Weights, deviation: float) -> dict[str, Tensor]:
    """Gaussian noise on all floating tensors (sec. 3.3); variances stay at least 0."""
    if deviation == 0:
        return dict(weights)
    # Never from the run's seed: every site knows it, and so does whoever gets the model file. They are the ones the
    # noise is against, and could subtract it. The price: a run with noise cannot be repeated bit for bit.
    generator = torch.Generator().manual_seed(secrets.randbits(63))
    noisy: dict[str, Tensor] = {}
    for key, value in weights.items():
        if not value.is_floating_point():
            noisy[key] = value
            continue
        blurred = value + deviation * torch.randn(value.shape, generator=generator, dtype=value.dtype)
        noisy[key] = blurred.clamp_(min=0) if key.endswith("running_var") else blurred
    return noisy


def _numbered(heads: Sequence[Weights]) -> dict[str, Tensor]:
    """Classifiers as the state dict of a module list."""
    return {f"{number}.{key}": value for number, head in enumerate(heads) for key, value in head.items()}


COPA = About(
    "copa",
    ("generalize",),
    "Wu and Gong, ICCV 2021",
    "images, and a net with convolutions",
    tasks=("classification",),
    # PACS and Office-Home. The digit recipe differs in rounds and schedule: docs/methods/copa.md.
    defaults={
        "batch_size": 30,
        "local_epochs": 1.0,
        "rounds": 40,
        "momentum": 0.9,
        "weight_decay": 5e-4,
        "schedule": "cosine",
    },
)
