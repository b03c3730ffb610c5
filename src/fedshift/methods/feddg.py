"""FedDG with ELCFS: sites lend each other the look of their images and train for changes of look.

Q. Liu, C. Chen, J. Qin, Q. Dou, P.-A. Heng: FedDG: Federated Domain Generalization on Medical Image Segmentation via
Episodic Learning in Continuous Frequency Space. CVPR 2021.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.func import functional_call

from fedshift.data.batches import LabelledBatch
from fedshift.errors import InputError, SiteError
from fedshift.federation.checks import Between
from fedshift.federation.federation import Federation
from fedshift.federation.labels import label_loss
from fedshift.federation.plan import Plan
from fedshift.federation.releases import Count, Metric, Release, Spectra, Weights
from fedshift.federation.site import Labelled
from fedshift.federation.step import Step, step
from fedshift.functional.spectrum import interpolate_low_amplitudes, low_amplitudes, window_radius
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

AMPLITUDES = "amplitudes"


@dataclass(frozen=True)
class Hyper:
    bank: int = 64
    """How many images of each site lend their low-frequency amplitudes to other sites."""
    alpha: float = 0.01
    """Reach of the low-frequency window to either side of frequency 0, as a share of the shorter image side, and at
    least 1 frequency; 0: the mean alone."""
    meta_step: float = 1e-3
    """Learning rate of the inner gradient step on a site's own images."""
    first_order: bool = True
    """Whether the inner step's gradient is a constant, as in the authors' code; false: second derivatives."""

    def __post_init__(self) -> None:
        if self.bank < 2:
            raise ValueError("bank must be at least 2")
        if not 0 <= self.alpha < 0.5:
            raise ValueError("alpha must be at least 0 and below 0.5")
        if self.meta_step < 0:
            raise ValueError("meta_step must not be negative")


@dataclass(frozen=True)
class State:
    """`spectra`: what each site lent. `delivered`: sites that have the others' spectra -> the round of their answer."""

    model: Weights
    spectra: Mapping[str, Tensor]
    delivered: Mapping[str, int]


@dataclass(frozen=True)
class Lent(Release):
    spectra: Spectra
    passed_on = frozenset({"spectra"})


@dataclass(frozen=True)
class Trained(Release):
    model: Weights
    samples: Count
    loss: Metric
    summed = frozenset({"model"})


@step
def lend_spectra(site: Labelled, rng: Rng) -> Lent:
    """The site's part of the distribution bank.

    DIFFERS: the paper's bank holds the whole amplitude spectrum of every image. Here only the window that
    interpolation uses leaves a site, and only of `bank` images, so that less of single images leaves.
    """
    hyper = site.hyper(Hyper)
    images = next(site.train.batches(hyper.bank, rng)).x
    low = low_amplitudes(images, _radius(site.plan, hyper)).cpu()
    # A small site repeats its spectra, so that all sites lend equally many and none is drawn less often.
    return Lent(spectra={AMPLITUDES: low[torch.arange(hyper.bank) % len(low)]})


@step
def train(site: Labelled, model: Weights, others: Tensor | None, rng: Rng) -> Trained:
    """Local episodic learning. `others` are the other sites' spectra `(n, 3, w, w)`; None: the site has them."""
    hyper, training = site.hyper(Hyper), site.plan.training
    bank = _kept_spectra(site, others).to(site.device)
    net = network_with(site.plan, model, site.device).train()
    generator = rng.child("spectra").torch()

    def loss_of(batch: LabelledBatch) -> Tensor:
        moved = other_looks(batch.x, bank, generator)
        return episode_loss(net, batch.x, moved, batch.y, hyper.meta_step, first_order=hyper.first_order)

    batches = site.train.batches(training.batch_size, rng, training.local_epochs, augmentation(site.plan))
    loss = train_batches(batches, loss_of, sgd(site, net), training.precision)
    return Trained(model=weights_of(net), samples=site.train.used, loss=loss)


def other_looks(images: Tensor, bank: Tensor, generator: torch.Generator) -> Tensor:
    """Continuous frequency space interpolation: the low amplitudes of each image `(B, 3, H, W)` move a random part of
    the way to a random entry of the bank `(n, 3, w, w)`. With an empty bank the images stay as they are."""
    if len(bank) == 0:
        return images
    chosen = torch.randint(len(bank), (len(images),), generator=generator)
    ratio = torch.rand(len(images), generator=generator)  # lambda ~ U(0, 1), one for each image
    moved = interpolate_low_amplitudes(images, bank[chosen.to(bank.device)], ratio.to(images.device))
    return moved.clamp(0, 1)


