"""What a site's message gives away: an attacker tries to rebuild the site's images from it (KD3A, Fig. 5).

KD3A says that FADA, whose sites synchronise after every batch, leaks images and that KD3A, whose sites send their
weights after a whole epoch, does not. Here both messages are made by the step that KD3A's sources run.

The attacker is the honest but curious coordinator: it knows the network and its weights before the message, the rate,
momentum and weight decay, how many images a site has and in what batches it took them. It does not know the images,
their order, or their labels. It reads the message as the mean gradient of the steps behind it, infers the labels from
the last layer's bias, and searches for as many images as there were whose gradient, as one batch, points the same way
(functional/inversion.py). For one step that gradient is exact; for an epoch it is not, because the weights change.
An attacker who replays the epoch step by step may do better than this one: a low figure is no proof of privacy.
"""

from __future__ import annotations

import dataclasses
import math
import statistics
import tempfile
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from fedshift.data import open_dataset
from fedshift.data.domain import Domain, Split
from fedshift.errors import InputError, nearest
from fedshift.federation.plan import Plan
from fedshift.federation.releases import Weights
from fedshift.federation.site import Labelled, SiteSpec
from fedshift.federation.step import fixed_threads
from fedshift.functional.averaging import add_noise
from fedshift.functional.inversion import Search, infer_labels, invert, momentum_total, psnr, ssim
from fedshift.functional.losses import cross_entropy
from fedshift.methods.kd3a import kd3a
from fedshift.methods.local import network_with, weights_of
from fedshift.rng import Rng
from fedshift.runs.config import make_config
from fedshift.runs.planning import Prepared, base_network, data_source, prepare

PROBES = 64
"""Number of random images from which the attacker learns how the network usually predicts."""


@dataclass(frozen=True)
class Message:
    """Sent by a site with `images` images that trained on them in batches of `batch`: after a single step if one batch
    holds them all, else after an epoch of several steps."""

    images: int
    batch: int

    @property
    def steps(self) -> int:
        return math.ceil(self.images / self.batch)

    @property
    def name(self) -> str:
        if self.steps == 1:
            return f"after one batch of {self.images}"
        return f"after an epoch: {self.images} images in batches of {self.batch}"


MESSAGES = (Message(1, 1), Message(4, 4), Message(4, 2), Message(16, 4))
"""Two messages after one batch, as in FADA; then KD3A at a tiny site, and at one with a few steps per epoch."""


@dataclass(frozen=True)
class Reconstruction:
    """A site's images and the rebuilt ones, `(n, 3, height, width)` in [0, 1], paired for the least total error.
    `labels_right` is the share of labels that were inferred correctly."""

    message: Message
    originals: Tensor
    rebuilt: Tensor
    labels_right: float

    @property
    def psnr(self) -> list[float]:
        return [float(value) for value in psnr(self.rebuilt, self.originals)]

    @property
    def ssim(self) -> list[float]:
        return [float(value) for value in ssim(self.rebuilt, self.originals)]


