"""The coordinator's gate: nothing that arrives is believed before it is checked."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor

from fedshift.errors import FedshiftError
from fedshift.federation import codec
from fedshift.federation.releases import Release, kinds
from fedshift.federation.step import Request, Step
from fedshift.functional.averaging import update_norm

R = TypeVar("R", bound=Release)

_MAX_COUNT = 10**12


class Refused(Exception):
    """Why a reply is not used: a short word for counting."""

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason


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
    expected: Mapping[str, Mapping[str, Tensor]],
    max_norm: float,
) -> Admitted[R]:
    """The checked release of a reply. `expected` maps a field to tensors that its own must match in name, shape and
    type; updates of weights longer than `max_norm` (L2) are refused. Raises `Refused` or `Failed`."""
    try:
        envelope = codec.unpack(data)
    except FedshiftError as error:
        raise Refused("undecodable") from error
    if not isinstance(envelope, dict):
        raise Refused("undecodable")
    for key in ("site", "step", "round", "nonce"):
        if envelope.get(key) != getattr(request, key):
            raise Refused(f"wrong-{key}")
    if envelope.get("code") is not None:
        raise Failed(str(envelope["code"])[:40])
    clipped = envelope.get("clipped")
    if not isinstance(clipped, int):
        raise Refused("schema")
    try:
        seconds = float(envelope["seconds"])
        release = codec.restore(step.release, envelope.get("release"))
    except (FedshiftError, KeyError, TypeError, ValueError) as error:
        raise Refused("schema") from error
    for field, kind in kinds(step.release).items():
        _check(kind.name, getattr(release, field), expected.get(field), max_norm)
    return Admitted(release, seconds, clipped)


def _check(kind: str, value: Any, expected: Mapping[str, Tensor] | None, max_norm: float) -> None:
    if kind in ("count", "tally") and not 0 <= value <= _MAX_COUNT:
        raise Refused("count")
    for tensor in _tensors(value):
        if tensor.is_floating_point() and not bool(torch.isfinite(tensor).all()):
            raise Refused("non-finite")
    if expected is None:
        return
    if not isinstance(value, Mapping) or set(value) != set(expected):
        raise Refused("keys")
    for key, tensor in value.items():
        if tensor.shape != expected[key].shape:
            raise Refused("shape")
        if tensor.dtype != expected[key].dtype:
            raise Refused("dtype")
    if kind == "weights" and update_norm(value, expected) > max_norm:
        raise Refused("norm")


def _tensors(value: Any) -> list[Tensor]:
    if isinstance(value, Tensor):
        return [value]
    if isinstance(value, Mapping):
        return [tensor for item in value.values() for tensor in _tensors(item)]
    if isinstance(value, list | tuple):
        return [tensor for item in value for tensor in _tensors(item)]
    return []
