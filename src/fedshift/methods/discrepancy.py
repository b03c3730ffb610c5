"""Maximum classifier discrepancy (MCD): at clients with a copy of the source data, or with all data at the home.

K. Saito, K. Watanabe, Y. Ushiku, T. Harada: Maximum Classifier Discrepancy for Unsupervised Domain Adaptation. CVPR
2018. Equation numbers and the federated and multi-target forms: C.-H. Yao et al.: Federated Multi-Target Domain
Adaptation. WACV 2022, sec. 3.1, 4 and 5.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor, nn

from fedshift.data.batches import LabelledBatch, UnlabelledBatch, UnlabelledData
from fedshift.errors import InputError
from fedshift.federation.federation import Federation
from fedshift.federation.labels import label_loss
from fedshift.federation.plan import Plan
from fedshift.federation.releases import Weights
from fedshift.federation.site import Site, WithSource, WithTargets
from fedshift.federation.step import Step, step
from fedshift.functional.losses import discrepancy
from fedshift.methods.averaging import State
from fedshift.methods.base import SHARED, About
from fedshift.methods.clients import (
    SOURCE_COPIES,
    Trained,
    average_of_clients,
    endless_batches,
    mean_of,
    paired_batches,
    paired_network,
    paired_weights,
)
from fedshift.methods.cost import Formula
from fedshift.methods.local import augmentation, sgd, train_batches, weights_of, with_weights
from fedshift.nn.archs import build_network
from fedshift.nn.backbones.segmentation import with_light_head
from fedshift.nn.network import Network
from fedshift.rng import Rng

Form = Literal["one-to-one", "one-to-combined", "one-to-multiple"]
Turn = tuple[Literal["source", "classifiers", "extractor"], tuple[LabelledBatch, Sequence[UnlabelledBatch]]]


@dataclass(frozen=True)
class FedHyper:
    repeats: int = 4
    """Updates of the extractor per batch (n of Saito et al.)."""

    def __post_init__(self) -> None:
        if self.repeats < 1:
            raise ValueError(f"repeats must be 1 or more, not {self.repeats}")


@dataclass(frozen=True)
class CentHyper(FedHyper):
    form: Form = "one-to-multiple"
    """A model for each client, one model for all clients' data as one domain, or one extractor with two classifiers for
    each client."""


def train_mcd(
    net: Network,
    pairs: Sequence[nn.ModuleList],
    batches: Iterable[tuple[LabelledBatch, Sequence[UnlabelledBatch]]],
    site: Site,
    repeats: int,
) -> tuple[float, float]:
    """Trains the extractor of `net` and `pairs` of classifiers, each pair on its own client's batch, in three kinds of
    turn per batch. Returns the mean loss on the source and the classifiers' mean discrepancy after their turns."""
    heads = nn.ModuleList(pairs)
    losses: dict[str, list[float]] = {"source": [], "classifiers": [], "extractor": []}

    def on_source(features: Tensor, batch: LabelledBatch) -> Tensor:
        size = batch.x.shape[-2:]
        terms = [label_loss(net.scores(features, size, head), batch.y) for pair in pairs for head in pair]
        return torch.stack(terms).sum() / len(pairs)

    def apart(features: Sequence[Tensor]) -> Tensor:
        terms = [discrepancy(pair[0](f), pair[1](f)).mean() for pair, f in zip(pairs, features, strict=True)]
        return torch.stack(terms).mean()

    def loss_of(turn: Turn) -> Tensor:
        kind, (source, targets) = turn
        heads.requires_grad_(kind != "extractor")
        with torch.set_grad_enabled(kind != "classifiers"):
            seen = [net.features(target.x) for target in targets] if kind != "source" else []
            known = net.features(source.x) if kind != "extractor" else torch.empty(0)
        if kind == "source":  # step A
            loss = on_source(known, source)
        elif kind == "classifiers":  # step B
            loss = on_source(known, source) - apart(seen)  # Eq. (1)
        else:  # step C
            loss = apart(seen)  # Eq. (2)
        losses[kind].append(float(loss.detach()))
        return loss

    optimizer = sgd(site, net.backbone)
    # A separate group, because a fused step needs gradients of all or none of a group's parameters.
    optimizer.add_param_group({"params": list(heads.parameters())})
    train_batches(_turns(batches, repeats), loss_of, optimizer, site.plan.training.precision)
    heads.requires_grad_(True)
    return mean_of(losses["source"]), mean_of(losses["extractor"][::repeats])


def _turns(batches: Iterable[tuple[LabelledBatch, Sequence[UnlabelledBatch]]], repeats: int) -> Iterator[Turn]:
    for batch in batches:
        yield "source", batch
        yield "classifiers", batch
        for _ in range(repeats):
            yield "extractor", batch


def _loaded(site: Site, model: Weights) -> tuple[Network, nn.ModuleList]:
    """The network, and its two classifiers."""
    net = paired_network(site.plan)
    with_weights(net, model, site.device).train()
    return net, net.head.get_submodule("members")  # type: ignore[return-value]


def first_model(base: Network, fed: Federation) -> dict[str, Tensor]:
    """Two classifiers on the extractor of `base`: its own, and one with other initial weights."""
    net, spec = with_light_head(copy.deepcopy(base)), fed.plan.model
    other = build_network(spec.arch, spec.input_shape, len(spec.classes), fed.rng("second classifier").seed())
    return paired_weights(weights_of(net.backbone), weights_of(net.head), weights_of(with_light_head(other).head))


# --- Fed-MCD ------------------------------------------------------------------------------------------------------


