"""SHOT with several sources: every site trains a model alone; the target fits each model's features to its classifier.

J. Liang, D. Hu, J. Feng: Do We Really Need to Access the Source Data? Source Hypothesis Transfer for Unsupervised
Domain Adaptation. ICML 2020.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from fedshift.data.augment import build_augment
from fedshift.data.batches import UnlabelledBatch
from fedshift.federation.federation import Federation
from fedshift.federation.labels import label_loss
from fedshift.federation.plan import Plan, Training
from fedshift.federation.releases import Weights
from fedshift.federation.site import Labelled, Unlabelled
from fedshift.federation.step import Step, step
from fedshift.functional.information import centroid_labels, diversity, entropy
from fedshift.functional.losses import cross_entropy
from fedshift.methods.base import SHARED, About
from fedshift.methods.cost import PLAIN
from fedshift.methods.ensembles import StateAlone, Trained, joined, start_alone, train_alone
from fedshift.methods.local import (
    all_finite,
    augmentation,
    network_with,
    over_target,
    plain_network,
    require_target,
    sgd,
    train_batches,
    weights_of,
)
from fedshift.nn.network import Ensemble, Network
from fedshift.rng import Rng


@dataclass(frozen=True)
class Hyper:
    source_rounds: float = 0.67
    """Share of the rounds in which sites train; then the target adapts (authors: 30 and 15 epochs on digits)."""
    smoothing: float = 0.1
    """Label smoothing of the sites' training."""
    diversity: float = 1.0
    """Weight of the diversity loss; 0: entropy alone."""
    beta: float = 0.3
    """Weight of the pseudo labels' cross-entropy; 0: information maximisation alone (authors: 0.1 on digits)."""

    def __post_init__(self) -> None:
        if not 0 < self.source_rounds < 1:
            raise ValueError(f"source_rounds is a share above 0 and below 1, not {self.source_rounds}")
        if not 0 <= self.smoothing < 1:
            raise ValueError(f"smoothing must be at least 0 and below 1, not {self.smoothing}")
        for key in ("diversity", "beta"):
            if not 0 <= getattr(self, key) < float("inf"):
                raise ValueError(f"{key} must be 0 or more, not {getattr(self, key)}")


# --- Sec. 3.1: the source hypothesis, where the labelled data is ---------------------------------------------------


@step
def train_source(site: Labelled, model: Weights, epochs: float, rng: Rng) -> Trained:
    """Cross-entropy with label smoothing on the site's own data."""
    hyper, training = site.hyper(Hyper), site.plan.training
    net = network_with(site.plan, model, site.device).train()
    batches = site.train.batches(training.batch_size, rng, epochs, augmentation(site.plan))
    optimizer, smoothing = sgd(site, net, lr=lr_of_part(training, hyper, site.round)), hyper.smoothing
    loss = train_batches(
        batches, lambda b: label_loss(net(b.x), b.y, smoothing=smoothing), optimizer, training.precision
    )  # Eq. (2)
    return Trained(model=weights_of(net), loss=loss)


# --- Sec. 3.2 and 3.3: hypothesis transfer, at the target -----------------------------------------------------------


@dataclass(frozen=True)
class Adapted:
    """`model` is None if training diverged."""

    model: Weights | None
    loss: float


def adapt(home: Unlabelled, model: Weights, source: str, rng: Rng) -> Adapted | None:
    """Trains one source's model at the target for one round. None if the predictions of `model` are NaN or infinite."""
    hyper = home.hyper(Hyper)
    net = network_with(home.plan, model, home.device)
    loss = transfer(net, home, hyper, lr_of_part(home.plan.training, hyper, home.round), rng.child(source))
    if loss is None:
        return None
    return Adapted(weights_of(net) if math.isfinite(loss) else None, loss)


def transfer(net: Network, home: Unlabelled, hyper: Hyper, lr: float, rng: Rng) -> float | None:
    """Trains `net` on inputs alone for one round, with new pseudo labels in every epoch: its extractor learns, its
    classifier is frozen. The mean loss; None if its predictions are NaN or infinite, NaN if they become so."""
    training = home.plan.training
    net.head.requires_grad_(False)
    optimizer = sgd(home, net.backbone, lr=lr)
    augment = build_augment(training.augment) if training.augment else None
    total = 0.0
    for epoch in range(math.ceil(training.local_epochs)):
        labels = pseudo_labels(net, home)
        if labels is None:
            return math.nan if epoch else None
        net.train()
        net.head.eval()
        share = min(1.0, training.local_epochs - epoch)  # The last epoch may be a part of one.
        batches = home.train.batches(training.batch_size, rng.child(epoch), share, augment)
        total += share * train_batches(batches, _loss(net, labels, hyper), optimizer, training.precision)
    return total / training.local_epochs


