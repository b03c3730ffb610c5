"""DualAdapt: clients train their own classifiers on frozen features. The home, which alone has labels, adapts the
features on mixup images that take the place of the clients' images.

C.-H. Yao, B. Gong, H. Qi, Y. Cui, Y. Zhu, M.-H. Yang: Federated Multi-Target Domain Adaptation. WACV 2022.

Algorithm 1, line by line. G is the extractor, F_g the shared classifier, F_l^i that of client i. A round is lines 13-18
on what the clients sent in the round before, then lines 3-12. So a client's F_l and statistics always belong to the G
that they are used with.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor, nn

from fedshift.data.batches import LabelledBatch, UnlabelledBatch
from fedshift.errors import SiteError
from fedshift.federation.checks import AtMost, Expected, Like, MixtureIn
from fedshift.federation.federation import Federation, Replies
from fedshift.federation.labels import label_loss
from fedshift.federation.plan import Plan
from fedshift.federation.releases import Metric, MixtureTerms, Release, Statistics, Tally, Weights
from fedshift.federation.site import Labelled, Site, Unlabelled, WithTargets
from fedshift.federation.step import Step, step
from fedshift.functional.averaging import add_noise
from fedshift.functional.losses import discrepancy, pseudo_label_loss
from fedshift.functional.mixtures import (
    Among,
    Axes,
    Mixture,
    Sample,
    Weighting,
    fit_mixture,
    principal_axes,
    typicality,
)
from fedshift.methods.base import SHARED, About
from fedshift.methods.clients import (
    FrozenFeatures,
    count_absent,
    endless_batches,
    frozen_copy,
    mean_of,
    paired_network,
    paired_weights,
    split_network,
)
from fedshift.methods.cost import Formula
from fedshift.methods.local import augmentation, random_like, sgd, train_batches, weights_of, with_weights
from fedshift.nn.backbones.segmentation import with_light_head
from fedshift.nn.network import Network
from fedshift.nn.normalisation import STATISTICS, forgetting, remembering, statistics_of
from fedshift.rng import Rng

NUDGE = 1e-3
"""Standard deviation of the noise that makes a client's classifier differ from the shared one without pseudo labels."""


@dataclass(frozen=True)
class Hyper:
    """R_c, the clients' iterations, is the common key local_epochs."""

    lambda_st: float = 1.0
    """Weight of the pseudo labels in Eq. (5). They prevail over the discrepancy where lambda_st W(x) > 2."""
    pretrain_epochs: float = 10.0
    """Passes over the home's data before the first round."""
    server_epochs: float = 1.0
    """R_s: passes over the home's data per round."""
    self_training: bool = True
    """Whether clients learn from pseudo labels; false: only from the discrepancy (Table 5)."""
    mixtures: bool = True
    """Whether Gaussian mixtures weight samples; false: all weights are 1 and no mixture is fitted or sent (Table 5)."""
    local_start: Literal["shared", "independent"] = "shared"
    """Where F_l starts in each round: as F_g (line 6), or with random weights of its own."""
    weighting: Weighting = "rank"
    """What W(x) is: the rank of the density at x, or the density per dimension relative to the fitted points' median,
    which tells how far away a client is."""
    weigh_among: Among = "batch"
    """What a rank compares x with: the other samples of its batch, or the points that the mixture was fitted to."""
    components_per_class: int = 2
    """Components of a mixture, times the number of classes."""
    energy: float = 0.8
    """Share of the features' variance that the principal axes keep."""
    points: int = 8192
    """Feature vectors, at most, that a mixture is fitted to."""
    alignment: float | None = None
    """Weight of Eq. (6), as a mean over clients; set to their number it is the printed sum. 0: the home learns only
    from its labels. None: 1, and 0.1 if the home has the clients' images (fed-oracle)."""
    statistics: Literal["auto", "client", "home"] = "auto"
    """Whose BatchNorm statistics the extractor has at a client: the client's, or the home's. auto: the client's,
    unless the common key `norm` is `average`."""
    local_share: float = 0.5
    """Share of a client's own classifier in its prediction (Eq. 7); the shared classifier has the rest."""

    def __post_init__(self) -> None:
        for name, value in (("lambda_st", self.lambda_st), ("alignment", self.alignment or 0.0)):
            if not 0 <= value < float("inf"):
                raise ValueError(f"{name} must be 0 or more, not {value}")
        if self.pretrain_epochs < 0 or self.server_epochs <= 0:
            raise ValueError("pretrain_epochs must be 0 or more and server_epochs above 0")
        if self.components_per_class < 1 or self.points < 1:
            raise ValueError("components_per_class and points must be 1 or more")
        if not 0 <= self.local_share <= 1:
            raise ValueError(f"local_share must be 0 to 1, not {self.local_share}")
        if not 0 < self.energy <= 1:
            raise ValueError(f"energy must be above 0 and at most 1, not {self.energy}")


