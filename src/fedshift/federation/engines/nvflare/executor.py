"""A site's half of the job: passes questions to a child process and its answers back, and never lets an error out."""

from __future__ import annotations

import json
import queue
import threading
import time
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from nvflare.apis.event_type import EventType
from nvflare.apis.executor import Executor
from nvflare.apis.fl_context import FLContext
from nvflare.apis.shareable import Shareable
from nvflare.apis.signal import Signal

from fedshift.beats import Transfer, transfers_in_words
from fedshift.federation.engines.nvflare.settings import SiteSettings, run_folder, worker_setup
from fedshift.federation.engines.nvflare.transfers import Reporter
from fedshift.federation.engines.workers import SpawnedWorker, question_head

_ABORT_CHECK_SECONDS = 0.5
_FIRST_SECONDS, _LOG_SECONDS = 3.0, 10.0
"""A transfer is logged once it has taken so long, and from then on so often."""
_LONGEST_HEAD = 4 * 1024 * 1024
_LONGEST_DEADLINE = 30 * 24 * 3600.0


def read_question(text: object, body: object) -> tuple[dict[str, Any], bytes]:
    """The head of a question and its body; ValueError for anything that is no question."""
    if type(text) is not str or len(text) > _LONGEST_HEAD or type(body) is not bytes:
        raise ValueError("a question is a text and bytes")
    head = json.loads(text)
    # `call` is the coordinator's own number for it, of no use here.
    if type(head) is not dict or not {"run", "plan", "part", "request", "deadline"} == set(head) - {"call"}:
        raise ValueError("a question has a run, a plan, a part, a request and a deadline")
    deadline = head["deadline"]
    if deadline is not None and not (type(deadline) in (int, float) and 0 < deadline <= _LONGEST_DEADLINE):
        raise ValueError("deadline is not a number of seconds")
    return head, body


class SiteDoor(Executor):  # type: ignore[misc]
    """Starts one child, of the installed fedshift, for the run that asks, and another when that one is gone."""

    def __init__(self) -> None:
        super().__init__()
        self._worker: SpawnedWorker | None = None
        self._setup = b""
        self._log: Path | None = None
        self._told = 0.0
        self._reporter: Reporter | None = None

    def execute(self, task_name: str, shareable: Shareable, fl_ctx: FLContext, abort_signal: Signal) -> Shareable:
        outcome, body = self._answer(shareable, Path(fl_ctx.get_workspace().get_root_dir()), abort_signal)
        reply = Shareable()
        reply["outcome"], reply["body"] = outcome, body
        return reply

    def handle_event(self, event_type: str, fl_ctx: FLContext) -> None:
        if event_type == EventType.START_RUN:
            self._reporter = Reporter(self._note)
        if event_type == EventType.END_RUN:
            if self._reporter is not None:
                self._reporter.close()
            self._end_worker()

    def _note(self, found: Sequence[Transfer]) -> None:
        """A line in the site's log of the run, of transfers that take long."""
        now = time.monotonic()
        if not found:
            self._told = 0.0
        elif not self._told:
            self._told = now - _LOG_SECONDS + _FIRST_SECONDS
        elif now - self._told >= _LOG_SECONDS and self._log is not None:
            self._told = now
            with self._log.open("a") as file:
                file.write(f"{datetime.now(UTC).isoformat(timespec='milliseconds')} {transfers_in_words(found)}\n")

    def _answer(self, question: Shareable, kit: Path, abort_signal: Signal) -> tuple[str, bytes]:
        try:
            settings = SiteSettings.read(kit)
            head, body = read_question(question.get("head"), question.get("body"))
            request, deadline = question_head(head["request"]), head["deadline"]
            if request["site"] != settings.site:
                raise ValueError("not for this site")
            setup = json.dumps(worker_setup(settings, kit, head["run"], head["part"], head["plan"])).encode()
            self._log = run_folder(kit, head["run"]) / "site.log"
        # Whatever is wrong with a question stays here; only that it was refused goes back.
        except Exception:
            self.logger.exception("a question could not be read")
            return "refused", b""
        return self._work(self._worker_for(settings.worker, setup), request, body, deadline, abort_signal)

    def _worker_for(self, module: str, setup: bytes) -> SpawnedWorker:
        if self._worker is None:
            self._worker = SpawnedWorker(module, setup)
        elif setup != self._setup:
            self._worker.set_up(setup)
        self._setup = setup
        return self._worker

    def _work(
        self, worker: SpawnedWorker, request: dict[str, Any], body: bytes, deadline: float | None, abort_signal: Signal
    ) -> tuple[str, bytes]:
        answers: queue.Queue[bytes | None] = queue.Queue()
        threading.Thread(target=lambda: answers.put(worker.exchange(request, body)), daemon=True).start()
        started = time.monotonic()
        while True:
            left = _ABORT_CHECK_SECONDS if deadline is None else deadline - (time.monotonic() - started)
            try:
                reply = answers.get(timeout=max(0.0, min(left, _ABORT_CHECK_SECONDS)))
            except queue.Empty:
                if left > 0 and not abort_signal.triggered:
                    continue
                self._end_worker()
                return "late", b""
            if reply is None:
                self._end_worker()
                return "crashed", b""
            return "reply", reply

    def _end_worker(self) -> None:
        if self._worker is not None:
            self._worker.kill()
        self._worker = None
