"""`fedshift ui`: a read-only page on this machine that shows runs live.

The server draws everything, with the charts of the report; the browser only inserts what arrives. An event carries the
whole main part of the page, and its id is the hash of that part. A browser that reconnects and has the newest part
already gets nothing.
"""

from __future__ import annotations

import hashlib
import os
import re
import statistics
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from http import HTTPStatus
from importlib.resources import files
from pathlib import Path
from typing import Literal
from urllib.parse import parse_qs, urlsplit

from fedshift._version import __version__
from fedshift.errors import FedshiftError, InputError
from fedshift.localserver import LocalHandler, LocalServer
from fedshift.report.charts import PERCENT, sparkline
from fedshift.report.page import render, templates
from fedshift.report.run_page import per_round, run_page
from fedshift.report.samples import DataView, data_view
from fedshift.report.text import duration
from fedshift.runs.heartbeat import read_moment
from fedshift.runs.progress import Moment
from fedshift.runs.record import Points, RunRecord, read_record

PORT = 8642
"""The port that is tried first if none is asked for. If it is in use, a free one is taken."""
LOOK_SECONDS = 1.0
"""How often an open page looks for news."""
MAX_RUNS = 500
_MAX_DEPTH = 6
_INNER = {"sites", "checkpoints"}
_FILES = ("config.yaml", "metrics.jsonl", "results.json", "done", "failed")
_STALE_SECONDS = 600
"""Where locks cannot be seen: a run that wrote nothing for this long counts as stopped."""
_REST_SECONDS = 0.5
"""Files are not read more often than this, however many pages are open."""
_ALIVE_SECONDS = 15.0
"""After this much silence a comment is sent, so that a closed connection is noticed."""
_MAX_STREAMS = 24
_ADDRESS = re.compile(r"/(?:(run|events|report)/([0-9a-f]{16})|(events|live\.js|live\.css)?)")
_PAGE_POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self' 'unsafe-inline'; connect-src 'self'; img-src data:"
)
_REPORT_POLICY = "default-src 'none'; style-src 'unsafe-inline'; img-src data:"
Status = Literal["running", "finished", "stopped", "failed", "damaged"]
Signature = tuple[tuple[int, int, int], ...]


@dataclass(frozen=True)
class WatchedRun:
    """A run: `key` is its name in addresses, `name` its path below the folder. A damaged run has a `problem`."""

    key: str
    name: str
    path: Path
    status: Status
    record: RunRecord | None
    problem: str = ""

    @cached_property
    def moment(self) -> Moment | None:
        """What a running run is doing now."""
        return read_moment(self.path / ".progress") if self.status == "running" else None

    @property
    def share_done(self) -> float:
        """Finished rounds and what is done of the one under way, in percent."""
        if self.status == "finished":
            return 100.0
        record, now = self.record, self.moment
        if not record or not record.rounds:
            return 0.0
        done = max(record.round, now.round - 1 + now.share) if now and now.share is not None else record.round
        return round(100 * min(done / record.rounds, 1.0), 1)

    @property
    def time_left(self) -> str:
        """An estimate, by the run itself or from its last rounds. Empty unless it is running and has used some data."""
        if self.status != "running" or self.record is None:
            return ""
        if self.moment and self.moment.left is not None:
            return duration(self.moment.left)
        seconds = per_round(self.record.series("round", "seconds").get("", []))
        recent = [y for _, y in seconds[-5:] if y is not None]
        left = self.record.rounds - self.record.round
        return duration(statistics.fmean(recent) * left) if recent else ""

    @property
    def curve(self) -> Points:
        """The mean test score over targets by round. Without targets, the mean validation score of the sources."""
        if self.record is None:
            return []
        scored = [(s.round, s.test or s.val) for s in self.record.history]
        return [(x, statistics.fmean(values.values())) for x, values in scored if values]