@dataclass(frozen=True)
class State:
    """G and F_g; F_l and BatchNorm statistics of each client that has answered at least once. `mixtures` are W_T of the
    clients that answered in the latest round (an empty entry if none are fitted), and `axes` the axes they are measured
    in: the next round begins with them."""

    extractor: Weights
    classifier: Weights
    local: Mapping[str, Weights]
    statistics: Mapping[str, Weights]
    mixtures: Mapping[str, MixtureTerms]
    axes: Weights
    pretrained: bool


@dataclass(frozen=True)
class Source:
    """W_S, and the principal axes that home and clients measure in."""

    axes: Axes
    mixture: Mixture


@dataclass(frozen=True)
class Adapted(Release):
    classifier: Weights
    statistics: Statistics
    mixture: MixtureTerms
    dropped: Tally
    discrepancy: Metric
    disagreement: Metric
    trust: Metric


# --- Lines 5-12: local adaptation at client i ---------------------------------------------------------------------


def client_loss(scores: Tensor, shared: Tensor, trust: Tensor, lambda_st: float) -> Tensor:
    """Eq. (5) from the logits of F_l and F_g `(B, C, ...)` and W_S(x) `(B, ...)`. F_g is a constant."""
    apart = discrepancy(scores, shared.detach())  # Eq. (3)
    return (lambda_st * trust * pseudo_label_loss(scores, shared) - apart).mean()


@step
def adapt(site: Unlabelled, extractor: Weights, classifier: Weights, source: Source | None, rng: Rng) -> Adapted:
    """Trains F_l on the client's data, with G and F_g frozen, and fits W_T to its features."""
    if not len(site.train):
        raise SiteError("data-empty", f"client {site.name!r} has no training data")
    hyper, training = site.hyper(Hyper), site.plan.training
    net = _loaded(site, extractor, classifier).eval().requires_grad_(False)
    statistics = _own_statistics(site, net) if hyper.statistics != "home" else {}
    site.train.begin_part()
    local = copy.deepcopy(net.head).requires_grad_(True).train()  # line 6
    if hyper.local_start == "independent":
        local.load_state_dict(random_like(local, rng.child("start")))
    elif not hyper.self_training:
        # DIFFERS: where F_l = F_g the discrepancy has no gradient, so that the two would stay equal.
        local.load_state_dict(add_noise(local.state_dict(), NUDGE, rng.child("nudge").torch()))
    lambda_st = hyper.lambda_st if hyper.self_training else 0.0
    sample = Sample(len(site.train), hyper.points, rng.child("sample").torch())
    features_of = FrozenFeatures(net, len(site.train))
    seen: list[tuple[float, float]] = []
    differs = torch.full((len(site.train),), torch.nan)

    def loss_of(batch: UnlabelledBatch) -> Tensor:
        with torch.no_grad():
            features = features_of(batch.x, batch.index)
            shared = net.head(features)
            trust = (
                typicality(features, source.axes, source.mixture, hyper.weigh_among, hyper.weighting)
                if source
                else torch.ones_like(shared[:, 0])
            )
        sample.add(features, batch.index)
        scores = local(features)
        seen.append((float(discrepancy(scores.detach(), shared).mean()), float(trust.mean())))
        # The share of a sample's pixels whose classes differ, or 0 or 1; later passes replace earlier ones.
        differs[batch.index] = (scores.argmax(1) != shared.argmax(1)).float().reshape(len(scores), -1).mean(1).cpu()
        return client_loss(scores, shared, trust, lambda_st)

    optimizer = sgd(site, local)
    for group in optimizer.param_groups:
        # Sec. 3.3: plain gradient descent at clients, momentum at the server. The schedule is for the server only: F_l
        # starts at F_g in every round, and at a rate near 0 it would stay there.
        group.update(momentum=0.0, lr=training.lr)
    batches = site.train.batches(training.batch_size, rng, training.local_epochs)
    train_batches(batches, loss_of, optimizer, training.precision)
    mixture = _fit(site, sample, source.axes, rng) if source else None
    return Adapted(
        classifier=weights_of(local),
        statistics=statistics,
        mixture=vars(mixture) if mixture else {},
        dropped=_components(site) - len(mixture.weights) if mixture else 0,
        discrepancy=mean_of([apart for apart, _ in seen]),
        disagreement=float(differs.nanmean()),
        trust=mean_of([trust for _, trust in seen]),
    )


