"""FedADG: every site matches its features, class by class, to a reference distribution that all sites learn together.

L. Zhang, X. Lei, Y. Shi, H. Huang, C. Chen: Federated Learning with Domain Generalization. arXiv:2111.10487, 2021.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fedshift.data.batches import LabelledBatch
from fedshift.federation.federation import Federation
from fedshift.federation.labels import label_loss
from fedshift.federation.plan import Plan
from fedshift.federation.releases import Count, Metric, Release, Weights
from fedshift.federation.site import Labelled
from fedshift.federation.step import Step, step
from fedshift.methods.base import SHARED, About
from fedshift.methods.local import (
    augmentation,
    autocast,
    descend,
    naming_batch,
    plain_network,
    sgd,
    train_batches,
    weights_of,
    with_weights,
)
from fedshift.nn.network import Network, seeded_init
from fedshift.rng import Rng

DISCRIMINATOR = "discriminator"


@dataclass(frozen=True)
class Hyper:
    """Sizes are fractions of the feature length: for the paper's AlexNet (4096) they are the authors' sizes."""

    adversarial: float = 0.15
    """Weight of the adversarial loss of the extractor; classification has the rest."""
    warmup: float = 0.3
    """Share of the local epochs in which extractor and classifier train alone (authors: 3 of 10 on PACS)."""
    smoothing: float = 0.01
    """Label smoothing of the classification loss (authors: 0.01 on PACS, 0.2 on VLCS)."""
    adversary_lr: float = 0.7
    """Learning rate of generator and discriminator, as a share of the extractor's."""
    noise: float = 0.5
    """Length of the generator's noise (authors: 2048)."""
    hidden: float = 1.0
    """Width of the generator's hidden layer (authors: 4096)."""
    projection: float = 0.25
    """Length of the randomly projected features, and width of the discriminator's hidden layer (authors: 1024)."""

    def __post_init__(self) -> None:
        for key in ("adversarial", "warmup", "smoothing"):
            if not 0 <= getattr(self, key) <= 1:
                raise ValueError(f"{key} must be from 0 to 1")
        for key in ("adversary_lr", "noise", "hidden", "projection"):
            if not getattr(self, key) > 0:
                raise ValueError(f"{key} must be above 0")


class Generator(nn.Module):
    """G: noise `(B, n)` and labels `(B,)` to reference features `(B, d)`, which are 0 or more, as after a ReLU."""

    def __init__(self, features: int, classes: int, hyper: Hyper) -> None:
        super().__init__()
        self.noise, self.classes = _share(features, hyper.noise), classes
        hidden = _share(features, hyper.hidden)
        self.layers = nn.Sequential(
            nn.Linear(self.noise + classes, hidden), nn.LeakyReLU(), nn.Linear(hidden, features), nn.ReLU()
        )

    def forward(self, noise: Tensor, labels: Tensor) -> Tensor:
        reference: Tensor = self.layers(torch.cat([noise, F.one_hot(labels, self.classes).to(noise)], dim=1))
        return reference


class Discriminator(nn.Module):
    """D: features `(B, d)` and labels `(B,)` to `(B,)`: 1 for the reference, 0 for a site's own features.

    It sees the features through a random projection that is never trained.
    """

    projection: Tensor

    def __init__(self, features: int, classes: int, hyper: Hyper) -> None:
        super().__init__()
        self.classes, size = classes, _share(features, hyper.projection)
        # DIFFERS: the authors' code trains the projection with the rest.
        self.register_buffer("projection", F.normalize(torch.randn(size, features), dim=1))
        self.layers = nn.Sequential(nn.Linear(size + classes, size), nn.LeakyReLU(), nn.Linear(size, 1), nn.Sigmoid())

    def forward(self, features: Tensor, labels: Tensor) -> Tensor:
        projected = features @ self.projection.T
        verdict: Tensor = self.layers(torch.cat([projected, F.one_hot(labels, self.classes).to(projected)], dim=1))
        return verdict.squeeze(1)


def discriminator_loss(on_reference: Tensor, on_features: Tensor) -> Tensor:
    """L_adv_d, least squares: D should give 1 for the reference and 0 for the features; both outputs are `(B,)`."""
    return ((1 - on_reference).square() + on_features.square()).mean()


def extractor_loss(on_features: Tensor) -> Tensor:
    """L_adv_f: low when D takes the features for the reference."""
    return (1 - on_features).square().mean()


def generator_loss(on_reference: Tensor) -> Tensor:
    """L_adv_g: low when D takes the reference for features, so that the reference moves towards all sites."""
    return on_reference.square().mean()


@dataclass(frozen=True)
class State:
    model: Weights
    generator: Weights


@dataclass(frozen=True)
class Trained(Release):
    model: Weights
    generator: Weights
    samples: Count
    loss: Metric
    discriminator_loss: Metric
    summed = frozenset({"model", "generator"})


@dataclass(frozen=True)
class Players:
    """The networks of the game. `optimizer` trains F, C and G; D has its own."""

    net: Network
    generator: Generator
    discriminator: Discriminator
    optimizer: torch.optim.Optimizer
    discriminator_sgd: torch.optim.Optimizer


def players_loss(players: Players, features: Tensor, reference: Tensor, labels: Tensor, hyper: Hyper) -> Tensor:
    """The loss of F, C and G, (1 - w) L_err + w L_adv_f + L_adv_g, from `features` and `reference`, both `(B, d)`.

    F and C get no gradient of L_adv_g, and G none of the rest.
    """
    judge = players.discriminator
    error = label_loss(players.net.scores(features, ()), labels, smoothing=hyper.smoothing)
    f_loss = (1 - hyper.adversarial) * error + hyper.adversarial * extractor_loss(judge(features, labels))
    return f_loss + generator_loss(judge(reference, labels))


