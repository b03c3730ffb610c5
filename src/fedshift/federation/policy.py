"""A site's own rules about what it may be asked and what may leave it. They are applied at the site: to the plan
before a step runs, to the samples that it used, and to what it released before anything is sent."""

from __future__ import annotations

import dataclasses
import hashlib
import hmac
import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from fedshift.data.domain import LARGEST_IMAGE, MIN_SAMPLES, SMALLEST_IMAGE
from fedshift.errors import InputError, SiteError, nearest
from fedshift.federation import codec
from fedshift.federation.engines.workers import MOST_ROUNDS
from fedshift.federation.plan import Plan
from fedshift.federation.releases import KINDS, SINGLE_SAMPLES, Release, kinds
from fedshift.functional.accountant import Mechanism
from fedshift.functional.averaging import update_norm
from fedshift.rng import secret_normals

_MOST = 10**9
MOST_QUESTIONS = _MOST
_MOST_THREADS = 256

Level = Literal["site", "record"]


@dataclass(frozen=True)
class Promise:
    """What a site promises to stay within: `epsilon` and `delta` of differential privacy. Level `site`: between any two
    data sets that it could have, of the same sizes. Level `record`: whether one training sample takes part. Both hold
    towards whoever sees the site's own answers. `noise` is as in `Mechanism`."""

    level: Level
    epsilon: float
    delta: float
    noise: float

    def answer(self, rate: float = 1.0, steps: int = 1) -> Mechanism:
        """What one answer costs; on level `record` one that took so many steps."""
        return Mechanism(self.noise, rate, steps)


