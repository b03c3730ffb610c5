"""A shared head guides each site's features: half of gPerXAN.

K. Le, L. Ho, C. Do, D. Le-Phuoc, K.-S. Wong: Efficiently Assembling Normalization Layers and Regularization for
Federated Domain Generalization. CVPR 2024. Its guiding regulariser, with the normalisation that the run has (key
`norm`); its personal BatchNorm layers, which leave an unseen domain without any, are not here.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from torch import Tensor, nn

from fedshift.data.batches import LabelledBatch
from fedshift.federation.federation import Federation
from fedshift.federation.labels import label_loss
from fedshift.federation.plan import Plan
from fedshift.federation.releases import Weights
from fedshift.federation.site import Labelled
from fedshift.federation.step import Step, step
from fedshift.methods.averaging import State, Trained, train_and_average
from fedshift.methods.base import SHARED, About
from fedshift.methods.cost import MODEL, Formula
from fedshift.methods.local import (
    augmentation,
    network_with,
    plain_network,
    sgd,
    train_batches,
    weights_of,
)
from fedshift.nn.network import Network
from fedshift.rng import Rng


@dataclass(frozen=True)
class Hyper:
    weight: float = 0.5
    """Weight of the cross-entropy of the frozen shared head; 0: FedAvg."""

    def __post_init__(self) -> None:
        if not 0 <= self.weight < float("inf"):
            raise ValueError(f"weight must be 0 or more, not {self.weight}")


@step
def train(site: Labelled, model: Weights, rng: Rng) -> Trained:
    """Minimises CE(C(F(x)), y) + weight CE(C'(F(x)), y), C' being the head that came, frozen."""
    weight, training = site.hyper(Hyper).weight, site.plan.training
    net = network_with(site.plan, model, site.device).train()
    shared = copy.deepcopy(net.head).requires_grad_(False)

    def loss_of(batch: LabelledBatch) -> Tensor:
        features, size = net.features(batch.x), batch.x.shape[-2:]
        guided = label_loss(net.scores(features, size, shared), batch.y)
        return label_loss(net.scores(features, size), batch.y) + weight * guided

    batches = site.train.batches(training.batch_size, rng, training.local_epochs, augmentation(site.plan))
    loss = train_batches(batches, loss_of, sgd(site, net), training.precision)
    return Trained(model=weights_of(net), samples=site.train.used, loss=loss)


class GuidedHead:
    """FedAvg with the guided loss."""

    hyper_type: ClassVar[type[Hyper]] = Hyper
    state_type: ClassVar[type[State]] = State
    steps: ClassVar[tuple[Step[Any], ...]] = (train,)

    def __init__(self, hyper: Hyper) -> None:
        self.hyper = hyper

    def init(self, base: Network, fed: Federation) -> State:
        return State(weights_of(base))

    def round(self, state: State, fed: Federation) -> State:
        return State(train_and_average(fed, train, state.model))

    def models(self, state: State) -> Mapping[str, Weights]:
        return {SHARED: state.model}

    @staticmethod
    def network(plan: Plan) -> nn.Module:
        return plain_network(plan)


GUIDED_HEAD = About(
    "guided-head",
    ("generalize",),
    "Le et al., CVPR 2024 (gPerXAN), its regulariser",
    draws_sites=True,
    time_factor=1.1,
    cost=Formula(flops={"G": 3, "F": 5, "dG": -1}, upload=MODEL, broadcast=MODEL),
)