@dataclass(frozen=True)
class Leakage:
    """All attacks on one site's messages: `trials` per kind of message, each on other images."""

    dataset: str
    site: str
    arch: str
    trials: int
    search: Search
    noise: float
    reconstructions: tuple[Reconstruction, ...]

    def of(self, message: Message) -> list[Reconstruction]:
        return [found for found in self.reconstructions if found.message == message]

    @property
    def messages(self) -> list[Message]:
        return list(dict.fromkeys(found.message for found in self.reconstructions))

    def summary(self) -> list[dict[str, Any]]:
        """One row per kind of message: mean and standard deviation of the PSNR in dB over images, and the mean of the
        structural similarity, beside those of a plain grey image and of random ones, which need no message."""
        rows = []
        for message in self.messages:
            own = self.of(message)
            values = [value for found in own for value in found.psnr]
            grey = [float(v) for a in own for v in psnr(torch.full_like(a.originals, 0.5), a.originals)]
            noise = torch.Generator().manual_seed(0)
            drawn = [torch.rand(a.originals.shape, generator=noise) for a in own]
            random = [float(v) for a, x in zip(own, drawn, strict=True) for v in psnr(x, a.originals)]
            unrelated = [float(v) for a, x in zip(own, drawn, strict=True) for v in ssim(x, a.originals)]
            rows.append(
                {
                    "message": message.name,
                    "images": message.images,
                    "batch": message.batch,
                    "steps": message.steps,
                    "psnr_mean": statistics.fmean(values),
                    "psnr_std": statistics.pstdev(values),
                    "psnr": values,
                    "psnr_of_plain_grey": statistics.fmean(grey),
                    "psnr_of_random_images": statistics.fmean(random),
                    "ssim_mean": statistics.fmean(value for found in own for value in found.ssim),
                    "ssim_of_random_images": statistics.fmean(unrelated),
                    "labels_right": statistics.fmean(found.labels_right for found in own),
                }
            )
        return rows

    def plain(self) -> dict[str, Any]:
        """Everything except the images, for JSON."""
        return {
            "dataset": self.dataset,
            "site": self.site,
            "arch": self.arch,
            "network": "as before round 1",
            "noise": self.noise,
            "trials": self.trials,
            "search": dataclasses.asdict(self.search),
            "attacker_knows": ["network and weights before", "rate, momentum, weight decay", "number of images, batch"],
            "rows": self.summary(),
        }


def leakage(
    site: str | None = None,
    *,
    messages: Sequence[Message] = MESSAGES,
    trials: int = 4,
    search: Search | None = None,
    noise: float = 0.0,
    seed: int = 0,
    progress: Callable[[str, int, int], None] = lambda what, done, total: None,
    **data: Any,
) -> Leakage:
    """Attacks messages of the domain `site`, by default the first. `data` are configuration keys such as `dataset`,
    `data_dir`, `arch`, `image_size` and `lr`. `noise` is added to the weights that leave, as by `policy.noise`."""
    chosen = search or Search()
    if min(trials, chosen.steps, chosen.starts) < 1:
        raise InputError("config-value", "trials, steps and starts of the leakage study must be 1 or more")
    prepared, site = _prepared(site, seed, data)
    images = _images_of(prepared, site, max(m.images for m in messages), trials)
    model, found = weights_of(base_network(prepared)[0]), []
    for message in messages:
        for trial, split in enumerate(images):
            own = split.take(np.arange(message.images))
            rng = Rng.of(seed, "leakage", message.name, trial)
            found.append(attack(own, message, prepared.plan, model, chosen, noise, rng))
            progress(f"{message.name}, trial {trial + 1}", len(found), len(messages) * trials)
    arch, name = prepared.plan.model.arch, prepared.dataset.name
    return Leakage(name, site, arch, trials, chosen, noise, tuple(found))


def attack(
    images: Split, message: Message, plan: Plan, model: Weights, search: Search, noise: float, rng: Rng
) -> Reconstruction:
    """Makes the message of a site that has `images`, then rebuilds the images from the message alone."""
    with fixed_threads(plan.threads):
        return _attack(images, message, _with_batch(plan, message.batch), model, search, noise, rng)


def _attack(
    images: Split, message: Message, plan: Plan, model: Weights, search: Search, noise: float, rng: Rng
) -> Reconstruction:
    sent = add_noise(_sent(images, plan, model, rng), noise, rng.child("noise").torch())
    net = network_with(plan, model, torch.device("cpu")).train()
    seen = _mean_gradient(net, model, sent, message, plan)
    bias = seen[last_bias(net, len(plan.model.classes))]
    labels = infer_labels(bias, usual_prediction(net, plan, rng), len(images))
    shape = (len(images), *plan.model.input_shape)

    def gradient_of(guess: Tensor) -> Sequence[Tensor]:
        return torch.autograd.grad(cross_entropy(net(guess), labels), list(net.parameters()), create_graph=True)

    found = invert(gradient_of, list(seen.values()), shape, search, rng.child("start").torch())
    originals = torch.from_numpy(np.array(images.inputs)).permute(0, 3, 1, 2).float() / 255
    assert images.labels is not None
    common = Counter(labels.tolist()) & Counter(images.labels.tolist())
    return Reconstruction(message, originals, found[_pairing(found, originals)], common.total() / len(images))


