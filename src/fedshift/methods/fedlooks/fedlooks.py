"""FedLooks, fedshift's own method: shapes tell classes and looks tell sites, so whoever has images trains on random
looks of them. One name for the three settings: `source.py` is what sites with labels do, `target.py` what the target
of adapt does."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, ClassVar

from torch import nn

from fedshift.errors import InputError
from fedshift.federation.federation import Federation
from fedshift.federation.plan import Plan
from fedshift.federation.releases import Weights
from fedshift.federation.step import Step
from fedshift.methods.averaging import EVERYWHERE, State, note_losses
from fedshift.methods.base import SHARED, About
from fedshift.methods.cost import MODEL, Formula
from fedshift.methods.fedlooks.source import Hyper, looks_network, source_rounds, train
from fedshift.methods.fedlooks.target import adapt
from fedshift.methods.local import all_finite, require_target, weights_of
from fedshift.nn.network import Network


class FedLooks:
    """FedAvg with the loss of looks. In adapt the target then goes on alone; in multi-adapt a client has statistics of
    its own (`norm=own`) and sends nothing else."""

    hyper_type: ClassVar[type[Hyper]] = Hyper
    state_type: ClassVar[type[State]] = State
    steps: ClassVar[tuple[Step[Any], ...]] = (train,)

    def __init__(self, hyper: Hyper) -> None:
        self.hyper = hyper

    def init(self, base: Network, fed: Federation) -> State:
        if len(fed.plan.model.input_shape) != 3:
            raise InputError("method-needs", "fedlooks changes the look of images; table rows have none: use fedavg")
        if fed.plan.setting == "adapt":
            require_target(fed)
            if fed.plan.model.tiled and source_rounds(fed.plan) < fed.plan.training.rounds:
                raise InputError(
                    "method-needs",
                    "fedlooks labels whole pictures at the target: with tile, set fedlooks.source_rounds=1",
                )
        return State(weights_of(base))

    def round(self, state: State, fed: Federation) -> State:
        first = source_rounds(fed.plan)
        if fed.round > first:
            return self._adapted(state, fed, fed.round - first, fed.plan.training.rounds - first)
        part = fed.taking_part(fed.labelled)
        replies = fed.ask(part.sites, train, model=state.model)
        note_losses(fed, replies)
        model = fed.average(
            lambda: ((trained.model, part.weight(site, trained.samples)) for site, trained in replies),
            since=state.model,
            sites=replies.answered,
        )
        return State(model)

    def _adapted(self, state: State, fed: Federation, number: int, rounds: int) -> State:
        """Round `number` of the target's own `rounds`, which have a schedule of their own."""
        fed.has_averaged = True  # in the rounds before
        rate = self.hyper.target_rate * replace(fed.plan.training, rounds=rounds).lr_at(number)
        found = fed.at_home(adapt, model=state.model, lr=rate)
        fed.note("confident_share", found.sure, fed.home.name)
        if not all_finite(found.model):
            fed.count("fedlooks.adaptation-diverged")
            return state
        fed.note("adaptation_loss", found.loss, fed.home.name)
        return State(found.model)

    def models(self, state: State) -> Mapping[str, Weights]:
        return {SHARED: state.model}

    @staticmethod
    def network(plan: Plan) -> nn.Module:
        return looks_network(plan)


FEDLOOKS = About(
    "fedlooks",
    EVERYWHERE,
    "fedshift",
    # Milder looks, of half of the images: a pre-trained network knows shapes, and heavy looks spoil it in few steps.
    pretrained={
        "lr": 0.002,
        "fedlooks": {"depth": 1, "blended": True, "replaced": 0.5, "smoothing": 0.0},
    },
    masks={"fedlooks": {"depth": 1, "blended": True}},
    best_norm="own",
    draws_sites=True,
    counters={"fedlooks.adaptation-diverged": "Adaptation gave NaN or infinite weights and was undone."},
    time_factor=2.2,
    cost=Formula(flops={"G": 6, "F": 6, "dG": -2}, upload=MODEL, broadcast=MODEL),
)
