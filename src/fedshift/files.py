"""Files that are there whole or not at all, reading with a limit, and where files that can be made again are kept."""

from __future__ import annotations

import errno
import json
import os
import re
import secrets
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, Any

from fedshift.errors import InputError

LARGEST_JSON = 256 * 2**20
"""Bytes of a JSON file. What a run writes itself is far below: a long log of metrics has some megabytes."""

_UNFINISHED = re.compile(r"\..+\.[0-9a-f]{16}")


def cache_root() -> Path:
    """`FEDSHIFT_CACHE`, or `~/.cache/fedshift`."""
    given = os.environ.get("FEDSHIFT_CACHE")
    return Path(given).expanduser() if given else Path.home() / ".cache" / "fedshift"


def refuse_too_many_files(problem: OSError) -> None:
    """Raises where no more files can be opened: what was tried is then neither missing nor is the disk full."""
    if problem.errno == errno.EMFILE:
        raise InputError(
            "open-files",
            f"this process may not have more than {open_files_limit()} files open at a time: raise the limit"
            " (`ulimit -n 8192`) and try again (a run: with --resume)",
        ) from problem
    if problem.errno == errno.ENFILE:
        raise InputError(
            "open-files", "no process on this system can open more files: end some, or raise its limit (fs.file-max)"
        ) from problem


def open_files_limit() -> int | None:
    """How many files this process may have open at a time; None where there is no limit."""
    try:
        import resource
    except ImportError:  # Windows
        return None
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return None if soft == resource.RLIM_INFINITY else soft


def open_files_left() -> int | None:
    """How many more files this process may open; None where there is no limit."""
    limit, listed = open_files_limit(), Path("/dev/fd")
    if limit is None:
        return None
    return max(0, limit - len(list(listed.iterdir()))) if listed.is_dir() else limit


def write_atomically(path: Path, data: bytes) -> None:
    """The file is there whole or not at all, also when the machine stops in the middle."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        # Not tempfile's: those are readable by their owner only, and reports and models are meant to be shared.
        temporary = path.with_name(f".{path.name}.{secrets.token_hex(8)}")
        try:
            with temporary.open("xb") as file:
                file.write(data)
                file.flush()
                os.fsync(file.fileno())
            temporary.replace(path)
        except BaseException:
            with suppress(OSError):
                temporary.unlink(missing_ok=True)
            raise
    except OSError as error:
        raise write_failed(path, error) from error


def write_failed(path: Path, error: OSError) -> InputError:
    refuse_too_many_files(error)
    return InputError(
        "disk",
        f"cannot write {path}: {error.strerror or error}. Free some space and try again (a run: with --resume).",
    )


@contextmanager
def locked(path: Path) -> Iterator[None]:
    """Waits while another process holds this lock. It ends with the process that holds it, however that ends."""
    try:
        import fcntl
    except ImportError:  # Windows
        yield
        return
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        file = path.open("w")
    except OSError as error:
        raise write_failed(path, error) from error
    with file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def is_unfinished(path: Path) -> bool:
    """Whether a name is one that `write_atomically` gives to what is not whole yet."""
    return _UNFINISHED.fullmatch(path.name) is not None


def read_bounded(path: Path, limit: int, code: str = "run-corrupt") -> bytes:
    """The bytes of a file. What is no file (a folder, a device), cannot be read or is longer than `limit` is an error
    with this code, before memory is taken."""
    try:
        with open(path, "rb", opener=open_without_waiting) as file:
            if not is_plain_file(file):
                raise InputError(code, f"{path} is not a file")
            # A file may grow while it is read.
            data = file.read(limit + 1) if os.fstat(file.fileno()).st_size <= limit else None
    except OSError as error:
        refuse_too_many_files(error)
        raise InputError(code, f"{path} cannot be read: {error.strerror or error}") from error
    if data is None or len(data) > limit:
        raise InputError(code, f"{path} is larger than {_readable(limit)}, so it cannot be what it should be")
    return data


def read_json(path: Path, code: str = "run-corrupt", limit: int = LARGEST_JSON) -> Any:
    """What a JSON file holds; anything else is one error that names it."""
    data = read_bounded(path, limit, code)
    try:
        return json.loads(data)
    except (ValueError, RecursionError) as error:
        raise InputError(code, f"{path} is damaged: it is not valid JSON") from error


def is_plain_file(file: IO[bytes]) -> bool:
    """False for folders, devices and pipes, which may have no end."""
    return stat.S_ISREG(os.fstat(file.fileno()).st_mode)


def open_without_waiting(path: str, flags: int) -> int:
    """An opener: a named pipe would wait for somebody to write to it."""
    return os.open(path, flags | getattr(os, "O_NONBLOCK", 0))


def _readable(size: int) -> str:
    return f"{size // 2**20} MB" if size >= 2**20 else f"{size} bytes"
