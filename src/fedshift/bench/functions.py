"""What suites share that are functions of their own: progress, and settings of their own."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from fedshift.bench.runner import Tell
from fedshift.bench.suite import Order
from fedshift.errors import FedshiftError, InputError, nearest
from fedshift.federation import codec

Options = TypeVar("Options")


def timed(tell: Tell) -> Callable[[str, int, int], None]:
    """`tell` with the seconds left, from what has been done so far."""
    started = time.monotonic()

    def telling(what: str, done: int, total: int) -> None:
        tell(what, done, total, (time.monotonic() - started) / done * (total - done))

    return telling


def only_seed(order: Order, suite: str, more: str) -> int:
    """The seed of a suite that is one picture: it repeats itself within it, `more` often with that option."""
    seeds = sorted(set(order.seeds or (0,)))
    if len(seeds) > 1:
        given = ",".join(map(str, seeds))
        raise InputError(
            "config-value",
            f"--seeds {given}: {suite} is a picture of one seed. Call it once for each, or for more of one seed raise"
            f" --set {more}=NUMBER",
        )
    return seeds[0]


def options_of(section: str, defaults: Options, values: Mapping[str, Any]) -> tuple[Options, dict[str, Any]]:
    """`defaults` with what stands under `section` in `values`, and the configuration keys that are left."""
    kept = {key: value for key, value in values.items() if key != section}
    kind: Any = type(defaults)
    known = [field.name for field in dataclasses.fields(kind)]
    given = values.get(section) or {}
    for key in given:
        if key not in known:
            raise InputError("config-key", f"unknown key {section}.{key}. {nearest(key, known)}")
    try:
        return codec.restore(kind, {**codec.plain(defaults), **given}, section), kept
    except FedshiftError as error:
        raise InputError("config-value", error.message) from error