def _loss(net: Network, labels: Tensor, hyper: Hyper) -> Callable[[UnlabelledBatch], Tensor]:
    def loss_of(batch: UnlabelledBatch) -> Tensor:
        scores = net(batch.x)
        loss = entropy(scores) + hyper.diversity * diversity(scores)  # Eq. (3)
        return loss + hyper.beta * cross_entropy(scores, labels[batch.index].to(scores.device))  # Eq. (7)

    return loss_of


def pseudo_labels(net: Network, home: Unlabelled) -> Tensor | None:
    """Pseudo labels `(N,)` of the target's samples by the model's centroids; None if it gives NaN or infinity."""
    net.eval()

    def features_and_scores(x: Tensor) -> Tensor:
        features = net.features(x)
        return torch.cat([features, net.head(features)], dim=1)

    both = over_target(home, features_and_scores)
    if not bool(torch.isfinite(both).all()):
        return None
    length = net.backbone.out_features
    return centroid_labels(both[:, :length], both[:, length:].softmax(1))


# --- The coordinator ------------------------------------------------------------------------------------------------


class Shot:
    """First sites train, then the target adapts. The prediction is the mean of all models' probabilities."""

    hyper_type: ClassVar[type[Hyper]] = Hyper
    state_type: ClassVar[type[StateAlone]] = StateAlone
    steps: ClassVar[tuple[Step[Any], ...]] = (train_source,)

    def __init__(self, hyper: Hyper) -> None:
        self.hyper = hyper

    def init(self, base: Network, fed: Federation) -> StateAlone:
        require_target(fed)
        return start_alone(base, fed)

    def round(self, state: StateAlone, fed: Federation) -> StateAlone:
        if fed.round > source_rounds(fed.plan.training.rounds, self.hyper.source_rounds):
            return self._adapted(state, fed)
        if fed.plan.training.rounds == 1:
            fed.count("shot.no-round-to-adapt")
        return train_alone(state, fed, train_source)

    def _adapted(self, state: StateAlone, fed: Federation) -> StateAlone:
        models, trained = dict(state.models), dict(state.trained)
        for site in sorted(site for site in models if trained[site]):
            adapted = fed.at_home(adapt, model=models[site], source=site)
            if adapted is None:
                fed.count("shot.unusable-model")
                trained[site] = False
            elif adapted.model is None or not all_finite(adapted.model):
                fed.count("shot.adaptation-diverged")
            else:
                fed.note("adaptation_loss", adapted.loss, site)
                models[site] = adapted.model
        # A model with share 0 gets the weights of a usable one: 0 times NaN would still be NaN.
        usable = [models[site] for site in sorted(models) if trained[site]]
        for site in models:
            if usable and not trained[site]:
                models[site] = usable[0]
        return StateAlone(models, trained)

    def models(self, state: StateAlone) -> Mapping[str, Weights]:
        return {SHARED: joined(state)}

    @staticmethod
    def network(plan: Plan) -> nn.Module:
        return Ensemble(plain_network(plan), len(plan.sources), "probabilities")


def source_rounds(rounds: int, share: float) -> int:
    """In how many rounds sites train: at least 1, and at most `rounds` - 1 if there are two or more."""
    return max(1, min(round(share * rounds), rounds - 1))


def lr_of_part(training: Training, hyper: Hyper, number: int) -> float:
    """The learning rate of round `number`. The sites' rounds and the target's have a whole schedule each."""
    first = source_rounds(training.rounds, hyper.source_rounds)
    if number <= first:
        return replace(training, rounds=first).lr_at(number)
    return replace(training, rounds=training.rounds - first).lr_at(number - first)


SHOT = About(
    "shot",
    ("adapt",),
    "Liang et al., ICML 2020",
    tasks=("classification",),
    aggregation="own",
    # Digits: 30 epochs at the source, 15 at the target.
    defaults={"rounds": 45, "batch_size": 64, "local_epochs": 1.0, "momentum": 0.9, "weight_decay": 1e-3},
    counters={
        "shot.adaptation-diverged": "Adaptation gave NaN or infinite weights and was undone: a lower lr may help.",
        "shot.no-round-to-adapt": "The only round was used to train the sources: no round was left to adapt.",
        "shot.unusable-model": "A source's model gave NaN or infinite predictions and was left out.",
    },
    time_factor=1.5,
    revision=1,  # Each half has a whole schedule; labels are new in every epoch.
    cost=replace(PLAIN, note="Sites take part in the first rounds only; the rest is the coordinator's work."),
)
