"""Before the first round every site says what it has, and the coordinator checks that they all mean the same."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any, TypeVar, cast

from fedshift._version import __version__
from fedshift.errors import FedshiftError, SiteError
from fedshift.federation import codec
from fedshift.federation.admission import needed_answers, tell_absent
from fedshift.federation.checks import MOST_SAMPLES, Refused, require
from fedshift.federation.federation import Federation
from fedshift.federation.plan import ModelSpec
from fedshift.federation.policy import Promise
from fedshift.federation.releases import Facts, Release
from fedshift.federation.site import Evaluated
from fedshift.federation.step import step

T = TypeVar("T")


@dataclass(frozen=True)
class Introduction(Release):
    """A site's own description of itself."""

    facts: Facts


@step
def introduce(site: Evaluated, rewind_to: int) -> Introduction:
    """Forgets what came after round `rewind_to` and describes the site. Runs for every site, also to resume."""
    site.store.rewind(rewind_to)
    return Introduction(facts=site.describe())


_SPLITS = ("train", "val", "test")
_SHOWN = 5
"""Names, at most, that a message lists."""


@dataclass(frozen=True)
class Described:
    """A site, as far as the coordinator may know it: how many samples a split has, which splits have labels, how many
    files could not be read, and how many are nearly black for want of scaling. `privacy`: what it promises to its own
    people, if it keeps a budget."""

    sizes: Mapping[str, int]
    labelled: tuple[str, ...]
    skipped: int
    dark: int
    privacy: Promise | None

    def __post_init__(self) -> None:
        numbers = (*self.sizes.values(), self.skipped, self.dark)
        is_sound = set(self.sizes) == set(_SPLITS) and set(self.labelled) <= set(_SPLITS)
        if self.privacy is not None:
            stated = (self.privacy.epsilon, self.privacy.delta, self.privacy.noise)
            is_sound = is_sound and all(0 < number <= 1e12 for number in stated) and self.privacy.delta < 1
        require(is_sound and all(0 <= number <= MOST_SAMPLES for number in numbers), "facts")


@dataclass(frozen=True)
class _Data:
    """What must be the same at all sites."""

    classes: list[str]
    input_shape: list[int]
    highest_label: int


def agree(fed: Federation, sites: Sequence[str], rewind_to: int) -> dict[str, Described]:
    """What sites hold, once all have the plan's version, classes and input shape; else one clear error.

    Class lists are compared by name: folders that lack a class would otherwise shift every label after it.

    A site whose answer is no answer at all, but rubbish, is left out of the run, as long as the others are a quorum: it
    is not asked again, and `fed.left_out` says why. When a run goes on after `rewind_to` rounds, so is one that no
    longer has what was agreed. A site that is silent or failed must be back first: it has not forgotten later rounds.
    """
    fed.left_out.clear()
    described: dict[str, Described] = {}
    replies = fed.ask(sites, introduce, everyone=True, any_answer=True, rewind_to=rewind_to)
    for site, introduction in replies:
        try:
            described[site] = _described(site, introduction.facts, fed.plan.model)
        except Refused as refused:
            replies.refused[site] = refused.reason
        except SiteError as error:
            if rewind_to == 0:
                raise
            replies.refused[site] = error.code
    needed = needed_answers(fed.rules.quorum, len(sites))
    if len(described) < needed:
        raise SiteError(
            "site-failed",
            f"{len(described)} of {len(sites)} sites said what they have and {needed} are needed."
            f" {tell_absent(replies.absent(), fed.engine.where_to_look)}",
        )
    fed.left_out.update(replies.refused)
    fed.sizes = {site: found.sizes for site, found in described.items()}
    return described


def require_same_version(site: str, facts: Mapping[str, object]) -> None:
    version = facts.get("version")
    if version != __version__:
        theirs = version if isinstance(version, str) and _VERSION.fullmatch(version) else "of an unknown version"
        raise SiteError(
            "site-mismatch",
            f"site {site!r} runs fedshift {theirs}, the coordinator {__version__}: install the same version at both",
        )


_VERSION = re.compile(r"[0-9]{1,4}(\.[0-9a-z+]{1,12}){1,5}")


def restored(kind: type[T], facts: Mapping[str, object], site: str) -> T:
    """The facts that are fields of `kind`. Raises `Refused` where one is missing or of another type."""
    names = [field.name for field in fields(cast(Any, kind))]
    try:
        return codec.restore(kind, {name: facts[name] for name in names if name in facts}, site)
    except FedshiftError as error:
        raise Refused("facts") from error


def shown(names: Iterable[str]) -> str:
    """A few of the names that a site sent, quoted."""
    found = sorted(names)
    more = f" and {len(found) - _SHOWN} more" if len(found) > _SHOWN else ""
    return f"{', '.join(map(repr, found[:_SHOWN])) or 'none'}{more}"


def _described(site: str, facts: Mapping[str, object], model: ModelSpec) -> Described:
    require_same_version(site, facts)
    data = restored(_Data, facts, site)
    if data.classes != list(model.classes):
        theirs, ours = set(data.classes), set(model.classes)
        raise SiteError(
            "data-classes",
            f"site {site!r} does not have the agreed classes (missing there: {shown(ours - theirs)};"
            f" only there: {shown(theirs - ours)}): give every site the same class folders",
        )
    if data.input_shape != list(model.input_shape):
        raise SiteError(
            "site-mismatch",
            f"site {site!r} has inputs of shape {data.input_shape[:_SHOWN]}, the run wants {list(model.input_shape)}:"
            " set image_size (or the table's columns) to the same at every site",
        )
    if data.highest_label >= len(model.classes):
        raise SiteError(
            "data-labels", f"site {site!r} has label {data.highest_label}, but there are {len(model.classes)} classes"
        )
    return restored(Described, facts, site)
