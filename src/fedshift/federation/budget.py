"""A site's budget of differential privacy: what its answers have cost, and answers that stay within it.

Under a budget nothing leaves that depends on samples, but through Gaussian noise whose cost is written down first. What
is public is told as it is: sizes of splits, classes, shapes. What cannot be hidden is refused or left out.

Noise is a function of a key of the run at this site, of the question, of what is hidden, and of the data it comes from:
the same question gets the same answer again, which tells nothing new and costs nothing; anything else gets noise of its
own. (Noise that depends on the hidden content alone would be no protection: equal contents of two questions would show
themselves as equal answers.)
"""

from __future__ import annotations

import dataclasses
import hashlib
import hmac
import json
import math
import secrets
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fedshift.errors import FedshiftError, InputError, SiteError
from fedshift.federation import codec
from fedshift.federation.policy import Policy, Promise
from fedshift.federation.releases import Release, kinds
from fedshift.files import write_atomically
from fedshift.functional.accountant import Mechanism, epsilon_of
from fedshift.functional.averaging import update_norm
from fedshift.rng import secret_normals, secret_uniforms

BUDGET, CHARGED = "privacy-budget.json", "charged"
_FORMAT = 1
HIDDEN_BY_NOISE = frozenset({"weights", "counts"})
REPLACED = frozenset({"count", "tally", "metric"})
"""Kinds that are one number. Noise that hides it would leave nothing of it, so what leaves is the same for all data."""
LEAVING = HIDDEN_BY_NOISE | REPLACED | {"facts", "masked"}
"""Kinds that leave a site under a budget."""


