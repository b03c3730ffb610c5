"""Forked workers: a copy of a process that has used several threads, and workers that end with their parent."""

from __future__ import annotations

import gc
import os
import subprocess
import sys
import time
from typing import ClassVar

import psutil
import pytest
import torch

from fedshift.federation.engines.workers import ForkedWorker, can_fork
from fedshift.federation.step import Request

HEAD = {"site": "north", "step": "s", "round": 1, "nonce": "n"}


@pytest.mark.timeout(60)
@pytest.mark.skipif(sys.platform != "linux", reason="only there workers are forked")
def test_a_copy_computes_although_its_original_has_used_several_threads() -> None:
    """The threads of the original are not in the copy: a sum that is shared with them would never end."""

    def answer(request: Request) -> bytes:
        total = torch.ones(2000, 2000).double().contiguous().clone().sum()
        return f"{request.site} {float(total):.0f}".encode()

    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        assert float(torch.ones(2000, 2000).double().sum()) == 4e6
        worker = ForkedWorker(answer)
        try:
            assert worker.exchange(HEAD, b"") == b"north 4000000"
        finally:
            worker.kill()
            worker.kill()  # Again: nothing happens.
    finally:
        torch.set_num_threads(before)
    assert not psutil.pid_exists(worker.pid) and worker.exchange(HEAD, b"") is None


class Needy:
    """Waits for something that only the original has when it is taken down, as sessions of onnxruntime do."""

    taken_down: ClassVar[list[int]] = []

    def __init__(self) -> None:
        self.itself = self  # Only the collector of cycles takes it down.

    def __del__(self) -> None:
        self.taken_down.append(os.getpid())


@pytest.mark.skipif(sys.platform != "linux", reason="only there workers are forked")
def test_what_the_original_no_longer_needs_is_not_taken_down_in_the_copy() -> None:
    def answer(request: Request) -> bytes:
        gc.collect()
        return str(len(Needy.taken_down)).encode()

    gc.disable()
    try:
        Needy()
        worker = ForkedWorker(answer)
        try:
            assert worker.exchange(HEAD, b"") == b"0"
        finally:
            worker.kill()
    finally:
        gc.enable()
    gc.collect()
    assert Needy.taken_down == [os.getpid()]


def test_several_threads_or_an_accelerator_forbid_a_fork(monkeypatch: pytest.MonkeyPatch) -> None:
    assert can_fork(1) == (sys.platform == "linux" and torch.cuda.device_count() == 0)
    assert not can_fork(2)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    assert not can_fork(1)


@pytest.mark.skipif(sys.platform != "linux", reason="only there workers are forked")
def test_a_worker_ends_with_its_parent_even_in_the_middle_of_a_step() -> None:
    code = (
        "import os, time\nfrom fedshift.federation.engines.workers import ForkedWorker\n"
        "worker = ForkedWorker(lambda request: time.sleep(600) or b'')\nprint(worker.pid, flush=True)\n"
        f"worker.exchange({HEAD!r}, b'')"
    )
    parent = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    pid = int(parent.stdout.readline())
    assert psutil.pid_exists(pid)
    os.kill(parent.pid, 9)
    parent.wait()
    until = time.monotonic() + 10
    while psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE:
        assert time.monotonic() < until
        time.sleep(0.05)
