"""What COPA's two settings share: its keys, its model of one extractor and many classifiers, and its loss.

Guile Wu, Shaogang Gong: Collaborative Optimization and Aggregation for Decentralized Domain Generalization and
Adaptation. ICCV 2021.
"""

from __future__ import annotations

import copy
import dataclasses
import secrets
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Literal, cast

import torch
from torch import Tensor, nn

from fedshift.data.augment import cutout, rand_augment
from fedshift.data.batches import LabelledBatch
from fedshift.data.randaugment import MAX_MAGNITUDE, MagnitudeDraw
from fedshift.federation import codec
from fedshift.federation.federation import Federation
from fedshift.federation.labels import label_loss
from fedshift.federation.plan import Plan
from fedshift.federation.releases import Weights
from fedshift.functional.agreement import equal_shares
from fedshift.functional.averaging import add_noise
from fedshift.methods.local import plain_network, with_weights
from fedshift.nn.network import Ensemble, Network, Rule
from fedshift.nn.normalisation import Start, Variant, Where, convert_norms, forgetting
from fedshift.rng import Rng

PHOTOGRAPH = 40
"""Images with a longer side than this, in pixels, count as photographs."""

Look = Callable[[Tensor], Tensor]


TABLE_KEYS = {"augment": False, "norm": "bn"}
"""For table rows, which nothing augments: what is left of the method is how classifiers and extractors judge each
other."""

PRETRAINED_KEYS = {
    "norm_where": "first-stage",
    "norm_start": "batch",
    "first_judges": "none",
    "shared_start": 0.5,
    "judges": "mean",
    "magnitude_draw": "uniform",
    "cutout": False,
}
"""For networks that start from given weights. Hybrid layers at equal shares take a pre-trained network's function away;
classifiers that each learn from one domain are poor for long, as judges and as predictors, unless they start from a
good common one; the sum of judges' losses asks for a lower rate the more sites there are; and second looks at full
strength hide what the network knows."""


@dataclass(frozen=True)
class Hyper:
    norm: Variant = "hbin"
    """What replaces batch normalisation (Fig. 3)."""
    norm_where: Where = "auto"
    """Which layers: see nn.normalisation.convert_norms."""
    norm_start: Start = "equal"
    """Where lambda starts: equal shares of batch and instance, or nearly all on the batch."""
    collaboration: Literal["frozen", "none", "enlarge", "consistency"] = "frozen"
    """The other domains' frozen classifiers, nothing, augmented copies for the site's own classifier, or consistency of
    the others with the own one (Fig. 2)."""
    first_judges: Literal["initial", "none"] = "initial"
    """Which frozen classifiers judge in round 1, before any has been trained: the initial one, which all start from, or
    none. Without iteration it is always the initial one."""
    shared_start: float = 0.0
    """The share of all rounds, at the beginning, in which sites train one classifier, averaged like the extractor, and
    no other one judges; 0: every site has its own from the first round on. Without iteration it is always 0."""
    judges: Literal["sum", "mean"] = "sum"
    """Whether the losses of the frozen classifiers are added up (Eq. (5)), or averaged."""
    augment: bool = True
    """Whether the other classifiers see an augmented copy of the batch (RandAugment, Cutout)."""
    ops: int = 2
    """RandAugment's operations per image."""
    magnitude: float = 9.0
    """RandAugment's strength on the scale of its paper, 0 to 10. Code that counts to 30, such as Dassl, says 10 where
    we say 3.3."""
    magnitude_draw: MagnitudeDraw = "fixed"
    """Whether all operations have this strength, or each draws its own, uniformly from 0 to it."""
    cutout: bool | Literal["auto"] = "auto"
    """Whether the augmented copy gets Cutout too; auto: on images larger than 40 pixels."""
    second_look_statistics: bool = False
    """Whether augmented copies change running statistics too. They are always normalised by their own batch."""
    iterate: bool = True
    """False: every site trains alone to the end and the aggregate is only scored (Table 6)."""
    noise: float = 0.0
    """Standard deviation of Gaussian noise on the aggregated extractor (sec. 3.3)."""
    predict: Rule = "probabilities"
    """Whether classifiers are averaged after or before the softmax."""

    def __post_init__(self) -> None:
        if self.ops < 1:
            raise ValueError(f"ops must be 1 or more, not {self.ops}; augment=false turns RandAugment off")
        if not 0 <= self.magnitude <= MAX_MAGNITUDE:
            raise ValueError(f"magnitude must be from 0 to {MAX_MAGNITUDE}, not {self.magnitude}")
        if not 0 <= self.shared_start <= 1:
            raise ValueError(f"shared_start must be from 0 to 1, not {self.shared_start}")
        if not 0 <= self.noise < float("inf"):
            raise ValueError(f"noise must be 0 or more, not {self.noise}")
        if self.collaboration == "consistency" and not self.iterate:
            raise ValueError("collaboration=consistency trains all classifiers together and needs iterate=true")
        if self.collaboration == "enlarge" and not self.augment:
            raise ValueError("collaboration=enlarge adds augmented copies and needs augment=true")


