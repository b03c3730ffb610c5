"""`fedshift audit leakage`: every attack on every message of a method, at several sizes of the site."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from fedshift.audit.leakage.features import by_features, by_mixture, by_spectrum
from fedshift.audit.leakage.inversion import by_gradient, by_statistics, closed_form, require_images, told_labels
from fedshift.audit.leakage.membership import told_members
from fedshift.audit.leakage.messages import Heard, Message, as_images, listen, other_samples, update_of
from fedshift.audit.leakage.scores import VERDICTS, Finding, Verdict
from fedshift.audit.privacy import propose
from fedshift.data import open_dataset
from fedshift.data.domain import Dataset, Split
from fedshift.errors import FedshiftError, InputError, nearest
from fedshift.functional.inversion import Search
from fedshift.methods import METHODS, find_about, find_method
from fedshift.methods.clients import split_network
from fedshift.rng import Rng
from fedshift.runs.config import RunConfig, make_config
from fedshift.runs.planning import data_source

SIZES = (1, 8, 32, 128)
DP_ROUNDS = 40
"""Rounds that a budget of `dp` is to last for: the noise is that of one of them."""
_FEW = 8
"""Images up to which the search takes all its steps; with more it takes fewer."""
SMALL: Mapping[str, Mapping[str, Any]] = {
    "copa": {"copa": {"norm": "bn", "norm_where": "all"}},
    "copa-uda": {"copa-uda": {"norm": "bn", "norm_where": "all"}},
    "csac": {"csac": {"acquisition_epochs": 2.0}},
    "dualadapt": {"dualadapt": {"pretrain_epochs": 2.0}},
    "fed-oracle": {"fed-oracle": {"pretrain_epochs": 2.0}},
}
"""Shorter trainings before the message than papers have: the study is of what leaves, not of how good it is.
COPA has the network's own norms: its hybrid layers have no second derivatives, which a search for images takes."""


@dataclass(frozen=True)
class Case:
    """A site of one size: what was found, what was not tried and why, and whether a site with the policy as it is by
    default lets anything out at all."""

    size: int
    by_default: str
    findings: tuple[Finding, ...]
    left_out: tuple[str, ...] = ()

    @property
    def worst(self) -> Finding | None:
        return min(self.findings, key=lambda one: VERDICTS.index(one.verdict), default=None)

    @property
    def verdict(self) -> Verdict:
        return self.worst.verdict if self.worst else "nothing found"


@dataclass(frozen=True)
class Leakage:
    method: str
    setting: str
    dataset: str
    site: str
    arch: str
    protection: str
    cases: tuple[Case, ...]
    seconds: float

    def plain(self) -> dict[str, Any]:
        return {
            **{name: getattr(self, name) for name in ("method", "setting", "dataset", "site", "arch", "protection")},
            "cases": [
                {
                    "size": case.size,
                    "by_default": case.by_default,
                    "verdict": case.verdict,
                    "findings": [finding.plain() for finding in case.findings],
                    "left_out": list(case.left_out),
                }
                for case in self.cases
            ],
            "seconds": round(self.seconds, 1),
        }


def attackable() -> tuple[str, ...]:
    """Methods whose messages differ: of those with the same steps and setting one stands for all. Bounds that move the
    data themselves are left out: there is nothing to attack."""
    found: dict[tuple[str, ...], str] = {}
    for name, entry in METHODS.items():
        steps = tuple(step.name for step in entry.implementation.steps)
        if steps and not entry.about.is_bound:
            found.setdefault(steps, name)
    return tuple(found.values())


def same_messages(method: str) -> tuple[str, ...]:
    """The other methods whose sites run the same steps."""
    steps = [step.name for step in find_method(method).steps]
    return tuple(
        name
        for name, entry in METHODS.items()
        if name != method and steps == [step.name for step in entry.implementation.steps] and not entry.about.is_bound
    )