def read_key(path: Path) -> bytes:
    """The 32 secret bytes of a file, made when they are first needed."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        # Linked into place whole: of two processes that make one at the same time, both read the same.
        fresh = path.with_name(f".{path.name}.{secrets.token_hex(8)}")
        if not path.exists():
            fresh.touch(0o600, exist_ok=False)
            fresh.write_bytes(secrets.token_bytes(32))
            with suppress(FileExistsError):
                path.hardlink_to(fresh)
            fresh.unlink()
        key = path.read_bytes()
    except OSError as error:
        raise InputError("disk", f"cannot read or write {path}: {error.strerror or error}") from error
    if len(key) != 32:
        raise InputError("deploy-kit", f"{path} is damaged: delete it, and a new one is made")
    return key


@dataclass(frozen=True)
class _Account:
    format: int
    spent: tuple[Mechanism, ...]


class Budget:
    """What all runs at a site have spent together, in a file beside its key. What a run was charged for already is in
    the run's own folder."""

    def __init__(self, key_file: Path, run: Path, promise: Promise) -> None:
        self._file, self._charged = key_file.with_name(BUDGET), run / CHARGED
        self._promise = promise

    @property
    def spent(self) -> tuple[Mechanism, ...]:
        if not self._file.exists():
            return ()
        try:
            account = codec.restore(_Account, json.loads(self._file.read_text()))
            if account.format == _FORMAT and all(_is_sound(answer) for answer in account.spent):
                return account.spent
        except (OSError, ValueError, RecursionError, FedshiftError):
            pass
        raise SiteError("privacy-budget", f"{self._file} is damaged: restore it from a copy; nothing leaves without it")

    @property
    def epsilon(self) -> float:
        """The epsilon of everything so far."""
        return epsilon_of(self.spent, self._promise.delta)

    def charge(self, answer: Mechanism, mark: str) -> float:
        """Writes down what an answer costs, before it leaves; what was spent in all then. The answer with this `mark`
        is paid for once. Raises `SiteError` if it would cost more than is left."""
        with self._locked():
            spent = self.spent
            if self._is_charged(mark):
                return epsilon_of(spent, self._promise.delta)
            total = _added(spent, answer)
            epsilon = epsilon_of(total, self._promise.delta)
            if epsilon > self._promise.epsilon:
                before, key = epsilon_of(spent, self._promise.delta), _key_of(self._promise)
                raise SiteError(
                    "privacy-budget",
                    f"this answer would bring the epsilon of all answers from {before:.3g} to {epsilon:.3g} (delta"
                    f" {self._promise.delta:g}), and the site's policy.{key} is {self._promise.epsilon:g}",
                )
            try:
                # In this order: a site that is killed in between pays twice and never too little.
                write_atomically(self._file, json.dumps(codec.plain(_Account(_FORMAT, total))).encode())
                with self._charged.open("a") as file:
                    file.write(f"{mark}\n")
            except OSError as error:
                raise InputError("disk", f"cannot write {self._file}: {error.strerror or error}") from error
            return epsilon

    def _is_charged(self, mark: str) -> bool:
        return self._charged.exists() and mark in self._charged.read_text().split("\n")

    @contextmanager
    def _locked(self) -> Iterator[None]:
        """Several runs at a site spend from one budget."""
        self._file.parent.mkdir(parents=True, exist_ok=True)
        self._charged.parent.mkdir(parents=True, exist_ok=True)
        try:
            import fcntl
        except ImportError:  # Windows: no advisory locks of this kind.
            yield
            return
        with self._file.with_name(f".{BUDGET}.lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            yield


def _is_sound(answer: Mechanism) -> bool:
    return answer.noise > 0 and math.isfinite(answer.noise) and 0 < answer.rate <= 1 and answer.times >= 0


def _added(spent: Sequence[Mechanism], answer: Mechanism) -> tuple[Mechanism, ...]:
    """What was spent and one more answer; like answers are counted together."""
    times = {(one.noise, one.rate): one.times for one in spent}
    times[answer.noise, answer.rate] = times.get((answer.noise, answer.rate), 0) + answer.times
    return tuple(Mechanism(noise, rate, count) for (noise, rate), count in times.items())


def _key_of(promise: Promise) -> str:
    return "epsilon" if promise.level == "site" else "record_epsilon"


@dataclass
class RecordPrivacy:
    """For a step that trains under a budget for single samples (methods/private.py): the longest gradient of a sample,
    the noise in multiples of it, and randomness that nobody else has. `rate` and `steps` say how it has trained."""

    clip: float
    noise: float
    key: bytes
    rate: float = 0.0
    steps: int = 0
    _drawn: int = field(default=0, repr=False)

    def uniforms(self, count: int) -> NDArray[np.float64]:
        return secret_uniforms(self._next_key(), count)

    def normals(self, count: int) -> NDArray[np.float64]:
        return secret_normals(self._next_key(), count)

    def _next_key(self) -> bytes:
        self._drawn += 1
        return hmac.digest(self.key, str(self._drawn).encode(), hashlib.sha256)


@dataclass(frozen=True)
class Public:
    """What is known of the data anyway: how many samples the site trains on, and how many a score was made from."""

    training: int
    scored: int


class Guard:
    """One answer under a budget. `question` identifies what was asked, `data` what the site learns from."""

    def __init__(self, policy: Policy, key_file: Path, run: Path, question: str, data: str) -> None:
        promise = policy.promise
        assert promise is not None
        self._policy, self._promise, self._question = policy, promise, question
        self._budget = Budget(key_file, run, promise)
        # Of this run alone: noise of another one, in which the data may be others, has nothing to do with it.
        self._key = hmac.digest(read_key(run / "noise-key"), f"{question} {data}".encode(), hashlib.sha256)
        keeps_records = promise.level == "record"
        self.record = RecordPrivacy(policy.dp_clip, policy.dp_noise, self._key) if keeps_records else None

    def protect(
        self, release: Release, received: Mapping[str, Any], public: Public, *, is_score: bool
    ) -> tuple[Release, float]:
        """The release as it may leave, and the epsilon of all that left until then."""
        found = kinds(type(release))
        for kind in found.values():
            if kind.name not in LEAVING:
                raise SiteError("site-policy", f"{kind.name!r} cannot leave under a budget of differential privacy")
        constant = {"count": max(1, public.training), "tally": 0, "metric": 0.0}
        changed: dict[str, Any] = {f: constant[kind.name] for f, kind in found.items() if kind.name in REPLACED}
        weights = [name for name, kind in found.items() if kind.name == "weights"]
        counts = [name for name, kind in found.items() if kind.name == "counts"]
        if counts and is_score and counts != ["confusion"]:
            # Noise is made for a matrix in which a sample counts once.
            raise SiteError("site-policy", "only a confusion matrix can leave as a score under a budget of privacy")
        if counts and not is_score:
            raise SiteError("site-policy", "'counts' cannot leave under a budget of differential privacy")
        charged: list[tuple[Mechanism, bytes]] = []
        if weights:
            models, answer, mark = self._weights({name: getattr(release, name) for name in weights}, received)
            changed |= models
            charged.append((answer, mark))
        if counts and self._policy.scoring == "refuse":
            raise SiteError("site-policy", "policy.scores: this site is not scored under its budget")
        if counts and self._policy.scoring == "noise":
            for name in counts:
                changed[name], mark = self._noised_counts(name, getattr(release, name), public.scored)
                charged.append((self._promise.answer(), mark))
        for answer, mark in charged:
            self._budget.charge(answer, mark.hex())
        return dataclasses.replace(release, **changed), self._budget.epsilon

    def _weights(
        self, models: Mapping[str, Mapping[str, Tensor]], received: Mapping[str, Any]
    ) -> tuple[dict[str, Any], Mechanism, bytes]:
        """All models of an answer: level `site` hides their update as one vector; on level `record` the training hid
        it. Buffers that are no numbers to train leave as they came."""
        new = {f"{field}/{key}": value for field, model in models.items() for key, value in model.items()}
        old = {f"{field}/{key}": value for field in models for key, value in (received.get(field) or {}).items()}
        old |= {key: torch.zeros_like(value) for key, value in new.items() if key not in old}
        fixed = {key: old[key] for key, value in new.items() if not value.is_floating_point()}
        if self.record is None:
            noised, mark = self._hidden_update(new, old)
            answer = self._promise.answer()
        else:
            if self.record.steps == 0:
                raise SiteError("site-policy", "this step does not train by DP-SGD: policy.record_epsilon refuses it")
            noised, mark = dict(new), self._key
            answer = self._promise.answer(self.record.rate, self.record.steps)
        noised |= fixed
        return {f: {key: noised[f"{f}/{key}"] for key in model} for f, model in models.items()}, answer, mark

    def _hidden_update(self, new: Mapping[str, Tensor], old: Mapping[str, Tensor]) -> tuple[dict[str, Tensor], bytes]:
        limit = self._policy.clip_norm or 0.0
        norm = update_norm(new, old)
        # An update that is not finite is none: every answer is within the bound, whatever the data are.
        scale = min(1.0, limit / norm) if 0 < norm < math.inf else 0.0
        floating = [key for key, value in new.items() if value.is_floating_point()]
        update = {
            key: (new[key].double() - old[key].double()) * scale if scale else torch.zeros_like(old[key]).double()
            for key in floating
        }
        content = codec.content_digest(update, {"old": codec.content_digest(old, {})})
        mark = hmac.digest(self._key, content.encode(), "sha256")
        # Noise on the update itself: next to large weights, which the coordinator may choose, small numbers are lost.
        noised = {
            key: value.add_(
                torch.from_numpy(secret_normals(mark + key.encode(), value.numel())).reshape(value.shape),
                alpha=self._policy.noise,
            )
            for key, value in update.items()
        }
        found = {key: (old[key].double() + value).to(old[key].dtype) for key, value in noised.items()}
        return {key: value.clamp(min=0) if key.endswith("running_var") else value for key, value in found.items()}, mark

    def _noised_counts(self, name: str, table: Tensor, scored: int) -> tuple[Tensor, bytes]:
        """A table that counts `scored` samples, each equally often, with noise. How often in all is public, so the
        noised numbers are made to add up to that."""
        total = int(table.sum())
        if scored < 1 or total % scored:
            raise SiteError("site-policy", "policy.scores=noise is for tables that count each sample equally often")
        # A sample that changes moves its counts from some cells to others; at level `site` all of them do.
        sensitivity = math.sqrt(2) * (total // scored) * (1 if self._promise.level == "record" else scored)
        content = codec.content_digest({"table": table}, {"field": name})
        mark = hmac.digest(self._key, content.encode(), "sha256")
        normal = torch.from_numpy(secret_normals(mark, table.numel())).reshape(table.shape)
        return rounded_to(table.double() + self._promise.noise * sensitivity * normal, total), mark


def rounded_to(table: Tensor, total: int) -> Tensor:
    """Whole numbers of 0 or more that add up to `total`, near the ones given."""
    shares = table.clamp_min(0).flatten()
    whole = float(shares.sum())
    scaled = shares * (total / whole) if whole > 0 else torch.full_like(shares, total / len(shares))
    low = scaled.floor()
    left = total - int(low.sum())
    low[(scaled - low).argsort(descending=True, stable=True)[:left]] += 1
    return low.to(torch.int64).reshape(table.shape)