def is_shared(hyper: Hyper, fed: Federation) -> bool:
    """Whether sites share one classifier in this round."""
    return hyper.iterate and fed.round <= hyper.shared_start * fed.plan.training.rounds


def hyper_of(plan: Plan) -> Hyper:
    """COPA's keys; copa-uda has the same and more."""
    return codec.restore(Hyper, {field.name: plan.hyper[field.name] for field in dataclasses.fields(Hyper)})


def converted_network(plan: Plan, hyper: Hyper) -> Network:
    """The plan's network with its norms converted. Its initial weights do not matter."""
    net = plain_network(plan)
    convert_norms(net.backbone, hyper.norm, hyper.norm_where, hyper.norm_start)
    return net


# --- The model ----------------------------------------------------------------------------------------------------


def loaded(net: Network, extractor: Weights, head: Weights, device: torch.device) -> Network:
    """`net` as {F, C}, ready to train."""
    weights = {f"backbone.{key}": value for key, value in extractor.items()}
    weights |= {f"head.{key}": value for key, value in head.items()}
    return cast(Network, with_weights(net, weights, device).train())


def copy_of(head: nn.Module, weights: Weights) -> nn.Module:
    """Another classifier like `head`, on its device."""
    other = copy.deepcopy(head)
    other.load_state_dict(dict(weights))
    return other


def judges_of(net: Network, frozen: Mapping[str, Weights], hyper: Hyper) -> list[nn.Module]:
    """The classifiers whose losses on the second look are added: the other domains' frozen ones, in the order of their
    names, or the site's own (`enlarge`)."""
    if hyper.collaboration == "enlarge":
        return [net.head]
    return [copy_of(net.head, weights).requires_grad_(False) for _, weights in sorted(frozen.items())]


def numbered(heads: Sequence[Weights]) -> dict[str, Tensor]:
    """The state dict of a module list."""
    return {f"{number}.{key}": value for number, head in enumerate(heads) for key, value in head.items()}


def below(prefix: str, weights: Weights) -> dict[str, Tensor]:
    return {key.removeprefix(prefix): value for key, value in weights.items() if key.startswith(prefix)}


def assembled(extractor: Weights, heads: Mapping[str, Weights], trained: Mapping[str, bool]) -> dict[str, Tensor]:
    """{F_t, {C_i}} as the weights of a network whose head is an ensemble, in the order of the domains' names.
    Classifiers that were never trained have share 0."""
    domains = sorted(heads)
    backbone = {f"backbone.{key}": value for key, value in extractor.items()}
    members = numbered([heads[domain] for domain in domains])
    shares = equal_shares([trained[domain] for domain in domains])
    return backbone | {f"head.members.{key}": value for key, value in members.items()} | {"head.shares": shares}


def ensemble_network(plan: Plan, domains: int) -> Network:
    """The module that predicts: one extractor, and the mean of one classifier for each of `domains`."""
    hyper = hyper_of(plan)
    net = converted_network(plan, hyper)
    net.head = Ensemble(net.head, domains, hyper.predict)  # Eq. (7)
    return net


# --- Eq. (5), for a site and for the target -----------------------------------------------------------------------


