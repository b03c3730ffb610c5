"""Runs below a folder as they are right now: found, read again when they change, running or not."""

from __future__ import annotations

import hashlib
import os
import statistics
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from fedshift.errors import FedshiftError
from fedshift.report.accounts import per_round
from fedshift.report.details import describe
from fedshift.report.gallery import Gallery
from fedshift.report.reading import Points, Record, read_run
from fedshift.report.words import duration

Status = Literal["running", "finished", "stopped", "failed", "damaged"]

MAX_RUNS = 500
_MAX_DEPTH = 6
_INNER = {"sites", "checkpoints"}
_STALE_SECONDS = 600
_REST_SECONDS = 0.5
"""However many look at once, files are not looked at more often than this."""
_FILES = ("config.yaml", "metrics.jsonl", "results.json", "done", "failed")

Signature = tuple[tuple[int, int, int], ...]


@dataclass(frozen=True)
class Watched:
    """A run: `key` is its name in addresses, `name` its path below the folder. A damaged one has a `problem`."""

    key: str
    name: str
    path: Path
    status: Status
    record: Record | None
    problem: str = ""

    @property
    def share_done(self) -> float:
        """Rounds done, in percent."""
        if self.status == "finished":
            return 100.0
        record = self.record
        return round(100 * record.round / record.rounds, 1) if record and record.rounds else 0.0

    @property
    def time_left(self) -> str:
        """From the last rounds; empty unless it is running and has done one."""
        if self.status != "running" or self.record is None:
            return ""
        seconds = per_round(self.record.series("round", "seconds").get("", []))
        recent = [y for _, y in seconds[-5:] if y is not None]
        left = self.record.rounds - self.record.round
        return duration(statistics.fmean(recent) * left) if recent else ""

    @property
    def curve(self) -> Points:
        """The mean test score over targets by round; without targets, the sources' mean validation score."""
        if self.record is None:
            return []
        scored = [(s.round, s.test or s.val) for s in self.record.history]
        return [(x, statistics.fmean(values.values())) for x, values in scored if values]


class Watcher:
    """Finds and reads runs below `root`; safe to ask from several threads."""

    def __init__(self, root: Path) -> None:
        self.root = root.resolve()
        self._lock = threading.Lock()
        self._read: dict[Path, tuple[Signature, Record | None, str]] = {}
        self._runs: dict[str, Watched] = {}
        self._looked = float("-inf")

    def runs(self) -> list[Watched]:
        """Running ones first, then the newest."""
        with self._lock:
            if time.monotonic() - self._looked > _REST_SECONDS:
                self._runs = {run.key: run for run in self._look()}
                self._looked = time.monotonic()
            return list(self._runs.values())

    def find(self, key: str) -> Watched | None:
        return next((run for run in self.runs() if run.key == key), None)

    def _look(self) -> list[Watched]:
        held = _held_locks()
        paths = list(_run_folders(self.root))
        self._read = {path: kept for path, kept in self._read.items() if path in set(paths)}
        found = [self._watched(path, held) for path in paths]
        newest = {run.key: run.record.written.timestamp() if run.record else 0.0 for run in found}
        return sorted(found, key=lambda run: (run.status != "running", -newest[run.key], run.name))

    def _watched(self, path: Path, held: set[int] | None) -> Watched:
        signature = tuple(_stat(path / name) for name in _FILES)
        if path not in self._read or self._read[path][0] != signature:
            try:
                self._read[path] = (signature, _readable(path), "")
            except (FedshiftError, OSError, ValueError, TypeError) as error:
                self._read[path] = (signature, None, getattr(error, "message", "its files cannot be read"))
        _, record, problem = self._read[path]
        name = "." if path == self.root else path.relative_to(self.root).as_posix()
        key = hashlib.sha256(os.fsencode(name)).hexdigest()[:16]
        return Watched(key, name, path, _status(path, record, held), record, problem)


def _readable(path: Path) -> Record:
    """The run, if everything that a page needs can be made of it: one bad file must not hide all other runs."""
    record = read_run(path)
    describe(1, record, Gallery())
    return record


def _run_folders(root: Path) -> Iterator[Path]:
    """Folders that `fedshift train` wrote. Links are not followed, and nothing inside a run is looked at."""
    count = 0
    for folder, inner, files in os.walk(root):
        path = Path(folder)
        if "config.yaml" in files and ("env.json" in files or "metrics.jsonl" in files):
            inner.clear()
            count += 1
            yield path
            if count == MAX_RUNS:
                return
        depth = len(path.relative_to(root).parts)
        inner[:] = sorted(n for n in inner if depth < _MAX_DEPTH and not n.startswith(".") and n not in _INNER)


def _status(path: Path, record: Record | None, held: set[int] | None) -> Status:
    if record is None:
        return "damaged"
    if record.results is not None:
        return "finished"
    if record.failure:  # Whoever goes on with a run takes the mark away.
        return "failed"
    if held is None:
        return "running" if time.time() - record.written.timestamp() < _STALE_SECONDS else "stopped"
    return "running" if _stat(path / ".lock")[2] in held else "stopped"


def _held_locks() -> set[int] | None:
    """Inodes that some process holds a lock on, or None where the system does not tell.

    Trying the lock itself would tell too, but a run that starts at that moment would find it taken."""
    with suppress(OSError, ValueError, IndexError):
        lines = [line.split() for line in Path("/proc/locks").read_text().splitlines()]
        return {int(fields[5].rpartition(":")[2]) for fields in lines if fields[1] == "FLOCK"}
    return None


def _stat(path: Path) -> tuple[int, int, int]:
    """When it was written, its size and its inode; zeros where there is none."""
    with suppress(OSError):
        found = path.stat()
        return found.st_mtime_ns, found.st_size, found.st_ino
    return 0, 0, 0
