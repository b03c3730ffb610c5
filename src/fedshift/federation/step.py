"""Steps: the functions of a method that run where the data is, and how a site runs one when asked."""

from __future__ import annotations

import contextlib
import functools
import inspect
import json
import time
import traceback
import typing
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Generic, TypeVar

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook

from fedshift.errors import FedshiftError, SiteError
from fedshift.federation import codec
from fedshift.federation.asked import KeptAnswers, UsedSamples, require_same_plan
from fedshift.federation.budget import Guard, Public
from fedshift.federation.compression import Received, coded_release, received
from fedshift.federation.engines.workers import question_head
from fedshift.federation.forgery import forged
from fedshift.federation.labels import learning_by
from fedshift.federation.ledger import Ledger, fields_left
from fedshift.federation.releases import Release, kinds
from fedshift.federation.site import Evaluated, Site, SiteHost, SiteSpec
from fedshift.files import locked
from fedshift.machine import has_accelerator
from fedshift.rng import Rng

R = TypeVar("R", bound=Release)


@dataclass(frozen=True)
class Step(Generic[R]):
    """A function `(site, *, payload..., rng) -> Release`, with what it needs and returns read from its signature.

    In a round a site answers it once: another payload would be another look at the same samples. A method whose
    protocol asks for more says which arguments number its questions (`numbered_by`); then it is once for each of their
    values. `by_sample` says that it trains by methods/private.py where the site keeps a budget for single samples, and
    that all it releases comes from there."""

    name: str
    run: Callable[..., R]
    view: type[Site]
    release: type[R]
    payload: Mapping[str, Any]
    numbered_by: tuple[str, ...] = ()
    by_sample: bool = False

    @property
    def scores_only(self) -> bool:
        return self.view is Evaluated

    @functools.cached_property
    def takes_rng(self) -> bool:
        return "rng" in inspect.signature(self.run).parameters

    def number(self, payload: Mapping[str, Any]) -> str:
        """What may be asked once in a round."""
        return codec.sha256(json.dumps([self.name, *(payload[key] for key in self.numbered_by)]).encode())[:16]


STEPS: dict[str, Step[Any]] = {}
"""Every step of the installed methods, by name. A site runs these and nothing else."""


@typing.overload
def step(function: Callable[..., R]) -> Step[R]: ...


@typing.overload
def step(*, numbered_by: tuple[str, ...] = (), by_sample: bool = False) -> Callable[[Callable[..., R]], Step[R]]: ...


def step(
    function: Callable[..., R] | None = None, *, numbered_by: tuple[str, ...] = (), by_sample: bool = False
) -> Any:
    """Declares a step. The first parameter's type chooses the site's view; `rng` is derived at the site. `numbered_by`
    (names of plain arguments) and `by_sample` are as in `Step`."""
    if function is None:
        return lambda named: _declare(named, numbered_by, by_sample)
    return _declare(function, numbered_by, by_sample)


def _declare(function: Callable[..., R], numbered_by: tuple[str, ...], by_sample: bool) -> Step[R]:
    hints = typing.get_type_hints(function, include_extras=True)
    site, *payload = inspect.signature(function).parameters
    release = hints["return"]
    kinds(release)  # Fails here, at import, when a field does not say what it is.
    # Randomness and ledgers depend on these names: those of fedshift's own steps never change.
    module = function.__module__
    name = f"{module.rsplit('.', 1)[-1] if module.startswith('fedshift.') else module}.{function.__name__}"
    declared = {key: hints[key] for key in payload if key != "rng"}
    if any(declared.get(key) not in (int, str) for key in numbered_by):
        raise TypeError(f"{name}: numbered_by names arguments that are int or str, not {numbered_by}")
    found = Step(name, function, hints[site], release, declared, numbered_by, by_sample)
    known = STEPS.get(name)
    # A notebook's cell is run again and a module reloaded: the newer function counts.
    if known is not None and known.run.__module__ != module:
        raise TypeError(f"two steps are called {name}")
    STEPS[name] = found
    return found


@dataclass(frozen=True, slots=True)
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


