"""FedOMG: the coordinator merges updates along a direction that suits the site which the mean suits least.

T.-B. Nguyen, M.-D. Nguyen, J. Park, Q.-V. Pham, W.-J. Hwang: Federated Domain Generalization with Data-free On-server
Matching Gradient. ICLR 2025. The step that sites run is FedAvg's.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from fedshift.federation.federation import Federation
from fedshift.federation.plan import Plan
from fedshift.federation.releases import Weights
from fedshift.federation.step import Step
from fedshift.functional.averaging import weighted_mean
from fedshift.methods.averaging import State, note_losses, train
from fedshift.methods.base import SHARED, About
from fedshift.methods.cost import PLAIN
from fedshift.methods.local import plain_network, weights_of
from fedshift.nn.network import Network

_SMALLEST = 1e-4
_STEPS, _RATE, _MOMENTUM = 20, 25.0, 0.5


@dataclass(frozen=True)
class Hyper:
    c: float = 0.5
    """How far from the mean update the merged one may be, as a share of its length; 0: FedAvg with equal weights."""
    rate: float = 1.0
    """What the merged update is multiplied by."""

    def __post_init__(self) -> None:
        if not 0 <= self.c < 1:
            raise ValueError(f"c must be at least 0 and below 1, not {self.c}")
        if not self.rate > 0:
            raise ValueError(f"rate must be above 0, not {self.rate}")


def matched(gram: Tensor, c: float) -> Tensor:
    """What each site's update is multiplied by, `(K,)` float64, from the products of all updates `(K, K)`.

    The weights w on the simplex minimise w' G 1/K + c |g| sqrt(w' G w), |g| being the length of the mean update; the
    merged update is (mean + c |g| / |g_w| g_w) / (1 + c^2) with g_w = sum_k w_k g_k, by the authors' 20 steps of SGD.
    """
    count = len(gram)
    gram = gram.double()
    gram = gram / (gram.diagonal() + _SMALLEST).sqrt().mean().square()
    to_mean = gram.mean(1)
    reach = c * (to_mean.mean() + _SMALLEST).clamp(min=0).sqrt()
    logits = torch.zeros(count, dtype=torch.float64, requires_grad=True)
    best, lowest, speed = logits.detach(), float("inf"), torch.zeros(count, dtype=torch.float64)
    for number in range(_STEPS + 1):
        w = logits.softmax(0)
        objective = w @ to_mean + reach * (w @ gram @ w + _SMALLEST).clamp(min=_SMALLEST).sqrt()
        if objective.item() < lowest:
            best, lowest = logits.detach(), objective.item()
        if number < _STEPS:
            (slope,) = torch.autograd.grad(objective, logits)
            speed = _MOMENTUM * speed + slope
            logits = (logits.detach() - _RATE * speed).requires_grad_()
    w = best.softmax(0)
    length = (w @ gram @ w + _SMALLEST).clamp(min=_SMALLEST).sqrt()
    return (1 / count + w * reach / (length + _SMALLEST)) / (1 + c**2)


class FedOMG:
    """Sites train as in FedAvg. DIFFERS: no weights by samples, and `rate` 1: the authors' 0.5 is of updates that are
    also divided by the number of sites, a fifth of FedAvg's step, for 500 local epochs."""

    hyper_type: ClassVar[type[Hyper]] = Hyper
    state_type: ClassVar[type[State]] = State
    steps: ClassVar[tuple[Step[Any], ...]] = (train,)

    def __init__(self, hyper: Hyper) -> None:
        self.hyper = hyper

    def init(self, base: Network, fed: Federation) -> State:
        return State(weights_of(base))

    def round(self, state: State, fed: Federation) -> State:
        replies = fed.ask(fed.labelled, train, model=state.model)
        note_losses(fed, replies)
        sites = replies.answered
        model_of = fed.clipped(sites, lambda site: replies[site].model, dict.fromkeys(sites, state.model))
        learned = {name for name, _ in plain_network(fed.plan).named_parameters()}
        updates = torch.stack([_update(model_of(site), state.model, learned) for site in sites])
        factors = matched(updates @ updates.T, self.hyper.c)
        for site, factor in zip(sites, factors.tolist(), strict=True):
            fed.note("weight", factor, site)
        # BatchNorm statistics are no gradients: their mean, as in FedAvg.
        merged = weighted_mean((model_of(site), 1.0) for site in sites)
        move = self.hyper.rate * (factors @ updates)
        for name in sorted(learned):
            part, move = move[: merged[name].numel()], move[merged[name].numel() :]
            before = state.model[name]
            merged[name] = (before.double() + part.view(before.shape)).to(before.dtype)
        return State(merged)

    def models(self, state: State) -> Mapping[str, Weights]:
        return {SHARED: state.model}

    @staticmethod
    def network(plan: Plan) -> nn.Module:
        return plain_network(plan)


def _update(model: Weights, since: Weights, names: set[str]) -> Tensor:
    """`model` minus `since`, as one float64 row of the parameters `names` in order."""
    return torch.cat([(model[name].double() - since[name].double()).flatten() for name in sorted(names)])


FEDOMG = About(
    "fedomg",
    ("generalize",),
    "Nguyen et al., ICLR 2025",
    all_because="the updates of all sites decide together where the model goes",
    aggregation="clipped",
    cost=PLAIN,
)
