"""NVFlare's own way to have something done at sites, for real_machines.py: tasks whose bytes come back as they are."""

from __future__ import annotations

import json
import statistics
import time
from pathlib import Path

from nvflare.apis.client import Client
from nvflare.apis.controller_spec import Task
from nvflare.apis.executor import Executor
from nvflare.apis.fl_context import FLContext
from nvflare.apis.impl.controller import Controller
from nvflare.apis.shareable import Shareable
from nvflare.apis.signal import Signal


class Asking(Controller):  # type: ignore[misc]
    """Writes medians of seconds for tasks without and with `size` bytes to the file `result`."""

    def __init__(self, size: int, repeats: int, result: str) -> None:
        super().__init__(task_check_period=0.05)
        self._size, self._repeats, self._result = size, repeats, Path(result)

    def start_controller(self, fl_ctx: FLContext) -> None:
        return

    def stop_controller(self, fl_ctx: FLContext) -> None:
        return

    def process_result_of_unknown_task(
        self, client: Client, task_name: str, client_task_id: str, result: Shareable, fl_ctx: FLContext
    ) -> None:
        return

    def control_flow(self, abort_signal: Signal, fl_ctx: FLContext) -> None:
        everyone = len(fl_ctx.get_engine().get_clients())
        found = {}
        for name, body in (("empty", b""), ("full", bytes(self._size))):
            seconds = []
            for _ in range(self._repeats + 1):
                data = Shareable()
                data["body"] = body
                started = time.perf_counter()
                task = Task(name="echo", data=data)
                self.broadcast_and_wait(task, fl_ctx, min_responses=everyone, abort_signal=abort_signal)
                came = [one.result["body"] for one in task.client_tasks]
                if [len(one) for one in came] != [len(body)] * everyone:
                    return  # Without a file: the benchmark says that the job ended.
                seconds.append(time.perf_counter() - started)
            found[name] = statistics.median(seconds[1:])  # The first is for starting.
        fresh = self._result.with_suffix(".new")
        fresh.write_text(json.dumps(found))
        fresh.replace(self._result)


class Echo(Executor):  # type: ignore[misc]
    def execute(self, task_name: str, shareable: Shareable, fl_ctx: FLContext, abort_signal: Signal) -> Shareable:
        reply = Shareable()
        reply["body"] = shareable["body"]
        return reply
