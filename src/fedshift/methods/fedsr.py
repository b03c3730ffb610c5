"""FedSR: a simple representation that holds no more about an image than its class needs.

A. T. Nguyen, P. Torr, S.-N. Lim: FedSR: A Simple and Effective Domain Generalization Method for Federated Learning.
NeurIPS 2022. FedL2R and FedCMI are its two halves, each alone.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fedshift.data.batches import LabelledBatch
from fedshift.federation import codec
from fedshift.federation.federation import Federation
from fedshift.federation.labels import label_loss
from fedshift.federation.plan import Plan
from fedshift.federation.releases import Weights
from fedshift.federation.site import Labelled
from fedshift.federation.step import Step, step
from fedshift.methods.averaging import State, Trained, train_and_average
from fedshift.methods.base import SHARED, About
from fedshift.methods.local import augmentation, plain_network, sgd, train_batches, weights_of, with_weights
from fedshift.nn.archs import find_arch
from fedshift.nn.network import Network, seeded_init
from fedshift.rng import Rng


@dataclass(frozen=True)
class Hyper:
    l2r: float = 0.01
    """Weight of the L2 regulariser, the squared length of the representation."""
    cmi: float = 0.001
    """Weight of the conditional mutual information regulariser."""
    stochastic: bool = True
    """Whether training draws the representation from a Gaussian; false: it is the mean."""
    z: int = 0
    """Length of the representation; 0: that of the backbone's features, as in the paper."""

    def __post_init__(self) -> None:
        if self.l2r < 0 or self.cmi < 0:
            raise ValueError("l2r and cmi must not be negative")
        if self.cmi > 0 and not self.stochastic:
            raise ValueError("cmi compares distributions: it needs stochastic = true, or cmi = 0")
        if self.z < 0:
            raise ValueError("z must not be negative")


class Representation(nn.Module):
    """Backbone, a linear layer to the parameters of p(z|x) = N(mu(x), sigma(x)^2), and a head on z.

    It also holds the reference distributions r(z|y), one Gaussian per class, which only training uses.
    """

    def __init__(self, network: Network, head: nn.Module, z: int, classes: int, *, stochastic: bool) -> None:
        super().__init__()
        self.network = network
        self.network.head = head
        self.encoder = nn.Linear(network.backbone.out_features, 2 * z if stochastic else z)
        self.stochastic = stochastic
        if stochastic:
            self.reference_mean = nn.Parameter(torch.zeros(classes, z))
            self.reference_scale = nn.Parameter(torch.ones(classes, z))

    def encode(self, x: Tensor) -> tuple[Tensor, Tensor | None]:
        """Mean and standard deviation of z, each `(B, z)`; None for the deviation if z is not random."""
        # In bfloat16 the divergence below would be a sum of many rounded squares.
        encoded = self.encoder(self.network.features(x)).float()
        if not self.stochastic:
            return encoded, None
        mean, scale = encoded.chunk(2, dim=1)
        return mean, F.softplus(scale)

    def reference(self, labels: Tensor) -> tuple[Tensor, Tensor]:
        """Mean and standard deviation of r(z|y) for labels `(B,)`, each `(B, z)`."""
        return self.reference_mean[labels], F.softplus(self.reference_scale[labels])

    def classify(self, z: Tensor) -> Tensor:
        """`(B, z)` to logits `(B, classes)`."""
        return self.network.scores(z, ())

    def forward(self, x: Tensor) -> Tensor:
        # DIFFERS: the authors' code averages the predictions of 20 draws; with the mean of z they are reproducible.
        return self.classify(self.encode(x)[0])


def l2_regulariser(z: Tensor) -> Tensor:
    """L2R: the mean over the batch of ||z||^2, z `(B, d)`."""
    return z.square().sum(dim=1).mean()


