"""Before the first round every site says what it has, and the coordinator checks that they all mean the same."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields

from fedshift._version import __version__
from fedshift.errors import SiteError
from fedshift.federation import codec
from fedshift.federation.federation import Federation
from fedshift.federation.plan import ModelSpec
from fedshift.federation.releases import Facts, Release
from fedshift.federation.site import Evaluated
from fedshift.federation.step import step


@dataclass(frozen=True)
class Introduction(Release):
    """A site's own description of itself."""

    facts: Facts


@step
def introduce(site: Evaluated, rewind_to: int) -> Introduction:
    """Forgets what came after round `rewind_to` and describes the site. Runs for every site, also to resume."""
    site.store.rewind(rewind_to)
    return Introduction(facts=site.describe())


@dataclass(frozen=True)
class Described:
    """A site, as far as the coordinator may know it: how many samples a split has, which splits have labels, how many
    files could not be read, and how many are nearly black for want of scaling."""

    sizes: Mapping[str, int]
    labelled: tuple[str, ...]
    skipped: int
    dark: int


def agree(fed: Federation, sites: Sequence[str], rewind_to: int) -> dict[str, Described]:
    """What sites hold, once all have the plan's version, classes and input shape; else one clear error.

    Class lists are compared by name: folders that lack a class would otherwise shift every label after it.
    """
    replies = fed.ask(sites, introduce, everyone=True, rewind_to=rewind_to)
    for site, introduction in replies:
        _compare(site, introduction.facts, fed.plan.model)
    told = [field.name for field in fields(Described)]
    return {
        site: codec.restore(Described, {key: introduction.facts.get(key) for key in told}, site)
        for site, introduction in replies
    }


def require_same_version(site: str, facts: Mapping[str, object]) -> None:
    if facts.get("version") != __version__:
        raise SiteError(
            "site-mismatch",
            f"site {site!r} runs fedshift {facts.get('version')}, the coordinator {__version__}:"
            " install the same version at both",
        )


def _compare(site: str, facts: Mapping[str, object], model: ModelSpec) -> None:
    require_same_version(site, facts)
    if facts.get("classes") != list(model.classes):
        theirs, ours = set(map(str, facts.get("classes") or [])), set(model.classes)  # type: ignore[call-overload]
        raise SiteError(
            "data-classes",
            f"site {site!r} does not have the agreed classes (missing there: {sorted(ours - theirs)},"
            f" only there: {sorted(theirs - ours)}): give every site the same class folders",
        )
    if facts.get("input_shape") != list(model.input_shape):
        raise SiteError(
            "site-mismatch",
            f"site {site!r} has inputs of shape {facts.get('input_shape')}, the run wants {list(model.input_shape)}:"
            " set image_size (or the table's columns) to the same at every site",
        )
    highest = facts.get("highest_label")
    if not isinstance(highest, int) or highest >= len(model.classes):
        raise SiteError("data-labels", f"site {site!r} has label {highest}, but there are {len(model.classes)} classes")
