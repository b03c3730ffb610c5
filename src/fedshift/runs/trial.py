"""Two rounds of a method on made-up data, in this process, with every operation and every message counted."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from torch import Tensor

from fedshift.data.batches import LabelledBatch, LabelledData, UnlabelledBatch, UnlabelledData
from fedshift.data.domain import Dataset
from fedshift.federation import codec
from fedshift.federation.engines import Failure
from fedshift.federation.federation import Federation
from fedshift.federation.plan import Plan
from fedshift.federation.site import Labelled, Site, SiteHost, SiteSpec, Unlabelled
from fedshift.federation.step import Request, answer
from fedshift.methods import find_method
from fedshift.runs.config import RunConfig
from fedshift.runs.flops import flop_counter
from fedshift.runs.madeup import made_up_dataset
from fedshift.runs.planning import Prepared, base_network, prepare, site_specs

ROUNDS = 2
"""The first may have what happens once (CSAC's acquisition); the second is like all that follow."""

BATCH = 8
"""Samples in a batch unless told otherwise. What grows with the batch, such as distances between its samples, is
counted for this size."""

B = TypeVar("B", LabelledBatch, UnlabelledBatch)


@dataclass(frozen=True)
class Work:
    """Floating-point operations somewhere: `training` while batches for training were worked on, `other` all the rest
    (voting, fitting mixtures). `samples` is how many of its own the batches had."""

    training: int = 0
    samples: int = 0
    other: int = 0

    def __add__(self, more: Work) -> Work:
        return Work(self.training + more.training, self.samples + more.samples, self.other + more.other)

    @property
    def per_sample(self) -> float:
        """Operations that training takes for a sample each time it is in a batch."""
        return self.training / self.samples if self.samples else 0.0


@dataclass(frozen=True)
class Message:
    """The size of what the codec really made: bytes, and how many numbers the tensors of each field hold."""

    bytes: int
    fields: Mapping[str, int]


@dataclass(frozen=True)
class Exchange:
    """One question to a site and its answer."""

    round: int
    site: str
    step: str
    work: Work
    down: Message
    up: Message


@dataclass(frozen=True)
class Trial:
    """What was counted: at sites, exchange by exchange, and at the coordinator by round."""

    plan: Plan
    exchanges: tuple[Exchange, ...]
    home: Mapping[int, Work]

    def of_round(self, round: int) -> tuple[Exchange, ...]:
        return tuple(exchange for exchange in self.exchanges if exchange.round == round)

    @property
    def usual(self) -> tuple[Exchange, ...]:
        """The last round in which sites were asked anything: in some methods they only take part at first."""
        return self.of_round(max((exchange.round for exchange in self.exchanges), default=ROUNDS))

    @property
    def flops_per_sample(self) -> float:
        """Operations that training takes at a site, each time a sample is in a batch."""
        return sum((exchange.work for exchange in self.usual), Work()).per_sample


def flops_per_sample(config: RunConfig, dataset: Dataset) -> float:
    """Of the configured method on data of the shape of `dataset`. A process counts the same thing once: the runs of a
    suite often differ in their seeds alone."""
    parts = (dataset.task, dataset.classes, dataset.domains, dataset.input_shape)
    prepared = _prepared(config, made_up_dataset(*parts, samples=BATCH), BATCH)
    question = repr((prepared.plan, prepared.roles))
    if question not in _COUNTED:
        _COUNTED[question] = _play(prepared).flops_per_sample
    return _COUNTED[question]


_COUNTED: dict[str, float] = {}


def try_out(config: RunConfig, dataset: Dataset, batch_size: int) -> Trial:
    """Plays the configured method with its own steps, keys and roles on `dataset`. No training loop goes over a site's
    data more than once: what is counted is counted for a sample, and papers ask for up to 30 epochs a round."""
    return _play(_prepared(config, dataset, batch_size))


def _prepared(config: RunConfig, dataset: Dataset, batch_size: int) -> Prepared:
    changed = {
        "seed": 0,
        "threads": 1,
        "rounds": ROUNDS,
        "batch_size": batch_size,
        # Noise teaches nothing: at a usual rate some methods would leave the range of numbers.
        "lr": 1e-6,
        "lr_min": 0.0,
        "local_epochs": 1.0,
        "train_per_site": None,
        "client_fraction": 1.0,
        "attack": (),
        "weights": None,
        "freeze_norm": False,
        "policy": {"min_samples": 2},
    }
    return prepare(config.model_copy(update=changed), dataset)


def _play(prepared: Prepared) -> Trial:
    plan, roles, dataset = prepared.plan, prepared.roles, prepared.dataset
    implementation = find_method(plan.method)
    method = implementation(codec.restore(implementation.hyper_type, dict(plan.hyper)))
    counter, at_home = flop_counter(), {}
    with tempfile.TemporaryDirectory(prefix="fedshift-trial-") as folder:
        specs, own = site_specs(prepared, Path(folder))
        engine = _Counting(specs, plan, dataset, counter.get_total_flops)
        home = _WatchedHost(own, plan, dataset, engine.elsewhere) if own else None
        fed = Federation(plan, engine, roles.sources, roles.targets, home)
        state = method.init(base_network(prepared)[0], fed)
        with counter:
            for round in range(1, ROUNDS + 1):
                fed.begin(round)
                before = engine.elsewhere()
                state = method.round(state, fed)
                seen = home.seen() if home else Work()
                at_home[round] = Work(seen.training, seen.samples, engine.elsewhere() - before - seen.training)
    return Trial(plan, tuple(engine.exchanges), at_home)


class _WatchedHost(SiteHost):
    """A site whose training data tell what was done while a batch was out. `clock` counts operations."""

    def __init__(self, spec: SiteSpec, plan: Plan, dataset: Dataset, clock: Callable[[], int]) -> None:
        super().__init__(spec, plan, lambda source: dataset)
        self._clock = clock
        self._training = self._samples = 0
        self._out = self._since = 0

    def view(self, kind: type[Site], round: int) -> Site:
        view = super().view(kind, round)
        if isinstance(view, Labelled | Unlabelled) and not isinstance(view.train, _WatchedData):
            view.train = _WatchedData(view.train, self)  # type: ignore[assignment]
        return view

    def watch(self, batches: Iterator[B]) -> Iterator[B]:
        """Counts what is done while any batch is out: until the next is asked for, or nobody wants another."""
        for batch in batches:
            given = self._clock()
            self._since = self._since if self._out else given
            self._out += 1
            try:
                yield batch
            finally:
                self._out -= 1
                now = self._clock()
                self._training += 0 if self._out else now - self._since
                # A batch that was only looked at is not trained on.
                self._samples += len(batch.index) if now > given else 0

    def seen(self) -> Work:
        """What training took since this was last asked."""
        seen = Work(self._training, self._samples)
        self._training = self._samples = 0
        return seen


class _WatchedData:
    """A site's training data: shuffled batches are watched and end after one pass. All else is as it was."""

    def __init__(self, data: LabelledData | UnlabelledData, host: _WatchedHost) -> None:
        self._data: Any = data
        self._host = host

    def __len__(self) -> int:
        return len(self._data)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._data, name)

    def batches(self, size: int, rng: Any, epochs: float = 1, augment: Any = None) -> Iterator[Any]:
        return self._host.watch(self._data.batches(size, rng, min(epochs, 1), augment))

    def stretch(self, begin: float, end: float, *how: Any) -> Any:
        found = self._data.stretch(begin, min(end, begin + 1), *how)
        return found if isinstance(found, Tensor) else self._host.watch(found)

    def along(self, order: Tensor, size: int) -> Iterator[UnlabelledBatch]:
        return self._host.watch(self._data.along(order, size))


