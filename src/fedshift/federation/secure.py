"""Secure aggregation: the coordinator learns the sum of what sites made, and no site's own.

With `secure_aggregation` a site keeps back every field that its release declares as `summed` (federation/masking.py).
When the method averages, the coordinator shows all sites that answered the list of their public keys, and each sends
what it kept, masked. A site does so once per round and field. If one of them drops out before it has answered, that sum
is lost: another one, without it, would tell what it sent if it comes after all. The round then ends with the model that
it began with.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fedshift.errors import InputError, SiteError
from fedshift.federation.checks import Refused, Sizes, require
from fedshift.federation.codec import Limits
from fedshift.federation.masking import LARGEST, LARGEST_WIDE, Layout, Sum, plan_digest, scales
from fedshift.federation.releases import Facts, Masked, Release, Weights
from fedshift.federation.site import Evaluated
from fedshift.federation.step import Step, step

if TYPE_CHECKING:
    from fedshift.federation.federation import Federation, Replies

_MARK = "~held:"
_WEIGHT_ERROR = 1e-6


@dataclass(frozen=True)
class Offered(Release):
    """A site's public key for the run, with the signature of its certificate where it has one."""

    key: Facts


@dataclass(frozen=True)
class Masks(Release):
    """What a site kept back, masked: alone it is noise."""

    numbers: Masked
    summed = frozenset({"numbers"})


@step
def offer(site: Evaluated) -> Offered:
    """The site's half of the run's keys."""
    return Offered(key=site.vault.public())


@step(numbered_by=("held",))
def reveal(site: Evaluated, held: str, keys: Mapping[str, Mapping[str, Any]], counted: bool, largest: int) -> Masks:
    """What the site kept back in this round for `held`, for the sum over the sites in `keys`."""
    if len(keys) < site.min_sites:
        raise SiteError("site-policy", f"a sum over {len(keys)} sites; policy.min_sites is {site.min_sites}")
    if largest < 1:
        raise SiteError("site-policy", "a sum that nobody counts in")
    narrow, wide = site.vault.masked(Sum(site.round, held, keys, counted, largest), plan_digest(site.plan))
    return Masks(numbers={"narrow": narrow, "wide": wide})


@dataclass(frozen=True)
class KeptBack:
    """What the coordinator expects in place of a field that is summed: nothing."""

    limits = Limits(0, header=128, tensors=0, nodes=4)

    def check(self, value: Any, sizes: Sizes) -> None:
        require(value == {}, "schema")


@dataclass(frozen=True)
class _Shaped:
    """Masked numbers, so many of each width."""

    narrow: int
    wide: int

    @property
    def limits(self) -> Limits:
        return Limits(4 * self.narrow + 8 * self.wide, header=1024, tensors=2, nodes=8)

    def check(self, value: Any, sizes: Sizes) -> None:
        if set(value) != {"narrow", "wide"}:
            raise Refused("keys")
        for name, count, dtype in (("narrow", self.narrow, torch.int32), ("wide", self.wide, torch.int64)):
            require(value[name].dtype == dtype and value[name].shape == (count,), "shape")


@dataclass
class _Held:
    """One field of the last answers to a step: who has kept it back, and the model that they started from."""

    since: Mapping[str, Tensor]
    counts: dict[str, float] = field(default_factory=dict)


def _is_too_much(changes: tuple[NDArray[np.float64], NDArray[np.float64]], weight: float) -> bool:
    """Whether a mean change is beyond what each site may have: some site has sent more."""
    parts = (changes[0], LARGEST), (changes[1][:-1], LARGEST_WIDE)
    return any(float(np.abs(part).max(initial=0)) > most * weight * (1 + _WEIGHT_ERROR) for part, most in parts)


