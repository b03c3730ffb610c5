"""The coordinator's gate: nothing that arrives is believed before it is checked."""

from __future__ import annotations

import functools
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from torch import Tensor

from fedshift.errors import CATALOGUE, FedshiftError
from fedshift.federation import codec
from fedshift.federation.checks import (
    PLAIN_KINDS,
    Expected,
    Like,
    Refused,
    Sizes,
    check_kind,
    length_of_update,
    limits_of,
    require,
)
from fedshift.federation.codec import Limits
from fedshift.federation.compression import Update
from fedshift.federation.releases import Kind, Release, kinds
from fedshift.federation.step import Request, Step

R = TypeVar("R", bound=Release)

UNKNOWN_CODE = "unknown-code"
"""What a site's own code is called if it is none of ours: its text goes nowhere."""

_ENVELOPE = frozenset({"site", "step", "round", "nonce", "code", "release", "seconds", "clipped"})
_HEADER = Limits(data=0, header=64 * 1024, tensors=0, nodes=256)
_SECONDS = re.compile(r"[0-9]{1,12}\.[0-9]{1,6}")


_declared = functools.cache(kinds)


def fields_of(release: Any) -> Mapping[str, Kind]:
    """`kinds`, once for each type: reading the declarations takes as long as checking a small model."""
    return _declared(release)


class Failed(Exception):
    """The site itself says that the step failed, by code."""

    def __init__(self, code: str) -> None:
        super().__init__(code)
        self.code = code


@dataclass(frozen=True)
class Admitted(Generic[R]):
    release: R
    seconds: float
    clipped: int


def admit(
    data: bytes,
    request: Request,
    step: Step[R],
    expected: Mapping[str, Expected | Mapping[str, Tensor]],
    max_norm: float,
    sizes: Sizes | None = None,
    waited: float | None = None,
) -> Admitted[R]:
    """The checked release of a reply. `expected` says what is known of a field: tensors that its own must match in
    name, shape and type, or more. Updates of weights longer than `max_norm` (L2) are refused. `sizes` is what the site
    said of itself at the handshake; it cannot have worked for longer than was `waited` for it.

    Raises `Refused` or `Failed` and nothing else, whatever the bytes are."""
    try:
        return inspect(data, request, step, expected, max_norm, sizes or {}, waited)
    except (Refused, Failed):
        raise
    except Exception as error:
        # Should a check ever stumble over what it looks at, one site must not end the run of the others.
        raise Refused("unreadable") from error


def inspect(
    data: bytes,
    request: Request,
    step: Step[R],
    expected: Mapping[str, Expected | Mapping[str, Tensor]],
    max_norm: float,
    sizes: Sizes,
    waited: float | None,
) -> Admitted[R]:
    """`admit` without its net."""
    known = {field: Like(like) if isinstance(like, Mapping) else like for field, like in expected.items()}
    limits = message_limits(step.release, known, len(request.body))
    require(len(data) <= limits.size, "size")
    try:
        envelope = codec.unpack(data, limits)
    except FedshiftError as error:
        raise Refused("undecodable") from error
    require(isinstance(envelope, dict), "undecodable")
    seconds = _envelope(envelope, request, waited)
    fields = fields_of(step.release)
    clipped = envelope.get("clipped")
    require(type(clipped) is int and 0 <= clipped <= len(fields), "schema")
    sent = envelope["release"]
    try:
        for field, update in known.items():
            if isinstance(update, Update) and isinstance(sent, dict) and field in sent:
                sent[field] = update.decoded(sent[field])
    except Exception as error:  # A hostile message can fail in any part of the decoder.
        raise Refused("undecodable") from error
    try:
        release = codec.restore(step.release, sent)
    except FedshiftError as error:
        raise Refused("schema") from error
    for field, kind in fields.items():
        value, like = getattr(release, field), known.get(field)
        if kind.name == "weights" and isinstance(like, Like) and like.fits(value):
            # One look at each number says how long the update is and whether all of it is finite.
            length = length_of_update(value, like.like)
            check_kind(kind.name, value, sizes, is_finite=math.isfinite(length))
        else:
            check_kind(kind.name, value, sizes)
            length = length_of_update(value, None) if kind.name == "weights" else 0.0
        if like is not None:
            like.check(value, sizes)
        require(length <= max_norm, "norm")
    return Admitted(release, seconds, clipped)


def message_limits(release: type[Release], known: Mapping[str, Expected], asked: int) -> Limits:
    """The most that an honest reply can hold, to a question of `asked` bytes."""
    limits = _HEADER
    for field, kind in fields_of(release).items():
        limits += known[field].limits if field in known else limits_of(kind.name)
        if field not in known and kind.name not in PLAIN_KINDS:
            limits += Limits(asked, header=0, tensors=0, nodes=0)
    return limits


def _envelope(envelope: dict[str, Any], request: Request, waited: float | None) -> float:
    """How long the site says it worked. Raises `Refused`, or `Failed` where it says that it did not."""
    for key in ("site", "step", "round", "nonce"):
        ours, theirs = getattr(request, key), envelope.get(key)
        # Types first: True is no 1, and a tensor compared with a number is another tensor.
        require(type(theirs) is type(ours) and theirs == ours, f"wrong-{key}")
    code, seconds = envelope.get("code"), envelope.get("seconds")
    # A site that failed clipped nothing.
    require(set(envelope) | {"clipped"} == _ENVELOPE, "schema")
    require(code is None or isinstance(code, str), "schema")
    if not isinstance(seconds, str) or _SECONDS.fullmatch(seconds) is None:
        raise Refused("seconds")
    if code is not None:
        raise Failed(code if code in CATALOGUE else UNKNOWN_CODE)
    return float(seconds) if waited is None else min(float(seconds), waited)


def needed_answers(quorum: float, asked: int) -> int:
    """How many of the asked sites must answer: that share of them, and one at least."""
    return max(1, math.ceil(quorum * asked - 1e-9))


def tell_absent(absent: Mapping[str, str], where_to_look: str) -> str:
    """Who is absent and why, in the coordinator's own words for the codes that crossed, and which log to open first."""
    by_reason: dict[str, list[str]] = {}
    for site, reason in sorted(absent.items()):
        by_reason.setdefault(reason, []).append(site)
    meaning = {reason: f" ({CATALOGUE[reason].rstrip('.')})" for reason in by_reason if reason in CATALOGUE}
    told = [f"{', '.join(sites)}: {reason}{meaning.get(reason, '')}." for reason, sites in by_reason.items()]
    # A site that sent a code has written down why; one that crashed or was refused has not.
    logged = [site for site, reason in sorted(absent.items()) if reason in CATALOGUE]
    return " ".join([*told, where_to_look.replace("<site>", logged[0]) if logged else where_to_look])
