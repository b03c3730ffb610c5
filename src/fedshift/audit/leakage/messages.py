"""What an attacker at the coordinator has: a round of the real method, with real sites, and every message of one."""

from __future__ import annotations

import dataclasses
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from fedshift.data.domain import Dataset, Domain, Split
from fedshift.federation import codec
from fedshift.federation.engines import Engine, Failure
from fedshift.federation.federation import Federation
from fedshift.federation.handshake import agree
from fedshift.federation.plan import Plan
from fedshift.federation.policy import Policy
from fedshift.federation.releases import kinds
from fedshift.federation.secure import SecureSums
from fedshift.federation.site import SiteHost, SiteSpec
from fedshift.federation.step import STEPS, Request, Step, answer
from fedshift.functional.inversion import momentum_total
from fedshift.methods import find_method
from fedshift.methods.clients import split_network
from fedshift.methods.copa.parts import converted_network, hyper_of
from fedshift.methods.local import plain_network
from fedshift.rng import Rng
from fedshift.runs.config import RunConfig
from fedshift.runs.planning import base_network, open_federation, prepare, site_specs

HOME_SAMPLES = 128
"""Training samples of the coordinator's own data, where a setting has some."""


@dataclass(frozen=True)
class Message:
    """One answer of the attacked site: the step, the question's payload, and what left. `members` are the samples that
    it was made from; of a secure sum, those of all sites in it. `by_default` says what the site's policy does with it
    if nobody changes that: empty if it leaves, else the code of the refusal."""

    step: Step[Any]
    payload: Mapping[str, Any]
    release: Mapping[str, Any]
    members: Split
    by_default: str
    plan: Plan
    round: int
    sites: int = 1

    def kind_of(self, field: str) -> str:
        return kinds(self.step.release)[field].name

    @property
    def steps(self) -> int:
        """Optimiser steps of an epoch at one site. What a method does beyond that, an attacker here does not use."""
        batch = self.plan.training.batch_size
        epochs = max(1, round(self.plan.training.local_epochs))
        return epochs * max(1, len(self.members) // self.sites // batch)


@dataclass(frozen=True)
class Update:
    """A message of weights as an attacker reads it: a network, and its state dict before and after."""

    net: nn.Module
    before: Mapping[str, Tensor]
    after: Mapping[str, Tensor]

    def loaded(self, weights: Mapping[str, Tensor]) -> nn.Module:
        self.net.load_state_dict(dict(weights))
        return self.net

    def gradient(self, message: Message) -> dict[str, Tensor]:
        """The update, read as the mean gradient of one batch."""
        training = message.plan.training
        total = momentum_total(message.steps, training.momentum)
        return {
            name: (self.before[name] - self.after[name]) / (training.lr_of(name, message.round) * total)
            - training.weight_decay * self.before[name]
            if self.has_learned(name)
            else torch.zeros_like(self.before[name])
            for name, _ in self.net.named_parameters()
        }

    def has_learned(self, name: str) -> bool:
        return not torch.equal(self.before[name], self.after[name])


@dataclass(frozen=True)
class Heard:
    """One round. `replay` has another site with other samples answer the same questions: what an attacker does who
    wants to know how an answer without a certain sample looks."""

    messages: tuple[Message, ...]
    replay: Callable[[Split, int], list[Mapping[str, Any]]]


def listen(config: RunConfig, dataset: Dataset, site: str, members: Split, rest: Mapping[str, Split]) -> Heard:
    """Runs round 1 of the configured method, in which `site` has `members` and the other sites have `rest`."""
    prepared = prepare(config, _with_samples(dataset, {site: members, **rest}))
    plan, implementation = prepared.plan, find_method(prepared.plan.method)
    method = implementation(codec.restore(implementation.hyper_type, dict(plan.hyper)))
    with tempfile.TemporaryDirectory(prefix="fedshift-leakage-") as folder:
        fed = open_federation(prepared, Path(folder))
        everyone = [*(person.name for person in prepared.roles.sites), *([fed.home.name] if fed.home_host else [])]
        agree(fed, everyone, rewind_to=0)
        line = _Line(fed.engine, site)
        fed.engine, sums = line, _Sums()
        fed.secure = sums
        state = method.init(base_network(prepared)[0], fed)
        fed.begin(1)
        method.round(state, fed)
        fed.engine.close()
    spec = next(one for one in site_specs(prepared, Path("unused"))[0] if one.name == site)
    heard = [(asked, data) for asked, data in line.heard if asked.round == 1 and not STEPS[asked.step].scores_only]
    questions = [asked for asked, _ in heard]

    def replay(samples: Split, seed: int, policy: Policy | None = None) -> list[dict[str, Any]]:
        known = _with_samples(prepared.dataset, {site: samples})
        return list(_answers(plan, spec, known, questions, policy))

    answers = [codec.unpack(data) for _, data in heard]
    usual = replay(members, 0, Policy())
    union = _joined([members, *rest.values()]) if plan.secure_aggregation else members
    sites = 1 + len(rest) if plan.secure_aggregation else 1
    messages = []
    for request, own, default in zip(questions, answers, usual, strict=True):
        if own["release"] is None:
            continue
        step, payload = STEPS[request.step], codec.unpack(request.body)
        release = codec.restore(step.release, own["release"])
        fields = {name: getattr(release, name) for name in kinds(step.release)}
        for name in step.release.summed if plan.secure_aggregation else ():
            fields[name] = next((found for found in sums.heard if set(found) == set(payload[name])), {})
        messages.append(Message(step, payload, fields, union, default["code"] or "", plan, 1, sites))
    return Heard(tuple(messages), lambda samples, seed: [one["release"] or {} for one in replay(samples, seed)])


def update_of(message: Message, release: Mapping[str, Any] | None = None) -> Update | None:
    """The network of a message, if weights of one leave."""
    release = message.release if release is None else release
    before: dict[str, Tensor] = {}
    after: dict[str, Tensor] = {}
    for field, prefix in {"model": "", "extractor": "backbone.", "head": "head.", "classifier": "head."}.items():
        old = message.payload.get(field)
        if isinstance(old, Mapping) and old:
            new = release.get(field) or old
            before |= {prefix + key: value for key, value in old.items()}
            after |= {prefix + key: new[key] for key in old}
    if not before or all(torch.equal(before[key], after[key]) for key in before):
        return None
    for net in _networks(message.plan):
        own = net.state_dict()
        if set(own) == set(before) and all(own[key].shape == before[key].shape for key in own):
            return Update(net, before, after)
    return None


def _networks(plan: Plan) -> Iterator[nn.Module]:
    yield find_method(plan.method).network(plan)
    yield plain_network(plan)
    yield split_network(plan)
    if plan.method.startswith("copa"):
        yield converted_network(plan, hyper_of(plan))


def other_samples(dataset: Dataset, site: str, members: Split) -> Split:
    """All labelled images of a domain but these."""
    domain = dataset.load(site)
    every = _joined([part for part in (domain.train, domain.val, domain.test) if part.labels is not None])
    own = {one.tobytes() for one in members.inputs}
    return every.take(np.array([i for i, one in enumerate(every.inputs) if one.tobytes() not in own], dtype=np.int64))


def as_images(split: Split) -> Tensor:
    """`(n, 3, height, width)` in [0, 1]."""
    return torch.from_numpy(np.array(split.inputs)).permute(0, 3, 1, 2).float().contiguous() / 255


def _joined(parts: Sequence[Split]) -> Split:
    labels = [part.labels for part in parts if part.labels is not None]
    return Split(np.concatenate([part.inputs for part in parts]), np.concatenate(labels))


def _with_samples(dataset: Dataset, own: Mapping[str, Split]) -> Dataset:
    def load(name: str) -> Domain:
        domain = dataset.load(name)
        if name in own:
            return dataclasses.replace(domain, train=own[name])
        order = Rng.of(0, "leakage", name).numpy().permutation(len(domain.train))[:HOME_SAMPLES]
        return dataclasses.replace(domain, train=domain.train.take(np.sort(order)))

    return dataclasses.replace(dataset, load=load)


def _answers(
    plan: Plan, spec: SiteSpec, dataset: Dataset, questions: Sequence[Request], policy: Policy | None
) -> Iterator[dict[str, Any]]:
    with tempfile.TemporaryDirectory(prefix="fedshift-leakage-") as folder:
        changed = dataclasses.replace(spec, folder=Path(folder), policy=policy or spec.policy)
        host = SiteHost(changed, dataclasses.replace(plan, secure_aggregation=False), lambda source: dataset)
        for request in questions:
            yield codec.unpack(answer(host, request))


class _Line:
    """An engine, and what one site was asked and answered through it."""

    def __init__(self, engine: Engine, site: str) -> None:
        self._engine, self._site = engine, site
        self.where_to_look = engine.where_to_look
        self.heard: list[tuple[Request, bytes]] = []

    def call(self, requests: Sequence[Request], deadline: float | None) -> Iterator[tuple[str, bytes | Failure]]:
        asked = {request.site: request for request in requests}
        for site, found in self._engine.call(requests, deadline):
            if site == self._site and isinstance(found, bytes):
                self.heard.append((asked[site], found))
            yield site, found

    def close(self) -> None:
        self._engine.close()


class _Sums(SecureSums):
    """Secure sums, and what the coordinator learned by them."""

    def __init__(self) -> None:
        super().__init__()
        self.heard: list[dict[str, Tensor]] = []

    def sum(self, fed: Federation, models: Sequence[tuple[Any, float]]) -> dict[str, Tensor]:
        found = super().sum(fed, models)
        self.heard.append(found)
        return found
