"""CSAC: sites' models are fused layer by layer, then every site aligns the fused model with its own, layer by layer.

J. Yuan, X. Ma, D. Chen, F. Wu, L. Lin, K. Kuang: Collaborative Semantic Aggregation and Calibration for Federated
Domain Generalization. IEEE Transactions on Knowledge and Data Engineering, 2023.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from fedshift.data.batches import LabelledBatch
from fedshift.federation.federation import Federation
from fedshift.federation.kinds import Metric, Release, Weights
from fedshift.federation.plan import ModelSpec, Plan
from fedshift.federation.replies import Replies
from fedshift.federation.site import Labelled
from fedshift.federation.step import Step, step
from fedshift.functional.alignment import Attention, Discrepancy, Pairs, alignment_loss
from fedshift.functional.fusion import Distance, Rule, fuse
from fedshift.functional.losses import cross_entropy
from fedshift.methods.base import SHARED, About
from fedshift.methods.local import augmentation, plain_network, sgd, train_batches, weights_of, with_weights
from fedshift.nn.archs import build_network
from fedshift.nn.network import Backbone, Network, seeded_init
from fedshift.nn.projections import FrozenMaps, Projections, resized
from fedshift.nn.taps import Taps
from fedshift.rng import Rng


@dataclass(frozen=True)
class Hyper:
    lambda_: float = 0.6
    """Weight of the alignment in calibration; 0: no alignment."""
    acquisition_epochs: float = 30.0
    """Epochs for which a site trains alone, before the first fusion."""
    calibration_epochs: float = 10.0
    """Epochs of calibration a round (5 on Rotated MNIST)."""
    batches_per_epoch: int | None = None
    """Batches that make an epoch; none: a pass over the site's data."""
    smoothing: float = 0.1
    """Label smoothing in acquisition."""
    fusion: Rule = "divergence"
    """What earns a layer its weight: distance from the mean, nearness to it, or nothing."""
    distance: Distance = "l2"
    """How far a layer is from the mean."""
    pairs: Pairs = "cross-layer"
    """Which layers are aligned: each with each, or each with its like alone."""
    attention: Attention = "both"
    """What says how alike two layers are: positions, channels, both, or nothing (all pairs weigh the same)."""
    discrepancy: Discrepancy = "mmd"
    """How far apart two layers' features are."""
    cross_entropy: bool = True
    """Whether calibration also learns from the labels."""
    layers: tuple[str, ...] = ()
    """Stages of the backbone to align, the last one giving the size of all; none: the backbone's own choice."""
    channels: int | None = None
    """Channels that features are projected to (32 in the authors' code); none: those of the last aligned layer."""

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
    """Whether sites have trained alone already."""


@dataclass(frozen=True)
class Trained(Release):
    # The fusion measures each site's own tensors: unlike a plain average, it cannot be made from their sum.
    model: Weights
    loss: Metric


@step
def acquire(site: Labelled, model: Weights, rng: Rng) -> Trained:
    """Local semantic acquisition (sec. 3.3): the site trains alone and keeps what it has learned as L^h."""
    hyper = site.hyper(Hyper)
    net = _network(site, model).train()
    loss = train_batches(
        _batches(site, hyper.acquisition_epochs, hyper, rng),
        lambda b: cross_entropy(net(b.x), b.y, smoothing=hyper.smoothing),  # Eq. (2)
        sgd(site, net),
        site.plan.training.precision,
    )
    trained = Trained(model=weights_of(net), loss=loss)
    site.store.save("local", dict(trained.model), site.round)
    return trained


@step
def calibrate(site: Labelled, model: Weights, rng: Rng) -> Trained:
    """Cross-layer semantic calibration (sec. 3.5): the fused model is trained here, aligned with the site's own."""
    hyper = site.hyper(Hyper)
    net = _network(site, model).train()
    names = _layers(hyper, net.backbone)
    alignment = _Alignment(site, hyper, names, model, rng) if hyper.lambda_ > 0 else None

    def loss_of(batch: LabelledBatch) -> Tensor:
        scores = net(batch.x)
        loss = cross_entropy(scores, batch.y) if hyper.cross_entropy else scores.new_zeros(())  # Eq. (10)
        if alignment is not None:
            loss = loss + hyper.lambda_ * alignment.loss(list(taps.outputs.values()), batch)  # Eq. (11)
        return loss

    projections = alignment.projections if alignment is not None else nn.Module()
    optimizer = sgd(site, net, projections)
    batches = _batches(site, hyper.calibration_epochs, hyper, rng)
    with Taps(net.backbone, names) as taps:
        loss = train_batches(batches, loss_of, optimizer, site.plan.training.precision)
    if alignment is not None:
        site.store.save("projections", weights_of(projections), site.round)
    return Trained(model=weights_of(net), loss=loss)