def _own_statistics(site: Unlabelled, net: Network) -> dict[str, Tensor]:
    """Replaces the BatchNorm statistics of G by those of the client's data, and returns them."""
    # DIFFERS: the paper does not say how a client normalises. G's weights are frozen, its statistics need not be.
    if len(site.train) > 1:
        with torch.no_grad(), remembering(net):
            for batch in site.train.evenly(site.plan.training.batch_size):
                net.features(batch.x)
    return statistics_of(net.backbone)


def _fit(site: Site, sample: Sample, axes: Axes, rng: Rng) -> Mixture:
    rows, owners = sample.result()
    generator = rng.child("mixture").torch()
    return fit_mixture(axes.reduce(rows), owners, _components(site), site.min_samples, generator)


def _components(site: Site) -> int:
    return _most_components(site.hyper(Hyper), site.plan)


def _most_components(hyper: Hyper, plan: Plan) -> int:
    return hyper.components_per_class * len(plan.model.classes)


def _loaded(site: Site, extractor: Weights, classifier: Weights) -> Network:
    net = split_network(site.plan).to(site.device)
    with_weights(net.backbone, extractor, site.device)
    with_weights(net.head, classifier, site.device)
    return net


# --- Lines 1, 3 and 13-18: at the home ----------------------------------------------------------------------------


@dataclass(frozen=True)
class Optimised:
    extractor: Weights
    classifier: Weights
    train_loss: float
    align_loss: float = 0.0


def pretrain(home: Labelled, extractor: Weights, classifier: Weights, rng: Rng) -> Optimised:
    """Line 1: cross-entropy on the home's labels."""
    training, net = home.plan.training, _loaded(home, extractor, classifier).train()
    epochs = home.hyper(Hyper).pretrain_epochs
    batches = home.train.batches(training.batch_size, rng, epochs, augmentation(home.plan))
    optimizer = sgd(home, net)
    loss = train_batches(batches, lambda b: label_loss(net(b.x), b.y), optimizer, training.precision)
    return Optimised(weights_of(net.backbone), weights_of(net.head), train_loss=loss)


@torch.no_grad()
def describe(home: Labelled, extractor: Weights, classifier: Weights, rng: Rng) -> Source:
    """Line 3: principal axes of the source features, and W_S fitted to them."""
    hyper, net = home.hyper(Hyper), _loaded(home, extractor, classifier).eval()
    sample = Sample(len(home.train), hyper.points, rng.child("sample").torch())
    for batch in home.train.batches(home.plan.training.batch_size, rng, min(1.0, hyper.points / len(home.train))):
        sample.add(net.features(batch.x), batch.index)
    axes = principal_axes(sample.result()[0], hyper.energy)
    return Source(axes, _fit(home, sample, axes, rng))


def mixup(x: Tensor) -> Tensor:
    """(x_m + x_n) / 2 of neighbours in a batch, whose order is random."""
    return (x + x.roll(1, 0)) / 2