@step
def train(site: WithSource, model: Weights, rng: Rng) -> Trained:
    """MCD between the source copy and the client's data."""
    net, pair = _loaded(site, model)
    batches = ((source, [target]) for source, target in paired_batches(site, rng))
    loss, gap = train_mcd(net, [pair], batches, site, site.hyper(FedHyper).repeats)
    return Trained(model=weights_of(net), samples=site.train.used, loss=loss, gap=gap)


class FedMcd:
    """FedAvg over clients that train by MCD."""

    hyper_type: ClassVar[type[FedHyper]] = FedHyper
    state_type: ClassVar[type[State]] = State
    steps: ClassVar[tuple[Step[Any], ...]] = (train,)

    def __init__(self, hyper: FedHyper) -> None:
        self.hyper = hyper

    def init(self, base: Network, fed: Federation) -> State:
        return State(first_model(base, fed))

    def round(self, state: State, fed: Federation) -> State:
        return State(average_of_clients(fed, train, state.model))

    def models(self, state: State) -> Mapping[str, Weights]:
        return {SHARED: state.model}

    @staticmethod
    def network(plan: Plan) -> nn.Module:
        return paired_network(plan)


# --- Cent-MCD -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class CentState:
    """Client that has data -> its model, or SHARED -> one model for all."""

    models: Mapping[str, Weights]


def train_at_home(
    home: WithTargets, models: Mapping[str, Weights], data: Mapping[str, UnlabelledData], rng: Rng
) -> tuple[Mapping[str, Weights], float, float]:
    """MCD of one extractor, the first model's, with each model's pair of classifiers on its own `data`."""
    training = home.plan.training
    loaded = {name: _loaded(home, models[name]) for name in sorted(data)}
    net = next(iter(loaded.values()))[0]
    streams = [endless_batches(data[name], training.batch_size, rng.child("target", name)) for name in loaded]
    labelled = home.train.batches(
        training.batch_size, rng.child("source"), training.local_epochs, augmentation(home.plan)
    )
    batches = ((source, [next(stream) for stream in streams]) for source in labelled)
    loss, gap = train_mcd(net, [pair for _, pair in loaded.values()], batches, home, home.hyper(CentHyper).repeats)
    extractor = weights_of(net.backbone)
    trained = {
        name: paired_weights(extractor, weights_of(first), weights_of(second))
        for name, (_, (first, second)) in loaded.items()
    }
    return trained, loss, gap


class CentMcd:
    """MCD at the home, which has the clients' data."""

    hyper_type: ClassVar[type[CentHyper]] = CentHyper
    state_type: ClassVar[type[CentState]] = CentState
    steps: ClassVar[tuple[Step[Any], ...]] = ()

    def __init__(self, hyper: CentHyper) -> None:
        self.hyper = hyper

    def init(self, base: Network, fed: Federation) -> CentState:
        # A client without data would keep its first weights: it gets no model.
        names = (SHARED,) if self.hyper.form == "one-to-combined" else tuple(_clients_data(_home(fed)))
        return CentState(dict.fromkeys(names, first_model(base, fed)))

    def round(self, state: CentState, fed: Federation) -> CentState:
        models = dict(state.models)
        for data in self._jobs(fed):
            trained, loss, gap = fed.at_home(train_at_home, models=models, data=data)
            models |= trained
            for name in data:
                fed.note("train_loss", loss, name)
                fed.note("gap", gap, name)
        return CentState(models)

    def _jobs(self, fed: Federation) -> list[dict[str, UnlabelledData]]:
        """For each extractor that is trained: client -> its data."""
        home = _home(fed)
        targets = _clients_data(home)
        for name in sorted(home.targets.keys() - targets.keys()):
            fed.count(f"skipped.{name}.data-empty")
        if not targets:
            raise InputError("data-empty", "no client has training data")
        if self.hyper.form == "one-to-combined":
            return [{SHARED: home.combined}]
        return [targets] if self.hyper.form == "one-to-multiple" else [{name: data} for name, data in targets.items()]

    def models(self, state: CentState) -> Mapping[str, Weights]:
        return state.models

    @staticmethod
    def network(plan: Plan) -> nn.Module:
        return paired_network(plan)


def _home(fed: Federation) -> WithTargets:
    home = fed.home
    assert isinstance(home, WithTargets)
    return home


def _clients_data(home: WithTargets) -> dict[str, UnlabelledData]:
    """Client -> its data, for clients that have any."""
    return {name: data for name, data in home.targets.items() if len(data)}


FED_MCD = About(
    "fed-mcd",
    ("multi-adapt",),
    "Saito et al., CVPR 2018, federated",
    SOURCE_COPIES,
    draws_sites=True,
    data="source-copies",
    best_norm="own",
    time_factor=17.0,
    cost=Formula(
        # Step A trains everything on the source sample; B the classifiers on both; C, four times, G on the target.
        flops={"G": 3 + 2 + 12, "F": 6 + 12 + 16, "dG": -5, "dF": -4},
        upload={"G": 1, "F": 2},
        broadcast={"G": 1, "F": 2},
        published={"G": 4, "F": 8},
        note="For a target and a source sample together, and fed-mcd.repeats at 4. The paper counts one pass of each;"
        " MCD's three steps need more.",
    ),
)
CENT_MCD = About(
    "cent-mcd",
    ("multi-adapt",),
    "Saito et al., CVPR 2018",
    "all clients' unlabelled data at the home: a bound, not to deploy",
    data="target-copies",
    aggregation="own",
    time_factor=14.0,
)
