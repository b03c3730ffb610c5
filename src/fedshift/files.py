"""Files that are there whole or not at all, and where those that can be made again are kept."""

from __future__ import annotations

import os
import secrets
from pathlib import Path

from fedshift.errors import InputError


def cache_root() -> Path:
    """`FEDSHIFT_CACHE`, or `~/.cache/fedshift`."""
    given = os.environ.get("FEDSHIFT_CACHE")
    return Path(given).expanduser() if given else Path.home() / ".cache" / "fedshift"


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
        raise InputError(
            "disk",
            f"cannot write {path}: {error.strerror or error}. Free some space and try again (a run: with --resume).",
        ) from error
