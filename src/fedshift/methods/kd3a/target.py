"""KD3A, the target's part: it collects the teachers' predictions, learns from what they agree on, and aligns the
aggregated model's features with the teachers' BatchNorm statistics. All of it runs on the target's unlabelled data at
the coordinator; nothing leaves it. The paper is named in kd3a.py.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Literal, Protocol

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.utils import clip_grad_norm_

from fedshift.data.augment import mixup
from fedshift.data.batches import UnlabelledBatch
from fedshift.federation.releases import Weights
from fedshift.federation.site import Site, Unlabelled
from fedshift.functional.losses import kl_divergence
from fedshift.functional.moments import (
    Anchor,
    Moments,
    batchnorm_mmd,
    channel_moments,
    recorded_moments,
    threshold_divergence,
    within_share,
)
from fedshift.methods.kd3a.keys import Choices, Hearing, Hyper
from fedshift.methods.local import (
    all_finite,
    autocast,
    network_with,
    plain_network,
    sgd,
    train_batches,
    weights_follow,
    weights_of,
    with_weights,
)
from fedshift.nn.network import Network
from fedshift.nn.taps import norm_inputs, norm_layers
from fedshift.rng import Rng

Distance = Literal["h-divergence", "info-gain"]

_VOTE_BATCH = 256


def passes_of(site: Site) -> tuple[float, float, Rng]:
    """Which part of the passes over a site's data a round takes (begin and end, counted in passes), and the generator
    that shuffles them. If an epoch has several rounds, they divide it among them."""
    epochs = site.plan.training.local_epochs
    return (site.round - 1) * epochs, site.round * epochs, Rng.of(site.plan.seed, site.name, "kd3a.passes")


def first_visits(order: Tensor) -> Tensor:
    """The different samples of `order`, in the order of their first appearance."""
    _, places = np.unique(order.numpy(), return_index=True)
    return order[torch.from_numpy(np.sort(places))]


@contextmanager
def lasting_momentum(net: nn.Module, optimizer: torch.optim.Optimizer, site: Site, is_kept: bool) -> Iterator[None]:
    """With `is_kept`, momentum continues from this site's last round."""
    if not is_kept:
        yield
        return
    parameters = dict(net.named_parameters())
    for name, saved in (site.store.load("momentum") or {}).items():
        parameter = parameters[name]
        # In the parameter's own memory layout, which the codec does not keep.
        optimizer.state[parameter]["momentum_buffer"] = torch.empty_like(parameter.detach()).copy_(saved)
    yield
    found = {name: optimizer.state[parameter].get("momentum_buffer") for name, parameter in parameters.items()}
    buffers = {name: value for name, value in found.items() if value is not None}
    # A round that diverged must not spoil all later ones.
    site.store.save("momentum", buffers if all_finite(buffers) else {}, site.round)


# --- Hearing the teachers -------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Heard:
    """The teachers' `probabilities` for the target's samples, `(K, N, C)` float32, in the order of `sites`.
    `statistics` are the buffers of teachers that voted in train mode. `distances` are their distances from the target,
    if these were asked for. `silent` are the sites whose models gave NaN or infinity."""

    sites: tuple[str, ...]
    probabilities: Tensor
    statistics: Mapping[str, Weights]
    distances: tuple[float, ...]
    silent: tuple[str, ...]


def hear(
    home: Unlabelled,
    teachers: Sequence[str],
    model_of: Callable[[str], Weights],
    samples: Tensor,
    mode: Hearing,
    distance: Distance | None,
    rng: Rng,
) -> Heard:
    """One forward pass of each teacher over `samples` `(N,)`, one model in memory at a time."""
    classes = len(home.plan.model.classes)
    said = torch.empty(len(teachers), len(samples), classes)
    with weights_follow():
        net = plain_network(home.plan)
    size = _VOTE_BATCH if mode == "eval" else home.plan.training.batch_size
    sites: list[str] = []
    silent: list[str] = []
    distances: list[float] = []
    statistics: dict[str, Weights] = {}
    for site in teachers:
        model = model_of(site)
        with_weights(net, model, home.device).train(mode == "train")
        if mode == "batch":
            for layer in norm_layers(net).values():
                layer.train()
        watch = _WATCHES[distance](classes, net.backbone.out_features) if distance else None
        opinion = _opinion(net, home.train.evenly(size, samples), watch)
        if not bool(torch.isfinite(opinion).all()):
            silent.append(site)
            continue
        said[len(sites)] = opinion
        sites.append(site)
        if watch:
            distances.append(watch.distance(model))
        if mode == "train":
            buffers = dict(net.named_buffers())
            statistics[site] = {key: buffers[key].cpu().clone() for key in model if key in buffers}
    return Heard(tuple(sites), said[: len(sites)], statistics, tuple(distances), tuple(silent))