def leakage(
    method: str,
    *,
    sizes: Sequence[int] = SIZES,
    site: str | None = None,
    steps: int = 300,
    shadows: int = 6,
    dp: float | None = None,
    secure: bool = False,
    minutes: float = 10.0,
    seed: int = 0,
    progress: Callable[[str, int, int], None] = lambda what, done, total: None,
    **keys: Any,
) -> Leakage:
    """Attacks the messages of round 1. `dp` is an epsilon, with the noise that a run of `DP_ROUNDS` rounds has then;
    `secure`: only the sum over sites is seen. After `minutes` nothing more is begun."""
    if min(steps, shadows + 1, *sizes) < 1 or not minutes > 0:
        raise InputError("config-value", "sizes, steps and minutes of the leakage study must be above 0")
    began = time.monotonic()
    about = find_about(method)
    fixed = {"rounds": 1, "seed": seed, "workers": 0, "method": about.name}
    given = {"arch": "digits-csac", **SMALL.get(about.name, {}), **keys, **fixed}
    dataset = open_dataset(data_source(make_config(given)))
    require_images(dataset.input_shape)
    setting, roles = _roles(about.settings[0], dataset, site)
    site = roles.pop("site")
    cases = []

    def is_late() -> bool:
        return time.monotonic() - began > 60 * minutes

    for number, size in enumerate(sizes, start=1):
        policy = {"min_samples": 1, "min_scored": 1, **(keys.get("policy") or {}), **_noise(about.name, dp)}
        config = make_config({**given, **roles, "policy": policy, "secure_aggregation": secure})
        late = Case(size, "", (), ("out of time",))
        cases.append(late if is_late() else _case(config, dataset, site, size, Search(steps=steps), shadows, is_late))
        progress(f"{about.name}, {size} samples", number, len(sizes))
    told = [*([f"epsilon {dp:g}"] if dp else []), *(["secure sums"] if secure else [])]
    protection = ", ".join(told) or "none"
    arch, seconds = str(given["arch"]), time.monotonic() - began
    return Leakage(about.name, setting, dataset.name, site, arch, protection, tuple(cases), seconds)


def _roles(setting: str, dataset: Dataset, site: str | None) -> tuple[str, dict[str, Any]]:
    site = site or dataset.domains[0]
    if site not in dataset.domains:
        known = nearest(site, dataset.domains)
        raise InputError("unknown-name", f"data set {dataset.name!r} has no domain {site!r}. {known}")
    others = [name for name in dataset.domains if name != site]
    if not others:
        raise InputError("method-needs", "the leakage study takes two or more domains")
    if setting == "multi-adapt":
        return setting, {"site": site, "setting": setting, "home": others[0]}
    return setting, {"site": site, "setting": setting, "target": others[0]}


def _noise(method: str, epsilon: float | None) -> dict[str, Any]:
    """The clipping and noise of level `site`, which every method with a budget has; they are not counted here."""
    settings = propose(method, epsilon, DP_ROUNDS).settings if epsilon is not None else {}
    return {key: value for key, value in settings.items() if key in ("clip_norm", "noise")}


def _case(
    config: RunConfig, dataset: Dataset, site: str, size: int, search: Search, shadows: int, is_late: Callable[[], bool]
) -> Case:
    train = dataset.load(site).train
    order = Rng.of(config.seed, "leakage", site).numpy().permutation(len(train))
    if train.labels is None or len(train) < 2 * size:
        return Case(size, "", (), (f"{site} has {len(train)} training samples, and {2 * size} are needed",))
    members = train.take(order[:size])
    elsewhere = {
        name: dataset.load(name).train.take(np.arange(size))
        for name in dataset.domains
        if name not in (site, config.target, config.home)
    }
    try:
        heard = listen(config, dataset, site, members, elsewhere)
    except FedshiftError as error:
        return Case(size, "", (), (f"no round: {error.message}",))
    others = other_samples(dataset, site, heard.messages[0].members if heard.messages else members)
    share = 2.0 if size == 1 else _FEW / max(_FEW, size)
    fitting = dataclasses.replace(search, steps=max(min(40, search.steps), round(search.steps * share)))
    findings: list[Finding] = []
    left_out: list[str] = []
    for place, message in enumerate(heard.messages):
        for attack in _attacks(message, place, heard, others, fitting, shadows):
            if is_late():
                left_out.append("out of time")
                break
            try:
                findings.extend(attack())
            except RuntimeError as error:  # torch has no class of its own for it.
                if not {"differentiation", "derivative", "differentiable"} & set(str(error).replace(".", " ").split()):
                    raise
                left_out.append("gradient inversion: a layer of this network has no second derivatives")
    refusals = {message.by_default for message in heard.messages}
    return Case(size, next(iter(refusals - {""}), "") if "" not in refusals else "", tuple(findings), tuple(left_out))


def _attacks(
    message: Message, place: int, heard: Heard, others: Split, search: Search, shadows: int
) -> Iterator[Callable[[], Sequence[Finding]]]:
    """All that fit the fields of a message."""
    unknown = as_images(others)
    plain = split_network(message.plan)
    for field in message.release:
        match message.kind_of(field):
            case "features":
                yield partial(by_features, message, field, plain, unknown, search)
            case "mixture":
                yield partial(by_mixture, message, field, plain, unknown, search)
            case "spectra":
                radius = next(iter(message.release[field].values())).shape[-1] // 2
                yield partial(by_spectrum, message, field, unknown, radius)
    update = update_of(message)
    if update is None:
        return
    yield lambda: [finding for finding in [told_labels(update, message)] if finding]
    yield lambda: closed_form(update, message, unknown, search)
    yield lambda: by_gradient(update, message, unknown, search)
    statistics = next((message.release[f] for f in message.release if message.kind_of(f) == "statistics"), None)
    yield lambda: by_statistics(update, statistics or None, message, unknown, search)
    yield lambda: told_members(update, message, place, heard, others, shadows)
