"""FedDG-GA: sites whose data the merged model suits less than their own model count more in the next average.

R. Zhang, Q. Xu, J. Yao, Y. Zhang, Q. Tian, Y. Wang: Federated Domain Generalization with Generalization Adjustment.
CVPR 2023.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import nn

from fedshift.federation.federation import Federation
from fedshift.federation.labels import label_loss
from fedshift.federation.plan import Plan
from fedshift.federation.releases import Count, Metric, Release, Weights
from fedshift.federation.site import Labelled
from fedshift.federation.step import Step, step
from fedshift.functional.losses import cross_entropy
from fedshift.methods.base import SHARED, About
from fedshift.methods.cost import PLAIN
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

_BATCH = 256


@dataclass(frozen=True)
class Hyper:
    step: float = 0.2
    """How far the weight of the site with the largest gap moves in round 1, in units of an equal share. It falls
    linearly to 0 over the run."""

    def __post_init__(self) -> None:
        if not 0 <= self.step <= 1:
            raise ValueError(f"step must be from 0 to 1, not {self.step}")


@dataclass(frozen=True)
class State:
    """`shares`: the sites' weights. `own_losses`: of each site's trained model in the last round, at the site."""

    model: Weights
    shares: Mapping[str, float]
    own_losses: Mapping[str, float]


@dataclass(frozen=True)
class Trained(Release):
    """`merged_loss` and `own_loss` are those of the model that came and of the trained one, on held-back data."""

    model: Weights
    samples: Count
    loss: Metric
    merged_loss: Metric
    own_loss: Metric


@step
def train(site: Labelled, model: Weights, rng: Rng) -> Trained:
    """Local epochs of cross-entropy, and its mean on held-back data before and after."""
    training = site.plan.training
    net = network_with(site.plan, model, site.device)
    merged = held_back_loss(site, net)
    net.train()
    site.train.begin_part()
    batches = site.train.batches(training.batch_size, rng, training.local_epochs, augmentation(site.plan))
    loss = train_batches(batches, lambda b: label_loss(net(b.x), b.y), sgd(site, net), training.precision)
    site.train.begin_part()
    own = held_back_loss(site, net)
    return Trained(model=weights_of(net), samples=site.train.used, loss=loss, merged_loss=merged, own_loss=own)


@torch.no_grad()
def held_back_loss(site: Labelled, net: nn.Module) -> float:
    """Mean cross-entropy on the site's validation data, or on its training data if its policy's least number of samples
    is more than the former has."""
    data = site.val if len(site.val) >= max(1, site.min_samples) else site.train
    net.eval()
    parts = [(float(cross_entropy(net(batch.x), batch.y)), len(batch.y)) for batch in data.in_order(_BATCH)]
    return sum(loss * count for loss, count in parts) / max(1, sum(count for _, count in parts))


def adjusted(shares: Mapping[str, float], gaps: Mapping[str, float], step: float) -> dict[str, float]:
    """New weights of the sites, which sum to 1: a + step gap / max |gap|, cut to [0, 1] and divided by their sum. Sites
    without a gap keep theirs before the division."""
    largest = max((abs(gap) for gap in gaps.values()), default=0.0)
    if largest == 0:
        return dict(shares)
    moved = {site: min(1.0, max(0.0, a + step * gaps.get(site, 0.0) / largest)) for site, a in shares.items()}
    total = sum(moved.values())
    return {site: a / total for site, a in moved.items()} if total > 0 else dict(shares)


class FedDGGA:
    """FedAvg whose weights follow the gaps between merged and local models."""

    hyper_type: ClassVar[type[Hyper]] = Hyper
    state_type: ClassVar[type[State]] = State
    steps: ClassVar[tuple[Step[Any], ...]] = (train,)

    def __init__(self, hyper: Hyper) -> None:
        self.hyper = hyper

    def init(self, base: Network, fed: Federation) -> State:
        # The weights start equal, as in the authors' code.
        return State(weights_of(base), dict.fromkeys(fed.labelled, 1 / len(fed.labelled)), {})

    def round(self, state: State, fed: Federation) -> State:
        replies = fed.ask(fed.labelled, train, model=state.model)
        # What came in this round is what was merged in the last one: the gap needs no message of its own.
        gaps = {site: reply.merged_loss - state.own_losses[site] for site, reply in replies if site in state.own_losses}
        left = 1 - (fed.round - 1) / fed.plan.training.rounds
        # DIFFERS: a third of the step in the authors' code, which has three sites. Here it is one over their number.
        shares = adjusted(state.shares, gaps, self.hyper.step * left / len(state.shares))
        for site, reply in replies:
            fed.note("train_loss", reply.loss, site)
            fed.note("weight", shares[site], site)
        counted = [site for site in replies.answered if shares[site] > 0] or list(replies.answered)
        model = fed.average(
            lambda: ((replies[site].model, shares[site] or 1.0) for site in counted),
            since=state.model,
            sites=counted,
            stated=False,
        )
        own_losses = {site: reply.own_loss for site, reply in replies}
        return State(model, shares, own_losses)

    def models(self, state: State) -> Mapping[str, Weights]:
        return {SHARED: state.model}

    @staticmethod
    def network(plan: Plan) -> nn.Module:
        return plain_network(plan)


FEDDG_GA = About(
    "feddg-ga",
    ("generalize",),
    "Zhang et al., CVPR 2023",
    all_because="each site's weight follows from its losses in consecutive rounds",
    time_factor=1.2,
    cost=PLAIN,
)
