"""CSAC: models are fused layer by layer; then every site aligns the layers of the fused model with its own model's.

J. Yuan, X. Ma, D. Chen, F. Wu, L. Lin, K. Kuang: Collaborative Semantic Aggregation and Calibration for Federated
Domain Generalization. IEEE Transactions on Knowledge and Data Engineering, 2023.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor, nn

from fedshift.data.batches import LabelledBatch
from fedshift.federation.aggregation import held
from fedshift.federation.federation import Federation, Replies
from fedshift.federation.labels import label_loss
from fedshift.federation.plan import ModelSpec, Plan
from fedshift.federation.releases import Metric, Release, Weights
from fedshift.federation.site import Labelled
from fedshift.federation.step import Step, step
from fedshift.functional.alignment import Attention, Discrepancy, Pairs, alignment_loss
from fedshift.functional.fusion import Distance, Rule, fuse
from fedshift.functional.mmd import Estimator
from fedshift.methods.base import SHARED, About
from fedshift.methods.cost import MODEL, Formula
from fedshift.methods.local import augmentation, autocast, plain_network, sgd, train_batches, weights_of, with_weights
from fedshift.nn.archs import build_network
from fedshift.nn.network import Backbone, Network, seeded_init
from fedshift.nn.taps import FrozenMaps, Projections, Taps, resized
from fedshift.rng import Rng


@dataclass(frozen=True)
class Hyper:
    lambda_: float = 0.6
    """Weight of the alignment in calibration; 0: no alignment."""
    acquisition_epochs: float = 30.0
    """Epochs that a site trains alone before the first fusion."""
    calibration_epochs: float = 10.0
    """Epochs of calibration per round (5 on Rotated MNIST)."""
    batches_per_epoch: int | None = None
    """Batches per epoch; none: a pass over the site's data."""
    smoothing: float = 0.1
    """Label smoothing in acquisition."""
    fusion: Rule = "divergence"
    """What a layer is weighted by: its distance from the mean, its nearness to it, or nothing (equal weights)."""
    distance: Distance = "l2"
    """How the distance of a layer from the mean is measured."""
    pairs: Pairs = "cross-layer"
    """Which layers are aligned: every layer with every layer, or only with the same layer of the other model."""
    attention: Attention = "both"
    """How the similarity of two layers is measured: over positions, over channels, over both, or not at all (all pairs
    have the same weight)."""
    discrepancy: Discrepancy = "mmd"
    """How the distance between two layers' features is measured."""
    estimator: Estimator = "biased"
    """How MMD is estimated: as in the authors' code, or by all pairs with kernels half as wide."""
    cross_entropy: bool = True
    """Whether calibration also learns from the labels."""
    layers: tuple[str, ...] = ()
    """Stages of the backbone to align; all are brought to the size of the last one. None: the backbone's default."""
    channels: int | None = None
    """Channels that features are projected to (32 in the authors' code); none: those of the last aligned layer."""
    projection_sharing: Literal["shared", "separate"] = "separate"
    """Whether a layer of the fused model and the same layer of the local model go through one projection, or through
    one each."""
    projection_learning: Literal["fixed", "learned"] = "learned"
    """Whether projections stay as they were drawn, or are trained with the model."""

    def __post_init__(self) -> None:
        if self.lambda_ < 0:
            raise ValueError("lambda must not be negative")
        if self.lambda_ == 0 and not self.cross_entropy:
            raise ValueError("without cross_entropy, lambda must be above 0: calibration would have nothing to learn")
        if self.acquisition_epochs <= 0 or self.calibration_epochs <= 0:
            raise ValueError("acquisition_epochs and calibration_epochs must be above 0")
        if self.batches_per_epoch is not None and self.batches_per_epoch < 1:
            raise ValueError("batches_per_epoch must be 1 or more, or none for a whole pass")
        if not 0 <= self.smoothing < 1:
            raise ValueError("smoothing must be at least 0 and below 1")
        if len(set(self.layers)) < len(self.layers):
            raise ValueError("layers names a stage twice")
        if self.channels is not None and self.channels < 1:
            raise ValueError("channels must be 1 or more, or none for those of the last aligned layer")


@dataclass(frozen=True)
class State:
    model: Weights
    acquired: bool
    """Whether sites have done the acquisition."""


@dataclass(frozen=True)
class Trained(Release):
    # The fusion measures each site's tensors, so a sum over sites, as in secure aggregation, is not enough.
    model: Weights
    loss: Metric


