"""The server's half of the job: takes a run's questions from a local socket and puts them to sites as tasks."""

from __future__ import annotations

import json
import socket
import threading
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict
from typing import IO, Any

from nvflare.apis.client import Client
from nvflare.apis.controller_spec import Task, TaskCompletionStatus
from nvflare.apis.fl_context import FLContext
from nvflare.apis.impl.controller import Controller
from nvflare.apis.shareable import ReturnCode, Shareable
from nvflare.apis.signal import Signal

from fedshift.beats import Transfer
from fedshift.federation.engines import Failure
from fedshift.federation.engines.nvflare.job import TASK
from fedshift.federation.engines.nvflare.transfers import Reporter
from fedshift.federation.engines.workers import read_frame, write_frame

_CHECK_SECONDS = 0.05
_GRACE_SECONDS = 10
"""A site ends late work itself, at the deadline; the task waits this much longer for its word."""


class Bridge(Controller):  # type: ignore[misc]
    """Lives as long as the run's end of the socket. It understands neither questions nor answers."""

    def __init__(self, address: str) -> None:
        super().__init__(task_check_period=_CHECK_SECONDS)
        self._address = address
        self._writing = threading.Lock()
        self._replies: IO[bytes] | None = None

    def start_controller(self, fl_ctx: FLContext) -> None:
        return

    def stop_controller(self, fl_ctx: FLContext) -> None:
        return

    def process_result_of_unknown_task(
        self, client: Client, task_name: str, client_task_id: str, result: Shareable, fl_ctx: FLContext
    ) -> None:
        return  # An answer that came after its deadline.

    def control_flow(self, abort_signal: Signal, fl_ctx: FLContext) -> None:
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as link:
            link.connect(self._address)
            with link.makefile("rb") as questions, link.makefile("wb") as self._replies:
                # A site that went away while the job was started is not part of it and would be waited for in vain.
                present = [client.name for client in fl_ctx.get_engine().get_clients()]
                write_frame(self._replies, json.dumps({"sites": present}).encode())
                reader = threading.Thread(target=self._read, args=(questions, fl_ctx), daemon=True)
                reader.start()
                reporter = Reporter(self._report)
                while reader.is_alive() and not abort_signal.triggered:
                    reader.join(0.2)
                reporter.close()
                with suppress(OSError):
                    link.shutdown(socket.SHUT_RDWR)
                reader.join(5)
        self.cancel_all_tasks()

    def _read(self, questions: IO[bytes], fl_ctx: FLContext) -> None:
        """Until the run closes its end."""
        body = b""
        with suppress(EOFError, OSError, ValueError):
            while True:
                head = json.loads(read_frame(questions))
                body = read_frame(questions) if head.pop("fresh") else body
                self._ask(head, body, fl_ctx)

    def _ask(self, head: dict[str, Any], body: bytes, fl_ctx: FLContext) -> None:
        data = Shareable()
        data["head"], data["body"] = json.dumps(head), body
        deadline = head["deadline"]
        task = Task(
            name=TASK,
            data=data,
            timeout=0 if deadline is None else int(deadline) + _GRACE_SECONDS,
            task_done_cb=self._done,
            props={"call": head["call"], "site": head["request"]["site"]},
        )
        self.broadcast(task, fl_ctx, targets=[head["request"]["site"]], min_responses=1)

    def _done(self, task: Task, fl_ctx: FLContext) -> None:
        """Passes on what came of a task, in whatever thread that is noticed."""
        result = task.client_tasks[0].result if task.client_tasks else None
        outcome, body = "unreachable", b""
        if task.completion_status == TaskCompletionStatus.TIMEOUT:
            outcome = "late"
        elif isinstance(result, Shareable):
            outcome = "crashed"
            if result.get_return_code() == ReturnCode.OK and isinstance(result.get("body"), bytes):
                told = result.get("outcome")
                outcome = "reply" if told == "reply" else Failure.told(told).reason
                body = result["body"] if outcome == "reply" else b""
        task.client_tasks.clear()
        with suppress(OSError, ValueError):
            self._send({"call": task.props["call"], "site": task.props["site"], "outcome": outcome}, body)

    def _report(self, found: Sequence[Transfer]) -> None:
        self._send({"transfers": [asdict(one) for one in found]}, b"")

    def _send(self, head: dict[str, Any], body: bytes) -> None:
        assert self._replies is not None
        with self._writing:
            write_frame(self._replies, json.dumps(head).encode())
            write_frame(self._replies, body)