class Watcher:
    """Finds and reads the runs below `root`. It can be used from several threads."""

    def __init__(self, root: Path) -> None:
        self.root = root.resolve()
        self._lock = threading.Lock()
        self._read: dict[Path, tuple[Signature, RunRecord | None, str]] = {}
        self._runs: dict[str, WatchedRun] = {}
        self._looked = float("-inf")

    def runs(self) -> list[WatchedRun]:
        """All runs: running ones first, then the newest."""
        with self._lock:
            if time.monotonic() - self._looked > _REST_SECONDS:
                self._runs = {run.key: run for run in self._look()}
                self._looked = time.monotonic()
            return list(self._runs.values())

    def find(self, key: str) -> WatchedRun | None:
        return next((run for run in self.runs() if run.key == key), None)

    def _look(self) -> list[WatchedRun]:
        held = _held_locks()
        paths = list(_run_folders(self.root))
        self._read = {path: kept for path, kept in self._read.items() if path in set(paths)}
        found = [self._watched(path, held) for path in paths]
        newest = {run.key: run.record.written.timestamp() if run.record else 0.0 for run in found}
        return sorted(found, key=lambda run: (run.status != "running", -newest[run.key], run.name))

    def _watched(self, path: Path, held: set[int] | None) -> WatchedRun:
        signature = tuple(_stat(path / name) for name in _FILES)
        if path not in self._read or self._read[path][0] != signature:
            try:
                self._read[path] = (signature, _readable(path), "")
            except (FedshiftError, OSError, ValueError, TypeError) as error:
                self._read[path] = (signature, None, getattr(error, "message", "its files cannot be read"))
        _, record, problem = self._read[path]
        name = "." if path == self.root else path.relative_to(self.root).as_posix()
        key = hashlib.sha256(os.fsencode(name)).hexdigest()[:16]
        return WatchedRun(key, name, path, _status(path, record, held), record, problem)


def _readable(path: Path) -> RunRecord:
    """The run, checked by drawing it once: one damaged run must not break the list of all runs."""
    record = read_record(path)
    run_page(1, record, DataView())
    return record


def _run_folders(root: Path) -> Iterator[Path]:
    """The run directories below `root`. Links are not followed, and runs are not searched inside."""
    count = 0
    for folder, inner, names in os.walk(root):
        path = Path(folder)
        # A folder in the place of a file is a damaged run, which is shown too.
        if "config.yaml" in (found := {*names, *inner}) and found & {"env.json", "metrics.jsonl"}:
            inner.clear()
            count += 1
            yield path
            if count == MAX_RUNS:
                return
        depth = len(path.relative_to(root).parts)
        inner[:] = sorted(n for n in inner if depth < _MAX_DEPTH and not n.startswith(".") and n not in _INNER)


def _status(path: Path, record: RunRecord | None, held: set[int] | None) -> Status:
    if record is None:
        return "damaged"
    if record.results is not None:
        return "finished"
    if record.failure:  # The mark is removed when the run is resumed.
        return "failed"
    if held is None:
        return "running" if time.time() - record.written.timestamp() < _STALE_SECONDS else "stopped"
    return "running" if _stat(path / ".lock")[2] in held else "stopped"


def _held_locks() -> set[int] | None:
    """Inodes that some process holds a lock on, or None if the system does not tell.

    Trying to take the lock would also tell, but a run that starts at that moment would fail."""
    with suppress(OSError, ValueError, IndexError):
        lines = [line.split() for line in Path("/proc/locks").read_text().splitlines()]
        return {int(fields[5].rpartition(":")[2]) for fields in lines if fields[1] == "FLOCK"}
    return None


def _stat(path: Path) -> tuple[int, int, int]:
    """Time of writing, size and inode of a file; zeros if it does not exist."""
    with suppress(OSError):
        found = path.stat()
        return found.st_mtime_ns, found.st_size, found.st_ino
    return 0, 0, 0


class Pages:
    """The pages as HTML text."""

    def __init__(self, watcher: Watcher) -> None:
        self.watcher = watcher
        self._templates = templates()

    def shell(self, title: str, events: str, part: str) -> str:
        return self._templates.get_template("live.html").render(
            title=title,
            events=events,
            part=part,
            seen=fingerprint(part),
            root=str(self.watcher.root),
            version=__version__,
        )

    def overview(self) -> str:
        runs = self.watcher.runs()
        drawn = [(run, sparkline(run.curve, PERCENT)) for run in runs]
        return self._templates.get_template("live_list.html").render(runs=drawn)

    def run(self, run: WatchedRun) -> str:
        page = run_page(1, run.record, DataView()) if run.record else None
        return self._templates.get_template("live_run.html").render(run=run, page=page)

    def report(self, run: WatchedRun) -> str:
        assert run.record is not None
        return render([run.record], [data_view(run.record, make=False)])


