"""Steps: the functions of a method that run where the data is, and how a site runs one when asked."""

from __future__ import annotations

import contextlib
import inspect
import time
import traceback
import typing
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import torch

from fedshift.errors import FedshiftError, SiteError
from fedshift.federation import codec
from fedshift.federation.ledger import Ledger
from fedshift.federation.releases import Release, kinds
from fedshift.federation.site import Evaluated, Site, SiteHost, SiteSpec
from fedshift.machine import has_accelerator
from fedshift.rng import Rng

R = TypeVar("R", bound=Release)


@dataclass(frozen=True)
class Step(Generic[R]):
    """A function `(site, *, payload..., rng) -> Release`, with what it needs and returns read from its signature."""

    name: str
    run: Callable[..., R]
    view: type[Site]
    release: type[R]
    payload: Mapping[str, Any]

    @property
    def scores_only(self) -> bool:
        return self.view is Evaluated


STEPS: dict[str, Step[Any]] = {}
"""Every step of the installed methods, by name. A site runs these and nothing else."""


def step(function: Callable[..., R]) -> Step[R]:
    """Declares a step. The first parameter's type chooses the site's view; `rng` is derived at the site."""
    hints = typing.get_type_hints(function, include_extras=True)
    site, *payload = inspect.signature(function).parameters
    release = hints["return"]
    kinds(release)  # Fails here, at import, when a field does not say what it is.
    # Randomness and ledgers depend on these names: those of fedshift's own steps never change.
    module = function.__module__
    name = f"{module.rsplit('.', 1)[-1] if module.startswith('fedshift.') else module}.{function.__name__}"
    declared = {key: hints[key] for key in payload if key != "rng"}
    found = Step(name, function, hints[site], release, declared)
    known = STEPS.get(name)
    # A notebook's cell is run again and a module reloaded: the newer function counts.
    if known is not None and known.run.__module__ != module:
        raise TypeError(f"two steps are called {name}")
    STEPS[name] = found
    return found


@dataclass(frozen=True)
class Request:
    """One question to one site. `body` is the packed payload, shared by all sites that are asked the same."""

    site: str
    step: str
    round: int
    nonce: str
    body: bytes

    @property
    def head(self) -> dict[str, str | int]:
        """All but the body, for JSON."""
        return {"site": self.site, "step": self.step, "round": self.round, "nonce": self.nonce}


def answer(host: SiteHost, request: Request, *, debug: bool = False) -> bytes:
    """Runs a step at its site and packs what may leave."""
    return pack_answer(host.spec, request, lambda: _run(host, request), debug=debug)


def pack_answer(
    spec: SiteSpec, request: Request, work: Callable[[], tuple[Release, int]], *, debug: bool = False
) -> bytes:
    """What `work` releases, recorded in the site's ledger and packed. An exception's text stays in the site's own log:
    only its code crosses. With `debug` (one process, one user) it is raised instead, naming step, site and round."""
    started = time.perf_counter()
    envelope: dict[str, Any] = request.head | {"site": spec.name}
    try:
        release, clipped = work()
        envelope |= {"code": None, "release": release, "clipped": clipped}
        data = codec.pack(envelope | {"seconds": _duration(started)})
        Ledger(spec.folder).record(request.round, request.step, release)
        return data
    except Exception as error:
        if debug:
            error.add_note(f"in step {request.step} at site {spec.name!r}, round {request.round}")
            raise
        text = error.message if isinstance(error, FedshiftError) else traceback.format_exc()
        Ledger(spec.folder).log(f"round {request.round}, step {request.step}: {text}")
        code = error.code if isinstance(error, FedshiftError) else "site-failed"
        return codec.pack(envelope | {"code": code, "release": None, "seconds": _duration(started)})


def _duration(started: float) -> str:
    """Seconds since `started`, always as many characters: the bytes of a run must not depend on its speed."""
    return f"{time.perf_counter() - started:012.3f}"


def _run(host: SiteHost, request: Request) -> tuple[Release, int]:
    known = STEPS.get(request.step)
    if known is None:
        raise SiteError("step-unknown", f"this site has no step {request.step!r}")
    payload = codec.unpack(request.body)
    if not isinstance(payload, dict) or set(payload) != set(known.payload):
        raise FedshiftError("message-invalid", f"{request.step} takes {sorted(known.payload)}")
    arguments = {key: codec.restore(hint, payload[key], key) for key, hint in known.payload.items()}
    site = host.view(known.view, request.round)
    if not known.scores_only:
        host.spec.policy.check_samples(len(host.domain.train))
    rng = Rng.of(host.plan.seed, request.round, host.spec.name, request.step)
    if "rng" in inspect.signature(known.run).parameters:
        arguments["rng"] = rng
    with isolated_randomness(rng), fixed_threads(host.plan.threads):
        release = known.run(site, **arguments)
    return host.spec.policy.apply(release, arguments)


@contextlib.contextmanager
def isolated_randomness(rng: Rng) -> Iterator[None]:
    """Dropout can only draw from torch's global generator: inside, it is seeded by `rng`; outside, untouched."""
    with torch.random.fork_rng(devices=[]):
        seed = rng.child("global").seed()
        # `manual_seed` of torch notes for every kind of accelerator who asked: a millisecond, for nothing on a CPU.
        (torch.manual_seed if has_accelerator() else torch.default_generator.manual_seed)(seed)
        yield


@contextlib.contextmanager
def fixed_threads(count: int) -> Iterator[None]:
    """Sums depend on how many threads share them: a step uses the plan's number wherever it runs."""
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)
