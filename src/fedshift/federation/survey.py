"""For a coordinator that cannot look at the data: before there is a plan, sites say what they have. From that it
learns the task, the classes and the shape of inputs, in which all sites must agree."""

from __future__ import annotations

import secrets
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from fedshift._version import __version__
from fedshift.data import open_dataset
from fedshift.data.domain import Dataset, Domain, Task
from fedshift.errors import InputError, SiteError, nearest
from fedshift.federation import codec
from fedshift.federation.admission import Failed, admit, needed_answers, tell_absent
from fedshift.federation.checks import Refused, require
from fedshift.federation.engines import Engine, Failure
from fedshift.federation.handshake import require_same_version, restored, shown
from fedshift.federation.releases import Facts, Release
from fedshift.federation.site import Evaluated, SiteSpec, require_nameable_classes
from fedshift.federation.step import Outcome, Request, Step, pack_answer

MAX_CLOCK_DIFFERENCE = 300.0
"""Seconds. Certificates and the order of events in logs rely on clocks."""
_LARGEST = 10**6
"""Pixels along a side, or columns."""


@dataclass(frozen=True)
class Surveyed(Release):
    """What a site's data look like from outside."""

    facts: Facts


@dataclass(frozen=True)
class Found:
    """The facts. `task` is None, and classes and shape are left open, where a site has no labels. `mask_ids` is as in
    `Dataset`."""

    version: str
    task: Task | None
    classes: tuple[str, ...]
    input_shape: tuple[int, ...]
    columns: tuple[str, ...]
    clock: float
    mask_ids: tuple[int, ...] = ()


def look(spec: SiteSpec) -> Found:
    """Runs at the site. Nothing is decoded, only listed."""
    # An empty class list stands for "not known yet": it is used only where the folder has no labels of its own.
    source = replace(spec.source, task="classification", classes=())
    if spec.is_remote:
        require_nameable_classes(source, spec.policy)
    dataset = open_dataset(source)
    for name in spec.domains:
        if name not in dataset.domains:
            raise InputError(
                "data-missing", f"the data folder has no part called {name!r}. {nearest(name, dataset.domains)}"
            )
    labelled = bool(dataset.classes)
    return Found(
        version=__version__,
        task=dataset.task if labelled else None,
        classes=dataset.classes,
        input_shape=dataset.input_shape if labelled else (),
        columns=dataset.columns,
        clock=time.time(),
        mask_ids=dataset.mask_ids,
    )


SURVEY: Step[Surveyed] = Step("survey.look", look, Evaluated, Surveyed, {})  # type: ignore[arg-type]


def answer_survey(spec: SiteSpec, request: Request) -> bytes:
    """A site's packed answer: under its policy and in its ledger, like everything that leaves it."""

    def work() -> Outcome:
        if request.step != SURVEY.name:
            raise SiteError("step-unknown", "before there is a plan, a site can only be surveyed")
        release, _ = spec.policy.apply(Surveyed(facts=codec.plain(look(spec))), {}, spec.read_secret)
        return Outcome(release)

    return pack_answer(spec, request, work)


def survey_sites(
    engine: Engine, sites: Sequence[str], deadline: float | None = None, quorum: float = 1.0
) -> dict[str, Found]:
    """What every site has, or one error that names who did not say. A site whose answer is rubbish is not among them,
    as long as the others are a `quorum`: it is asked once more when the run begins."""
    requests = {site: Request(site, SURVEY.name, 0, secrets.token_hex(8), codec.pack({})) for site in sorted(sites)}
    found: dict[str, Found] = {}
    absent: dict[str, str] = {}
    refused: dict[str, str] = {}
    for site, outcome in engine.call(list(requests.values()), deadline):
        if isinstance(outcome, Failure):
            absent[site] = outcome.reason
            continue
        try:
            facts = admit(outcome, requests[site], SURVEY, {}, 0.0).release.facts
            require_same_version(site, facts)
            found[site] = _sound(restored(Found, facts, site))
        except Failed as failed:
            absent[site] = failed.code
        except Refused as error:
            refused[site] = error.reason
    if absent or len(found) < needed_answers(quorum, len(sites)):
        told = tell_absent({**refused, **absent}, engine.where_to_look)
        raise SiteError("site-failed", f"not every site could say what it has. {told}")
    return found


def _sound(found: Found) -> Found:
    """Itself, if a data set can be like that. Raises `Refused`."""
    require(len(found.input_shape) <= 3 and len(set(found.classes)) == len(found.classes), "facts")
    require(all(0 < size <= _LARGEST for size in found.input_shape), "facts")
    require(found.task is None or bool(found.classes and found.input_shape), "facts")
    return found


def agreed_dataset(name: str, found: Mapping[str, Found], now: float) -> Dataset:
    """What sites have in common, as a data set whose domains only they can load; else one error that says who differs.

    Stricter than on one machine, where a class that one folder lacks is seen to exist in another: here every labelled
    site must list the same classes (an empty folder or `classes.txt` keeps the place of one without samples).
    """
    for site, facts in sorted(found.items()):
        if abs(facts.clock - now) > MAX_CLOCK_DIFFERENCE:
            raise SiteError(
                "site-mismatch",
                f"the clock of site {site!r} is {abs(facts.clock - now) / 60:.0f} minutes away from the coordinator's:"
                " set both by a time server",
            )
    labelled = {site: facts for site, facts in sorted(found.items()) if facts.task is not None}
    if not labelled:
        raise SiteError("method-needs", "no site has labels: nobody knows the classes")
    first, *others = labelled
    ours = labelled[first]
    for site in others:
        theirs = labelled[site]
        if theirs.classes != ours.classes:
            only = _differing(ours.classes, theirs.classes)
            raise SiteError(
                "data-classes",
                f"sites {first!r} and {site!r} do not list the same classes (they differ in {only}): give every site"
                " the same class folders, empty ones included, or the same classes.txt",
            )
        differences = {
            "task": (ours.task, theirs.task),
            "input_shape": (ours.input_shape, theirs.input_shape),
            "columns": (ours.columns, theirs.columns),
        }
        for what, (here, there) in differences.items():
            if here != there:
                told = f"{here} and {there}" if what != "columns" else _differing(ours.columns, theirs.columns)
                raise SiteError(
                    "site-mismatch",
                    f"sites {first!r} and {site!r} differ in {what} ({told}):"
                    " set image_size, or give both the same columns in the same order",
                )

    assert ours.task is not None
    # Sites may number the same classes differently in their files: then no id is right for all.
    same_ids = all(facts.mask_ids == ours.mask_ids for facts in labelled.values())
    return Dataset(
        name,
        ours.task,
        ours.classes,
        tuple(sorted(found)),
        ours.input_shape,
        elsewhere,
        columns=ours.columns,
        mask_ids=ours.mask_ids if same_ids else (),
    )


def _differing(ours: tuple[str, ...], theirs: tuple[str, ...]) -> str:
    return shown(set(ours) ^ set(theirs)) if set(ours) != set(theirs) else "their order"


def elsewhere(domain: str) -> Domain:
    """Stands where a data set would load a domain that is not on this machine."""
    raise AssertionError(f"the data of {domain!r} is at its site")