def play(
    players: Players, batch: LabelledBatch, noise: Tensor, hyper: Hyper, precision: str = "float32"
) -> tuple[Tensor, Tensor]:
    """One batch of the game: a step of D on its loss, then one of F, C and G. Returns both losses, D's last."""
    judge, device, y = players.discriminator, batch.x.device, batch.y
    with autocast(device, precision):
        features, reference = players.net.features(batch.x), players.generator(noise, y)
        d_loss = discriminator_loss(judge(reference.detach(), y), judge(features.detach(), y))
    descend(d_loss, players.discriminator_sgd)
    judge.requires_grad_(False)
    with autocast(device, precision):
        loss = players_loss(players, features, reference, y, hyper)
    descend(loss, players.optimizer)
    judge.requires_grad_(True)
    return loss.detach(), d_loss.detach()


@step
def train(site: Labelled, model: Weights, generator: Weights, rng: Rng) -> Trained:
    """A site's round: classification alone, then the adversarial game. The discriminator stays at the site."""
    hyper, training = site.hyper(Hyper), site.plan.training
    net = plain_network(site.plan)
    with_weights(net, model, site.device).train()
    features = net.backbone.out_features
    maker = Generator(features, len(site.plan.model.classes), hyper)
    with_weights(maker, generator, site.device)
    judge = _own_discriminator(site, features, hyper, rng)
    adversary_lr = hyper.adversary_lr * site.lr
    optimizer, judge_sgd = sgd(site, net), sgd(site, judge)
    optimizer.add_param_group({"params": list(maker.parameters()), "lr": adversary_lr})
    judge_sgd.param_groups[0]["lr"] = adversary_lr
    draws = rng.child("noise").torch()

    def batches(name: str, share: float) -> Iterator[LabelledBatch]:
        epochs = share * training.local_epochs
        return site.train.batches(training.batch_size, rng.child(name), epochs, augmentation(site.plan))

    def alone(batch: LabelledBatch) -> Tensor:
        return label_loss(net(batch.x), batch.y, smoothing=hyper.smoothing)  # L_err

    train_batches(batches("alone", hyper.warmup), alone, optimizer, training.precision)
    site.train.begin_part()  # Only the game makes the generator.
    players = Players(net, maker, judge, optimizer, judge_sgd)
    total, judge_losses = torch.zeros((), device=site.device), []
    for number, batch in enumerate(batches("game", 1 - hyper.warmup)):
        with naming_batch(number):
            noise = torch.rand(len(batch.x), maker.noise, generator=draws).to(site.device)
            loss, judge_loss = play(players, batch, noise, hyper, training.precision)
        total += loss
        judge_losses.append(judge_loss)
    site.store.save(DISCRIMINATOR, weights_of(judge), site.round)
    return Trained(
        model=weights_of(net),
        generator=weights_of(maker),
        samples=site.train.used,
        loss=float(total) / max(len(judge_losses), 1),
        discriminator_loss=float(torch.stack(judge_losses).mean()) if judge_losses else 0.0,
    )


class FedADG:
    """The coordinator averages F, C and G; every discriminator stays at its site."""

    hyper_type: ClassVar[type[Hyper]] = Hyper
    state_type: ClassVar[type[State]] = State
    steps: ClassVar[tuple[Step[Any], ...]] = (train,)

    def __init__(self, hyper: Hyper) -> None:
        self.hyper = hyper

    def init(self, base: Network, fed: Federation) -> State:
        with seeded_init(fed.rng("generator").seed()):
            generator = Generator(base.backbone.out_features, len(fed.plan.model.classes), self.hyper)
        return State(weights_of(base), weights_of(generator))

    def round(self, state: State, fed: Federation) -> State:
        # Every site has the same weight, whatever its number of samples: so it has the same chance to be drawn.
        part = fed.taking_part(fed.labelled, by_size=False)
        replies = fed.ask(part.sites, train, model=state.model, generator=state.generator)
        for site, trained in replies:
            fed.note("train_loss", trained.loss, site)
            fed.note("discriminator_loss", trained.discriminator_loss, site)
        return State(
            fed.average(
                lambda: ((trained.model, 1.0) for _, trained in replies), since=state.model, sites=replies.answered
            ),
            fed.average(
                lambda: ((trained.generator, 1.0) for _, trained in replies),
                since=state.generator,
                sites=replies.answered,
            ),
        )

    def models(self, state: State) -> Mapping[str, Weights]:
        return {SHARED: state.model}

    @staticmethod
    def network(plan: Plan) -> nn.Module:
        return plain_network(plan)


def _share(features: int, share: float) -> int:
    return max(1, round(share * features))


def _own_discriminator(site: Labelled, features: int, hyper: Hyper, rng: Rng) -> Discriminator:
    """The site's discriminator as it was after its last round, or a new one."""
    with seeded_init(rng.child(DISCRIMINATOR).seed()):
        discriminator = Discriminator(features, len(site.plan.model.classes), hyper)
    kept = site.store.load(DISCRIMINATOR)
    if kept is not None:
        discriminator.load_state_dict(kept)
    return discriminator.to(site.device)


FEDADG = About(
    "fedadg",
    ("generalize",),
    "Zhang et al., 2021",
    draws_sites=True,
    tasks=("classification",),
    # PACS. Local epochs, batch size and learning rate are for a pretrained AlexNet: docs/methods/fedadg.md.
    defaults={"rounds": 30, "momentum": 0.9, "weight_decay": 1e-5},
    time_factor=1.3,
)
