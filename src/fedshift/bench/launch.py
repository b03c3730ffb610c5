"""How a suite trains its jobs: each in a process of its own."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from contextlib import suppress
from pathlib import Path
from threading import Lock
from typing import Protocol


class Launcher(Protocol):
    """How a job is trained: to the end, going on where a run was left."""

    def train(self, config: Path, folder: Path, log: Path, threads: int) -> int:
        """Returns the exit code; what was said on the way is in `log`."""

    def stop(self) -> None:
        """Ends what is being trained, which can be resumed, and whoever waits for more to train."""


class Processes:
    """`fedshift train` for each job. Where processes can safely be forked, they come from one that has imported
    everything already, so that a job starts in a moment and not in seconds."""

    def __init__(self) -> None:
        self._lock = Lock()
        self._idle: list[tuple[int, subprocess.Popen[bytes]]] = []
        self._started: list[subprocess.Popen[bytes]] = []

    def train(self, config: Path, folder: Path, log: Path, threads: int) -> int:
        arguments = ["train", str(config), "--out", str(folder), "--resume"]
        # Elsewhere system libraries that torch loads do not bear a fork.
        if sys.platform != "linux":
            with log.open("wb") as file:
                return self._start([sys.executable, "-m", "fedshift", *arguments], threads, file.fileno()).wait()
        starter = self._starter(threads)
        assert starter.stdin is not None and starter.stdout is not None
        with suppress(BrokenPipeError):
            starter.stdin.write(json.dumps({"arguments": arguments, "log": str(log)}).encode() + b"\n")
            starter.stdin.flush()
        answer = starter.stdout.readline()
        if not answer:  # it was stopped, or killed
            return starter.wait() or 1
        with self._lock:
            self._idle.append((threads, starter))
        return int(answer)

    def stop(self) -> None:
        for process in self._started:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGTERM) if sys.platform == "linux" else process.terminate()
            process.wait()
        self._started, self._idle = [], []

    def _starter(self, threads: int) -> subprocess.Popen[bytes]:
        """One that waits, or a new one. `threads` is decided when torch is loaded."""
        with self._lock:
            for waiting in self._idle:
                if waiting[0] == threads:
                    self._idle.remove(waiting)
                    return waiting[1]
        return self._start([sys.executable, "-m", "fedshift.cli.starter"], threads, subprocess.PIPE)

    def _start(self, command: list[str], threads: int, output: int) -> subprocess.Popen[bytes]:
        # Jobs share the cores; within one, threads would only get in each other's way.
        environment = {**os.environ, "OMP_NUM_THREADS": str(threads)}
        process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=output,
            stderr=None if output == subprocess.PIPE else output,
            env=environment,
            start_new_session=True,  # It is ended as a group, with what it forked.
        )
        self._started.append(process)
        return process