class _Counting:
    """An engine that asks one site after another and keeps the size of everything. A failure is raised as it is."""

    where_to_look = ""

    def __init__(self, specs: Sequence[SiteSpec], plan: Plan, dataset: Dataset, clock: Callable[[], int]) -> None:
        self._hosts = {spec.name: _WatchedHost(spec, plan, dataset, clock) for spec in specs}
        self._clock = clock
        self._at_sites = 0
        self.exchanges: list[Exchange] = []

    def call(self, requests: Sequence[Request], deadline: float | None) -> Iterator[tuple[str, bytes | Failure]]:
        for request in requests:
            host, before = self._hosts[request.site], self._clock()
            reply = answer(host, request, debug=True)
            total, seen = self._clock() - before, host.seen()
            self._at_sites += total
            self.exchanges.append(
                Exchange(
                    round=request.round,
                    site=request.site,
                    step=request.step,
                    work=Work(seen.training, seen.samples, total - seen.training),
                    down=Message(len(request.body), _sizes(codec.unpack(request.body))),
                    up=Message(len(reply), _sizes(codec.unpack(reply)["release"])),
                )
            )
            yield request.site, reply

    def elsewhere(self) -> int:
        """Operations so far that no site did."""
        return self._clock() - self._at_sites

    def close(self) -> None:
        self._hosts.clear()


def _sizes(fields: Mapping[str, Any]) -> dict[str, int]:
    return {name: size for name, value in fields.items() if (size := _numbers_in(value))}


def _numbers_in(tree: Any) -> int:
    if isinstance(tree, Tensor):
        return tree.numel()
    items = tree.values() if isinstance(tree, dict) else tree if isinstance(tree, list) else ()
    return sum(_numbers_in(item) for item in items)