@dataclass(frozen=True)
class Outcome:
    """What a step releases, under the site's policy. `coded` are the fields that leave in fewer bytes, as they are
    sent. `seconds` is the time it took when it was computed. `epsilon` is what the site has spent of its budget of
    privacy by then."""

    release: Release
    clipped: int = 0
    seconds: str | None = None
    coded: Mapping[str, Any] = field(default_factory=dict)
    epsilon: float | None = None

    @property
    def fields(self) -> dict[str, Any]:
        """The release as it is sent."""
        return {name: self.coded.get(name, getattr(self.release, name)) for name in kinds(type(self.release))}


def answer(host: SiteHost, request: Request, *, debug: bool = False) -> bytes:
    """Runs a step at its site and packs what may leave."""
    run = _run_once if host.spec.is_remote else lambda host, request: _run(host, request, *_read(host, request))
    return pack_answer(host.spec, request, lambda: run(host, request), debug=debug)


_UNREADABLE = {"step": "", "round": 0, "nonce": ""}
"""Stands for the head of a question that could not be read: nothing of it is repeated."""


def pack_answer(spec: SiteSpec, request: Request, work: Callable[[], Outcome], *, debug: bool = False) -> bytes:
    """What `work` releases, recorded in the site's ledger and packed. An exception's text stays in the site's own log:
    only its code crosses. With `debug` (one process, one user) it is raised instead, naming step, site and round."""
    # A coordinator elsewhere may begin several jobs of one run at a time: in different processes, a question would be
    # answered twice before either process sees the other's answer, and lines of the ledger would be mixed up.
    with locked(spec.folder / "lock") if spec.is_remote else contextlib.nullcontext():
        return _pack_answer(spec, request, work, debug=debug)


def _pack_answer(spec: SiteSpec, request: Request, work: Callable[[], Outcome], *, debug: bool) -> bytes:
    started = time.perf_counter()
    ledger = Ledger(spec.folder)
    head: dict[str, Any] = {"site": spec.name, **_UNREADABLE}
    outcome: Outcome | None = None
    code: str | None = None
    try:
        wrong = _wrong_with(request, spec)
        if wrong is None:
            head = question_head(request.head)
        asked = ledger.asked(head["step"], head["round"], head["nonce"], request.body)
        if wrong is not None:
            raise FedshiftError("message-invalid", wrong)
        spec.policy.check_questions(asked.questions, asked.starts)
        outcome = work()
        # Packed here, so that what cannot be packed is the step's failure.
        answered = {"code": None, "release": outcome.fields, "clipped": outcome.clipped}
        seconds = outcome.seconds or _duration(started, spec)
        data = codec.pack(head | answered | {"seconds": seconds})
    except Exception as error:
        if debug:
            error.add_note(f"in step {head['step']} at site {spec.name!r}, round {head['round']}")
            raise
        text = error.message if isinstance(error, FedshiftError) else traceback.format_exc()
        ledger.log(f"round {head['round']}, step {head['step']}: {text}")
        code = error.code if isinstance(error, FedshiftError) else "site-failed"
        outcome, seconds = None, _duration(started, spec)
        data = codec.pack(head | {"code": code, "release": None, "seconds": seconds})
    left = () if outcome is None else fields_left(outcome.release, outcome.coded)
    clipped, epsilon = (outcome.clipped, outcome.epsilon) if outcome else (0, None)
    ledger.answered(head["step"], head["round"], left, code, seconds, clipped, data, epsilon)
    return data


def _wrong_with(request: Request, spec: SiteSpec) -> str | None:
    """Why a question is not answered, whatever it asks."""
    try:
        head = question_head(request.head)
    except ValueError as error:
        return str(error)
    if head["site"] != spec.name:
        return "the question is for another site"
    return None if type(request.body) is bytes else "the question has no body"


def _duration(started: float, spec: SiteSpec) -> str:
    """Seconds since `started`, always as many characters: the bytes of a run must not depend on its speed. A site with
    a budget of privacy does not tell."""
    return f"{0.0 if spec.policy.promise else time.perf_counter() - started:012.3f}"