@step
def acquire(site: Labelled, model: Weights, rng: Rng) -> Trained:
    """Local semantic acquisition (sec. 3.3): the site trains alone and keeps the result, its local model L^h."""
    hyper = site.hyper(Hyper)
    net = _network(site, model).train()
    loss = train_batches(
        _batches(site, hyper.acquisition_epochs, hyper, rng),
        lambda b: label_loss(net(b.x), b.y, smoothing=hyper.smoothing),  # Eq. (2)
        sgd(site, net),
        site.plan.training.precision,
    )
    trained = Trained(model=weights_of(net), loss=loss)
    site.store.save("local", dict(trained.model), site.round)
    return trained


@step
def calibrate(site: Labelled, model: Weights, rng: Rng) -> Trained:
    """Cross-layer semantic calibration (sec. 3.5): the site trains the fused model, aligned with its local model."""
    hyper = site.hyper(Hyper)
    net = _network(site, model).train()
    names = _layers(hyper, net.backbone)
    alignment = _Alignment(site, hyper, names, model, rng) if hyper.lambda_ > 0 else None

    def loss_of(batch: LabelledBatch) -> Tensor:
        scores = net(batch.x)
        loss = label_loss(scores, batch.y) if hyper.cross_entropy else scores.new_zeros(())  # Eq. (10)
        if alignment is not None:
            loss = loss + hyper.lambda_ * alignment.loss(list(taps.outputs.values()), batch)  # Eq. (11)
        return loss

    is_learned = alignment is not None and hyper.projection_learning == "learned"
    optimizer = sgd(site, net, alignment.projections) if alignment is not None and is_learned else sgd(site, net)
    batches = _batches(site, hyper.calibration_epochs, hyper, rng)
    with Taps(net.backbone, names) as taps:
        loss = train_batches(batches, loss_of, optimizer, site.plan.training.precision)
    if alignment is not None and (is_learned or alignment.is_new):
        site.store.save("projections", weights_of(alignment.projections), site.round)
    return Trained(model=weights_of(net), loss=loss)


class _Alignment:
    """What a site aligns the fused model with: its local model and the projections, from its store or newly made."""

    def __init__(self, site: Labelled, hyper: Hyper, layers: Sequence[str], model: Weights, rng: Rng) -> None:
        acquired = site.store.load("local")
        if acquired is None:
            # DIFFERS: the paper has no absent sites. A site that missed the acquisition does it now, starting from the
            # fused model.
            acquired = acquire.run(site, model, rng.child("acquire")).model
        self._hyper = hyper
        self._local = FrozenMaps(
            _network(site, acquired),
            layers,
            site.plan.model.input_shape,
            samples=len(site.train),
            remember=not site.plan.training.augment,
        )
        with seeded_init(rng.child("projections").seed()):
            widths = self._local.widths
            # DIFFERS: Eq. (5) writes one Proj for both models; `separate` has one for each, as the authors' code does.
            is_shared = hyper.projection_sharing == "shared"
            self.projections = Projections(widths, hyper.channels or widths[-1], shared=is_shared).to(site.device)
        # DIFFERS: the authors' code makes new projections every round, so that what is compared changes every round.
        kept = site.store.load("projections")
        self.is_new = kept is None
        if kept is not None:
            self.projections.load_state_dict(kept)
        self.projections.requires_grad_(hyper.projection_learning == "learned")

    def loss(self, features: Sequence[Tensor], batch: LabelledBatch) -> Tensor:
        """L_AL for a batch and its `features` at the aligned layers of the fused model."""
        local = self._local(batch.x, batch.index)
        # Distances are small differences of large numbers: never in bfloat16.
        with autocast(batch.x.device, "float32"):
            fused = [resized(layer, self._local.size) for layer in features]
            a, b = self.projections(fused, local)  # Eq. (5)
            how = self._hyper
            return alignment_loss(
                a, b, attention=how.attention, pairs=how.pairs, discrepancy=how.discrepancy, estimator=how.estimator
            )


