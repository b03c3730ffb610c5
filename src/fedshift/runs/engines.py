"""How a run reaches its sites, by the name in the key `engine`: on this machine, or on others over NVFlare."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from fedshift.data.domain import Dataset, DataSource
from fedshift.errors import InputError, nearest
from fedshift.federation.engines import Engine
from fedshift.federation.site import SiteSpec
from fedshift.federation.survey import agreed_dataset, elsewhere, look, survey_sites
from fedshift.methods import find_about
from fedshift.registry import Registry
from fedshift.runs import planning
from fedshift.runs.config import RunConfig
from fedshift.runs.planning import Prepared
from fedshift.runs.roles import Participant, Roles, assign_roles

if TYPE_CHECKING:
    from fedshift.federation.engines.nvflare.link import Link


class Connection(Protocol):
    """An open line to the sites of a run. `dataset` is what sites on other machines agreed on; the coordinator can load
    none of it. It is None where the coordinator opens the data itself."""

    @property
    def dataset(self) -> Dataset | None: ...

    def engine(self, specs: Sequence[SiteSpec], prepared: Prepared, debug: bool) -> Engine: ...


@dataclass(frozen=True)
class EngineKind:
    """`connect(config, run, say)` opens the line to the sites: `run` is the name that they know the run by, and `say`
    is told what is being waited for. With `is_local` the sites are on this machine: their data is looked over before a
    run starts, and `--debug` can show what happens at a site."""

    connect: Callable[[RunConfig, str, Callable[[str], None]], AbstractContextManager[Connection]]
    is_local: bool = False


class _OnThisMachine:
    dataset = None

    def engine(self, specs: Sequence[SiteSpec], prepared: Prepared, debug: bool) -> Engine:
        return planning.local_engine(specs, prepared, debug)


@contextmanager
def connect_inprocess(config: RunConfig, run: str, say: Callable[[str], None]) -> Iterator[Connection]:
    """Simulated sites: in this process, or in worker processes beside it."""
    yield _OnThisMachine()


@dataclass(frozen=True)
class _OverNvflare:
    link: Link
    run: str
    dataset: Dataset

    def engine(self, specs: Sequence[SiteSpec], prepared: Prepared, debug: bool) -> Engine:
        from fedshift.federation.engines.nvflare.engine import Nvflare

        return Nvflare(self.link, self.run, specs, prepared.plan)


@contextmanager
def connect_nvflare(config: RunConfig, run: str, say: Callable[[str], None]) -> Iterator[Connection]:
    """Sites on other machines: submits the run's job and asks every site what it has."""
    from fedshift.federation.engines.nvflare.engine import Nvflare
    from fedshift.federation.engines.nvflare.kits import Coordinator
    from fedshift.federation.engines.nvflare.link import Link
    from fedshift.federation.engines.nvflare.status import Status

    _check(config)
    assert config.federation is not None
    coordinator = Coordinator.read(config.federation)
    named = (config.home, config.target, *(config.sources or ()), *(config.targets or ()))
    domains = tuple(sorted({*coordinator.sites, *(name for name in named if name)}))
    roles = _expected_roles(config, domains)
    if config.policy and roles.home is None:
        # Where there is a home it is the home's; everybody else's is not the coordinator's to set.
        raise InputError("config-value", "policy: on other machines every site has a policy of its own; leave it out")
    if config.label_column is not None and roles.home is None:
        raise InputError(
            "config-value", "label_column: on other machines every site's own file names its label column; leave it out"
        )
    for person in roles.sites:
        if person.name not in coordinator.sites:
            raise InputError(
                "unknown-name",
                f"federation {coordinator.project!r} has no site {person.name!r}."
                f" {nearest(person.name, coordinator.sites)}",
            )
    say(f"connecting to {', '.join(person.name for person in roles.sites)} of {coordinator.project}")
    link = Link(coordinator, [person.name for person in roles.sites])
    try:
        engine = Nvflare(link, run, [_survey_spec(person, config) for person in roles.sites], None)
        found = survey_sites(engine, [person.name for person in roles.sites], quorum=config.quorum)
        status = Status(coordinator.status_file)
        for site, facts in found.items():
            status.note(site, "answered", version=facts.version)
        status.save(run, 0)
        if roles.home:
            found[roles.home.name] = look(_survey_spec(roles.home, config, at_home=True))
        agreed = agreed_dataset(coordinator.project, found, time.time())
        if isinstance(config.tile, int):
            agreed = replace(agreed, tile=config.tile, scaled_to=config.image_size)
        yield _OverNvflare(link, run, replace(agreed, domains=domains))
    finally:
        link.close()


def _check(config: RunConfig) -> None:
    if config.federation is None:
        raise InputError(
            "config-value",
            "engine nvflare needs the coordinator's folder, as `fedshift deploy init` wrote it: --set federation=DIR",
        )
    if config.tile == "auto":
        raise InputError("config-value", "tile: sites on other machines must all use the same: give pixels, tile=128")
    if config.attack:
        raise InputError("config-value", "attack: bad sites are played on one machine only; leave it out")


def _expected_roles(config: RunConfig, domains: tuple[str, ...]) -> Roles:
    """Who plays which part, before anybody has said what data there is."""
    task = find_about(config.method).tasks[0]
    return assign_roles(config, Dataset("federation", task, (), domains, (), elsewhere))


def _survey_spec(person: Participant, config: RunConfig, *, at_home: bool = False) -> SiteSpec:
    source = DataSource(image_size=config.image_size, label_column=config.label_column, tile=config.tile)
    if at_home:
        if config.dataset is None and config.data_dir is None:
            raise InputError(
                "data-missing", f"{person.name!r} is the coordinator's own data: say where it is, --data-dir DIR"
            )
        source = replace(source, name=config.dataset, data_dir=config.data_dir)
    return SiteSpec(person.name, "held-out", source, (*person.domains, *person.copies), Path())


def _as_kind(name: str, value: Any) -> EngineKind:
    if not isinstance(value, EngineKind):
        raise InputError("config-value", f"engine {name!r}: {value!r} is not an EngineKind")
    return value


ENGINES: Registry[EngineKind] = Registry(
    "engine",
    "engines",
    {"inprocess": EngineKind(connect_inprocess, is_local=True), "nvflare": EngineKind(connect_nvflare)},
    _as_kind,
)
