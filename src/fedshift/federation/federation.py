"""The door: `Federation.ask` puts a step to sites and returns `Replies`, the answers that passed admission."""

from __future__ import annotations

import dataclasses
import secrets
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial
from typing import Any, Generic, TypeVar, cast

from torch import Tensor

from fedshift.errors import InputError, SiteError
from fedshift.federation import codec
from fedshift.federation.admission import Failed, admit, needed_answers, tell_absent
from fedshift.federation.aggregation import (
    COUNT_MULTIPLE,
    DEFAULT,
    FAR,
    HELD_BYTES,
    HELD_MODELS,
    RULES,
    Gathered,
    RobustRule,
    clipping,
    held,
)
from fedshift.federation.checks import Expected, Refused, Sizes
from fedshift.federation.compression import LOST, Broadcasts, Compress, like_of
from fedshift.federation.engines import Engine, Failure
from fedshift.federation.labels import learning_by
from fedshift.federation.plan import Plan
from fedshift.federation.releases import Release, Weights
from fedshift.federation.sampling import TakingPart, draw_sites, wanted_sites
from fedshift.federation.secure import SecureSums, offer, reveal
from fedshift.federation.shelf import Shelf
from fedshift.federation.site import Labelled, SiteHost, Unlabelled, WithTargets
from fedshift.federation.step import Request, Step, answer, fixed_threads, isolated_randomness
from fedshift.functional.averaging import weighted_mean
from fedshift.functional.robust import capped, has_negative_variance, shortened, with_variances_from_zero
from fedshift.rng import Rng

R = TypeVar("R", bound=Release)

IN_MEMORY_BYTES, IN_MEMORY_REPLIES = HELD_BYTES, HELD_MODELS


class Replies(Generic[R]):
    """Iterates `(site, release)` of the admitted replies, sorted by site, as often as needed.

    Up to `IN_MEMORY_BYTES` of `IN_MEMORY_REPLIES` are held; what comes after waits in a temporary file until its turn
    comes, so that an average over a thousand sites needs the memory of a few.
    """

    def __init__(self, step: Step[R]) -> None:
        self._step = step
        self._held: dict[str, R] = {}
        self._bytes = 0
        self._shelf: Shelf[R] | None = None
        self.refused: dict[str, str] = {}
        self.missing: dict[str, str] = {}

    def add(self, site: str, release: R, size: int) -> None:
        if self._bytes + size <= IN_MEMORY_BYTES and len(self._held) < IN_MEMORY_REPLIES:
            self._bytes += size
            self._held[site] = release
            return
        if self._shelf is None:
            self._shelf = Shelf(self._step)
        self._shelf.add(site, release)

    @property
    def answered(self) -> tuple[str, ...]:
        return tuple(sorted([*self._held, *(self._shelf or ())]))

    def __len__(self) -> int:
        return len(self.answered)

    def __getitem__(self, site: str) -> R:
        if site in self._held or self._shelf is None:
            return self._held[site]
        return self._shelf[site]

    def __iter__(self) -> Iterator[tuple[str, R]]:
        return ((site, self[site]) for site in self.answered)

    def absent(self) -> Mapping[str, str]:
        """Who is not among the answers, and why."""
        return {**self.refused, **self.missing}


T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Note:
    """Something a method wants shown for a round: a site's weight, a loss."""

    round: int
    name: str
    value: float
    site: str


@dataclass(frozen=True)
class _Question:
    """What a site is asked, the same object for all that are asked the same, and what is known of their answers."""

    body: bytes
    expected: dict[str, Expected | Mapping[str, Tensor]]


@dataclass(frozen=True)
class Rules:
    """Of the run, not of methods. `quorum`: the least share of the asked sites that must answer. `deadline`: seconds a
    question may take. `max_update_norm`: longer updates are refused. `aggregation`: how `Federation.average` combines
    models; `bad_sites`: how many of them some of these rules have to stand. `sites_per_round`: how many sites take
    part, as a number or as a share below 1 (None: all). `compress`: how models cross. `secure_aggregation`: as in
    the plan."""

    quorum: float = 0.5
    deadline: float | None = None
    max_update_norm: float = 1e6
    aggregation: str = DEFAULT
    bad_sites: int = 1
    sites_per_round: float | None = None
    compress: Compress = "none"
    secure_aggregation: bool = False


@dataclass
class Traffic:
    """Measured payload: bytes by direction. `site_seconds` adds up the sites' work, `waited` is how long the
    coordinator had to wait for it, which is less when sites work side by side."""

    up: int = 0
    down: int = 0
    site_seconds: float = 0.0
    waited: float = 0.0


