"""A site as a step sees it. The type that a step asks for decides which view it gets: `Labelled` and `Unlabelled` for
learning, `Evaluated` for scoring only."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any, Literal, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray

from fedshift._version import __version__
from fedshift.data.attacks import Attack, spoiled
from fedshift.data.batches import LabelledData, UnlabelledData
from fedshift.data.domain import VOID, Dataset, DataSource, Domain, Split, joined_inputs
from fedshift.data.registry import survey
from fedshift.errors import InputError, SiteError
from fedshift.federation import codec
from fedshift.federation.budget import RecordPrivacy, read_key
from fedshift.federation.masking import Vault
from fedshift.federation.plan import Plan
from fedshift.federation.policy import Policy
from fedshift.federation.store import SiteStore
from fedshift.rng import Rng

Role = Literal["labelled", "unlabelled", "held-out"]
H = TypeVar("H")
D = TypeVar("D", LabelledData, UnlabelledData)


@dataclass(frozen=True)
class Copied:
    """A domain of another site, which uses `train_share` of its training data."""

    domain: str
    train_share: float


@dataclass(frozen=True)
class SiteSpec:
    """All that another process needs to become this site. Several domains make a pooled site (centralized baselines).

    `role` is what methods may do here: learn with labels, learn without, or nothing (held out for scoring).
    `train_cap` keeps that many training samples, `train_share` that fraction, both chosen by the seed. `copies` were
    given to this site beforehand, by methods that move data (`About.data`). `attacks` are played by it, for studies.
    With `is_remote` the coordinator is somebody else, and nothing it says is trusted. `secret` is the file with the
    site's own key, which noise is made from; without one it is in `folder`. `kit` is where its certificate is.
    """

    name: str
    role: Role
    source: DataSource
    domains: tuple[str, ...]
    folder: Path
    policy: Policy = field(default_factory=Policy)
    train_cap: int | None = None
    train_share: float = 1.0
    device: str = "cpu"
    copies: tuple[Copied, ...] = ()
    attacks: tuple[Attack, ...] = ()
    is_remote: bool = False
    secret: Path | None = None
    kit: Path | None = None

    def read_secret(self) -> bytes:
        """The site's own key, made when it is first needed."""
        return read_key(self.key_file)

    @property
    def key_file(self) -> Path:
        return self.secret or self.folder / "secret"

    @property
    def poison(self) -> float:
        """The share of every training batch that gets wrong labels. Of a pooled site, a domain has its part."""
        return sum(attack.amount for attack in self.attacks if attack.kind == "poison") / len(self.domains)


class Site:
    """What every view has: who and when, the agreed plan, the site's own store, and `min_samples` of its policy: from
    how many samples anything that leaves it must be made."""

    def __init__(
        self,
        spec: SiteSpec,
        plan: Plan,
        domain: Domain,
        classes: tuple[str, ...],
        round: int,
        copies: Mapping[str, Split] | None = None,
    ) -> None:
        self._domain = domain
        self._copies = copies or {}
        self._classes = classes
        self.name = spec.name
        self.plan = plan
        self.round = round
        self.store = SiteStore(spec.folder / "state")
        self.device = torch.device(spec.device)
        self.min_samples = spec.policy.min_samples
        self._least_scored = spec.policy.least_scored
        self._poison = spec.poison
        self._scoring, self._promise = spec.policy.scoring, spec.policy.promise
        self.min_sites = spec.policy.min_sites
        self.vault = Vault(spec.folder / "secure", spec.name, spec.kit)
        self.private: RecordPrivacy | None = None
        """Set while a step trains under a budget for single samples."""
        self._data: list[tuple[str, LabelledData | UnlabelledData]] = []

    def begin(self, round: int) -> None:
        """A step begins: what it uses is counted from here on."""
        self.round = round
        for _, data in self._data:
            data.forget_use()

    def seen(self) -> int:
        """How many different samples the step was given: of several sets of data, the least of any that it used."""
        return min((data.seen for _, data in self._data if data.seen), default=0)

    def used(self) -> int:
        """The same of the samples that were drawn, as sites tell it."""
        return min((data.used for _, data in self._data if data.used), default=0)

    def sets_used(self) -> Iterator[tuple[str, NDArray[np.bool_]]]:
        """Of each set of data and each part of the step, which samples the step was given."""
        for name, data in self._data:
            for part in data.parts:
                yield name, part.numpy()

    def _counted(self, data: D, name: str) -> D:
        self._data.append((name, data))
        return data

    @property
    def lr(self) -> float:
        return self.plan.training.lr_at(self.round)

    def hyper(self, kind: type[H]) -> H:
        """The method's own hyper-parameters, as the dataclass in its file."""
        return codec.restore(kind, dict(self.plan.hyper))

    def _labelled(self, split: Split, name: str) -> LabelledData:
        if split.labels is None:
            raise SiteError("method-needs", f"site {self.name!r} has no labels in its {name} split")
        poison = self._poison if name == "train" else 0.0
        return self._counted(LabelledData(split, self.device, poison, len(self._classes)), name)


