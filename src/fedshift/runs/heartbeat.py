"""Looks once a second how far a run is, for the terminal, the log and the live page.

What is known of a round on this machine: which sites are done and how many batches were used (`fedshift.beats`). In the
first round their number is estimated from the sizes of the sites; later it is that of the round before. Of sites on
other machines it is known who has answered, how much of a model has crossed, and how long earlier rounds took.
"""

from __future__ import annotations

import json
import os
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

from fedshift.beats import beats, tell_transfers
from fedshift.errors import FedshiftError
from fedshift.federation import codec
from fedshift.federation.federation import Watch
from fedshift.files import read_bounded
from fedshift.runs.progress import Moment, Progress

_EVERY = 1.0
_OLD_SECONDS = 30.0
_LARGEST = 10_000
_NAMED = 3

_looking = threading.RLock()
if hasattr(os, "register_at_fork"):
    # A copy of this process must not be made while this thread prints: it could never print itself.
    os.register_at_fork(before=_looking.acquire, after_in_parent=_looking.release, after_in_child=_looking.release)


class Heartbeat(Watch):
    """Tells `shown` about every second how far the run is and, once it has a folder, the file `file` too."""

    def __init__(self, shown: Progress, file: Path) -> None:
        self._shown, self._file = shown, file
        self._fresh = file.with_name(f"{file.name}.new")
        self._doing = "reading the data"
        self._round, self._rounds = 0, 0
        self._waiting: dict[str, None] = {}
        self._asked = 0
        self._expected = 0
        self._lengths: list[float] = []
        self._began = self._round_began = time.monotonic()
        self._beats = beats()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._work, daemon=True)

    def __enter__(self) -> Heartbeat:
        self._thread.start()
        return self

    def __exit__(self, *details: Any) -> None:
        self._stop.set()
        self._thread.join()
        for file in (self._file, self._fresh):
            with suppress(OSError):
                file.unlink(missing_ok=True)

    def reading(self, name: str, done: int, total: int) -> None:
        """Samples of a domain were read from files."""
        self._doing = f"reading {name}: {done:,} of {total:,}"

    def doing(self, words: str) -> None:
        """Something else that takes time."""
        self._doing, self._waiting, self._asked = words, {}, 0

    def begin_round(self, round: int, rounds: int, expected: int) -> None:
        """`expected` is an estimate of its batches, for as long as no round was counted; 0 where there is none."""
        self._round, self._rounds = round, rounds
        self._expected = self._expected or expected
        self._beats, self._round_began = beats(), time.monotonic()

    def end_round(self) -> None:
        self._lengths.append(time.monotonic() - self._round_began)
        self._expected = beats() - self._beats

    def asked(self, step: str, sites: Sequence[str]) -> None:
        self._doing = step.rpartition(".")[2].replace("_", " ")
        self._waiting, self._asked = dict.fromkeys(sites), len(sites)

    def answered(self, step: str, site: str) -> None:
        self._waiting.pop(site, None)

    def moment(self) -> Moment:
        now = time.monotonic()
        waiting, asked, words = list(self._waiting), self._asked, self._doing
        if asked > 1:
            names = ", ".join(waiting[:_NAMED]) + (f" and {len(waiting) - _NAMED} more" if waiting[_NAMED:] else "")
            words += f", {asked - len(waiting)} of {asked} sites done" + (f", waiting for {names}" if names else "")
        elif waiting:
            words += f" at {waiting[0]}"
        if crossing := tell_transfers():
            words += f", {crossing}"
        if not self._round:
            return Moment(0, self._rounds, words, now - self._began)
        in_round, used = now - self._round_began, beats() - self._beats
        length = sum(self._lengths[-3:]) / len(self._lengths[-3:]) if self._lengths else None
        share = None
        if used and self._expected:
            # Of the first round it is a guess: a method may use its data more often.
            share = used / self._expected if used <= self._expected else None
            total = f" of {'' if self._lengths else 'about '}{self._expected:,}" if share is not None else ""
            words += f", batch {used:,}{total}"
        elif length:
            share = min(in_round / length, 0.99)
        if length is None and share and in_round > 1:
            length = in_round / share
        left = None
        if length is not None:
            rest = length * (1 - share) if share is not None else max(length - in_round, 0.0)
            left = rest + length * (self._rounds - self._round)
        return Moment(self._round, self._rounds, words, now - self._began, share, left)

    def _work(self) -> None:
        while not self._stop.wait(_EVERY):
            moment = self.moment()
            with _looking:
                self._shown.moment(moment)
            with suppress(OSError):  # A full disk is told by those who write what is needed.
                self._write(moment)

    def _write(self, moment: Moment) -> None:
        """Not flushed to the disk: it is old after a second."""
        if not self._file.parent.is_dir():
            return
        self._fresh.write_text(json.dumps(asdict(moment)))
        self._fresh.replace(self._file)


def read_moment(file: Path) -> Moment | None:
    """What a run last told, if it is running and did so a moment ago."""
    try:
        told = json.loads(read_bounded(file, _LARGEST))
        if time.time() - file.stat().st_mtime > _OLD_SECONDS:
            return None
        return codec.restore(Moment, told)
    except (FedshiftError, OSError, ValueError, RecursionError):
        return None