class Csac:
    """Acquisition once, then alternating calibration and aggregation (sec. 3.6)."""

    hyper_type: ClassVar[type[Hyper]] = Hyper
    state_type: ClassVar[type[State]] = State
    steps: ClassVar[tuple[Step[Any], ...]] = (acquire, calibrate)

    def __init__(self, hyper: Hyper) -> None:
        self.hyper = hyper

    def init(self, base: Network, fed: Federation) -> State:
        # A layer that the network does not have must be an error before any site trains.
        Taps(base.backbone, _layers(self.hyper, base.backbone))
        return State(weights_of(base), acquired=False)

    def round(self, state: State, fed: Federation) -> State:
        model = state.model
        if not state.acquired:
            model = self._fuse(fed.ask(fed.labelled, acquire, model=model), model, fed, "acquisition_")
        calibrated = fed.ask(fed.labelled, calibrate, model=model)
        return State(self._fuse(calibrated, model, fed), acquired=True)

    def models(self, state: State) -> Mapping[str, Weights]:
        return {SHARED: state.model}

    @staticmethod
    def network(plan: Plan) -> nn.Module:
        return plain_network(plan)

    def _fuse(self, replies: Replies[Trained], since: Weights, fed: Federation, phase: str = "") -> Weights:
        """Data-free semantic aggregation (sec. 3.4). Records the weights of each site's layers (Fig. 7)."""
        sites = replies.answered
        # The farther a layer is from the mean, the more it weighs: a site that sends nonsense would have all weight.
        model_of = fed.clipped(sites, lambda site: replies[site].model, dict.fromkeys(sites, since))
        if len(replies) == 1:
            fed.count("fusion.one-site")

        def models() -> Iterable[tuple[str, Weights]]:
            return held(((site, model_of(site)) for site in sites), lambda pair: pair[1])

        fused = fuse(models, self.hyper.fusion, self.hyper.distance)
        for site, trained in replies:
            fed.note(f"{phase}train_loss", trained.loss, site)
            for stage, layer in shown_layers(fed.plan.model).items():
                fed.note(f"{phase}fusion.{stage}", fused.weights[site][layer], site)
        return fused.model


@functools.cache
def shown_layers(model: ModelSpec) -> dict[str, str]:
    """Stage -> the tensor whose fusion weight is recorded for it: its last convolution or linear layer."""
    with torch.device("meta"):
        net = build_network(model.arch, model.input_shape, len(model.classes), generator_seed=0)
    shown = {}
    for stage in (*(f"backbone.{name}" for name in net.backbone.stages), "head"):
        matrices = [key for key, value in net.state_dict().items() if key.startswith(f"{stage}.") and value.ndim > 1]
        if matrices:
            shown[stage.removeprefix("backbone.")] = matrices[-1]
    return shown


def _network(site: Labelled, weights: Weights) -> Network:
    net = plain_network(site.plan)
    with_weights(net, weights, site.device)
    return net


def _layers(hyper: Hyper, backbone: Backbone) -> tuple[str, ...]:
    return hyper.layers or backbone.taps


def _batches(site: Labelled, epochs: float, hyper: Hyper, rng: Rng) -> Iterator[LabelledBatch]:
    size, augment = site.plan.training.batch_size, augmentation(site.plan)
    if hyper.batches_per_epoch is None:
        return site.train.batches(size, rng, epochs, augment)
    steps = max(1, round(epochs * hyper.batches_per_epoch))
    # Every pass has at least one batch, so as many passes as steps are enough.
    return islice(site.train.batches(size, rng, steps, augment), steps)


FEW_STEPS = {
    "momentum": 0.9,
    "weight_decay": 5e-4,
    "schedule": "cosine",
    "csac": {"lambda_": 0.1, "acquisition_epochs": 2.0, "calibration_epochs": 1.0},
}
"""For pre-trained networks and for tables: the paper's sites train for ten epochs a round on thousands of images."""

CSAC = About(
    "csac",
    ("generalize",),
    "Yuan et al., TKDE 2023",
    all_because="it weighs each layer by its distance from the mean of all sites' models",
    tasks=("classification",),
    defaults={
        "lr": 0.01,
        "momentum": 0.5,
        "weight_decay": 0.0,
        "batch_size": 64,
        "rounds": 40,
        "schedule": "constant",
    },
    # After few steps, local models are poor references for alignment: the paper's lambda is for thousands of steps, and
    # its epochs would make a run ten times as long as one of FedAvg with as many rounds.
    tables=FEW_STEPS,
    pretrained=FEW_STEPS,
    aggregation="clipped",
    counters={"fusion.one-site": "There was only one site to fuse: the fused model is that site's model."},
    time_factor=1.6,
    cost=Formula(
        flops=None,
        upload=MODEL,
        broadcast=MODEL,
        note="Calibration adds a forward pass of the site's own model where it is not kept, projections, and distances"
        " that grow with the batch: no closed formula.",
    ),
)