class Labelled(Site):
    """A site whose labels a method may learn from."""

    @cached_property
    def train(self) -> LabelledData:
        return self._labelled(self._domain.train, "train")

    @cached_property
    def val(self) -> LabelledData:
        return self._labelled(self._domain.val, "val")


class Unlabelled(Site):
    """A site whose labels, if it has any, no method ever sees."""

    @cached_property
    def train(self) -> UnlabelledData:
        return self._counted(UnlabelledData(self._domain.train.without_labels(), self.device), "train")


class WithSource(Unlabelled):
    """An unlabelled site that was given a copy of the home's labelled training data."""

    @cached_property
    def source(self) -> LabelledData:
        (copy,) = self._copies.values()
        return self._labelled(copy, "copied")


class WithTargets(Labelled):
    """The labelled home, given a copy of all clients' training data without labels."""

    @cached_property
    def targets(self) -> dict[str, UnlabelledData]:
        return {
            name: self._counted(UnlabelledData(copy.without_labels(), self.device), f"copied from {name}")
            for name, copy in self._copies.items()
        }

    @cached_property
    def combined(self) -> UnlabelledData:
        """All clients' data as one."""
        return self._counted(UnlabelledData(joined_inputs(list(self._copies.values())), self.device), "copied")


class Evaluated(Site):
    """A site for scoring: the labels of its val and test splits, nothing that is trained on."""

    def begin(self, round: int) -> None:
        self._data.clear()  # Parts of splits are made anew for each step.
        super().begin(round)

    def seen(self) -> int:
        """How many samples were scored: those of all parts, which have none in common."""
        return sum(data.seen for _, data in self._data)

    def split(self, name: Literal["val", "test"]) -> Iterator[LabelledData]:
        """A split in its parts: they may be too large to be put together in memory."""
        domain = self._domain
        for part in (domain.test, *domain.rest) if name == "test" else (domain.val,):
            yield self._labelled(part, name)

    def describe(self) -> dict[str, object]:
        """What the site has, in sizes and names."""
        domain = self._domain
        splits = {"train": [domain.train], "val": [domain.val], "test": [domain.test, *domain.rest]}
        # A split with too few labelled samples cannot be scored, so it is as if it had no labels.
        least = {"train": 1, "val": self._least_scored, "test": self._least_scored}
        labels = [part.labels for parts in splits.values() for part in parts if part.labels is not None]
        tiles = domain.train.tiles
        shape = (tiles.side, tiles.side, 3) if tiles else domain.train.inputs.shape[1:]
        refused = ("val", "test") if self._scoring == "refuse" else ()
        highest = max((int(np.max(part, initial=0, where=part != VOID)) for part in labels), default=-1)
        return {
            "version": __version__,
            "classes": list(self._classes),
            "input_shape": [shape[2], shape[0], shape[1]] if len(shape) == 3 else list(shape),
            "sizes": {name: sum(map(len, parts)) for name, parts in splits.items()},
            "labelled": [
                name
                for name, parts in splits.items()
                if name not in refused and sum(len(part) for part in parts if part.labels is not None) >= least[name]
            ],
            # Under a budget nothing is told that depends on single samples, but for sizes.
            "privacy": codec.plain(self._promise),
            "skipped": 0 if self._promise else len(domain.skipped),
            "dark": 0 if self._promise else len(domain.dark),
            "highest_label": max(highest, len(self._classes) - 1) if self._promise else highest,
        }


