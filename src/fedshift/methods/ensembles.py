"""Baselines of COPA's Tables 6 and 7: sites train alone and their models are joined, or sites train one after another.

Guile Wu, Shaogang Gong: Collaborative Optimization and Aggregation for Decentralized Domain Generalization and
Adaptation. ICCV 2021, sec. 4.3.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

from torch import Tensor, nn

from fedshift.federation.federation import Federation
from fedshift.federation.labels import label_loss
from fedshift.federation.plan import Plan
from fedshift.federation.releases import Metric, Release, Weights
from fedshift.federation.site import Labelled
from fedshift.federation.step import Step, step
from fedshift.functional.agreement import equal_shares
from fedshift.functional.averaging import weighted_mean
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
from fedshift.nn.network import Ensemble, Network
from fedshift.rng import Rng


@dataclass(frozen=True)
class Trained(Release):
    """The coordinator needs each site's model, so that a sum over sites, as in secure aggregation, is not enough."""

    model: Weights
    loss: Metric


@step
def train(site: Labelled, model: Weights, epochs: float, rng: Rng) -> Trained:
    """`epochs` passes over the site's data: SGD on cross-entropy."""
    training = site.plan.training
    net = network_with(site.plan, model, site.device).train()
    batches = site.train.batches(training.batch_size, rng, epochs, augmentation(site.plan))
    optimizer = sgd(site, net)
    loss = train_batches(batches, lambda b: label_loss(net(b.x), b.y), optimizer, training.precision)
    return Trained(model=weights_of(net), loss=loss)


# --- Table 7: every site alone, all rounds long -------------------------------------------------------------------


@dataclass(frozen=True)
class Hyper:
    """Nothing beyond the common keys."""


@dataclass(frozen=True)
class StateAlone:
    """Each site's own model. `trained` says which sites have answered at least once."""

    models: Mapping[str, Weights]
    trained: Mapping[str, bool]


def start_alone(base: Network, fed: Federation) -> StateAlone:
    weights = weights_of(base)
    return StateAlone(dict.fromkeys(fed.labelled, weights), dict.fromkeys(fed.labelled, False))


def train_alone(state: StateAlone, fed: Federation, work: Step[Trained] = train) -> StateAlone:
    """One round of every site alone. A site that does not answer keeps its model."""
    each = {site: {"model": model} for site, model in state.models.items()}
    replies = fed.ask(fed.labelled, work, each=each, epochs=fed.plan.training.local_epochs)
    for site, reply in replies:
        fed.note("train_loss", reply.loss, site)
    return StateAlone(
        {**state.models, **{site: reply.model for site, reply in replies}},
        {**state.trained, **dict.fromkeys(replies.answered, True)},
    )


def joined(state: StateAlone) -> dict[str, Tensor]:
    """All models as the weights of an ensemble, in the order of the sites' names. A model that was never trained has
    share 0."""
    sites = sorted(state.models)
    members = {
        f"members.{number}.{key}": value
        for number, site in enumerate(sites)
        for key, value in state.models[site].items()
    }
    return members | {"shares": equal_shares([state.trained[site] for site in sites])}


class IndEnsemble:
    """The prediction is the mean of the logits of all sites' models."""

    hyper_type: ClassVar[type[Hyper]] = Hyper
    state_type: ClassVar[type[StateAlone]] = StateAlone
    steps: ClassVar[tuple[Step[Any], ...]] = (train,)

    def __init__(self, hyper: Hyper) -> None:
        self.hyper = hyper

    def init(self, base: Network, fed: Federation) -> StateAlone:
        return start_alone(base, fed)

    def round(self, state: StateAlone, fed: Federation) -> StateAlone:
        return train_alone(state, fed)

    def models(self, state: StateAlone) -> Mapping[str, Weights]:
        return {SHARED: joined(state)}

    @staticmethod
    def network(plan: Plan) -> nn.Module:
        return Ensemble(plain_network(plan), len(plan.sources), "logits")


class IndParamAvg:
    """The prediction is that of the mean of all sites' parameters: FedAvg without iteration (Table 6)."""

    hyper_type: ClassVar[type[Hyper]] = Hyper
    state_type: ClassVar[type[StateAlone]] = StateAlone
    steps: ClassVar[tuple[Step[Any], ...]] = (train,)

    def __init__(self, hyper: Hyper) -> None:
        self.hyper = hyper

    def init(self, base: Network, fed: Federation) -> StateAlone:
        return start_alone(base, fed)

    def round(self, state: StateAlone, fed: Federation) -> StateAlone:
        return train_alone(state, fed)

    def models(self, state: StateAlone) -> Mapping[str, Weights]:
        nobody = not any(state.trained.values())
        members = [model for site, model in sorted(state.models.items()) if state.trained[site] or nobody]
        return {SHARED: weighted_mean((model, 1.0) for model in members)}

    @staticmethod
    def network(plan: Plan) -> nn.Module:
        return plain_network(plan)


# --- Table 6: one site after the other ----------------------------------------------------------------------------


@dataclass(frozen=True)
class Turns:
    visits: Literal["once", "every-round"] = "once"
    """`once`: the model stays at each site for its share of the rounds and never returns. `every-round`: it visits all
    sites in each round."""


@dataclass(frozen=True)
class StateInTurn:
    model: Weights


class InTurn:
    """One model goes from site to site, in the order of their names."""

    hyper_type: ClassVar[type[Turns]] = Turns
    state_type: ClassVar[type[StateInTurn]] = StateInTurn
    steps: ClassVar[tuple[Step[Any], ...]] = (train,)

    def __init__(self, hyper: Turns) -> None:
        self.hyper = hyper

    def init(self, base: Network, fed: Federation) -> StateInTurn:
        return StateInTurn(weights_of(base))

    def round(self, state: StateInTurn, fed: Federation) -> StateInTurn:
        sites, training = sorted(fed.labelled), fed.plan.training
        epochs = training.local_epochs
        if self.hyper.visits == "once":
            # A round belongs to one site (with fewer rounds than sites, to several). Rounds are longer, so that by the
            # end each site has trained for as many epochs as in the other methods.
            epochs *= min(len(sites), training.rounds)
            first = (fed.round - 1) * len(sites) // training.rounds
            sites = sites[first : max(first + 1, fed.round * len(sites) // training.rounds)]
        model = state.model
        for site in sites:
            # No other site can take its place: if a site does not answer, the run ends here and can be resumed.
            reply = fed.ask((site,), train, model=model, epochs=epochs, everyone=True)[site]
            fed.note("train_loss", reply.loss, site)
            model = reply.model
        return StateInTurn(model)

    def models(self, state: StateInTurn) -> Mapping[str, Weights]:
        return {SHARED: state.model}

    @staticmethod
    def network(plan: Plan) -> nn.Module:
        return plain_network(plan)


IND_ENSEMBLE = About(
    "ind-ensemble", ("generalize",), "baseline: Wu and Gong, ICCV 2021, Table 7", aggregation="own", cost=PLAIN
)
IND_PARAMAVG = About(
    "ind-paramavg", ("generalize",), "baseline: Wu and Gong, ICCV 2021, Table 7", aggregation="own", cost=PLAIN
)
SEQUENTIAL = About(
    "sequential",
    ("generalize",),
    "baseline: Wu and Gong, ICCV 2021, Table 6",
    needs_all=True,
    aggregation="own",
    cost=PLAIN,
)