@dataclass
class SecureSums:
    """The coordinator's side."""

    _held: dict[str, _Held] = field(default_factory=dict)
    _keys: dict[str, Mapping[str, Any]] = field(default_factory=dict)

    def expected(self, step: Step[Any]) -> dict[str, KeptBack]:
        return {name: KeptBack() for name in step.release.summed}

    def asked(self, step: Step[Any], payload: Mapping[str, Any]) -> None:
        """A step whose fields are kept back is asked of all its sites with the same models."""
        for name in step.release.summed:
            since = payload.get(name)
            if not isinstance(since, Mapping):
                raise InputError("method-needs", f"secure_aggregation: {step.name} sums {name}, which it was not sent")
            self._held[f"{step.name}/{name}"] = _Held(since)

    def marked(self, step: Step[Any], site: str, release: Any) -> dict[str, Weights]:
        """For each field that was kept back, what stands for it until it is summed."""
        names = [f"{step.name}/{name}" for name in step.release.summed]
        for held in names:
            self._held[held].counts[site] = float(getattr(release, "samples", 1))
        return {held.rpartition("/")[2]: {_MARK + held: torch.zeros(0)} for held in names}

    def sum(self, fed: Federation, models: Sequence[tuple[Weights, float]]) -> dict[str, Tensor]:
        """The weighted mean of what sites kept back, which these stand for."""
        marks = {next(iter(model), "") for model, _ in models}
        held = next(iter(marks), "").removeprefix(_MARK)
        if len(marks) != 1 or held not in self._held:
            raise InputError("method-needs", f"secure_aggregation: {fed.plan.method} combines models one by one")
        about = self._held[held]
        sites, weights = sorted(about.counts), [weight for _, weight in models]
        counted = len(set(weights)) > 1
        if len(models) != len(sites) or (counted and sorted(weights) != sorted(about.counts.values())):
            raise InputError("method-needs", f"secure_aggregation: {fed.plan.method} gives sites weights of its own")
        total = self._total(fed, held, about, sites, counted)
        return {name: value.clone() for name, value in about.since.items()} if total is None else total

    def _total(
        self, fed: Federation, held: str, about: _Held, sites: Sequence[str], counted: bool
    ) -> dict[str, Tensor] | None:
        new = [site for site in sites if site not in self._keys]
        if new:
            for site, offered in fed.ask(new, offer, any_answer=True):
                self._keys[site] = offered.key
        layout = Layout.of(about.since)
        narrow, wide = (sum(about.since[name].numel() for name in names) for names in (layout.narrow, layout.wide))
        keys = {site: self._keys[site] for site in sites if site in self._keys}
        largest = max(1, int(max(about.counts.values())))
        shape = {"numbers": _Shaped(narrow, wide + 1)}
        replies: Replies[Masks] = fed.ask(
            sorted(keys), reveal, expect=shape, held=held, keys=keys, counted=counted, largest=largest
        )
        if len(replies) < len(sites):
            fed.count("secure.lost-sums")
            return None
        in_32, in_64 = np.zeros(narrow, np.uint32), np.zeros(wide + 1, np.uint64)
        for _, masks in replies:
            in_32 += masks.numbers["narrow"].numpy().view(np.uint32)
            in_64 += masks.numbers["wide"].numpy().view(np.uint64)
        small, large = scales(len(sites))
        changes = in_32.view(np.int32) / small, in_64.view(np.int64) / large
        weight = float(changes[1][-1]) * 2 / LARGEST_WIDE
        stated = sum(about.counts[site] for site in sites) / largest if counted else len(sites)
        if abs(weight - stated) > _WEIGHT_ERROR * stated or _is_too_much(changes, weight):
            # Within the masks a site may say what it likes: with weights that add up to 0, no number would be one.
            fed.count("secure.wrong-sums")
            return None
        found = {name: value.clone() for name, value in about.since.items()}
        for names, change in zip((layout.narrow, layout.wide), changes, strict=True):
            start = 0
            for name in names:
                old = about.since[name]
                part = torch.from_numpy(change[start : start + old.numel()]).reshape(old.shape) / weight
                found[name] = (old.double() + part).to(old.dtype)
                start += old.numel()
        return found
