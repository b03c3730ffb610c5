"""Processes that run steps for others, so that a crash or a kill costs one reply and nothing more.

Standard library only: a process that only starts workers need not load torch. Frames on the pipes are a length, then
that many bytes.
"""

from __future__ import annotations

import ctypes
import gc
import json
import os
import re
import signal
import struct
import subprocess
import sys
import threading
import time
import traceback
import warnings
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import IO, TYPE_CHECKING, Any

from fedshift.beats import count_in, next_place

if TYPE_CHECKING:
    from fedshift.federation.step import Request

_LENGTH = struct.Struct("<Q")

MOST_ROUNDS = 10**6


def question_head(head: object) -> dict[str, Any]:
    """The head of a question from anywhere, in exactly these types; ValueError if it is anything else.

    What a site does with a question begins here: a worker is never handed a key more than these four, because one of
    its frames (`setup`) tells it which data and which policy to use.
    """
    if type(head) is not dict or set(head) != {"site", "step", "round", "nonce"}:
        raise ValueError("a question has a site, a step, a round and a nonce")
    site, step, round, nonce = (head[key] for key in ("site", "step", "round", "nonce"))
    if type(site) is not str or not 0 < len(site) <= 255:
        raise ValueError("site is not a name")
    if type(step) is not str or not re.fullmatch(r"[A-Za-z_][A-Za-z0-9_.]{0,199}", step):
        raise ValueError("step is not the name of a step")
    if type(round) is not int or not 0 <= round <= MOST_ROUNDS:  # A bool is no number here.
        raise ValueError(f"round is not a whole number from 0 to {MOST_ROUNDS}")
    if type(nonce) is not str or not re.fullmatch(r"[0-9a-z]{1,64}", nonce):
        raise ValueError("nonce is not a short word of digits and small letters")
    return {"site": site, "step": step, "round": round, "nonce": nonce}


class Worker(ABC):
    """One worker process, as its owner sees it."""

    pid: int
    exit_code: int | None = None
    """How the process ended, once it was reaped: minus the number of the signal that ended it."""
    _requests: IO[bytes]
    _replies: IO[bytes]

    def exchange(self, head: Mapping[str, Any], body: bytes) -> bytes | None:
        """The answer to one request; None when the process is gone."""
        try:
            write_frame(self._requests, json.dumps(head).encode())
            write_frame(self._requests, body)
            return read_frame(self._replies)
        except (OSError, EOFError, ValueError):
            return None

    def kill(self) -> None:
        """Ends the process. Calling it again does nothing."""
        with suppress(ProcessLookupError):
            os.kill(self.pid, signal.SIGKILL)
        self._reap()
        for stream in (self._requests, self._replies):
            with suppress(OSError):
                stream.close()

    @abstractmethod
    def _reap(self) -> None:
        """Waits until the process has ended, so that none is left as a zombie."""


class ForkedWorker(Worker):
    """A copy of this process that answers requests with `answer`: it has everything that is loaded and starts in
    milliseconds. Only where a fork is safe; see `can_fork`."""

    def __init__(self, answer: Callable[[Request], bytes]) -> None:
        child_reads, requests = os.pipe()
        replies, child_writes = os.pipe()
        parent, place = os.getpid(), next_place()
        with warnings.catch_warnings():
            # Python 3.12 warns when other threads exist. The child uses none of their locks: it computes and writes.
            warnings.simplefilter("ignore", DeprecationWarning)
            pid = os.fork()
        if pid == 0:
            os.close(requests)
            os.close(replies)
            count_in(place)
            _serve_and_exit(answer, child_reads, child_writes, parent)
        os.close(child_reads)
        os.close(child_writes)
        self.pid = pid
        self._requests, self._replies = os.fdopen(requests, "wb"), os.fdopen(replies, "rb")
        self._is_reaped = False

    def _reap(self) -> None:
        if not self._is_reaped:
            with suppress(ChildProcessError):
                self.exit_code = os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])
            self._is_reaped = True


class SpawnedWorker(Worker):
    """A new interpreter that runs `module`. `setup` is the JSON that it reads first."""

    def __init__(self, module: str, setup: bytes) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", module],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            # Ctrl-C belongs to the coordinator, which then closes its workers in order.
            start_new_session=True,
        )
        assert self._process.stdin and self._process.stdout
        self.pid = self._process.pid
        self._requests, self._replies = self._process.stdin, self._process.stdout
        self.set_up(setup)

    def set_up(self, setup: bytes) -> None:
        """Tells the process which sites of which run it is. Told again, it is others from then on."""
        with suppress(OSError, ValueError):
            write_frame(self._requests, b'{"setup": ' + setup + b"}")

    def _reap(self) -> None:
        self.exit_code = self._process.wait()


def how_it_ended(exit_code: int | None) -> str:
    """In words, of a process that should not have ended."""
    if exit_code is None or exit_code >= 0:
        return "it ended by itself" + (f" with exit code {exit_code}" if exit_code else "")
    try:
        name = signal.Signals(-exit_code).name
    except ValueError:
        name = f"signal {-exit_code}"
    return f"it was ended by {name}{_MEANING.get(name, '')}"


_MEANING = {
    "SIGILL": ": this processor does not have an instruction that it announces; with precision=bfloat16, use float32",
    "SIGKILL": ": by hand, or because memory ran out",
    "SIGSEGV": ": an error in a library",
    "SIGBUS": ": a file that it read was changed or cut, or memory ran out",
}


def can_fork(threads: int) -> bool:
    """Whether a copy of this process can train. A copy has one thread: with several torch threads, or where torch
    drives an accelerator, it would wait for threads that only the original has."""
    if sys.platform != "linux" or threads > 1:
        return False
    torch = sys.modules.get("torch")
    return torch is None or torch.cuda.device_count() == 0


def end_with_parent(parent: int) -> None:
    """This process ends when the process `parent` does, however that ends."""
    if sys.platform == "linux":
        with suppress(OSError, AttributeError):
            ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG
    threading.Thread(target=_watch, args=(parent,), daemon=True).start()


def serve(
    requests: IO[bytes], replies: IO[bytes], handle: Callable[[Mapping[str, Any]], Callable[[bytes], bytes] | None]
) -> None:
    """Answers until the pipe closes. `handle` gets the head of a frame and returns a function of the body that follows,
    or None if none does."""
    with suppress(EOFError, KeyboardInterrupt, BrokenPipeError):
        while True:
            answer = handle(json.loads(read_frame(requests)))
            if answer is not None:
                write_frame(replies, answer(read_frame(requests)))


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


def _serve_and_exit(answer: Callable[[Request], bytes], reads: int, writes: int, parent: int) -> None:
    """The life of a forked worker. It must never return into the code of the process it was copied from."""
    code = 1
    gc.freeze()  # What the original no longer needs is not taken down here: it may wait for threads of the original.
    try:
        from fedshift.federation.step import Request

        os.setsid()  # Ctrl-C belongs to the coordinator, which then closes its workers in order.
        end_with_parent(parent)
        os.dup2(2, 1)  # What a library prints is no output of the command.
        if torch := sys.modules.get("torch"):
            torch.set_num_threads(1)  # The threads of the original are not here: a sum shared with them never ends.
        with os.fdopen(reads, "rb") as requests, os.fdopen(writes, "wb") as replies:
            serve(requests, replies, lambda head: lambda body: answer(Request(body=body, **head)))
        code = 0
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(code)


def _watch(parent: int) -> None:
    """The closed pipe tells the same, but a step that is under way would not notice for as long as it takes."""
    while os.getppid() == parent:
        time.sleep(1)
    os._exit(1)