def _opinion(net: Network, batches: Iterator[UnlabelledBatch], watch: _Watch | None) -> Tensor:
    rows = []
    with torch.inference_mode(), norm_inputs(net) as inputs:
        for batch in batches:
            features = net.features(batch.x)
            rows.append(net.scores(features, batch.x.shape[-2:]).softmax(1).cpu())
            if watch:
                watch.see(features, rows[-1].argmax(1), inputs)
    return torch.cat(rows)


class _Watch(Protocol):
    """Collects over batches what a distance between a teacher's site and the target needs."""

    def __init__(self, classes: int, features: int) -> None: ...

    def see(self, features: Tensor, choices: Tensor, inputs: Mapping[str, Tensor]) -> None:
        """Adds a batch: the teacher's features `(B, F)`, predicted classes `(B,)` and inputs of BatchNorm layers."""

    def distance(self, model: Weights) -> float:
        """The distance between the target and the site that trained `model`."""


class _Divergence:
    """d_H of Eq. (6), from the teacher's BatchNorm statistics of its site and from their inputs here: the mean over
    channels, then over layers, of how well a threshold separates the two."""

    # DIFFERS: the H-divergence is the supremum over classifiers and needs the data of both domains in one place. The
    # best of hundreds of channels separates any two domains; the mean over channels still shows which are similar.
    def __init__(self, classes: int, features: int) -> None:
        self._sums: dict[str, Tensor] = {}
        self._count = 0

    def see(self, features: Tensor, choices: Tensor, inputs: Mapping[str, Tensor]) -> None:
        self._count += len(choices)
        for layer, x in inputs.items():
            moments = channel_moments(x)
            both = torch.stack([moments.mean, moments.square]).double() * len(choices)
            self._sums[layer] = self._sums[layer] + both if layer in self._sums else both

    def distance(self, model: Weights) -> float:
        here = {layer: Moments(*(both.cpu() / self._count)) for layer, both in self._sums.items()}
        there = recorded_moments(model, here)
        return float(np.mean([float(threshold_divergence(there[layer], here[layer]).mean()) for layer in here]))


class _Dispersion:
    """Minus the information gain of FADA (X. Peng et al., ICLR 2020), up to a constant common to all teachers: the
    share of the variance of the target's features that lies within clusters. All teachers of a round start from one
    model, so that the dispersion before their training cancels out of the softmax of the gains."""

    # DIFFERS: FADA clusters by k-means and uses the absolute dispersion. Here a cluster is what the teacher predicts as
    # one class, and the dispersion is relative: with sums over all samples, the softmax would select a single teacher.
    def __init__(self, classes: int, features: int) -> None:
        self._counts = torch.zeros(classes, dtype=torch.float64)
        self._sums = torch.zeros(classes, features, dtype=torch.float64)
        self._squares = torch.zeros((), dtype=torch.float64)

    def see(self, features: Tensor, choices: Tensor, inputs: Mapping[str, Tensor]) -> None:
        rows = features.double().cpu()
        self._counts += torch.bincount(choices, minlength=len(self._counts))
        self._sums.index_add_(0, choices, rows)
        self._squares += rows.square().sum()

    def distance(self, model: Weights) -> float:
        return within_share(self._counts, self._sums, self._squares)


_WATCHES: dict[Distance, type[_Watch]] = {"h-divergence": _Divergence, "info-gain": _Dispersion}


# --- Learning from what they agree on -------------------------------------------------------------------------------


@dataclass(frozen=True)
class Lesson:
    """D^{K+1} of sec. 3.2: for each of the target's `samples` `(N,)`, p `(N, C)` and its weight `(N,)`."""

    samples: Tensor
    probabilities: Tensor
    weights: Tensor


