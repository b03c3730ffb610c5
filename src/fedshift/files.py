"""Files that are there whole or not at all, and where those that can be made again are kept."""

from __future__ import annotations

import errno
import os
import secrets
from pathlib import Path

from fedshift.errors import InputError


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
            temporary.unlink(missing_ok=True)
            raise
    except OSError as error:
        refuse_too_many_files(error)
        raise InputError(
            "disk",
            f"cannot write {path}: {error.strerror or error}. Free some space and try again (a run: with --resume).",
        ) from error
