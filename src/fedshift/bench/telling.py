"""Progress of a suite that is a function of its own."""

from __future__ import annotations

import time
from collections.abc import Callable

from fedshift.bench.runner import Tell


def timed(tell: Tell) -> Callable[[str, int, int], None]:
    """`tell` with the seconds left, from what has been done so far."""
    started = time.monotonic()

    def telling(what: str, done: int, total: int) -> None:
        tell(what, done, total, (time.monotonic() - started) / done * (total - done))

    return telling