def _run_once(host: SiteHost, request: Request) -> Outcome:
    """The outcome of a question that may have been asked before."""
    kept = KeptAnswers(host.spec.folder / "answers")
    known, payload, asked = _read(host, request)
    require_same_plan(host)
    if "rewind_to" in known.payload:
        outcome = _run(host, request, known, payload, asked)
        kept.rewind(payload["rewind_to"])  # Once the step has accepted it.
        return outcome
    if request.round < kept.round:
        raise SiteError(
            "site-policy",
            f"asked for round {request.round} after round {kept.round}: only the handshake of a resumed run goes back",
        )
    question = _question(host, request)
    number = known.number(payload)
    before = kept.load(request.round, number, question)
    if before is not None:
        release = codec.restore(known.release, before["release"])
        return Outcome(release, before["clipped"], before["seconds"], before.get("coded", {}))
    started = time.perf_counter()
    outcome = _run(host, request, known, payload, asked)
    outcome = replace(outcome, seconds=_duration(started, host.spec))
    told = {"release": outcome.release, "clipped": outcome.clipped, "seconds": outcome.seconds}
    told |= {"coded": outcome.coded} if outcome.coded else {}
    kept.save(request.round, number, question, told)
    return outcome


def _question(host: SiteHost, request: Request) -> str:
    """The same for the same step, round and payload under the same plan."""
    return codec.sha256(f"{host.agreement} {request.step} {request.round} ".encode() + request.body)


def _read(host: SiteHost, request: Request) -> tuple[Step[Any], dict[str, Any], Received]:
    """The step that is asked for, its arguments in the types that it declares, and which of them came coded."""
    host.spec.policy.check_plan(host.plan)
    known = STEPS.get(request.step)
    if known is None or (host.steps is not None and known.name not in host.steps):
        raise SiteError("step-unknown", f"this site has no step {request.step!r} for {host.plan.method}")
    if request.round > host.plan.training.rounds:
        raise FedshiftError("message-invalid", f"round {request.round} of {host.plan.training.rounds}")
    payload = _unpacked(request.body)
    if not isinstance(payload, dict) or set(payload) != set(known.payload):
        raise FedshiftError("message-invalid", f"{request.step} takes {sorted(known.payload)}")
    payload, asked = received(payload, host.store)
    return known, {key: codec.restore(hint, payload[key], key) for key, hint in known.payload.items()}, asked


_SMALL = 1024 * 1024
_last: tuple[bytes, Any] = (b"", None)


def _unpacked(body: bytes) -> Any:
    """`codec.unpack`. Simulated sites are mostly asked the same one after the other: to copy a small payload takes a
    fraction of the time that checking and parsing it does. Nobody else ever holds the tensors that are kept."""
    global _last
    if len(body) > _SMALL:
        return codec.unpack(body)
    if body != _last[0] or not body:
        _last = (body, codec.unpack(body))
    return _copied(_last[1])


def _copied(tree: Any) -> Any:
    """A decoded tree of which nothing is shared."""
    if isinstance(tree, dict):
        return {key: _copied(value) for key, value in tree.items()}
    if isinstance(tree, list):
        return [_copied(value) for value in tree]
    return tree.clone() if isinstance(tree, torch.Tensor) else tree