def collaborative_loss(
    net: Network, judges: Sequence[nn.Module], look_again: Look | None, hyper: Hyper
) -> tuple[Callable[[LabelledBatch], Tensor], ...]:
    """Eq. (5) as functions of a batch that add up to the loss: that of the site's own classifier on the batch, and that
    of the `judges` on a second look at it, or on the same features if there is no second look."""
    share = 1 / len(judges) if judges and hyper.judges == "mean" else 1

    def own(batch: LabelledBatch) -> Tensor:
        return label_loss(net(batch.x), batch.y)  # Eq. (1)

    def both(batch: LabelledBatch) -> Tensor:
        features = net.features(batch.x)
        return label_loss(net.head(features), batch.y) + share * sum_of_losses(judges, features, batch.y)

    if not judges:
        return (own,)
    if look_again is None:
        return (both,)

    def others(batch: LabelledBatch) -> Tensor:
        # A separate pass: in one batch, plain and augmented images would be normalised by common statistics.
        return share * sum_of_losses(judges, second_features(net, look_again(batch.x), hyper), batch.y)

    return (own, others)


class CollaborativeLoss(nn.Module):
    """Eq. (5) of one image, for training under a budget. `look` is the second look at it, if there is one."""

    def __init__(self, net: Network, judges: Sequence[nn.Module], hyper: Hyper) -> None:
        super().__init__()
        self.net, self.judges = net, nn.ModuleList(judges)
        self.share = 1 / len(judges) if judges and hyper.judges == "mean" else 1.0

    def forward(self, x: Tensor, y: Tensor, look: Tensor | None = None) -> Tensor:
        features = self.net.features(x)
        own = label_loss(self.net.head(features), y)
        if not self.judges:
            return own
        again = features if look is None else self.net.features(look)
        return own + self.share * sum_of_losses(list(self.judges), again, y)


def second_features(net: Network, x: Tensor, hyper: Hyper) -> Tensor:
    """The features of augmented images. Nobody predicts on such images, so running statistics do not learn from them
    unless asked to."""
    with nullcontext() if hyper.second_look_statistics else forgetting(net):
        return net.features(x)


def sum_of_losses(heads: Sequence[nn.Module], features: Tensor, labels: Tensor) -> Tensor:
    """sum_j CE(C'_j(features), labels). The gradient passes through frozen classifiers to the features."""
    scores = torch.cat([head(features) for head in heads])
    return len(heads) * label_loss(scores, labels.repeat(len(heads)))


def second_look(hyper: Hyper, plan: Plan, rng: Rng) -> Look | None:
    """A(x) of Eq. (5): RandAugment, and Cutout on photographs. None: all classifiers see the same features."""
    if not hyper.augment:
        return None
    generator = rng.child("second-look").torch()
    is_cut = max(plan.model.input_shape) > PHOTOGRAPH if hyper.cutout == "auto" else hyper.cutout

    def augment(x: Tensor) -> Tensor:
        new = rand_augment(x.cpu(), generator, hyper.ops, hyper.magnitude, hyper.magnitude_draw)
        if is_cut:
            new = cutout(new, min(x.shape[2:]) // 2, generator)
        return new.to(x.device, memory_format=torch.channels_last)

    return augment


# --- Eq. (6) ------------------------------------------------------------------------------------------------------


def aggregated(
    fed: Federation,
    extractors: Callable[[], Iterable[tuple[Weights, float]]],
    since: Weights | None,
    sites: Sequence[str],
    noise: float,
) -> dict[str, Tensor]:
    """F_t = sum_i alpha_i F_i, with Gaussian noise of deviation `noise`. The weights alpha_i need not sum to 1. `since`
    is F_t of the round before, if the sites started from it, and `sites` have the extractors."""
    mean = fed.average(extractors, since=since, sites=sites, stated=False)  # Eq. (6)
    if noise == 0:
        return mean
    # Never from the run's seed: the noise protects against sites and readers of the model file, who know the seed and
    # could subtract it again. The price is that such a run cannot be repeated bit for bit.
    return add_noise(mean, noise, torch.Generator().manual_seed(secrets.randbits(63)))