_MOST_CLASSES, _MOST_CLASSES_OF_TABLES = 1000, 100


def require_nameable_classes(source: DataSource, policy: Policy) -> None:
    """Refuses data whose class names the site's own file does not let out: more than `max_classes`, names that are not
    in `classes`, or names that fewer than `min_samples` samples of a domain have. An administrator who lists a rare
    class, in `classes` or in `classes.txt`, has decided that it may be told."""
    if source.name is not None:
        return  # The class list of a published data set is public.
    found = survey(source)
    is_table = bool(found.columns)
    most = policy.max_classes or (_MOST_CLASSES_OF_TABLES if is_table else _MOST_CLASSES)
    names = found.form.classes
    if len(names) > most:
        raise SiteError(
            "site-policy",
            f"the data has {len(names)} classes and the site's policy allows {most} (policy.max_classes): is the label"
            " column the right one?",
        )
    labelled = [part for part in found.domains if part.task is not None]
    if found.text_columns:
        raise SiteError(
            "site-policy",
            f"column {found.text_columns[0]!r} holds text, and names of its categories would leave the site: list"
            " them in columns.yaml (categories), the same at every site, or leave the column out",
        )
    if policy.classes is not None and labelled:
        unlisted = sorted(set(names) - set(policy.classes))
        if unlisted:
            raise SiteError(
                "site-policy",
                f"the data has classes that policy.classes does not list: {', '.join(map(repr, unlisted[:6]))}",
            )
        return
    if found.has_class_file:
        return
    for part in labelled:
        for name, count in (part.class_counts() or {}).items():
            if 0 < count < policy.min_samples:
                raise SiteError(
                    "site-policy",
                    f"class {name!r} has {count} samples in {part.name}, fewer than policy.min_samples"
                    f" ({policy.min_samples}), so its name does not leave the site: add samples, or list all classes in"
                    " policy.classes",
                )


_VIEWS: dict[type[Site], tuple[Role, ...]] = {
    Labelled: ("labelled",),
    Unlabelled: ("unlabelled",),
    WithSource: ("unlabelled",),
    WithTargets: ("labelled",),
    Evaluated: ("labelled", "unlabelled", "held-out"),
}


def is_asked(role: Role, view: type[Site]) -> bool:
    """Whether a site of this role may be asked for a step that takes `view`."""
    return role in _VIEWS[view]


def kept_samples(count: int, cap: int | None, share: float) -> int:
    """How many of `count` training samples a site uses, given `SiteSpec.train_cap` and a share."""
    wanted = count if cap is None else min(count, cap)
    return min(wanted, max(1, round(count * share))) if count else 0


