"""A site's half of the job: passes questions to a child process and its answers back, and never lets an error out."""

from __future__ import annotations

import json
import queue
import threading
import time
from pathlib import Path
from typing import Any

from nvflare.apis.event_type import EventType
from nvflare.apis.executor import Executor
from nvflare.apis.fl_context import FLContext
from nvflare.apis.shareable import Shareable
from nvflare.apis.signal import Signal

from fedshift.federation.engines.nvflare.settings import SiteSettings, worker_setup
from fedshift.federation.engines.workers import SpawnedWorker

_ABORT_CHECK_SECONDS = 0.5


class SiteDoor(Executor):  # type: ignore[misc]
    """Starts one child, of the installed fedshift, for the run that asks, and another when that one is gone."""

    def __init__(self) -> None:
        super().__init__()
        self._worker: SpawnedWorker | None = None
        self._setup = b""

    def execute(self, task_name: str, shareable: Shareable, fl_ctx: FLContext, abort_signal: Signal) -> Shareable:
        outcome, body = self._answer(shareable, Path(fl_ctx.get_workspace().get_root_dir()), abort_signal)
        reply = Shareable()
        reply["outcome"], reply["body"] = outcome, body
        return reply

    def handle_event(self, event_type: str, fl_ctx: FLContext) -> None:
        if event_type == EventType.END_RUN:
            self._end_worker()

    def _answer(self, question: Shareable, kit: Path, abort_signal: Signal) -> tuple[str, bytes]:
        try:
            head, body = json.loads(question["head"]), question["body"]
            request, deadline = dict(head["request"]), head["deadline"]
            settings = SiteSettings.read(kit)
            setup = json.dumps(worker_setup(settings, kit, head["run"], head["part"], head["plan"])).encode()
            if request["site"] != settings.site or not isinstance(body, bytes):
                raise ValueError("not for this site")
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
