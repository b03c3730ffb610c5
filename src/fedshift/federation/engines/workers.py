"""A process that runs steps for others: the heavy work is its, so that a crash or a kill costs one reply.

Standard library only: whoever starts such a process need not load torch. Frames on its pipes: length, then bytes.
"""

from __future__ import annotations

import json
import struct
import subprocess
import sys
from collections.abc import Mapping
from contextlib import suppress
from typing import IO, Any

_LENGTH = struct.Struct("<Q")


class Worker:
    """One worker process. `setup` is the JSON that `fedshift.federation.engines.worker` reads first."""

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
        self.set_up(setup)

    def set_up(self, setup: bytes) -> None:
        """Tells the process which sites of which run it is. Said again, it is others from then on."""
        with suppress(OSError, ValueError):
            write_frame(self._stdin, b'{"setup": ' + setup + b"}")

    def exchange(self, head: Mapping[str, Any], body: bytes) -> bytes | None:
        """The answer to one request; None when the process is gone."""
        try:
            write_frame(self._stdin, json.dumps(head).encode())
            write_frame(self._stdin, body)
            return read_frame(self._stdout)
        except (OSError, EOFError, ValueError):
            return None

    @property
    def pid(self) -> int:
        return self._process.pid

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
