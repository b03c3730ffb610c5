"""Sites simulated on one machine: one after another in this process, or side by side in worker processes.

Both give the same bytes: a step's randomness comes from names, its thread count from the plan, its data from the site.
"""

from __future__ import annotations

import json
import queue
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from fedshift.data.domain import Dataset, DataSource
from fedshift.federation import codec
from fedshift.federation.engines import Failure
from fedshift.federation.engines.workers import ForkedWorker, SpawnedWorker, Worker, how_it_ended
from fedshift.federation.ledger import Ledger
from fedshift.federation.plan import Plan
from fedshift.federation.site import SiteHost, SiteSpec
from fedshift.federation.step import Request, answer
from fedshift.files import open_files_left

OpenDataset = Callable[[DataSource], Dataset]

KEPT_SITES = 64
"""Sites whose data stay open and in tensors between two questions, in each process. With more, memory and open files
would grow with the number of sites."""


class Hosts:
    """The sites of one process by name, of which the last `KEPT_SITES` that were asked stay ready: fewer where their
    files, about six each, would be too many."""

    def __init__(
        self,
        specs: Sequence[SiteSpec],
        plan: Plan,
        open_dataset: OpenDataset,
        steps: frozenset[str] | None = None,
    ) -> None:
        """`steps`: as for `SiteHost`."""
        self._specs = {spec.name: spec for spec in specs}
        self._plan = plan
        self._open_dataset = open_dataset
        self._steps = steps
        self._ready: OrderedDict[str, SiteHost] = OrderedDict()
        limit = open_files_left()
        self._most = KEPT_SITES if limit is None else max(1, min(KEPT_SITES, limit // 16))

    def __getitem__(self, site: str) -> SiteHost:
        if site not in self._ready:
            self._ready[site] = SiteHost(self._specs[site], self._plan, self._open_dataset, self._steps)
        self._ready.move_to_end(site)
        if len(self._ready) > self._most:
            self._ready.popitem(last=False)
        return self._ready[site]

    def clear(self) -> None:
        """Lets go of all data."""
        self._ready.clear()


class Sequential:
    """One site after another, in this process. `debug` lets a step's exception through, named."""

    def __init__(
        self, specs: Sequence[SiteSpec], plan: Plan, open_dataset: OpenDataset, *, debug: bool = False
    ) -> None:
        self._hosts = Hosts(specs, plan, open_dataset)
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

    At most one reply per worker waits unread, so memory does not grow with the number of sites.
    """

    def __init__(self, specs: Sequence[SiteSpec], start_worker: Callable[[], Worker], workers: int) -> None:
        self._start_worker = start_worker
        self._idle = [start_worker() for _ in range(workers)]
        self._folders = {spec.name: spec.folder for spec in specs}
        self.where_to_look = _where_to_look(specs)

    @classmethod
    def forked(cls, specs: Sequence[SiteSpec], plan: Plan, open_dataset: OpenDataset, workers: int) -> Parallel:
        """Workers that are copies of this process: they know its methods, networks and data, and start at once."""
        hosts = Hosts(specs, plan, open_dataset)
        return cls(specs, lambda: ForkedWorker(lambda request: answer(hosts[request.site], request)), workers)

    @classmethod
    def spawned(
        cls, specs: Sequence[SiteSpec], plan: Plan, module: str, workers: int, imports: Sequence[str] = ()
    ) -> Parallel:
        """Workers that are new interpreters running `module`, for where a fork is not safe. They open the data
        themselves, import the modules `imports` and find the method by its name."""
        told = {"plan": codec.plain(plan), "specs": codec.plain(list(specs)), "imports": list(imports)}
        setup = json.dumps(told).encode()
        return cls(specs, lambda: SpawnedWorker(module, setup), workers)

    def call(self, requests: Sequence[Request], deadline: float | None) -> Iterator[tuple[str, bytes | Failure]]:
        waiting = list(reversed(requests))
        outcomes: queue.Queue[tuple[Worker, bytes | Failure]] = queue.Queue()
        busy: dict[Worker, _Job] = {}
        while waiting or busy:
            while waiting and self._idle:
                worker, request = self._idle.pop(), waiting.pop()
                busy[worker] = _Job(request, time.monotonic())
                threading.Thread(target=_exchange, args=(worker, request, outcomes), daemon=True).start()
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
                if not job.late:
                    self._tell_crash(job.request, how_it_ended(worker.exit_code))
                worker = self._start_worker()
                outcome = Failure("late") if job.late else outcome
            self._idle.append(worker)
            yield job.request.site, outcome

    def _tell_crash(self, request: Request, how: str) -> None:
        """A process that crashed could not write down why."""
        folder = self._folders[request.site]
        Ledger(folder).log(f"round {request.round}, step {request.step}: the process of the step is gone: {how}")
        self.where_to_look = f"{folder / 'site.log'} says: the process of the step is gone: {how}."

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


def _exchange(worker: Worker, request: Request, outcomes: queue.Queue[tuple[Worker, bytes | Failure]]) -> None:
    reply = worker.exchange(request.head, request.body)
    outcomes.put((worker, Failure("crashed") if reply is None else reply))


def _time_left(busy: dict[Worker, _Job], deadline: float | None) -> float | None:
    """Seconds until the next running job is late; None when none can be."""
    running = [job for job in busy.values() if not job.late]
    if deadline is None or not running:
        return None
    return max(0.01, deadline - max(job.age() for job in running))


def _where_to_look(specs: Sequence[SiteSpec]) -> str:
    folder = specs[0].folder.parent if specs else Path()
    return f"What happened is in {folder}/<site>/site.log; --debug shows it at once."
