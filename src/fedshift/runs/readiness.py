"""Whether the data are fit for the parts they play. On one machine that is known, and told, before anything starts."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from fedshift.data.check import about_frames
from fedshift.data.domain import MIN_SAMPLES, Domain
from fedshift.errors import InputError
from fedshift.federation.admission import needed_answers
from fedshift.federation.site import SiteSpec, is_asked, kept_samples
from fedshift.methods import find_about, find_method
from fedshift.runs.planning import Prepared, site_specs
from fedshift.runs.roles import Participant

_NAMED = 5
"""How many sites a message names one by one."""


def read_domains(prepared: Prepared) -> Prepared:
    """Reads, and so caches, all that sites on this machine will: what is wrong with the user's own files is told here,
    by name and before anything starts. A site may say no more of it than a code."""
    if not _is_worth_reading(prepared):
        return prepared
    names = {name for person in prepared.roles.everyone for name in person.domains}
    found = {name: _seen(prepared.dataset.load(name)) for name in sorted(names)}
    warnings = [seen.warning for seen in found.values() if seen.warning]
    specs, own = site_specs(prepared, Path())
    sites = [*specs, own] if own else specs
    used = {spec.name: sum(_kept(spec, found[name].samples) for name in spec.domains) for spec in sites}
    labelled = [name for name, seen in found.items() if seen.trains_with_labels]
    require_training_data(prepared, used, labelled)
    given = {spec.name: sum(found[name].samples for name in spec.domains) for spec in sites}
    scored = [name for name in prepared.roles.tested if found[name].is_scored]
    warnings += _check_min_samples(prepared, sites, used, given, scored)
    dataset = dataclasses.replace(prepared.dataset, warnings=(*prepared.dataset.warnings, *warnings))
    return dataclasses.replace(prepared, dataset=dataset)


@dataclass(frozen=True)
class _Seen:
    """What is known of a domain once it was read. The domain itself is let go: of many, not all may be open."""

    samples: int
    trains_with_labels: bool
    is_scored: bool
    warning: str


def _seen(domain: Domain) -> _Seen:
    frames = about_frames(domain) if domain.frames else ""
    warning = (
        f"{len(domain.skipped)} samples of {domain.name} are left out; the first is {domain.skipped[0].file}: "
        f"{domain.skipped[0].reason}"
        if domain.skipped
        else ""
    )
    warning = " ".join(filter(None, (warning, frames)))
    is_labelled, is_scored = domain.train.labels is not None, domain.test.labels is not None
    return _Seen(len(domain.train), is_labelled, is_scored, warning)


def require_training_data(prepared: Prepared, sizes: Mapping[str, int], labelled: Collection[str]) -> None:
    """Everyone who must learn has training data, and those who learn with labels have labels. `sizes`: training samples
    by site, without those that are left out of the run; `labelled`: domains (or sites) whose training data have labels.
    """
    home, labelled = prepared.roles.home, dict.fromkeys(labelled)  # Quick to look up, and in order.
    everyone = [person for person in prepared.roles.everyone if person.name in sizes]
    for person in everyone:
        if sizes[person.name]:
            continue
        if prepared.plan.setting == "adapt" and person is home:
            raise InputError("data-empty", f"target {person.name!r} has no training data to adapt to")
        if person.role == "labelled":
            raise InputError("data-empty", f"site {person.name!r} has no training data")
    for person in everyone:
        # A pooled site is known by its domains on this machine, and by its own name to those who only asked it.
        is_known = person.name in labelled or all(name in labelled for name in person.domains)
        if person.role == "labelled" and not is_known:
            lacking = [name for name in person.domains if name not in labelled]
            raise InputError("method-needs", _without_labels(prepared, person, lacking[0], labelled))


def _is_worth_reading(prepared: Prepared) -> bool:
    """Built-in data are sound and drawn where they are needed. Only settings can leave too little of them."""
    config = prepared.config
    least = config.policy.get("min_samples", MIN_SAMPLES)
    is_cut = config.client_fraction < 1 or (config.train_per_site is not None and config.train_per_site < least)
    return config.data_dir is not None or is_cut or least > MIN_SAMPLES


def _kept(spec: SiteSpec, samples: int) -> int:
    return kept_samples(samples, spec.train_cap, spec.train_share)


def _without_labels(prepared: Prepared, person: Participant, name: str, labelled: Collection[str]) -> str:
    lacks = f"has no labels to train on: {_missing_labels(prepared, name)}."
    if person is prepared.roles.home:
        others = [other for other in prepared.roles.tested if other in labelled]
        choice = f" ({', '.join(others[:_NAMED])} {'has' if len(others) == 1 else 'have'} labels)" if others else ""
        return f"the home {name!r} {lacks} Add them, or choose another --home{choice}"
    if name in prepared.roles.tested:
        return f"target {name!r} {lacks} {prepared.plan.method} learns from the target's labels: add them"
    return f"source {name!r} {lacks} Add them, or leave it out of --sources; it can be a --target"


def _missing_labels(prepared: Prepared, name: str) -> str:
    """What a domain of this data would have if it were labelled."""
    config, dataset = prepared.config, prepared.dataset
    if dataset.columns:
        return "its table has no label column" + (f" {config.label_column!r}" if config.label_column else "")
    if dataset.task == "segmentation":
        return f"there is no mask for its training images ({name}/masks beside {name}/images)"
    if config.data_dir is not None and (config.data_dir / f"{name}.npz").is_file():
        return f"{name}.npz has no array train_labels (or labels)"
    return f"its images are not in class folders ({name}/CLASS/*.png)"


def _check_min_samples(
    prepared: Prepared,
    sites: Sequence[SiteSpec],
    used: Mapping[str, int],
    given: Mapping[str, int],
    scored: Collection[str],
) -> list[str]:
    """Warns of sites that their policy will keep out of every round; an error where the run could not go on without
    them."""
    config, about = prepared.config, find_about(prepared.plan.method)
    # Sources that KD3A was told to do without.
    dropped = prepared.plan.hyper.get("drop", ())
    views = [step.view for step in find_method(about.name).steps]
    asked = [s for s in sites if s.name not in dropped and any(is_asked(s.role, view) for view in views)]
    few = [spec for spec in asked if used[spec.name] < spec.policy.min_samples]
    if not few:
        return []
    least = few[0].policy.min_samples
    told = {spec.name: _tell_size(prepared, spec, used[spec.name], given[spec.name]) for spec in few}
    cut = _cut_by(prepared, few, used, given)
    rule = f"policy.min_samples asks for {least} before anything learned from them may leave a site"
    remedy = f"add data, {f'raise {cut}, ' if cut else ''}or lower policy.min_samples"
    left, needed = len(asked) - len(few), needed_answers(config.quorum, len(asked))
    if left < needed or about.needs_all:
        why = "nobody would be left to learn from"
        if left:
            rest = f"{left} of {len(asked)} sites would be left to learn from"
            why = f"{about.name} needs every site" if about.needs_all else f"{rest} and the quorum asks for {needed}"
        more = f" and {len(told) - _NAMED} more sites are as small" if len(told) > _NAMED else ""
        raise InputError("site-policy", f"{why}: {', '.join(list(told.values())[:_NAMED])}{more}; {rule}: {remedy}")
    return [
        f"{told[spec.name]}, but {rule}. It is skipped in every round"
        f"{' and scored with what was learned without it' if spec.name in scored else ''}: {remedy}"
        for spec in few
    ]


def _tell_size(prepared: Prepared, spec: SiteSpec, used: int, given: int) -> str:
    cut = _cut_by(prepared, [spec], {spec.name: used}, {spec.name: given})
    of = f" (of {given:,}, by {cut})" if cut else ""
    return f"{spec.name!r} has {used} training sample{'' if used == 1 else 's'}{of}"


def _cut_by(prepared: Prepared, sites: Sequence[SiteSpec], used: Mapping[str, int], given: Mapping[str, int]) -> str:
    """The keys that left sites with fewer samples than they have; empty where none did."""
    cut = [spec for spec in sites if used[spec.name] < given[spec.name]]
    keys = {
        "train_per_site": any(s.train_cap is not None and s.train_cap < given[s.name] for s in cut),
        "client_fraction": any(s.train_share < 1 for s in cut),
    }
    return " and ".join(key for key, does in keys.items() if does)
