"""Sites simulated on one machine: one after another in this process, or side by side in worker processes.

Both give the same bytes: a step's randomness comes from names, its thread count from the plan, its data from the site.
"""

from __future__ import annotations

import json
import queue
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from fedshift.data import open_dataset
from fedshift.federation import codec
from fedshift.federation.engines import Failure
from fedshift.federation.plan import Plan
from fedshift.federation.site import SiteHost, SiteSpec
from fedshift.federation.step import Request, answer

_LENGTH = struct.Struct("<Q")


class Sequential:
    """One site after another, in this process. `debug` lets a step's exception through, named."""

    def __init__(self, specs: Sequence[SiteSpec], plan: Plan, *, debug: bool = False) -> None:
        self._hosts = {spec.name: SiteHost(spec, plan, open_dataset) for spec in specs}
        self._debug = debug
        self.where_to_look = _where_to_look(specs)

    def call(self, requests: Sequence[Request], deadline: float | None) -> Iterator[tuple[str, bytes | Failure]]:
        for request in requests:
            started = time.monotonic()
            reply = answer(self._hosts[request.site], request, debug=self._debug)
            late = deadline is not None and time.monotonic() - started > deadline
            yield request.site, Failure("late") if late else reply

    def close(self) -> None:
        self._hosts.clear()


class Parallel:
    """Worker processes that each serve one request at a time for whichever site is next.

    At most one reply a worker waits unread, so memory does not grow with the number of sites.
    """

    def __init__(self, specs: Sequence[SiteSpec], plan: Plan, workers: int) -> None:
        self._setup = json.dumps({"plan": codec.plain(plan), "specs": codec.plain(list(specs))}).encode()
        self._idle = [_Worker(self._setup) for _ in range(workers)]
        self.where_to_look = _where_to_look(specs)

    def call(self, requests: Sequence[Request], deadline: float | None) -> Iterator[tuple[str, bytes | Failure]]:
        waiting = list(reversed(requests))
        outcomes: queue.Queue[tuple[_Worker, bytes | Failure]] = queue.Queue()
        busy: dict[_Worker, _Job] = {}
        while waiting or busy:
            while waiting and self._idle:
                worker, request = self._idle.pop(), waiting.pop()
                busy[worker] = _Job(request, time.monotonic())
                worker.start(request, outcomes)
            try:
                worker, outcome = outcomes.get(timeout=_time_left(busy, deadline))
            except queue.Empty:
                # Its reader thread then reports the closed pipe as this job's outcome.
                for late in [w for w, job in busy.items() if deadline and job.age() > deadline]:
                    busy[late].late = True
                    late.kill()
                continue
            job = busy.pop(worker)
            if isinstance(outcome, Failure):
                worker.kill()
                worker = _Worker(self._setup)
                outcome = Failure("late") if job.late else outcome
            self._idle.append(worker)
            yield job.request.site, outcome

    def close(self) -> None:
        for worker in self._idle:
            worker.kill()
        self._idle.clear()


@dataclass
class _Job:
    request: Request
    started: float
    late: bool = False

    def age(self) -> float:
        return time.monotonic() - self.started


class _Worker:
    """One worker process and the thread that waits for its answer. Frames on its pipes: length, then bytes."""

    def __init__(self, setup: bytes) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "fedshift.federation.engines.worker"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            # Ctrl-C belongs to the coordinator, which then closes its workers in order.
            start_new_session=True,
        )
        assert self._process.stdin and self._process.stdout
        self._stdin: IO[bytes] = self._process.stdin
        self._stdout: IO[bytes] = self._process.stdout
        with suppress(OSError):
            write_frame(self._stdin, setup)

    def start(self, request: Request, outcomes: queue.Queue[tuple[_Worker, bytes | Failure]]) -> None:
        threading.Thread(target=self._exchange, args=(request, outcomes), daemon=True).start()

    def _exchange(self, request: Request, outcomes: queue.Queue[tuple[_Worker, bytes | Failure]]) -> None:
        try:
            head = {
                "site": request.site,
                "step": request.step,
                "round": request.round,
                "nonce": request.nonce,
            }
            write_frame(self._stdin, json.dumps(head).encode())
            write_frame(self._stdin, request.body)
            outcomes.put((self, read_frame(self._stdout)))
        except (OSError, EOFError, ValueError):
            outcomes.put((self, Failure("crashed")))

    def kill(self) -> None:
        self._process.kill()
        self._process.wait()
        for stream in (self._stdin, self._stdout):
            with suppress(OSError):
                stream.close()


def write_frame(stream: IO[bytes], data: bytes) -> None:
    stream.write(_LENGTH.pack(len(data)))
    stream.write(data)
    stream.flush()


def read_frame(stream: IO[bytes]) -> bytes:
    """The next frame; EOFError when the other side is gone."""
    (length,) = _LENGTH.unpack(_read_exactly(stream, _LENGTH.size))
    return _read_exactly(stream, length)


def _read_exactly(stream: IO[bytes], size: int) -> bytes:
    data = stream.read(size)
    if len(data) != size:
        raise EOFError
    return data


def _time_left(busy: dict[_Worker, _Job], deadline: float | None) -> float | None:
    """Seconds until the next running job is late; None when none can be."""
    running = [job for job in busy.values() if not job.late]
    if deadline is None or not running:
        return None
    return max(0.01, deadline - max(job.age() for job in running))


def _where_to_look(specs: Sequence[SiteSpec]) -> str:
    folder = specs[0].folder.parent if specs else Path()
    return f"What happened is in {folder}/<site>/site.log; --debug shows it at once."
