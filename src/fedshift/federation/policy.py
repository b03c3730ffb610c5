"""A site's own rules about what may leave it. They are applied at the site, after a step, before anything is sent."""

from __future__ import annotations

import dataclasses
import math
import secrets
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fedshift.data.domain import MIN_SAMPLES
from fedshift.errors import SiteError
from fedshift.federation.releases import Release, kinds
from fedshift.functional.averaging import add_noise, update_norm


@dataclass(frozen=True)
class Policy:
    """`allow`: kinds that may leave (None: every declared kind). `min_samples`: fewer training samples than this and
    nothing learned from them leaves, because a model fitted to a handful of images gives those images away; nor does a
    mixture with a component made from fewer.
    `clip_norm`: longest update of weights, in L2. `noise`: standard deviation of Gaussian noise added to it.
    `imports`: modules with methods or networks that do not come with fedshift, which a site on another machine will
    import when a run asks for them."""

    allow: tuple[str, ...] | None = None
    min_samples: int = MIN_SAMPLES
    clip_norm: float | None = None
    noise: float = 0.0
    imports: tuple[str, ...] = ()

    def check_samples(self, samples: int) -> None:
        if samples < self.min_samples:
            raise SiteError(
                "site-policy",
                f"the site has {samples} training samples and its policy asks for at least {self.min_samples}"
                " before anything learned from them may leave; add data or lower policy.min_samples",
            )

    def apply(self, release: Release, received: Mapping[str, Any]) -> tuple[Release, int]:
        """The release as it may leave, and how many of its fields were clipped. `received` is the step's payload:
        weights are clipped and noised as the update to what came under the same name."""
        changed: dict[str, Any] = {}
        clipped = 0
        for field, kind in kinds(type(release)).items():
            if self.allow is not None and kind.name not in self.allow:
                raise SiteError("site-policy", f"the site's policy does not allow {kind.name!r} to leave it")
            if kind.name == "mixture":
                self._check_components(getattr(release, field))
            if kind.name == "weights" and (self.clip_norm is not None or self.noise > 0):
                value, was_clipped = self._protect(getattr(release, field), received.get(field))
                changed[field] = value
                clipped += was_clipped
        return (dataclasses.replace(release, **changed) if changed else release), clipped

    def _check_components(self, mixture: Mapping[str, Tensor]) -> None:
        """Fails closed: a mixture that does not say how many samples made each component may not leave either."""
        if not mixture:
            return
        counts, means = mixture.get("counts", torch.zeros(0)), mixture.get("means", torch.zeros(1))
        if len(counts) != len(means) or bool((counts < self.min_samples).any()):
            raise SiteError(
                "site-policy",
                f"a mixture has a component made from fewer than {self.min_samples} samples (policy.min_samples)",
            )

    def _protect(
        self, weights: Mapping[str, Tensor], old: Mapping[str, Tensor] | None
    ) -> tuple[dict[str, Tensor], bool]:
        origin = old or {key: torch.zeros_like(value) for key, value in weights.items()}
        norm = update_norm(weights, origin)
        limit = math.inf if self.clip_norm is None else self.clip_norm
        scale = min(1.0, limit / norm) if norm > 0 else 1.0
        # Never derive this from the run's seed: the coordinator knows the seed and could subtract the noise again.
        generator = torch.Generator().manual_seed(secrets.randbits(63))
        clipped = {
            key: origin[key] + (value - origin[key]) * scale if value.is_floating_point() else value
            for key, value in weights.items()
        }
        return add_noise(clipped, self.noise, generator), scale < 1.0