class SiteHost:
    """A site's own side of the door: it opens the data once and hands out views of it."""

    def __init__(
        self,
        spec: SiteSpec,
        plan: Plan,
        open_dataset: Callable[[DataSource], Dataset],
        steps: frozenset[str] | None = None,
    ) -> None:
        """`steps`: the only ones that may be asked for; None: every one that is known here."""
        self.spec = spec
        self.plan = plan
        self.steps = steps
        self._open_dataset = open_dataset
        self._views: dict[type[Site], Site] = {}

    @cached_property
    def store(self) -> SiteStore:
        return SiteStore(self.spec.folder / "state")

    @cached_property
    def dataset(self) -> Dataset:
        if self.spec.is_remote:
            require_nameable_classes(self.spec.source, self.spec.policy)
        return self._open_dataset(self.spec.source)

    @cached_property
    def domain(self) -> Domain:
        parts = [self._as_scored(self._as_attacked(self.dataset.load(name))) for name in self.spec.domains]
        train = _concatenate([self._capped(part.train, part.name, self.spec.train_share) for part in parts])
        val, test = _concatenate([part.val for part in parts]), _concatenate([part.test for part in parts])
        return Domain(
            self.spec.name,
            train,
            val,
            test,
            skipped=tuple(skipped for part in parts for skipped in part.skipped),
            dark=tuple(name for part in parts for name in part.dark),
            rest=tuple(split for part in parts for split in part.rest),
        )

    @cached_property
    def copies(self) -> dict[str, Split]:
        """Domain -> the very training samples that its own site uses."""
        return {
            copy.domain: self._capped(self.dataset.load(copy.domain).train, copy.domain, copy.train_share)
            for copy in self.spec.copies
        }

    @cached_property
    def agreement(self) -> str:
        """SHA-256 of the plan and of this site's part in it: the same question under another plan is another one."""
        told = [codec.plain(self.plan), codec.plain(replace(self.spec, policy=Policy()))]
        return codec.sha256(json.dumps(told, sort_keys=True).encode())

    @cached_property
    def data_digest(self) -> str:
        """SHA-256 of what the site learns from."""
        train = self.domain.train
        digest = hashlib.sha256(np.ascontiguousarray(train.inputs).data)
        if train.labels is not None:
            digest.update(np.ascontiguousarray(train.labels).data)
        return digest.hexdigest()

    def view(self, kind: type[Site], round: int) -> Site:
        """The view of `kind`. Views are kept between rounds, so that data becomes tensors once."""
        copies = self.copies if issubclass(kind, WithSource | WithTargets) else None
        if not is_asked(self.spec.role, kind) or copies == {}:
            raise SiteError(
                "site-policy",
                f"a step asked site {self.spec.name!r} ({self.spec.role}) for {kind.__name__} data",
            )
        if kind not in self._views:
            self._views[kind] = kind(self.spec, self.plan, self.domain, self.dataset.classes, round, copies)
        view = self._views[kind]
        view.begin(round)
        return view

    def _as_scored(self, part: Domain) -> Domain:
        """A site that is held out from everyone's training is scored on all its labelled samples, unless a test split
        came with them. Where others adapt to the domain, the splits stay: all methods are scored on the same samples.
        """
        if self.spec.role != "held-out" or self.plan.setting != "generalize" or part.test_given:
            return part
        labelled = [split for split in (part.test, part.train, part.val) if split.labels is not None]
        if not labelled:
            return part
        nothing = part.train.take(np.arange(0))
        return replace(part, train=nothing, val=nothing, test=labelled[0], rest=tuple(labelled[1:]))

    def _as_attacked(self, part: Domain) -> Domain:
        for attack in self.spec.attacks:
            if attack.domain == part.name:
                rng, classes = Rng.of(self.plan.seed, "attack", part.name), len(self.dataset.classes)
                train = spoiled(part.train, attack, classes, rng)
                val = spoiled(part.val, attack, classes, rng.child("val"), trains=False)
                part = replace(part, train=train, val=val)
        return part

    def as_there(self, name: str, used: NDArray[np.bool_]) -> NDArray[np.bool_]:
        """Which samples of all that the site has were `used`, given which of those that take part."""
        if name != "train":
            return used
        taken = np.concatenate(
            [self._taken(len(self.dataset.load(part).train), part, self.spec.train_share) for part in self.spec.domains]
        )
        return np.isin(np.arange(len(taken)), np.flatnonzero(taken)[used])

    def _capped(self, split: Split, domain: str, share: float) -> Split:
        taken = self._taken(len(split), domain, share)
        return split if taken.all() else split.take(np.flatnonzero(taken))

    def _taken(self, count: int, domain: str, share: float) -> NDArray[np.bool_]:
        """Which of `count` training samples take part."""
        wanted = kept_samples(count, self.spec.train_cap, share)
        if wanted == count:
            return np.ones(count, np.bool_)
        # The order is drawn without looking at labels, so that an unlabelled site is cut the same way.
        order = Rng.of(self.plan.seed, "train-subset", domain).numpy().permutation(count)
        return np.isin(np.arange(count), order[:wanted])


def _concatenate(splits: list[Split]) -> Split:
    if len(splits) == 1:
        return splits[0]
    labels = [split.labels for split in splits]
    if any(part is None for part in labels):
        raise InputError("data-labels", "an unlabelled domain cannot be pooled with labelled ones")
    joined: Any = np.concatenate([part for part in labels if part is not None])
    return replace(joined_inputs(splits), labels=joined)
