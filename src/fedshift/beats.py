"""How many batches were used, counted in memory that forked worker processes share with the process they came from, and
how much of the models that cross a network has crossed.

It is for those who watch a run on this machine. Nothing that is computed depends on it.
"""

from __future__ import annotations

import mmap
from collections.abc import Sequence
from dataclasses import dataclass

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


@dataclass(frozen=True)
class Transfer:
    """A message on its way to or from `peer`: `done` of `total` bytes are there."""

    peer: str
    is_sent: bool
    done: int
    total: int


_under_way: tuple[Transfer, ...] = ()


def note_transfers(found: Sequence[Transfer]) -> None:
    """What is under way now, in place of what was."""
    global _under_way
    _under_way = tuple(found)


def tell_transfers() -> str:
    """What is under way, in words; empty if nothing is."""
    return transfers_in_words(_under_way)


def transfers_in_words(found: Sequence[Transfer]) -> str:
    """`sending 31 of 90 MB to east, west, receiving 2.5 of 45 MB from north`."""
    parts = []
    for is_sent, verb, preposition in ((True, "sending", "to"), (False, "receiving", "from")):
        own = [one for one in found if one.is_sent is is_sent]
        if own:
            names = sorted({one.peer for one in own})
            who = ", ".join(names) if len(names) <= _NAMED else f"{len(names)} sites"
            done, total = sum(one.done for one in own), sum(one.total for one in own)
            parts.append(f"{verb} {_megabytes(done)} of {_megabytes(total)} MB {preposition} {who}")
    return ", ".join(parts)


_NAMED = 3


def _megabytes(size: int) -> str:
    return f"{size / 1e6:.1f}" if size < 9.95e6 else f"{size / 1e6:.0f}"
