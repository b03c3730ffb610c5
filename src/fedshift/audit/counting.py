"""Counts the operations and messages of a method: two of its rounds are run on random data in this process."""

from __future__ import annotations

import math
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from fedshift.data import open_dataset
from fedshift.data.batches import LabelledBatch, LabelledData, UnlabelledBatch, UnlabelledData
from fedshift.data.domain import Dataset, Domain, Split, Task
from fedshift.federation import codec
from fedshift.federation.engines import Failure
from fedshift.federation.federation import Federation
from fedshift.federation.plan import Plan
from fedshift.federation.site import Labelled, Site, SiteHost, SiteSpec, Unlabelled
from fedshift.federation.step import Request, answer
from fedshift.methods import find_method
from fedshift.rng import Rng
from fedshift.runs.config import RunConfig
from fedshift.runs.planning import Prepared, base_network, data_source, prepare, site_specs


def flop_counter() -> FlopCounterMode:
    """Counts matrix products and convolutions that are executed inside it, two operations per multiplication. Norms,
    activations, losses and optimizer steps are not counted: they are a few operations per value."""
    return FlopCounterMode(display=False, custom_mapping={torch.ops.aten.convolution_backward: _convolution_backward})


def _convolution_backward(
    grad_out: Sequence[int],
    x: Sequence[int],
    weight: Sequence[int],
    bias: Any,
    stride: Any,
    padding: Any,
    dilation: Any,
    transposed: bool,
    output_padding: Any,
    groups: int,
    wanted: Sequence[bool],
    **results: Any,
) -> int:
    """Operations from shapes. Each gradient, of the input and of the weight, multiplies as often as the forward pass.

    torch's own count ignores `groups` in the weight's gradient: 96 times too much for 96 depthwise channels.
    """
    positions = x if transposed else grad_out
    forward = 2 * math.prod(positions) * math.prod(weight[1:])
    return forward * (bool(wanted[0]) + bool(wanted[1]))


ROUNDS = 2
"""The first round may have a step that happens once (CSAC's acquisition); the second is like all that follow."""

BATCH = 8
"""Default samples per batch. Work that grows with the batch, such as distances between samples, is counted for this
size."""


@dataclass(frozen=True)
class Work:
    """Floating-point operations at a site or at the coordinator: `training` while training batches were in use,
    `other` all the rest (voting, fitting mixtures). `samples` is the number of samples in these batches."""

    training: int = 0
    samples: int = 0
    other: int = 0

    def __add__(self, more: Work) -> Work:
        return Work(self.training + more.training, self.samples + more.samples, self.other + more.other)

    @property
    def per_sample(self) -> float:
        """Training operations each time a sample is in a batch."""
        return self.training / self.samples if self.samples else 0.0


@dataclass(frozen=True)
class MessageSize:
    """The size of an encoded message: its bytes, and the numbers in the tensors of each field."""

    bytes: int
    fields: Mapping[str, int]


@dataclass(frozen=True)
class Exchange:
    """One request to a site and its reply."""

    round: int
    site: str
    step: str
    work: Work
    down: MessageSize
    up: MessageSize


@dataclass(frozen=True)
class CountedRounds:
    """What was counted: at sites per exchange, at the coordinator (`home`) per round."""

    plan: Plan
    exchanges: tuple[Exchange, ...]
    home: Mapping[int, Work]

    def of_round(self, round: int) -> tuple[Exchange, ...]:
        return tuple(exchange for exchange in self.exchanges if exchange.round == round)

    @property
    def usual(self) -> tuple[Exchange, ...]:
        """The exchanges of the last round in which sites were asked: in some methods they only take part at first."""
        return self.of_round(max((exchange.round for exchange in self.exchanges), default=ROUNDS))

    @property
    def flops_per_sample(self) -> float:
        """Training operations at a site each time a sample is in a batch."""
        return sum((exchange.work for exchange in self.usual), Work()).per_sample


_COUNTED: dict[str, float] = {}


def flops_per_sample(config: RunConfig) -> float:
    """Operations per training sample at a site, for the configured method and data of the same shape. Results are
    cached: the runs of a suite often differ only in their seeds."""
    dataset = open_dataset(data_source(config))
    parts = (dataset.task, dataset.classes, dataset.domains, dataset.input_shape)
    prepared = _prepared(config, random_dataset(*parts, samples=BATCH), BATCH)
    key = repr((prepared.plan, prepared.roles))
    if key not in _COUNTED:
        _COUNTED[key] = _run_rounds(prepared).flops_per_sample
    return _COUNTED[key]