def optimise(
    home: Labelled,
    extractor: Weights,
    classifier: Weights,
    local: Mapping[str, Weights],
    mixtures: Mapping[str, Mixture],
    axes: Axes | None,
    rng: Rng,
) -> Optimised:
    """Lines 14-18, alternating: G learns to make all classifiers agree; G and F_g learn from labels."""
    hyper, training, net = home.hyper(Hyper), home.plan.training, _loaded(home, extractor, classifier).train()
    heads = {client: frozen_copy(net.head, weights) for client, weights in sorted(local.items())}
    # The mixtures were fitted to features of G as it was sent to the clients.
    before = copy.deepcopy(net).eval().requires_grad_(False)
    stand_ins = _stand_ins(home, tuple(heads), rng)
    # Neither mixup images nor a client's images (fed-oracle) may change the statistics of the home's images.
    is_apart = hyper.statistics != "home"
    weight = _alignment(hyper, home)
    losses: dict[bool, list[float]] = {True: [], False: []}

    def align(x: Tensor, clients: Sequence[str]) -> Tensor:
        """Eq. (6) for the clients that x stands for."""
        then = before.features(x) if axes else None
        features = net.features(x)
        shared, total = net.head(features), torch.zeros((), device=x.device)
        for client in clients:
            terms = discrepancy(heads[client](features), shared)
            if axes and then is not None:
                terms = typicality(then, axes, mixtures[client], hyper.weigh_among, hyper.weighting) * terms
            total = total + terms.mean()
        return weight * total / len(heads)

    def loss_of(turn: tuple[bool, LabelledBatch]) -> Tensor:
        is_alignment, batch = turn
        net.head.requires_grad_(not is_alignment)
        if is_alignment:
            with forgetting(net) if is_apart else nullcontext():
                loss = torch.stack([align(x, clients) for x, clients in stand_ins(batch.x)]).sum()  # line 17
        else:
            loss = label_loss(net(batch.x), batch.y)  # line 18
        losses[is_alignment].append(float(loss.detach()))
        return loss

    batches = home.train.batches(training.batch_size, rng, hyper.server_epochs, augmentation(home.plan))
    kinds = (True, False) if heads and weight else (False,)
    turns = ((kind, batch) for batch in batches for kind in kinds)
    optimizer = sgd(home, net.backbone)
    # A separate group, because a fused step needs gradients of all or none of a group's parameters.
    optimizer.add_param_group({"params": list(net.head.parameters())})
    train_batches(turns, loss_of, optimizer, training.precision)
    return Optimised(weights_of(net.backbone), weights_of(net.head), mean_of(losses[False]), mean_of(losses[True]))


def _alignment(hyper: Hyper, home: Labelled) -> float:
    if hyper.alignment is not None:
        return hyper.alignment
    # At the full weight, all images of distant clients end in one class, where classifiers agree as well.
    return 0.1 if isinstance(home, WithTargets) else 1.0


def _stand_ins(
    home: Labelled, clients: tuple[str, ...], rng: Rng
) -> Callable[[Tensor], list[tuple[Tensor, tuple[str, ...]]]]:
    """A function from a source batch to images and the clients that they represent: mixup images for all (line 16), or,
    if the home has it (fed-oracle), each client's own data."""
    if not isinstance(home, WithTargets):
        return lambda x: [(mixup(x), clients)]
    size = home.plan.training.batch_size
    streams = {client: endless_batches(home.targets[client], size, rng.child(client)) for client in clients}
    return lambda x: [(next(stream).x, (client,)) for client, stream in streams.items()]


