"""A site as a step sees it. The type that a step asks for decides which view it gets: `Labelled` and `Unlabelled` for
learning, `Evaluated` for scoring only. Between rounds a site keeps its own state in `SiteStore`."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any, Literal, TypeVar

import numpy as np
import torch

from fedshift._version import __version__
from fedshift.data.attacks import Attack, spoiled
from fedshift.data.batches import LabelledData, UnlabelledData
from fedshift.data.domain import VOID, Dataset, DataSource, Domain, Split
from fedshift.errors import InputError, SiteError
from fedshift.federation import codec
from fedshift.federation.plan import Plan
from fedshift.federation.policy import Policy
from fedshift.files import write_atomically
from fedshift.rng import Rng

# The coordinator may fall back to the checkpoint before its last: the site must still have that round's state.
_KEPT_VERSIONS = 3


class SiteStore:
    """Named trees, one file a round: `<name>@<round>.safetensors`."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def load(self, name: str) -> Any | None:
        """The newest version, or None."""
        versions = self._versions(name)
        return codec.unpack(versions[max(versions)].read_bytes()) if versions else None

    def save(self, name: str, tree: Any, round: int) -> None:
        write_atomically(self._folder / f"{name}@{round}.safetensors", codec.pack(tree))
        versions = self._versions(name)
        for old in sorted(versions)[:-_KEPT_VERSIONS]:
            versions[old].unlink(missing_ok=True)

    def rewind(self, round: int) -> None:
        """Forgets everything written after `round`: what an interrupted attempt at a later round left behind."""
        for path in self._folder.glob("*@*.safetensors"):
            match = re.search(r"@(\d+)$", path.stem)
            if match and int(match.group(1)) > round:
                path.unlink(missing_ok=True)

    def _versions(self, name: str) -> dict[int, Path]:
        return {int(path.stem.rsplit("@", 1)[1]): path for path in self._folder.glob(f"{name}@*.safetensors")}


Role = Literal["labelled", "unlabelled", "held-out"]
H = TypeVar("H")


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
        self._poison = spec.poison

    @property
    def lr(self) -> float:
        return self.plan.training.lr_at(self.round)

    def hyper(self, kind: type[H]) -> H:
        """The method's own hyper-parameters, as the dataclass in its file."""
        return codec.restore(kind, dict(self.plan.hyper))

    def _labelled(self, split: Split, name: str) -> LabelledData:
        if split.labels is None:
            raise SiteError("method-needs", f"site {self.name!r} has no labels in its {name} split")
        return LabelledData(split, self.device, self._poison if name == "train" else 0.0, len(self._classes))


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
        return UnlabelledData(self._domain.train.without_labels(), self.device)


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
        return {name: UnlabelledData(copy.without_labels(), self.device) for name, copy in self._copies.items()}

    @cached_property
    def combined(self) -> UnlabelledData:
        """All clients' data as one."""
        inputs = np.concatenate([copy.inputs for copy in self._copies.values()])
        return UnlabelledData(Split(inputs, None), self.device)


class Evaluated(Site):
    """A site for scoring: the labels of its val and test splits, nothing that is trained on."""

    def split(self, name: Literal["val", "test"]) -> Iterator[LabelledData]:
        """A split in its parts: they may be too large to be put together in memory."""
        domain = self._domain
        for part in (domain.test, *domain.rest) if name == "test" else (domain.val,):
            yield self._labelled(part, name)

    def describe(self) -> dict[str, object]:
        """What the site has, in sizes and names."""
        domain = self._domain
        splits = {"train": [domain.train], "val": [domain.val], "test": [domain.test, *domain.rest]}
        labels = [part.labels for parts in splits.values() for part in parts if part.labels is not None]
        shape = domain.train.inputs.shape[1:]
        return {
            "version": __version__,
            "classes": list(self._classes),
            "input_shape": [shape[2], shape[0], shape[1]] if len(shape) == 3 else list(shape),
            "sizes": {name: sum(map(len, parts)) for name, parts in splits.items()},
            "labelled": [name for name, parts in splits.items() if any(len(p) for p in parts if p.labels is not None)],
            "skipped": len(domain.skipped),
            "dark": len(domain.dark),
            "highest_label": max((int(np.max(part, initial=0, where=part != VOID)) for part in labels), default=-1),
        }


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

    def __init__(self, spec: SiteSpec, plan: Plan, open_dataset: Callable[[DataSource], Dataset]) -> None:
        self.spec = spec
        self.plan = plan
        self._open_dataset = open_dataset
        self._views: dict[type[Site], Site] = {}

    @cached_property
    def dataset(self) -> Dataset:
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
        view.round = round
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
                part = replace(part, train=train, val=spoiled(part.val, attack, classes, rng.child("val")))
        return part

    def _capped(self, split: Split, domain: str, share: float) -> Split:
        wanted = kept_samples(len(split), self.spec.train_cap, share)
        if wanted == len(split):
            return split
        # The order is drawn without looking at labels, so that an unlabelled site is cut the same way.
        order = Rng.of(self.plan.seed, "train-subset", domain).numpy().permutation(len(split))
        return split.take(np.sort(order[:wanted]))


def _concatenate(splits: list[Split]) -> Split:
    if len(splits) == 1:
        return splits[0]
    labels = [split.labels for split in splits]
    if any(part is None for part in labels):
        raise InputError("data-labels", "an unlabelled domain cannot be pooled with labelled ones")
    joined: Any = np.concatenate([part for part in labels if part is not None])
    return Split(np.concatenate([split.inputs for split in splits]), joined)
