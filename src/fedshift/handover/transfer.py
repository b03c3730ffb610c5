"""A network fitted to inputs without labels, and what can be told without labels of what that brought.

First the site's own statistics for the layers that normalise, then source-free adaptation as in SHOT (J. Liang, D. Hu,
J. Feng: Do We Really Need to Access the Source Data? ICML 2020): features are fitted to the classifier, which is
frozen.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn

from fedshift.data.domain import DataSource, Domain, Split
from fedshift.federation.plan import Plan
from fedshift.federation.site import SiteSpec, Unlabelled
from fedshift.methods import shot
from fedshift.nn.network import Ensemble, Network
from fedshift.nn.normalisation import Frozen, remembering, tracking_layers
from fedshift.rng import Rng

_BATCH = 256
AS_IT_WAS, STATISTICS, ADAPTED = "as it was", "own statistics", "adapted"


@dataclass(frozen=True)
class State:
    """The model at the new site: `AS_IT_WAS`, with its own `STATISTICS`, or `ADAPTED`.

    `confidence` is the mean probability of the predicted class. `changed` is the share of inputs of which it says
    something else than the model did before. `agreement` is the share of inputs on which two models say the same that
    were made from one half of the inputs each: 1 where no input was used."""

    name: str
    net: nn.Module
    confidence: float
    changed: float
    agreement: float

    @property
    def expected(self) -> float:
        """An estimate of the accuracy. Adapting makes a model sure whether it is right or not, so that its confidence
        says nothing any more; models made from different inputs rarely agree on the same mistake."""
        return self.agreement if self.name == ADAPTED else self.confidence


def networks_of(net: nn.Module) -> list[Network]:
    """The networks that can be adapted: itself, or the members of an ensemble. None if its prediction is not that of a
    classifier on features."""
    parts = list(net.members) if isinstance(net, Ensemble) else [net]
    return [part for part in parts if isinstance(part, Network)] if all(isinstance(p, Network) for p in parts) else []


def can_measure(net: nn.Module) -> bool:
    """Whether it has layers whose statistics can be the site's own; those of frozen layers stay."""
    return any(not isinstance(layer, Frozen) for layer in tracking_layers(net).values())


class Adaptation:
    """The inputs of one site for one plan. `folder` is where nothing is written: steps of methods want to know one."""

    def __init__(self, plan: Plan, hyper: shot.Hyper, inputs: Split, temperature: float = 1.0) -> None:
        self.plan, self.hyper, self.inputs = plan, hyper, inputs.without_labels()
        self.temperature = temperature

    def states(self, net: nn.Module, *, transfer: bool) -> list[State]:
        """The model as it was, then after each step that is possible."""
        halves = torch.randperm(len(self.inputs), generator=Rng.of(self.plan.seed, "adapt-halves").torch())
        parts = [part.sort().values for part in halves.tensor_split(2)]
        before = self._probabilities(net)
        found = [self._state(AS_IT_WAS, net, before, before, 1.0)]
        nets, made = [net, net], net
        sites = [self._site(self.inputs.take(part.numpy())) for part in parts]
        if can_measure(net):
            made = self._measured(net, self._site(self.inputs))
            nets = [self._measured(net, site) for site in sites]
            found.append(self._state(STATISTICS, made, before, self._probabilities(made), self._agreement(nets)))
        if transfer:
            rng = Rng.of(self.plan.seed, "adapt")
            adapted = self._transferred(made, self._site(self.inputs), rng)
            twins = [self._transferred(nets[k], sites[k], rng.child("half", k)) for k in range(2)]
            if adapted is not None and all(twin is not None for twin in twins):
                agreement = self._agreement([twin for twin in twins if twin is not None])
                found.append(self._state(ADAPTED, adapted, before, self._probabilities(adapted), agreement))
        return found

    def _state(self, name: str, net: nn.Module, before: Tensor, after: Tensor, agreement: float) -> State:
        changed = float((before.argmax(1) != after.argmax(1)).double().mean())
        return State(name, net, float(after.amax(1).mean()), changed, agreement)

    def _site(self, split: Split) -> Unlabelled:
        nothing = split.take(np.arange(0))
        spec = SiteSpec("new", "unlabelled", DataSource(), ("new",), Path("nowhere"))
        return Unlabelled(spec, self.plan, Domain("new", split, nothing, nothing), self.plan.model.classes, 1)

    @torch.inference_mode()
    def _probabilities(self, net: nn.Module) -> Tensor:
        net.eval()
        batches = self._site(self.inputs).train.in_order(_BATCH)
        return torch.cat([(net(batch.x) / self.temperature).softmax(1) for batch in batches])

    def _agreement(self, nets: Sequence[nn.Module]) -> float:
        first, second = (self._probabilities(net).argmax(1) for net in nets)
        return float((first == second).double().mean())

    def _measured(self, net: nn.Module, home: Unlabelled) -> nn.Module:
        made = copy.deepcopy(net).eval()
        with torch.no_grad(), remembering(made):
            for batch in home.train.evenly(self.plan.training.batch_size):
                made(batch.x)
        return made.eval()

    def _transferred(self, net: nn.Module, home: Unlabelled, rng: Rng) -> nn.Module | None:
        """Every network of an ensemble is adapted alone, as SHOT does with several sources. None if one diverged."""
        made = copy.deepcopy(net)
        for number, part in enumerate(networks_of(made)):
            for round in range(1, self.plan.training.rounds + 1):
                lr = self.plan.training.lr_at(round)
                loss = shot.transfer(part, home, self.hyper, lr, rng.child(number, round))
                if loss is None or not math.isfinite(loss):
                    return None
        return made.eval()
