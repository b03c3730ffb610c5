"""Who plays which part: from a configuration and a data set to the sites of a run."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from fedshift.data.domain import Dataset
from fedshift.errors import InputError, nearest
from fedshift.federation.plan import Setting
from fedshift.federation.site import Role
from fedshift.methods import find_about
from fedshift.methods.base import About
from fedshift.runs.config import RunConfig


@dataclass(frozen=True)
class Participant:
    """A site to be: its name, what may be done there, the domains it holds, and those it has copies of."""

    name: str
    role: Role
    domains: tuple[str, ...]
    copies: tuple[str, ...] = ()


@dataclass(frozen=True)
class Roles:
    """`sites` take part through the engine, `home` sits at the coordinator. `validation` names those whose held-back
    labels choose a round, `tested` the domains that results are reported for."""

    setting: Setting
    sources: tuple[str, ...]
    targets: tuple[str, ...]
    home: Participant | None
    sites: tuple[Participant, ...]
    validation: tuple[str, ...]
    tested: tuple[str, ...]

    @property
    def everyone(self) -> tuple[Participant, ...]:
        return (*self.sites, *([self.home] if self.home else []))

    @property
    def source_domains(self) -> tuple[str, ...]:
        """The domains that labelled training data comes from."""
        return tuple(sorted(name for p in self.everyone if p.role == "labelled" for name in p.domains))


def assign_roles(config: RunConfig, dataset: Dataset) -> Roles:
    about = find_about(config.method)
    setting = _setting(config, about)
    known = set(dataset.domains)
    for name in [*(config.sources or ()), *(config.targets or ()), config.target, config.home]:
        if name is not None and name not in known:
            raise InputError(
                "unknown-name", f"data set {dataset.name!r} has no domain {name!r}. {nearest(name, dataset.domains)}"
            )
    if dataset.task not in about.tasks:
        raise InputError("method-needs", f"{about.name} does not do {dataset.task}")
    if setting == "multi-adapt":
        return _one_home_many_clients(config, dataset, about)
    return _many_sources_one_target(config, dataset, about, setting)


def _setting(config: RunConfig, about: About) -> Setting:
    if config.setting is not None and config.setting not in about.settings:
        raise InputError(
            "config-roles", f"{about.name} is a method for {' or '.join(about.settings)}, not for {config.setting}"
        )
    implied = config.setting or ("multi-adapt" if config.home else about.settings[0])
    if implied not in about.settings:
        raise InputError("config-roles", f"{about.name} has no home: leave --home out and name a --target")
    return implied


def _many_sources_one_target(config: RunConfig, dataset: Dataset, about: About, setting: Setting) -> Roles:
    if config.home or config.targets:
        raise InputError("config-roles", f"home and targets belong to multi-adapt; {setting} takes one target")
    target = config.target
    sources = config.sources or tuple(name for name in dataset.domains if name != target)
    if target in sources:
        raise InputError("config-roles", f"{target!r} is the target and a source: take it out of one of them")
    if not sources:
        raise InputError("config-roles", "there is no source domain left to train on")
    if target is None and (setting == "adapt" or about.data == "target-labels"):
        raise InputError("config-roles", f"{about.name} needs a --target out of {', '.join(dataset.domains)}")
    tested = (target,) if target else ()
    held_out = tuple(Participant(name, "held-out", (name,)) for name in tested)
    if about.data == "target-labels":
        people = tuple(Participant(name, "labelled", (name,)) for name in tested)
        return Roles(setting, tested, (), None, people, tested, tested)
    if about.data == "pooled":
        pool = Participant("pooled", "labelled", tuple(sorted(sources)))
        return Roles(setting, ("pooled",), (), None, (pool, *held_out), ("pooled",), tested)
    people = tuple(Participant(name, "labelled", (name,)) for name in sorted(sources))
    names = tuple(person.name for person in people)
    if setting == "adapt" and target:
        return Roles(setting, names, (), Participant(target, "unlabelled", (target,)), people, names, tested)
    return Roles(setting, names, (), None, (*people, *held_out), names, tested)


def _one_home_many_clients(config: RunConfig, dataset: Dataset, about: About) -> Roles:
    if config.target or config.sources:
        raise InputError("config-roles", "multi-adapt takes --home and --targets, not --target or --sources")
    if config.home is None:
        raise InputError("config-roles", f"multi-adapt needs a --home out of {', '.join(dataset.domains)}")
    clients = tuple(sorted(config.targets or [name for name in dataset.domains if name != config.home]))
    if config.home in clients:
        raise InputError("config-roles", f"{config.home!r} is the home and a client: take it out of one of them")
    if not clients:
        raise InputError("config-roles", "there is no client domain left")
    if about.data == "target-labels":
        return Roles("multi-adapt", clients, (), None, _people(clients, "labelled"), clients, clients)
    moved = clients if about.data == "target-copies" else ()
    home = Participant(config.home, "labelled", (config.home,), moved)
    people = _people(clients, "unlabelled", (home.name,) if about.data == "source-copies" else ())
    return Roles("multi-adapt", (), clients, home, people, (home.name,), clients)


def _people(names: Sequence[str], role: Role, copies: tuple[str, ...] = ()) -> tuple[Participant, ...]:
    return tuple(Participant(name, role, (name,), copies) for name in names)