class DualAdapt:
    """The coordinator is the home."""

    hyper_type: ClassVar[type[Hyper]] = Hyper
    state_type: ClassVar[type[State]] = State
    steps: ClassVar[tuple[Step[Any], ...]] = (adapt,)

    def __init__(self, hyper: Hyper) -> None:
        self.hyper = hyper

    def init(self, base: Network, fed: Federation) -> State:
        net = with_light_head(copy.deepcopy(base))
        return State(weights_of(net.backbone), weights_of(net.head), {}, {}, {}, {}, pretrained=False)

    def round(self, state: State, fed: Federation) -> State:
        now: dict[str, Any] = {"extractor": state.extractor, "classifier": state.classifier}
        found = fed.at_home(optimise, **now, **_answers(state)) if state.pretrained else fed.at_home(pretrain, **now)
        fed.note("train_loss", found.train_loss, fed.plan.sources[0])
        if state.pretrained:
            fed.note("align_loss", found.align_loss, fed.plan.sources[0])
        now = {"extractor": found.extractor, "classifier": found.classifier}
        source = fed.at_home(describe, **now) if self.hyper.mixtures else None
        expect = self._expected(found.extractor, source, fed.plan)
        replies = fed.ask(fed.targets, adapt, **now, source=source, expect=expect)  # line 4
        self._tell(replies, fed)
        sites = replies.answered
        classifier_of = fed.clipped(
            sites, lambda site: replies[site].classifier, dict.fromkeys(sites, found.classifier)
        )
        # A client that gave no answer keeps its classifier and statistics, and is left out of the next Eq. (6).
        return State(
            **now,
            local={**state.local, **{site: classifier_of(site) for site in sites}},
            statistics={**state.statistics, **{site: reply.statistics for site, reply in replies}},
            mixtures={site: reply.mixture for site, reply in replies},
            axes=vars(source.axes) if source else {},
            pretrained=True,
        )

    def _expected(self, extractor: Weights, source: Source | None, plan: Plan) -> dict[str, Expected]:
        """What the answers of the clients must be like."""
        is_own, most = self.hyper.statistics != "home", _most_components(self.hyper, plan)
        like = {key: value for key, value in extractor.items() if is_own and key.endswith(STATISTICS)}
        share = AtMost(1.001)
        return {
            "statistics": Like(like),
            "mixture": MixtureIn(source.axes.axes.shape[1], most) if source else Like({}),
            "dropped": AtMost(most),
            "disagreement": share,
            "trust": share,
        }

    def _tell(self, replies: Replies[Adapted], fed: Federation) -> None:
        count_absent(fed, replies)
        for site, reply in replies:
            if reply.mixture:
                fed.note("components", len(reply.mixture["weights"]), site)
                if self.hyper.weigh_among == "fitted" or self.hyper.weighting == "density":  # In a batch always 1/2.
                    fed.note("trust", reply.trust, site)
            if reply.dropped:
                fed.count(f"dropped.components.{site}", reply.dropped)
            fed.note("discrepancy", reply.discrepancy, site)
            fed.note("disagreement", reply.disagreement, site)

    def models(self, state: State) -> Mapping[str, Weights]:
        share = self.hyper.local_share
        own = {
            site: paired_weights({**state.extractor, **state.statistics[site]}, state.classifier, head, share)
            for site, head in state.local.items()
        }
        return {SHARED: paired_weights(state.extractor, state.classifier, None), **own}

    @staticmethod
    def network(plan: Plan) -> nn.Module:
        return paired_network(plan)  # Eq. (7)


def _answers(state: State) -> dict[str, Any]:
    """F_l and W_T of the clients that answered in the round before."""
    mixtures = {site: Mixture(**terms) for site, terms in state.mixtures.items() if terms}
    local = {site: state.local[site] for site in state.mixtures}
    return {"local": local, "mixtures": mixtures, "axes": Axes(**state.axes) if state.axes else None}


_COST = Formula(
    flops={"G": 1, "F": 4, "dF": -1},
    upload={"F": 1, "W": 1},
    broadcast={"G": 1, "F": 1, "W": 1},
    published={"G": 1, "F": 3},
    mixture=("mixture", "source"),
    note="The size of W depends on the data: its components on the number of samples, its axes on the features. It is"
    " broadcast together with the axes. With norm=own a client also sends its BatchNorm statistics, |S|, and measuring"
    " them takes a forward pass, ||G|| per sample and round, outside of training batches.",
)

DUALADAPT = About(
    "dualadapt",
    ("multi-adapt",),
    "Yao et al., WACV 2022",
    all_because="the home's model is made from the mixtures of all clients",
    whole_because="it keeps the features of each picture while it trains",
    defaults={"local_epochs": 3.0},
    uses_statistics=True,
    aggregation="clipped",
    time_factor=3.0,
    revision=1,  # By default the home's statistics normalise.
    cost=_COST,
)
FED_ORACLE = About(
    "fed-oracle",
    ("multi-adapt",),
    "Yao et al., WACV 2022: DualAdapt's bound",
    "the clients' unlabelled data at the home: a bound, not to deploy",
    data="target-copies",
    whole_because=DUALADAPT.whole_because,
    defaults=DUALADAPT.defaults,
    hyper={"mixtures": False},
    unsent=frozenset({"mixture"}),
    uses_statistics=True,
    aggregation="clipped",
    time_factor=6.0,
    revision=DUALADAPT.revision,
    cost=Formula(_COST.flops, {"F": 1}, {"G": 1, "F": 1}, _COST.published, note="DualAdapt without its mixtures."),
)