def count_rounds(config: RunConfig, dataset: Dataset, batch_size: int) -> CountedRounds:
    """Runs the configured method with its own steps, keys and roles on `dataset`. Each training loop makes only one
    pass over a site's data: the count is per sample, and papers ask for up to 30 epochs per round."""
    return _run_rounds(_prepared(config, dataset, batch_size))


def _prepared(config: RunConfig, dataset: Dataset, batch_size: int) -> Prepared:
    changed = {
        "seed": 0,
        "threads": 1,
        "rounds": ROUNDS,
        "batch_size": batch_size,
        # On random data, some methods overflow at a usual learning rate.
        "lr": 1e-6,
        "lr_min": 0.0,
        "local_epochs": 1.0,
        "train_per_site": None,
        "client_fraction": 1.0,
        "attack": (),
        "weights": None,
        "freeze_norm": None,
        "norm": "auto" if config.norm == "frozen" else config.norm,  # frozen needs weights
        "policy": {"min_samples": 2},
    }
    return prepare(config.model_copy(update=changed), dataset)


def _run_rounds(prepared: Prepared) -> CountedRounds:
    plan, roles, dataset = prepared.plan, prepared.roles, prepared.dataset
    implementation = find_method(plan.method)
    method = implementation(codec.restore(implementation.hyper_type, dict(plan.hyper)))
    counter, at_home = flop_counter(), {}
    with tempfile.TemporaryDirectory(prefix="fedshift-count-") as folder:
        specs, own = site_specs(prepared, Path(folder))
        engine = _CountingEngine(specs, plan, dataset, counter.get_total_flops)
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
    return CountedRounds(plan, tuple(engine.exchanges), at_home)


def random_dataset(
    task: Task, classes: Sequence[str], domains: Sequence[str], input_shape: Sequence[int], samples: int
) -> Dataset:
    """Labelled noise: per domain `samples` training samples, and two each for validation and test."""
    shape = tuple(input_shape)

    def split(domain: str, name: str, count: int) -> Split:
        numbers = Rng.of(0, "made-up", domain, name).numpy()
        labels = np.arange(count, dtype=np.int64) % len(classes)
        if len(shape) == 1:
            return Split(numbers.normal(size=(count, *shape)).astype(np.float32), labels)
        images = numbers.integers(0, 256, (count, *shape[1:], shape[0]), dtype=np.uint8)
        if task == "segmentation":
            masks = numbers.integers(0, len(classes), (count, *shape[1:]), dtype=np.uint8)
            return Split(images, masks)
        return Split(images, labels)

    def load(domain: str) -> Domain:
        return Domain(domain, split(domain, "train", samples), split(domain, "val", 2), split(domain, "test", 2))

    columns = tuple(f"column{number}" for number in range(shape[0])) if len(shape) == 1 else ()
    return Dataset("made-up", task, tuple(classes), tuple(domains), shape, load, columns=columns)


B = TypeVar("B", LabelledBatch, UnlabelledBatch)


class _WatchedHost(SiteHost):
    """A site that counts the operations done while a training batch is in use. `clock` returns operations so far."""

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
        """Counts operations while a batch is in use: until the next is asked for, or the loop ends."""
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
                # A batch without operations was not trained on.
                self._samples += len(batch.index) if now > given else 0

    def seen(self) -> Work:
        """The training work since the last call."""
        seen = Work(self._training, self._samples)
        self._training = self._samples = 0
        return seen


class _WatchedData:
    """A site's training data. Shuffled batches are watched and end after one pass; the rest is unchanged."""

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


class _CountingEngine:
    """An engine that asks one site after another and keeps the sizes of all messages. Exceptions are raised as they
    are."""

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
                    down=MessageSize(len(request.body), _sizes(codec.unpack(request.body))),
                    up=MessageSize(len(reply), _sizes(codec.unpack(reply)["release"])),
                )
            )
            yield request.site, reply

    def elsewhere(self) -> int:
        """Operations so far that were not done at sites."""
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
