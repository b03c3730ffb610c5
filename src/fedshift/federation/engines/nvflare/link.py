"""A run's line to its sites: a submitted job, and the local socket over which its bridge takes questions."""

from __future__ import annotations

import json
import queue
import shutil
import socket
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from fedshift.beats import Transfer, note_transfers
from fedshift.errors import SiteError
from fedshift.federation.engines import Failure
from fedshift.federation.engines.nvflare.job import write_job
from fedshift.federation.engines.nvflare.kits import COORDINATOR_USER, Coordinator
from fedshift.federation.engines.nvflare.session import Server
from fedshift.federation.engines.workers import read_frame, write_frame

_PATIENCE = 30.0
"""Seconds that sites may take to appear before a run starts without them, that is, not at all."""
_JOB_START = 120.0
_STARTS = 3
"""A site may go between being seen and being part of the job: so often is a job started to have all of them."""


@dataclass(frozen=True)
class Question:
    """`head` is JSON for the site's half of the job; `body` may be shared by several questions."""

    site: str
    head: Mapping[str, Any]
    body: bytes


class Link:
    """Open while a run lasts. `lost` are sites that stopped answering; they are asked again once they are back."""

    def __init__(self, coordinator: Coordinator, wanted: Sequence[str], patience: float = _PATIENCE) -> None:
        self.coordinator = coordinator
        self.wanted = tuple(sorted(wanted))
        self.lost: dict[str, float] = {}
        self._server = Server(coordinator.admin_kit, COORDINATOR_USER)
        self._bridge: _Bridge | None = None
        try:
            for _ in range(_STARTS):
                self._await_sites(patience)
                self.lost = {}
                self._start_job()
                if not self.lost:
                    break
        except BaseException:
            self.close()
            raise

    def call(self, questions: Sequence[Question], deadline: float | None) -> Iterator[tuple[str, bytes | Failure]]:
        """Every question's outcome as it comes. A site that is lost is not waited for."""
        for question in questions:
            if question.site in self.lost:
                yield question.site, Failure("unreachable")
        asked = [question for question in questions if question.site not in self.lost]
        assert self._bridge is not None
        for site, outcome in self._bridge.call(asked, deadline):
            if outcome == Failure("unreachable"):
                self.lost[site] = time.time()
            yield site, outcome

    def welcome_back(self) -> None:
        """Asks the server whether lost sites are connected again; if so, a new job takes them in."""
        if not self.lost:
            return
        back = {site.name for site in self._server.online() if site.seen > self.lost.get(site.name, float("inf"))}
        if back:
            self.lost = {site: since for site, since in self.lost.items() if site not in back}
            self._start_job()

    def close(self) -> None:
        if self._bridge is not None:
            self._bridge.close()
        self._bridge = None
        self._server.close()

    def _await_sites(self, patience: float) -> None:
        until = time.monotonic() + patience
        while missing := set(self.wanted) - {site.name for site in self._server.online()}:
            if time.monotonic() > until:
                raise SiteError(
                    "site-failed",
                    f"not connected: {', '.join(sorted(missing))}. Start them with `fedshift site start`,"
                    " or leave them out with --sources or --targets",
                )
            time.sleep(0.5)

    def _start_job(self) -> None:
        if self._bridge is not None:
            self._bridge.close()
        self._bridge = _Bridge()
        sites = [site for site in self.wanted if site not in self.lost]
        with tempfile.TemporaryDirectory(prefix="fedshift-job-") as folder:
            job = self._server.submit(write_job(Path(folder), sites, self._bridge.address))
        until = time.monotonic() + _JOB_START
        while not self._bridge.connected(timeout=1.0):
            ended = self._server.has_ended(job)
            if ended or time.monotonic() > until:
                raise SiteError(
                    "server-offline",
                    f"the server did not start the run's job ({ended or 'no answer'}): its log is in"
                    f" {self.coordinator.server_kit}",
                )
        self.lost |= {site: time.time() for site in sites if site not in self._bridge.sites}


class _Bridge:
    """The run's end of the socket. Frames: a JSON head, then bytes; a body like the one before is not sent twice."""

    def __init__(self) -> None:
        # Readable by this user only; its path is short, as those of sockets have to be.
        self._folder = Path(tempfile.mkdtemp(prefix="fedshift-"))
        self.address = str(self._folder / "bridge")
        self._listening = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._listening.bind(self.address)
        self._listening.listen(1)
        self._link: socket.socket | None = None
        self._questions: IO[bytes] | None = None
        self._answers: queue.Queue[tuple[dict[str, Any], bytes] | None] = queue.Queue()
        self._last_body: bytes | None = None
        self._calls = 0
        self.sites: frozenset[str] = frozenset()

    def connected(self, timeout: float) -> bool:
        if self._link is None:
            self._listening.settimeout(timeout)
            try:
                self._link, _ = self._listening.accept()
            except TimeoutError:
                return False
            self._link.settimeout(None)
            self._questions, answers = self._link.makefile("wb"), self._link.makefile("rb")
            try:
                self.sites = frozenset(json.loads(read_frame(answers))["sites"])
            except (EOFError, OSError) as error:
                raise _job_ended() from error
            threading.Thread(target=self._read, args=(answers,), daemon=True).start()
        return True

    def call(self, questions: Sequence[Question], deadline: float | None) -> Iterator[tuple[str, bytes | Failure]]:
        self._calls += 1
        waiting = {question.site for question in questions}
        for question in questions:
            self._send(question, deadline)
        while waiting:
            answer = self._answers.get()
            if answer is None:
                raise _job_ended()
            head, body = answer
            if head["call"] != self._calls or head["site"] not in waiting:
                continue  # Of an earlier question, after its deadline.
            waiting.remove(head["site"])
            yield head["site"], body if head["outcome"] == "reply" else Failure.told(head["outcome"])

    def close(self) -> None:
        for end in (self._link, self._listening):
            if end is not None:
                with suppress(OSError):
                    end.shutdown(socket.SHUT_RDWR)
                end.close()
        shutil.rmtree(self._folder, ignore_errors=True)

    def _send(self, question: Question, deadline: float | None) -> None:
        fresh = question.body is not self._last_body
        self._last_body = question.body
        head = {**question.head, "call": self._calls, "deadline": deadline, "fresh": fresh}
        assert self._questions is not None
        try:
            write_frame(self._questions, json.dumps(head).encode())
            if fresh:
                write_frame(self._questions, question.body)
        except OSError as error:
            raise _job_ended() from error

    def _read(self, stream: IO[bytes]) -> None:
        with suppress(EOFError, OSError, ValueError):
            while True:
                head, body = json.loads(read_frame(stream)), read_frame(stream)
                if "transfers" in head:
                    note_transfers([Transfer(**one) for one in head["transfers"]])
                else:
                    self._answers.put((head, body))
        note_transfers(())
        self._answers.put(None)


def _job_ended() -> SiteError:
    return SiteError(
        "server-offline",
        "the run's job ended: the server was stopped, or a site's job process was killed. Nothing that was finished is"
        " lost: see that the server and the sites run (`fedshift status`), then repeat the command with --resume",
    )