def fingerprint(text: str) -> str:
    return hashlib.sha256(text.encode("utf-8", "replace")).hexdigest()[:20]


def event(text: str) -> bytes:
    """A server-sent event with this text: every line of it is a line of data."""
    lines = "".join(f"data: {line}\n" for line in re.split(r"\r\n|\r|\n", text))
    return f"id: {fingerprint(text)}\nevent: part\n{lines}\n".encode("utf-8", "replace")


class LiveServer(LocalServer):
    """Listens on this machine only. Setting `stopping` ends all streams."""

    def __init__(self, root: Path, port: int) -> None:
        super().__init__(_Handler, port)
        self.pages = Pages(Watcher(root))
        self.stopping = threading.Event()
        self.streams = threading.BoundedSemaphore(_MAX_STREAMS)


def open_server(root: Path, port: int | None = None) -> LiveServer:
    """A server for the runs below `root`, ready to serve. Without a port, 8642 or any free one."""
    if not root.is_dir():
        raise InputError("data-missing", f"there is no folder {root}: give the folder that contains your runs")
    for candidate in (PORT, 0) if port is None else (port,):
        with suppress(OSError, OverflowError):
            return LiveServer(root, candidate)
    raise InputError("config-value", f"port {port} is in use or not allowed: choose another --port, or leave it out")


class _Handler(LocalHandler):
    server: LiveServer

    def answer(self) -> None:
        url = urlsplit(self.path)
        match = _ADDRESS.fullmatch(url.path)
        if match is None:
            return self.refuse(HTTPStatus.NOT_FOUND, "There is nothing here.")
        kind, key, plain = match.groups()
        pages = self.server.pages
        if kind is None:
            return self._plain(plain or "", url.query)
        run = pages.watcher.find(key)
        if run is None or (kind == "report" and run.record is None):
            return self.refuse(HTTPStatus.NOT_FOUND, "This run does not exist, or not any more.")
        if kind == "events":
            return self._stream(lambda: self._part_of(key), url.query)
        if kind == "report":
            return self.send(pages.report(run), "text/html", _REPORT_POLICY)
        return self.send(pages.shell(run.name, f"/events/{key}", pages.run(run)), "text/html", _PAGE_POLICY)

    def _plain(self, name: str, query: str) -> None:
        pages = self.server.pages
        if name == "events":
            return self._stream(pages.overview, query)
        if name == "live.js":
            return self.send(_static("static/live.js"), "text/javascript")
        if name == "live.css":
            return self.send(_static("templates/style.css") + _static("static/live.css"), "text/css")
        return self.send(pages.shell("Runs", "/events", pages.overview()), "text/html", _PAGE_POLICY)

    def _part_of(self, key: str) -> str:
        run = self.server.pages.watcher.find(key)
        return self.server.pages.run(run) if run else "<p class='notice'>This run does not exist any more.</p>"

    def _stream(self, draw: Callable[[], str], query: str) -> None:
        """Sends what `draw` returns whenever it changes, at first only if the browser has not seen it."""
        if not self.server.streams.acquire(blocking=False):
            return self.refuse(HTTPStatus.SERVICE_UNAVAILABLE, "Too many pages are open: close one.")
        try:
            self.send_head(HTTPStatus.OK, "text/event-stream")
            if self.command == "HEAD":
                return None
            seen = self.headers.get("Last-Event-ID") or parse_qs(query).get("seen", [""])[0]
            self.wfile.write(b"retry: 2000\n\n")
            silent = 0.0
            while not self.server.stopping.is_set():
                part = draw()
                if fingerprint(part) != seen:
                    seen, silent = fingerprint(part), 0.0
                    self.wfile.write(event(part))
                elif silent >= _ALIVE_SECONDS:
                    silent = 0.0
                    self.wfile.write(b": nothing new\n\n")
                self.wfile.flush()
                self.server.stopping.wait(LOOK_SECONDS)
                silent += LOOK_SECONDS
        finally:
            self.server.streams.release()
        return None


def _static(name: str) -> str:
    return (files("fedshift.report") / name).read_text(encoding="utf-8")
