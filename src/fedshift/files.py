"""Files that are there whole or not at all."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

from fedshift.errors import InputError


def write_atomically(path: Path, data: bytes) -> None:
    """The file is there whole or not at all, also when the machine stops in the middle."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
        try:
            with os.fdopen(handle, "wb") as file:
                file.write(data)
                file.flush()
                os.fsync(file.fileno())
            Path(temporary).replace(path)
        except BaseException:
            Path(temporary).unlink(missing_ok=True)
            raise
    except OSError as error:
        raise InputError(
            "disk",
            f"cannot write {path}: {error.strerror or error}. Free some space and start again with --resume.",
        ) from error