def episode_loss(
    net: nn.Module, own: Tensor, moved: Tensor, labels: Tensor, meta_step: float, *, first_order: bool
) -> Tensor:
    """Loss on a site's own images (meta-train) plus the loss on moved images after a step on the own ones (meta-test).

    DIFFERS: without the boundary term, and cross-entropy in place of the Dice loss, for images and pixels alike.
    """
    weights = dict(net.named_parameters())
    meta_train = label_loss(net(own), labels)
    gradients = torch.autograd.grad(meta_train, list(weights.values()), retain_graph=True, create_graph=not first_order)
    # The inner update, theta' = theta - beta grad L(x; theta).
    stepped = {
        name: weight - meta_step * gradient for (name, weight), gradient in zip(weights.items(), gradients, strict=True)
    }
    meta_test = label_loss(functional_call(net, stepped, (moved,)), labels)
    # The local objective, argmin over theta of L(x; theta) + L(t; theta').
    return meta_train + meta_test


class FedDG:
    """Spectra are exchanged once, in round 1. From then on it is FedAvg with episodic learning."""

    hyper_type: ClassVar[type[Hyper]] = Hyper
    state_type: ClassVar[type[State]] = State
    steps: ClassVar[tuple[Step[Any], ...]] = (lend_spectra, train)

    def __init__(self, hyper: Hyper) -> None:
        self.hyper = hyper

    def init(self, base: Network, fed: Federation) -> State:
        if len(fed.plan.model.input_shape) != 3:
            raise InputError("method-needs", "feddg works on the spectra of images; table rows have none: use fedavg")
        return State(weights_of(base), {}, {})

    def round(self, state: State, fed: Federation) -> State:
        spectra = state.spectra if state.delivered else self._collect(fed)
        # A site that did not answer in the last round may have missed the spectra: it gets them again.
        missed = [site for site in fed.labelled if site not in state.delivered]
        each = {site: {"others": _of_others(spectra, site, self._template(fed.plan))} for site in missed}
        part = fed.taking_part(fed.labelled)
        replies = fed.ask(part.sites, train, each=each, model=state.model, others=None)
        for site, trained in replies:
            fed.note("train_loss", trained.loss, site)
        model = fed.average(
            lambda: ((trained.model, part.weight(site, trained.samples)) for site, trained in replies),
            since=state.model,
            sites=replies.answered,
        )
        return State(model, spectra, {site: fed.round for site, _ in replies})

    def _collect(self, fed: Federation) -> Mapping[str, Tensor]:
        _, height, width = fed.plan.model.input_shape
        # No amplitude is above the sum of an image's pixels, which are 0 to 1.
        spectra = Between({AMPLITUDES: self._template(fed.plan)}, low=0, high=1.001 * height * width)
        lent = fed.ask(fed.labelled, lend_spectra, expect={"spectra": spectra})
        return {site: release.spectra[AMPLITUDES] for site, release in lent}

    def _template(self, plan: Plan) -> Tensor:
        side = 2 * _radius(plan, self.hyper) + 1
        return torch.zeros(self.hyper.bank, 3, side, side)

    def models(self, state: State) -> Mapping[str, Weights]:
        return {SHARED: state.model}

    @staticmethod
    def network(plan: Plan) -> nn.Module:
        return plain_network(plan)


def _radius(plan: Plan, hyper: Hyper) -> int:
    """DIFFERS: at least 1, because 0.01 of an image below 100 pixels would be its mean colour alone."""
    _, height, width = plan.model.input_shape
    return max(1, window_radius(height, width, hyper.alpha)) if hyper.alpha > 0 else 0


def _of_others(spectra: Mapping[str, Tensor], site: str, template: Tensor) -> Tensor:
    """What the other sites lent, `(n, 3, w, w)`, without their names; `(0, 3, w, w)` if none did."""
    return torch.cat([template[:0], *(spectra[name] for name in sorted(spectra) if name != site)])


def _kept_spectra(site: Labelled, others: Tensor | None) -> Tensor:
    """The other sites' spectra: those sent now, which are stored for later rounds, or else the stored ones."""
    if others is not None:
        site.store.save("spectra", {AMPLITUDES: others}, site.round)
        return others
    kept = site.store.load("spectra")
    if kept is None:
        raise SiteError(
            "site-failed", f"site {site.name!r} lost the spectra it was sent; it gets them again next round"
        )
    found: Tensor = kept[AMPLITUDES]
    return found


FEDDG = About(
    "feddg",
    ("generalize",),
    "Liu et al., CVPR 2021",
    "images; sites lend each other low-frequency amplitudes of some of them",
    draws_sites=True,
    # Learning rate (of Adam) and batches of 5 are for medical images of 384 pixels: docs/methods/feddg.md.
    defaults={"rounds": 100, "local_epochs": 1.0},
    time_factor=3.0,
    cost=Formula(
        flops={"G": 8, "F": 8, "dG": -3},
        upload=MODEL,
        broadcast=MODEL,
        note="Two forward passes and three backward passes, of which one is for the inner step.",
    ),
)