class Watch:
    """Hears which sites work on which step, and which of them are done. This one keeps nothing."""

    def asked(self, step: str, sites: Sequence[str]) -> None:
        return None

    def answered(self, step: str, site: str) -> None:
        return None


@dataclass
class Federation:
    """What a method's coordinator half talks to. `sources` have labels, `targets` have none; `home_host` is the
    coordinator's own data, where the setting has it, listed among neither. `sizes` is how many samples each site said
    at the handshake that it has, by split. `left_out` are sites that are not asked, and why: what they said of
    themselves could not be used."""

    plan: Plan
    engine: Engine
    sources: tuple[str, ...]
    targets: tuple[str, ...] = ()
    home_host: SiteHost | None = None
    rules: Rules = field(default_factory=Rules)
    watch: Watch = field(default_factory=Watch)
    round: int = 0
    learning: Traffic = field(default_factory=Traffic)
    scoring: Traffic = field(default_factory=Traffic)
    counters: Counter[str] = field(default_factory=Counter)
    notes: list[Note] = field(default_factory=list)
    has_averaged: bool = False
    sizes: dict[str, Sizes] = field(default_factory=dict)
    left_out: dict[str, str] = field(default_factory=dict)
    secure: SecureSums = field(default_factory=SecureSums)
    _asked: set[tuple[str, str]] = field(default_factory=set)

    @cached_property
    def broadcasts(self) -> Broadcasts:
        """What sites have of models, where these are sent in fewer bytes."""
        return Broadcasts(self.rules.compress)

    def begin(self, round: int) -> None:
        """Called by the run before each round."""
        self.round = round
        self.notes = []
        self._asked.clear()

    @property
    def home(self) -> Labelled | Unlabelled:
        """The coordinator's own data, as its role allows."""
        assert self.home_host is not None, f"there is no home in the setting {self.plan.setting}"
        labelled = WithTargets if self.home_host.spec.copies else Labelled
        view = labelled if self.home_host.spec.role == "labelled" else Unlabelled
        return cast(Labelled | Unlabelled, self.home_host.view(view, self.round))

    @property
    def labelled(self) -> tuple[str, ...]:
        """Everyone with labels: the sources, or the home where it is the only one that has them."""
        return self.plan.sources

    def at_home(self, work: Callable[..., T], **arguments: Any) -> T:
        """`work(home, **arguments, rng=...)` on the coordinator's own data: nothing travels, so nothing is packed."""
        rng = self.rng(work.__name__)
        self.watch.asked(work.__name__, (self.home.name,))
        loss = self.plan.training.loss if isinstance(self.home, Labelled) else "cross-entropy"
        with isolated_randomness(rng), fixed_threads(self.plan.threads), learning_by(loss):
            found = work(self.home, **arguments, rng=rng)
        self.watch.answered(work.__name__, self.home.name)
        return found

    def rng(self, *names: str | int) -> Rng:
        """The coordinator's own randomness for this round."""
        return Rng.of(self.plan.seed, self.round, "coordinator", *names)

    def taking_part(self, sites: Sequence[str], *, by_size: bool = True) -> TakingPart:
        """Those of the sites that take part in this round, drawn by the run's seed where it asks for fewer than all;
        `by_size` says whether the method's average counts a site by its samples."""
        asked = self.rules.sites_per_round
        if asked is None or wanted_sites(asked, len(sites)) == len(sites):
            return TakingPart(tuple(sites))
        present = [site for site in sites if site not in self.left_out]
        # What sites state is limited before the draw: a site that boasts would take part in every round.
        sizes = [float(self.sizes[site]["train"]) if by_size else 1.0 for site in present]
        limited = dict(zip(present, self.believable(sizes, present), strict=True))
        drawn = draw_sites(limited, wanted_sites(asked, len(sites)), self.rng("sites"))
        for site in drawn.sites:
            self.note("took_part", drawn.weights[site], site)
        return drawn

    def note(self, name: str, value: float, site: str = "") -> None:
        """Records a number for this round's metrics."""
        self.notes.append(Note(self.round, name, float(value), site))

    def count(self, name: str, amount: int = 1) -> None:
        self.counters[name] += amount

    def average(
        self,
        models: Iterable[tuple[Weights, float]] | Callable[[], Iterable[tuple[Weights, float]]],
        *,
        since: Weights | None = None,
        sites: Sequence[str] = (),
        stated: bool = True,
    ) -> dict[str, Tensor]:
        """One model of several, each with its weight, by the rule that the run is configured with.

        Rules may have to read the models several times: `models` is a function that reads them again; of an iterator,
        all are kept in memory. `since` is the model that the sites started from: without it, updates cannot be clipped.
        `sites` names who sent them, for counters. Weights that sites `stated` are capped; the method's own are not.
        """
        self.has_averaged = True
        if self.rules.secure_aggregation:
            return self.secure.sum(self, list(models() if callable(models) else models))
        rule = RULES.find(self.rules.aggregation)
        read = (
            models if callable(models) else list(models).__iter__ if isinstance(rule, RobustRule) else models.__iter__
        )
        if not isinstance(rule, RobustRule):
            return rule(held(read(), lambda pair: pair[0]))
        weights = []
        for place, (model, weight) in enumerate(read()):
            weights.append(float(weight))
            if has_negative_variance(model):
                self._tell(sites, "negative-variance", place)
        least = rule.least_sites(self.rules.bad_sites)
        if len(weights) < least:
            raise SiteError(
                "site-failed",
                f"round {self.round}: aggregation={self.rules.aggregation} with bad_sites={self.rules.bad_sites} needs"
                f" {least} models and {len(weights)} came",
            )
        if stated:
            weights = self.believable(weights, sites)

        def usable() -> Iterable[Weights]:
            return held((with_variances_from_zero(model) for model, _ in read()), lambda model: model)

        return rule.combine(Gathered(usable, weights, since, self.rules.bad_sites, partial(self._tell, sites)))

    def clipped(
        self, sites: Sequence[str], model_of: Callable[[str], Weights], since: Mapping[str, Weights]
    ) -> Callable[[str], Weights]:
        """`model_of` for methods that combine models in their own way: with every rule that limits bad sites, updates
        to what each site started from (`since`) are clipped as in `average`. A model whose update is more than twice as
        long as it may be is replaced by the mean of the others: how such methods weight models may depend on how far
        apart they are, and one that has hardly moved would be far from all."""
        if not isinstance(RULES.find(self.rules.aggregation), RobustRule):
            return model_of
        for place, site in enumerate(sites):
            if has_negative_variance(model_of(site)):
                self._tell(sites, "negative-variance", place)

        def usable(site: str) -> Weights:
            return with_variances_from_zero(model_of(site))

        origins = [since[site] for site in sites]
        found = clipping(map(usable, sites), origins, partial(self._tell, sites))
        factors = dict(zip(sites, found, strict=True))
        far = [site for site in sites if factors[site].parameters < FAR]
        mean = weighted_mean((usable(site), 1.0) for site in sites if site not in far) if far else {}
        return lambda site: mean if site in far else shortened(usable(site), since[site], factors[site])

    def believable(self, counts: Sequence[float], sites: Sequence[str]) -> list[float]:
        """Numbers of samples that sites state, of which none gives a site more than `COUNT_MULTIPLE` times the weight
        of the median site. With `aggregation: mean` they are believed."""
        if self.rules.aggregation == "mean":
            return list(counts)
        found = capped(counts, COUNT_MULTIPLE)
        for place, (before, after) in enumerate(zip(counts, found, strict=True)):
            if after < before:
                self._tell(sites, "count", place)
        return found

    def _tell(self, sites: Sequence[str], what: str, place: int) -> None:
        self.count(f"robust.{what}" + (f".{sites[place]}" if 0 <= place < len(sites) else ""))

    def ask(
        self,
        sites: Sequence[str],
        step: Step[R],
        *,
        each: Mapping[str, Mapping[str, Any]] | None = None,
        expect: Mapping[str, Expected | Mapping[str, Tensor]] | None = None,
        everyone: bool = False,
        any_answer: bool = False,
        **payload: Any,
    ) -> Replies[R]:
        """Runs `step` at `sites` with `payload` (and what `each` has for one site alone); returns the admitted answers.

        Released tensors must match those of the same name in the payload, or in `expect`, in keys, shapes and types;
        `expect` may ask for more than that (fedshift.federation.checks). With `everyone` a single missing answer ends
        the run; otherwise the quorum decides. With `any_answer` a refused answer counts like a good one there: for
        questions that a round does not depend on.
        """
        replies = Replies(step)
        own: dict[str, Mapping[str, Any]] = {}
        number = ""
        for site in sorted(sites):
            if site in self.left_out:
                replies.refused[site] = self.left_out[site]
                continue
            own[site] = payload | dict(each.get(site, {})) if each else payload
            number = step.number(own[site]) if each or not number else number
            self._require_new(site, step, number)
        if self._keeps_back(step):
            self.secure.asked(step, payload)
            expect = {**(expect or {}), **self.secure.expected(step)}
        self._ask(own, step, expect or {}, replies)
        lost = [site for site, reason in replies.missing.items() if reason == LOST]
        if lost:
            for site in lost:
                self.broadcasts.forget(site)
                del replies.missing[site]
            self._ask({site: own[site] for site in lost}, step, expect or {}, replies)
        answers = len(replies) + (len(replies.refused) if any_answer else 0)
        self._require_quorum(answers, len(sites), step, replies, 1.0 if everyone else self.rules.quorum)
        return replies

    def _ask(
        self,
        payloads: Mapping[str, Mapping[str, Any]],
        step: Step[R],
        expect: Mapping[str, Expected | Mapping[str, Tensor]],
        replies: Replies[R],
    ) -> None:
        """Puts the step to sites, each with its payload, and sorts what comes of it into `replies`."""
        requests: dict[str, Request] = {}
        expected: dict[str, Mapping[str, Expected | Mapping[str, Tensor]]] = {}
        home = self.home_host.spec.name if self.home_host else None
        made: dict[tuple[int, ...], _Question] = {}
        for site, own in payloads.items():
            # What does not travel is not coded.
            wire, coded = (own, {}) if site == home else self.broadcasts.coded(site, own, step, expect)
            values = tuple(map(id, wire.values()))
            if values not in made:
                made[values] = _Question(codec.pack(wire), {**like_of(step.release, own, coded), **expect})
            requests[site] = Request(site, step.name, self.round, secrets.token_hex(8), made[values].body)
            expected[site] = made[values].expected
        self.broadcasts.asked()
        self.watch.asked(step.name, tuple(requests))
        began = asked = time.perf_counter()
        for site, outcome in self._outcomes(list(requests.values())):
            is_scoring = step.scores_only and step.name not in (offer.name, reveal.name)
            traffic = Traffic() if site == home else self.scoring if is_scoring else self.learning
            traffic.waited += time.perf_counter() - asked
            traffic.down += len(requests[site].body)
            if isinstance(outcome, Failure):
                replies.missing[site] = outcome.reason
                self.count(f"missing.{outcome.reason}")
            else:
                traffic.up += len(outcome)
                waited = time.perf_counter() - began
                self._admit(outcome, requests[site], step, expected[site], replies, traffic, waited)
            self.watch.answered(step.name, site)
            asked = time.perf_counter()

    def _keeps_back(self, step: Step[Any]) -> bool:
        return self.rules.secure_aggregation and bool(step.release.summed) and step.name != reveal.name

    def _require_new(self, site: str, step: Step[Any], number: str) -> None:
        """Sites on other machines would refuse it: what works here has to work there."""
        question = (site, number)
        if question in self._asked:
            raise InputError(
                "config-value",
                f"round {self.round}: the method asks site {site!r} for step {step.name} twice, and sites answer it"
                " once per round. If that is its protocol, say which argument numbers the questions:"
                ' @step(numbered_by=("exchange",))',
            )
        self._asked.add(question)

    def _outcomes(self, requests: Sequence[Request]) -> Iterator[tuple[str, bytes | Failure]]:
        """Every site's answer. The coordinator's own data is asked here; all other sites through the engine."""
        home = self.home_host
        away = [request for request in requests if home is None or request.site != home.spec.name]
        for request in requests:
            if home is not None and request.site == home.spec.name:
                yield request.site, answer(home, request, debug=True)
        if away:
            yield from self.engine.call(away, self.rules.deadline)

    def _admit(
        self,
        data: bytes,
        request: Request,
        step: Step[R],
        expected: Mapping[str, Expected | Mapping[str, Tensor]],
        replies: Replies[R],
        traffic: Traffic,
        waited: float,
    ) -> None:
        limit, sizes = self.rules.max_update_norm, self.sizes.get(request.site)
        try:
            admitted = admit(data, request, step, expected, limit, sizes, waited)
        except Refused as refused:
            replies.refused[request.site] = refused.reason
            self.count(f"refused.{refused.reason}")
        except Failed as failed:
            replies.missing[request.site] = failed.code
            self.count(f"failed.{failed.code}")
        else:
            release = admitted.release
            if self._keeps_back(step):
                release = dataclasses.replace(release, **self.secure.marked(step, request.site, release))
            replies.add(request.site, release, len(data))
            self.broadcasts.answered(request.site)
            traffic.site_seconds += admitted.seconds
            if admitted.clipped:
                self.count("clipped.updates", admitted.clipped)

    def _require_quorum(self, answers: int, asked: int, step: Step[R], replies: Replies[R], share: float) -> None:
        needed = needed_answers(share, asked)
        if answers >= needed or not asked:
            return
        raise SiteError(
            "site-failed",
            f"round {self.round}, step {step.name}: {len(replies)} of {asked} sites gave a usable answer and"
            f" {needed} are needed. {tell_absent(replies.absent(), self.engine.where_to_look)}",
        )
