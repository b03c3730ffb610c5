"""How many batches were used, counted in memory that forked worker processes share with the process they came from.

It is for those who watch a run on this machine. No message carries it, and nothing that is computed depends on it.
"""

from __future__ import annotations

import mmap

_PLACES = 1024
_counts = memoryview(mmap.mmap(-1, 8 * _PLACES)).cast("q")
"""Each process counts in a place of its own, so that none has to wait for another."""
_own = 0
_given = 0


def beat() -> None:
    """One more batch."""
    _counts[_own] += 1


def beats() -> int:
    """The batches of this process and of all that were forked from it, since the first of them began."""
    return sum(_counts)


def next_place() -> int:
    """The place of a process that is about to be forked. After very many, some share one and may lose a count."""
    global _given
    _given = _given % (_PLACES - 1) + 1
    return _given


def count_in(place: int) -> None:
    """Called by the new process."""
    global _own
    _own = place