def _run(host: SiteHost, request: Request, known: Step[Any], payload: Mapping[str, Any], asked: Received) -> Outcome:
    arguments = dict(payload)
    policy = host.spec.policy
    site = host.view(known.view, request.round)
    if not known.scores_only:
        policy.check_samples(len(host.domain.train))
    guard = _guard(host, request, known)
    site.private = guard.record if guard else None
    rng = Rng.of(host.plan.seed, request.round, host.spec.name, request.step)
    if known.takes_rng:
        arguments["rng"] = rng
    with (
        isolated_randomness(rng),
        fixed_threads(host.plan.threads),
        learning_by(host.plan.training.loss),
        counted_steps(host.spec.is_remote) as steps,
    ):
        release = known.run(site, **arguments)
    policy.check_used(site.seen(), steps[0], type(release), scores=known.scores_only)
    release, clipped = policy.apply(_with_used_counts(release, site.used()), payload, host.spec.read_secret)
    epsilon = None
    if guard is not None:
        public = Public(len(host.domain.train), site.seen())
        release, epsilon = guard.protect(release, payload, public, is_score=known.scores_only)
    if host.spec.is_remote and guard is None and not known.scores_only:
        used = UsedSamples(host.spec.key_file.with_name("used-samples"), policy.min_samples)
        for name, samples in site.sets_used():
            used.add(host.spec.domains, name, host.as_there(name, samples))
    if not known.scores_only:
        release = forged(release, payload, host.spec.attacks, rng)
    if host.plan.secure_aggregation and not known.scores_only:
        release = _kept_back(host, request, known, payload, release, site)
    # What a policy has made shorter or noisy leaves as it is: coded, it might be longer again.
    is_protected = policy.clip_norm is not None or policy.noise > 0 or guard is not None
    coded = {} if is_protected else coded_release(release, asked, host.store, request.round)
    asked.keep(host.store, request.round)
    return Outcome(release, clipped, coded=coded, epsilon=epsilon)


SUMMABLE = frozenset({"count", "tally", "metric", "masked", "facts"})
"""Kinds that a step may release under secure aggregation beside what it declares as summed."""


def _kept_back(
    host: SiteHost, request: Request, known: Step[Any], payload: Mapping[str, Any], release: Release, site: Site
) -> Release:
    """The release without what is only summed, which stays here until a sum is asked for."""
    found = kinds(known.release)
    alone = [name for name, kind in found.items() if kind.name not in SUMMABLE and name not in known.release.summed]
    if alone:
        raise SiteError("site-policy", f"secure_aggregation: {known.name} would let {', '.join(alone)} leave by itself")
    count = next((getattr(release, name) for name, kind in found.items() if kind.name == "count"), 1)
    for name in known.release.summed:
        model = getattr(release, name)
        site.vault.hold(f"{known.name}/{name}", request.round, model, payload.get(name) or {}, count)
    return replace(release, **{name: {} for name in known.release.summed})


def _guard(host: SiteHost, request: Request, known: Step[Any]) -> Guard | None:
    """What keeps an answer within the site's budget of privacy, if it has one."""
    policy, spec = host.spec.policy, host.spec
    if policy.promise is None:
        return None
    if policy.promise.level == "record" and not (known.scores_only or known.by_sample):
        raise SiteError(
            "site-policy", f"step {known.name} does not train by DP-SGD, which policy.record_epsilon asks for"
        )
    return Guard(policy, spec.key_file, spec.folder, _question(host, request), host.data_digest)


def _with_used_counts(release: Release, used: int) -> Release:
    """The release, in which no count of samples is above how many were used."""
    counted = [field for field, kind in kinds(type(release)).items() if kind.name == "count"]
    too_many = {field: used for field in counted if getattr(release, field) > used}
    return replace(release, **too_many) if too_many else release


MOST_FORGOTTEN = 0.1
"""Of what was learned, by each optimiser step at a site on another machine."""


@contextlib.contextmanager
def counted_steps(is_remote: bool = False) -> Iterator[list[int]]:
    """A list whose only number is how many steps optimisers have taken inside."""
    count = [0]

    def add(optimizer: torch.optim.Optimizer, *_: Any) -> None:
        count[0] += 1
        # Where the rate times the weight decay is 1, weights are made of the last batch alone; a momentum of 1 or more
        # makes them of the first. Rates and momentum are a method's own too: only here are all of them known.
        if is_remote and any(_forgets(group) for group in optimizer.param_groups):
            raise SiteError(
                "site-policy", "rate, momentum and weight decay are such that few of the samples make the weights"
            )

    handle = register_optimizer_step_post_hook(add)
    try:
        yield count
    finally:
        handle.remove()


def _forgets(group: Mapping[str, Any]) -> bool:
    forgotten = group["lr"] * group.get("weight_decay", 0.0)
    return not (forgotten <= MOST_FORGOTTEN and group.get("momentum", 0.0) < 1)


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