@dataclass(frozen=True)
class Policy:
    """`allow`: kinds that may leave (None: every kind but those of single samples, `SINGLE_SAMPLES`). `min_samples`:
    nothing made from fewer different samples than this leaves, because a model fitted to a handful of images gives
    those images away: no training, no score, no mixture with a component of fewer, no name of a class with fewer.
    `min_scored`: a split with fewer labelled samples is not scored (None: `min_samples`).
    `clip_norm`: longest update of weights, in L2. `noise`: standard deviation of Gaussian noise added to it.
    `imports`: modules with methods or networks that do not come with fedshift, which a site on another machine will
    import when a run asks for them. `methods`: those it takes part in (None: every one that is installed). `min_steps`:
    weights leave only after this many optimiser steps. `min_batch_size`: smallest batch size of a plan. `max_rounds`
    and `max_questions`: the most per run. `max_resumes`: how often a run may go on after an interruption, and ask the
    last rounds again. `max_image_size`: the largest that images may be asked for, in pixels.

    `secure_aggregation`: whether the site takes part only in runs whose coordinator sees nothing but sums over sites,
    of `min_sites` at least.

    `epsilon` and `delta`: the budget of differential privacy for all that leaves, of every run together; it takes
    `clip_norm` and `noise`. `record_epsilon` is one for single training samples instead, kept by DP-SGD with `dp_clip`,
    the longest gradient of a sample, and `dp_noise`, the noise in multiples of it. `scores` under a budget: refuse
    (None), noise, or exact, which is outside of it.

    For the file of a site on another machine: `label_column`: the column of its table with the classes. `classes`: the
    only names of classes that it may tell. `max_classes`: the most classes that its data may have (None: 1000 of
    images, 100 of tables, so that a column of identifiers is none of labels)."""

    allow: tuple[str, ...] | None = None
    min_samples: int = MIN_SAMPLES
    min_scored: int | None = None
    clip_norm: float | None = None
    noise: float = 0.0
    secure_aggregation: bool = False
    min_sites: int = 3
    epsilon: float | None = None
    delta: float = 1e-5
    record_epsilon: float | None = None
    dp_clip: float = 1.0
    dp_noise: float = 0.0
    scores: Literal["refuse", "noise", "exact"] | None = None
    imports: tuple[str, ...] = ()
    methods: tuple[str, ...] | None = None
    min_steps: int = 0
    min_batch_size: int = 1
    max_rounds: int = 10_000
    max_questions: int = 100_000
    max_resumes: int = 100
    max_image_size: int = LARGEST_IMAGE
    label_column: str | None = None
    classes: tuple[str, ...] | None = None
    max_classes: int | None = None

    def __post_init__(self) -> None:
        """A value that is not understood is an error, never a weaker policy."""
        for key in ("allow", "imports", "methods", "classes"):
            value = getattr(self, key)
            if value is None and key != "imports":
                continue
            if not isinstance(value, list | tuple) or not all(type(item) is str and item for item in value):
                raise _wrong(key, "a list of names", value)
            object.__setattr__(self, key, tuple(value))
        for name in self.allow or ():
            if name not in KINDS:
                raise InputError("config-value", f"policy.allow: there is no kind {name!r}. {nearest(name, KINDS)}")
        for module in self.imports:
            if not re.fullmatch(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*", module):
                raise _wrong("imports", "a list of module names such as package.module", self.imports)
        least = {"min_samples": 1, "min_steps": 0, "min_batch_size": 1, "max_rounds": 1, "max_questions": 1}
        most = {"max_rounds": MOST_ROUNDS, "max_image_size": LARGEST_IMAGE}
        limits = {key: (low, most.get(key, _MOST)) for key, low in least.items()}
        limits |= {"max_image_size": (SMALLEST_IMAGE, LARGEST_IMAGE), "max_classes": (2, _MOST)}
        limits |= {"min_sites": (2, _MOST), "min_scored": (1, _MOST), "max_resumes": (0, _MOST)}
        for key, (low, high) in limits.items():
            value = getattr(self, key)
            if value is None and key in ("max_classes", "min_scored"):
                continue
            if type(value) is not int or not low <= value <= high:
                raise _wrong(key, f"a whole number from {low} to {high}", value)
        if not _is_number(self.noise) or self.noise < 0:
            raise _wrong("noise", "a number of 0 or more", self.noise)
        if self.clip_norm is not None and (not _is_number(self.clip_norm) or self.clip_norm <= 0):
            raise _wrong("clip_norm", "a number above 0, or null for no limit", self.clip_norm)
        if self.label_column is not None and (type(self.label_column) is not str or not self.label_column):
            raise _wrong("label_column", "the name of a column", self.label_column)
        if type(self.secure_aggregation) is not bool:
            raise _wrong("secure_aggregation", "true or false", self.secure_aggregation)
        self._check_budget()

    def _check_budget(self) -> None:
        for key in ("epsilon", "record_epsilon"):
            value = getattr(self, key)
            if value is not None and (not _is_number(value) or value <= 0):
                raise _wrong(key, "a number above 0, or null for no budget", value)
        if not _is_number(self.delta) or not 0 < self.delta < 1:
            raise _wrong("delta", "a number above 0 and below 1, such as 1e-5", self.delta)
        if not _is_number(self.dp_clip) or self.dp_clip <= 0:
            raise _wrong("dp_clip", "a number above 0", self.dp_clip)
        if not _is_number(self.dp_noise) or self.dp_noise < 0:
            raise _wrong("dp_noise", "a number of 0 or more", self.dp_noise)
        if self.scores not in (None, "refuse", "noise", "exact"):
            raise _wrong("scores", "refuse, noise or exact", self.scores)
        advice = "`fedshift privacy METHOD --epsilon E --rounds N` proposes them"
        if self.epsilon is not None and self.record_epsilon is not None:
            raise InputError("config-value", "policy.epsilon and policy.record_epsilon: a site keeps one of them")
        if self.epsilon is not None and (self.clip_norm is None or self.noise == 0):
            raise InputError("config-value", f"policy.epsilon takes policy.clip_norm and policy.noise: {advice}")
        if self.record_epsilon is not None and self.dp_noise == 0:
            raise InputError("config-value", f"policy.record_epsilon takes policy.dp_noise: {advice} (--level record)")
        if self.record_epsilon is not None and (self.clip_norm is not None or self.noise > 0):
            raise InputError(
                "config-value", "policy.record_epsilon: the noise is in the training, so leave out clip_norm and noise"
            )

    @property
    def promise(self) -> Promise | None:
        """The budget that the site keeps, if it has one."""
        if self.epsilon is not None:
            # Two updates of at most `clip_norm` are at most twice that apart.
            return Promise("site", self.epsilon, self.delta, self.noise / (2 * (self.clip_norm or math.inf)))
        if self.record_epsilon is not None:
            return Promise("record", self.record_epsilon, self.delta, self.dp_noise)
        return None

    @property
    def scoring(self) -> Literal["refuse", "noise", "exact"]:
        """How held-back samples are scored."""
        return self.scores or ("exact" if self.promise is None else "refuse")

    def check_plan(self, plan: Plan) -> None:
        """Refuses a plan that asks for what this site does not take part in, or whose numbers make no sense."""
        training, model = plan.training, plan.model
        rates = (training.lr, training.lr_min, training.momentum, training.weight_decay, training.backbone_lr_factor)
        whole = (
            (training.rounds, 0, MOST_ROUNDS),
            (training.batch_size, 1, _MOST),
            (training.probe_epochs, 0, MOST_ROUNDS),
            (plan.threads, 1, _MOST_THREADS),
            (plan.seed, -(2**63), 2**64),
            *((size, 1, _MOST) for size in model.input_shape),
        )
        if (
            not all(low <= value <= high for value, low, high in whole)
            or not all(math.isfinite(rate) and rate >= 0 for rate in rates)
            or not (math.isfinite(training.local_epochs) and 0 < training.local_epochs <= MOST_ROUNDS)
            or training.momentum >= 1
        ):
            raise SiteError("message-invalid", "a number of the plan is out of range")
        if self.secure_aggregation and not plan.secure_aggregation:
            raise SiteError("site-policy", "the site takes part with secure_aggregation=true only (its policy says so)")
        if self.methods is not None and plan.method not in self.methods:
            raise SiteError("site-policy", f"the site's policy does not list the method {plan.method!r}")
        if training.rounds > self.max_rounds:
            raise SiteError(
                "site-policy", f"{training.rounds} rounds are more than policy.max_rounds={self.max_rounds}"
            )
        if training.batch_size < self.min_batch_size:
            raise SiteError(
                "site-policy",
                f"a batch size of {training.batch_size} is below policy.min_batch_size={self.min_batch_size}",
            )
        if len(model.input_shape) == 3 and max(model.input_shape) > self.max_image_size:
            raise SiteError(
                "site-policy", f"images of {model.input_shape} are above policy.max_image_size={self.max_image_size}"
            )

    def check_questions(self, count: int, starts: int) -> None:
        if count > self.max_questions:
            raise SiteError("site-policy", f"question {count} of this run: policy.max_questions={self.max_questions}")
        if starts - 1 > self.max_resumes:
            raise SiteError("site-policy", f"the run was begun {starts} times: policy.max_resumes={self.max_resumes}")

    def check_samples(self, samples: int) -> None:
        if samples < self.min_samples:
            raise SiteError(
                "site-policy",
                f"the site has {samples} training samples and its policy asks for at least {self.min_samples}"
                " before anything learned from them may leave; add data or lower policy.min_samples",
            )

    @property
    def least_scored(self) -> int:
        """The fewest labelled samples that a score may be made from."""
        return self.min_samples if self.min_scored is None else self.min_scored

    def check_used(self, samples: int, steps: int, release: type[Release], *, scores: bool = False) -> None:
        """Refuses what was made from too few samples, or weights after too few optimiser steps. Facts are made from
        none; what is masked was checked when it was made."""
        names = {kind.name for kind in kinds(release).values()}
        least, key = (self.least_scored, "min_scored") if scores else (self.min_samples, "min_samples")
        if not names <= {"facts", "masked"} and samples < least:
            raise SiteError(
                "site-policy",
                f"the step used {samples} different samples and policy.{key} asks for {least} before"
                " anything made from them may leave",
            )
        if "weights" in names and steps < self.min_steps:
            raise SiteError("site-policy", f"the step took {steps} optimiser steps, policy.min_steps={self.min_steps}")

    def apply(self, release: Release, received: Mapping[str, Any], secret: Callable[[], bytes]) -> tuple[Release, int]:
        """The release as it may leave, and how many of its fields were clipped. `received` is the step's payload:
        weights are clipped and noised as the update to what came under the same name. `secret` reads the site's own
        key, which noise is made from."""
        changed: dict[str, Any] = {}
        clipped = 0
        for field, kind in kinds(type(release)).items():
            if kind.name in SINGLE_SAMPLES and kind.name not in (self.allow or ()):
                raise SiteError(
                    "site-policy", f"{kind.name!r} of single samples leave only if the site's policy.allow lists them"
                )
            # What is masked are weights, which the site kept back under this very policy.
            listed = "weights" if kind.name == "masked" else kind.name
            if self.allow is not None and listed not in self.allow:
                raise SiteError("site-policy", f"the site's policy does not allow {kind.name!r} to leave it")
            if kind.name == "mixture":
                self._check_components(getattr(release, field))
            hides = self.clip_norm is not None or self.noise > 0
            if kind.name == "weights" and hides and self.promise is None:
                value, was_clipped = self._protect(getattr(release, field), received.get(field), secret)
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
        self, weights: Mapping[str, Tensor], old: Mapping[str, Tensor] | None, secret: Callable[[], bytes]
    ) -> tuple[dict[str, Tensor], bool]:
        origin = old or {key: torch.zeros_like(value) for key, value in weights.items()}
        norm = update_norm(weights, origin)
        if not math.isfinite(norm):
            # What came may hold a NaN where training does not read it, such as in the statistics that BatchNorm writes.
            raise SiteError("site-policy", "an update that is not finite can be neither clipped nor hidden by noise")
        limit = math.inf if self.clip_norm is None else self.clip_norm
        scale = min(1.0, limit / norm) if norm > 0 else 1.0
        clipped = {
            key: origin[key] + (value - origin[key]) * scale if value.is_floating_point() else value
            for key, value in weights.items()
        }
        if self.noise == 0:
            return clipped, scale < 1.0
        # The noise is a function of the weights themselves and of a secret that never leaves the site. Noise that is
        # drawn anew averages out when the same is asked again. Noise that depends on the question (its run, round, seed
        # or payload) does too, because the coordinator can vary what has no effect on the answer. This noise is new
        # only where the weights are, and each such question counts towards `max_questions`. Never derive it from the
        # run's seed alone: the coordinator knows that and could subtract the noise again.
        content = codec.content_digest(clipped, {"noise": self.noise})
        key = hmac.digest(secret(), content.encode(), hashlib.sha256)
        return _with_noise(clipped, self.noise, key), scale < 1.0


def _with_noise(weights: Mapping[str, Tensor], deviation: float, key: bytes) -> dict[str, Tensor]:
    """Adds Gaussian noise made from `key` to every number of every floating tensor; integer buffers stay."""
    # Not torch's generator: it has 2^32 seeds. Where an update is known to be 0, as that of a frozen layer, whoever
    # tries them all finds the one that fits, and with it the noise on everything else.
    noisy = dict(weights)
    for name, value in weights.items():
        if value.is_floating_point():
            normal = secret_normals(key + name.encode(), value.numel())
            noisy[name] = value + torch.from_numpy(deviation * normal).to(value).reshape(value.shape)
            if name.endswith("running_var"):
                noisy[name].clamp_(min=0)  # A network takes its root.
    return noisy


def _is_number(value: object) -> bool:
    return type(value) in (int, float) and math.isfinite(value)  # type: ignore[arg-type]


def _wrong(key: str, wanted: str, value: object) -> InputError:
    return InputError("config-value", f"policy.{key} must be {wanted}, not {value!r}")