class _Alignment:
    """What a site aligns the fused model with: its own model and the projections, from its store or newly made."""

    def __init__(self, site: Labelled, hyper: Hyper, layers: Sequence[str], model: Weights, rng: Rng) -> None:
        acquired = site.store.load("local")
        if acquired is None:
            # DIFFERS: the paper has no absent sites. One that missed the acquisition makes up for it, starting from
            # what it has now: the fused model.
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
            self.projections = Projections(widths, hyper.channels or widths[-1]).to(site.device)
        # DIFFERS: the authors' code makes new ones every round, so that they never learn what to compare.
        if (learned := site.store.load("projections")) is not None:
            self.projections.load_state_dict(learned)

    def loss(self, features: Sequence[Tensor], batch: LabelledBatch) -> Tensor:
        """L_AL for what the aligned layers of the fused model give for a batch."""
        local = self._local(batch.x, batch.index)
        # Distances are small differences of large numbers: never in bfloat16.
        with torch.autocast("cpu", enabled=False):
            fused = [resized(layer, self._local.size) for layer in features]
            a, b = self.projections(fused, local)  # Eq. (5)
            how = self._hyper
            return alignment_loss(a, b, attention=how.attention, pairs=how.pairs, discrepancy=how.discrepancy)


class Csac:
    """Acquisition once, then aggregation and calibration in turn (sec. 3.6)."""

    hyper_type: ClassVar[type[Hyper]] = Hyper
    state_type: ClassVar[type[State]] = State
    steps: ClassVar[tuple[Step[Any], ...]] = (acquire, calibrate)

    def __init__(self, hyper: Hyper) -> None:
        self.hyper = hyper

    def init(self, base: Network, fed: Federation) -> State:
        # A layer that the network does not have is an error here, before any site has trained.
        Taps(base.backbone, _layers(self.hyper, base.backbone))
        return State(weights_of(base), acquired=False)

    def round(self, state: State, fed: Federation) -> State:
        model = state.model
        if not state.acquired:
            model = self._fuse(fed.ask(fed.labelled, acquire, model=model), fed, "acquisition_")
        calibrated = fed.ask(fed.labelled, calibrate, model=model)
        return State(self._fuse(calibrated, fed), acquired=True)

    def models(self, state: State) -> Mapping[str, Weights]:
        return {SHARED: state.model}

    @staticmethod
    def network(plan: Plan) -> nn.Module:
        return plain_network(plan)

    def _fuse(self, replies: Replies[Trained], fed: Federation, phase: str = "") -> Weights:
        """Data-free semantic aggregation (sec. 3.4), noting how much each site's layers weigh (Fig. 7)."""
        if len(replies) == 1:
            fed.count("fusion.one-site")  # There is nothing to fuse: the model is that site's.
        fused = fuse(
            lambda: ((site, trained.model) for site, trained in replies), self.hyper.fusion, self.hyper.distance
        )
        for site, trained in replies:
            fed.note(f"{phase}train_loss", trained.loss, site)
            for stage, layer in shown_layers(fed.plan.model).items():
                fed.note(f"{phase}fusion.{stage}", fused.weights[site][layer], site)
        return fused.model


@functools.cache
def shown_layers(model: ModelSpec) -> dict[str, str]:
    """Stage -> the tensor whose fusion weight stands for it in metrics: its last convolution or linear map."""
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
    # Every pass has at least one batch: as many passes as steps are enough.
    return islice(site.train.batches(size, rng, steps, augment), steps)


CSAC = About(
    "csac",
    ("generalize",),
    "Yuan et al., TKDE 2023",
    tasks=("classification",),
    defaults={
        "lr": 0.01,
        "momentum": 0.5,
        "weight_decay": 0.0,
        "batch_size": 64,
        "rounds": 40,
        "schedule": "constant",
    },
)