def distil(
    home: Unlabelled, model: Weights, order: Tensor, lesson: Lesson, choices: Choices, rng: Rng
) -> tuple[dict[str, Tensor], float]:
    """h_{K+1}, trained from the global model by Eq. (5) over the samples in `order`, and its mean loss."""
    training = home.plan.training
    net = network_with(home.plan, model, home.device).train()
    row = torch.zeros(len(home.train), dtype=torch.int64)
    row[lesson.samples] = torch.arange(len(lesson.samples))
    generator = rng.child("mixup").torch()

    def loss_of(batch: UnlabelledBatch) -> Tensor:
        place = row[batch.index]
        x, p, weights = mixed(batch.x, lesson.probabilities[place], lesson.weights[place], choices, generator)
        return kl_divergence(p.to(home.device), net(x), weights.to(home.device))  # Eq. (5)

    optimizer = sgd(home, net)
    with lasting_momentum(net, optimizer, home, choices.keep_momentum):
        loss = train_batches(home.train.along(order, training.batch_size), loss_of, optimizer, training.precision)
    return weights_of(net), loss


def mixed(
    x: Tensor, p: Tensor, weights: Tensor, choices: Choices, generator: torch.Generator
) -> tuple[Tensor, Tensor, Tensor]:
    """Mixup of inputs, labels `(B, C)` and their weights `(B,)`.

    Jointly mixed, a sample has the weight w = l n + (1 - l) n' and the label (l n p + (1 - l) n' p') / w: the gradient
    is that of l n KL(p || q) + (1 - l) n' KL(p' || q), so that a sample without support contributes no false label.
    """
    if choices.mixup == 0:
        return x, p, weights
    is_joint = choices.mixup_weight == "joint"
    mass = (weights if is_joint else torch.ones_like(weights))[:, None]
    # A missing value (NaN) of a table row is ignored: the mixture has the other row's value, or misses it too.
    present = (~x.isnan()).cpu() if x.ndim == 2 else torch.zeros(len(x), 0)
    alike = torch.cat([mass * p, mass, present], 1)
    inputs = x.cpu().nan_to_num(nan=0.0) if x.ndim == 2 else x  # Images stay where they are.
    new, alike, _ = mixup(inputs, alike, choices.mixup, generator, per_batch=choices.mixup_draw == "batch")
    labels, total, present = alike.split([p.shape[1], 1, present.shape[1]], dim=1)
    new = new / present if x.ndim == 2 else new.to(memory_format=torch.channels_last)
    labels = labels / total.clamp(min=torch.finfo(total.dtype).tiny)
    return new.to(x.device), labels, total.squeeze(1) if is_joint else weights


# --- BatchNorm MMD --------------------------------------------------------------------------------------------------


def align(
    home: Unlabelled, model: Weights, samples: Tensor, sources: Mapping[str, Anchor], hyper: Hyper, rng: Rng
) -> tuple[dict[str, Tensor], float]:
    """The aggregated model after one pass over `samples` that minimises BatchNorm MMD, and its mean loss."""
    training = home.plan.training
    net = network_with(home.plan, model, home.device).train(hyper.mmd_mode == "train")
    optimizer = sgd(home, net)
    for group in optimizer.param_groups:
        group["lr"] *= hyper.mmd_rate

    def shorten(*_: object) -> None:
        clip_grad_norm_(net.parameters(), hyper.mmd_clip)

    if hyper.mmd_clip:
        # DIFFERS: the loss sums squared differences of squares over all channels. Its gradients are so large that the
        # digit nets have no finite weights after one pass at the round's learning rate.
        optimizer.register_step_pre_hook(shorten)

    with norm_inputs(net) as inputs:

        def loss_of(batch: UnlabelledBatch) -> Tensor:
            net(batch.x)
            with autocast(home.device, "float32"):
                here = {layer: channel_moments(x) for layer, x in inputs.items()}
                return batchnorm_mmd(here, sources)

        loss = train_batches(home.train.evenly(training.batch_size, samples), loss_of, optimizer, training.precision)
    return weights_of(net), loss