def _prepared(site: str | None, seed: int, data: dict[str, Any]) -> tuple[Prepared, str]:
    """A run of KD3A in which `site` is a source, and the name of the site. It does not matter which is the target."""
    keys = {"method": "kd3a", "arch": "digits-csac", "seed": seed, "rounds": 1, **data}
    dataset = open_dataset(data_source(make_config(keys)))
    site = site or dataset.domains[0]
    if site not in dataset.domains:
        known = nearest(site, dataset.domains)
        raise InputError("unknown-name", f"data set {dataset.name!r} has no domain {site!r}. {known}")
    others = [name for name in dataset.domains if name != site]
    if dataset.task != "classification" or len(dataset.input_shape) != 3 or not others:
        raise InputError("method-needs", "the leakage study takes two or more domains of labelled images")
    return prepare(make_config({**keys, "target": others[0]}), dataset), site


def _images_of(prepared: Prepared, site: str, count: int, trials: int) -> list[Split]:
    """`count` labelled training images per trial, each image in one trial only."""
    train = prepared.dataset.load(site).train
    if train.labels is None or len(train) < count * trials:
        have = 0 if train.labels is None else len(train)
        raise InputError(
            "data-empty",
            f"{site!r} has {have} labelled training images, but the study takes {count} in each of {trials} trials",
        )
    order = Rng.of(prepared.plan.seed, "leakage", site).numpy().permutation(len(train))
    return [train.take(order[trial * count : (trial + 1) * count]) for trial in range(trials)]


def _with_batch(plan: Plan, batch: int) -> Plan:
    training = dataclasses.replace(plan.training, batch_size=batch, local_epochs=1.0, augment=())
    return dataclasses.replace(plan, training=training)


def _sent(images: Split, plan: Plan, model: Weights, rng: Rng) -> Weights:
    """The weights that leave a site whose training data are `images`."""
    with tempfile.TemporaryDirectory(prefix="fedshift-leakage-") as folder:
        spec = SiteSpec("site", "labelled", data_source(make_config({"method": "kd3a"})), ("site",), Path(folder))
        nothing = images.take(np.arange(0))
        site = Labelled(spec, plan, Domain("site", images, nothing, nothing), plan.model.classes, round=1)
        trained: kd3a.Trained = kd3a.train.run(site, model=model, rng=rng)
    return trained.model


def _mean_gradient(net: nn.Module, before: Weights, after: Weights, message: Message, plan: Plan) -> dict[str, Tensor]:
    """The update, read as the mean gradient of the loss over the steps that made it."""
    training = plan.training
    steps = momentum_total(message.steps, training.momentum)
    return {
        name: (before[name] - after[name]) / (training.lr_of(name, 1) * steps) - training.weight_decay * before[name]
        for name, _ in net.named_parameters()
    }


def last_bias(net: nn.Module, classes: int) -> str:
    names = [name for name, tensor in net.named_parameters() if tensor.shape == (classes,) and name.startswith("head.")]
    if not names:
        raise InputError("method-needs", "labels are inferred from the last layer's bias, but this network has none")
    return names[-1]


def usual_prediction(net: nn.Module, plan: Plan, rng: Rng) -> Tensor:
    probes = torch.rand(PROBES, *plan.model.input_shape, generator=rng.child("probes").torch())
    with torch.no_grad():
        return net(probes).softmax(1).mean(0)  # type: ignore[no-any-return]


def _pairing(found: Tensor, originals: Tensor) -> Tensor:
    """The index of the rebuilt image for each original: a batch has no order."""
    from scipy.optimize import linear_sum_assignment

    error = torch.cdist(originals.flatten(1), found.flatten(1)).square()
    _, columns = linear_sum_assignment(error.numpy())
    return torch.from_numpy(columns)
