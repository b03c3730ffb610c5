"""Long-running processes in the foreground, as service managers want them: they end with all that they started."""

from __future__ import annotations

import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from types import FrameType

_END_SECONDS = 10.0


def python_module(module: str, *arguments: str) -> list[str]:
    return [sys.executable, "-u", "-m", module, *arguments]


def supervise(command: Sequence[str], log: Path, started: Callable[[int], None] = lambda pid: None) -> int:
    """Runs `command` until it ends or this process is told to stop; returns its exit code, 0 when told to stop. Its
    output goes to `log`."""
    stop = threading.Event()

    def told(number: int, frame: FrameType | None) -> None:
        stop.set()

    before = {number: signal.signal(number, told) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        with log.open("ab") as output:
            process = subprocess.Popen(
                list(command), stdout=output, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL, start_new_session=True
            )
        try:
            started(process.pid)
            while not stop.wait(0.2):
                if process.poll() is not None:
                    return process.returncode
            return 0
        finally:
            end_tree(process)
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def end_tree(process: subprocess.Popen[bytes]) -> None:
    """A process and all below it: asked first, then killed."""
    import psutil  # Comes with the engine.

    with suppress(psutil.NoSuchProcess):
        root = psutil.Process(process.pid)
        everyone = [*root.children(recursive=True), root]
        for one in everyone:
            with suppress(psutil.NoSuchProcess):
                one.terminate()
        for one in psutil.wait_procs(everyone, timeout=_END_SECONDS)[1]:
            with suppress(psutil.NoSuchProcess):
                one.kill()
    process.wait()