def gaussian_kl(mean: Tensor, scale: Tensor, to_mean: Tensor, to_scale: Tensor) -> Tensor:
    """KL(N(mean, scale^2) || N(to_mean, to_scale^2)) of Gaussians with independent coordinates, `(B, d)` to `(B,)`."""
    ratio = scale / to_scale
    return (0.5 * (ratio.square() + ((mean - to_mean) / to_scale).square() - 1) - ratio.log()).sum(dim=1)


def local_loss(net: Representation, x: Tensor, y: Tensor, hyper: Hyper, generator: torch.Generator) -> Tensor:
    """The local objective: cross-entropy of a drawn z, L2R and CMI."""
    mean, scale = net.encode(x)
    if scale is None:
        return label_loss(net.classify(mean), y) + hyper.l2r * l2_regulariser(mean)
    noise = torch.randn(mean.shape, generator=generator, dtype=mean.dtype).to(mean.device)
    z = mean + scale * noise
    # CMI: I(x; z | y) is at most the mean of KL(p(z|x) || r(z|y)).
    bound = gaussian_kl(mean, scale, *net.reference(y)).mean()
    return label_loss(net.classify(z), y) + hyper.l2r * l2_regulariser(z) + hyper.cmi * bound


@step
def train(site: Labelled, model: Weights, rng: Rng) -> Trained:
    """Local epochs of SGD on the regularised objective."""
    hyper, training = site.hyper(Hyper), site.plan.training
    net = FedSR.network(site.plan)
    with_weights(net, model, site.device).train()
    generator = rng.child("z").torch()

    def loss_of(batch: LabelledBatch) -> Tensor:
        return local_loss(net, batch.x, batch.y, hyper, generator)

    batches = site.train.batches(training.batch_size, rng, training.local_epochs, augmentation(site.plan))
    loss = train_batches(batches, loss_of, sgd(site, net), training.precision)
    return Trained(model=weights_of(net), samples=site.train.used, loss=loss)


class FedSR:
    """FedAvg with the regularised objective. Encoder and reference distributions are averaged too."""

    hyper_type: ClassVar[type[Hyper]] = Hyper
    state_type: ClassVar[type[State]] = State
    steps: ClassVar[tuple[Step[Any], ...]] = (train,)

    def __init__(self, hyper: Hyper) -> None:
        self.hyper = hyper

    def init(self, base: Network, fed: Federation) -> State:
        seed = fed.rng("encoder").seed()
        net = build(fed.plan, self.hyper, base, seed)
        return State(weights_of(net))

    def round(self, state: State, fed: Federation) -> State:
        # DIFFERS: all sites share r(z|y). In the authors' code every site keeps its own, which aligns no two sites.
        return State(train_and_average(fed, train, state.model))

    def models(self, state: State) -> Mapping[str, Weights]:
        return {SHARED: state.model}

    @staticmethod
    def network(plan: Plan) -> Representation:
        return build(plan, codec.restore(Hyper, dict(plan.hyper)), plain_network(plan), seed=0)


def build(plan: Plan, hyper: Hyper, base: Network, seed: int) -> Representation:
    """`base` with an encoder between its backbone and its head. New layers draw their first weights from `seed`."""
    features, classes = base.backbone.out_features, len(plan.model.classes)
    z = hyper.z or features
    with seeded_init(seed):
        head = base.head if z == features else find_arch(plan.model.arch).head(z, classes)
        return Representation(base, head, z, classes, stochastic=hyper.stochastic)


# Rounds of 5 batches at a learning rate of 0.01 are the paper's: docs/methods/fedsr.md says how.
_DEFAULTS: dict[str, Any] = {"batch_size": 64, "momentum": 0.9, "weight_decay": 5e-4}
_PAPER = "Nguyen et al., NeurIPS 2022"

FEDSR = About(
    "fedsr", ("generalize",), _PAPER, tasks=("classification",), defaults=_DEFAULTS, time_factor=1.2, draws_sites=True
)
FEDL2R = dataclasses.replace(FEDSR, name="fedl2r", hyper={"cmi": 0.0, "stochastic": False})
FEDCMI = dataclasses.replace(FEDSR, name="fedcmi", hyper={"l2r": 0.0})
