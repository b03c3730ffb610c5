"""A cache of arrays on disk: made once, then opened memory-mapped and read-only.

An entry is a folder of `.npy` files, named by the hash of its key. It is written to a temporary folder and then
renamed, so a reader finds a whole entry or none. If two processes make the same entry, the first to rename wins and
the other discards its copy.
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
import re
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from numpy.typing import DTypeLike, NDArray

from fedshift.errors import InputError
from fedshift.files import cache_root, refuse_too_many_files

FORMAT = 1
"""Part of every key: raised when the meaning of stored entries changes."""

INDEX = "index.json"
"""Lists the arrays of an entry and holds its notes."""

UNFINISHED = "making-"
DAY = 24 * 60 * 60


def cached_arrays(key: str, make: Callable[[], Mapping[str, NDArray[Any]]]) -> dict[str, NDArray[Any]]:
    """The arrays `make` returns, memory-mapped and read-only; `make` runs only when `key` is not cached yet.

    `key` must contain all that the arrays depend on, including a version of the code that makes them. Array names are
    letters, digits and underscores."""

    def write(writer: EntryWriter) -> None:
        for name, array in make().items():
            writer.add(name, array)

    return cached_entry(key, write).arrays


@dataclass(frozen=True)
class Entry:
    """What is stored under one key: memory-mapped arrays, and JSON notes about them."""

    arrays: dict[str, NDArray[Any]]
    notes: dict[str, Any]


class EntryWriter:
    """Fills the folder of a new entry."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._names: list[str] = []
        self.notes: dict[str, Any] = {}

    def add(self, name: str, array: NDArray[Any]) -> None:
        """Store one whole array."""
        array = np.asarray(array)
        with self.rows(name, array.shape[1:], array.dtype) as append:
            append(array)

    @contextmanager
    def rows(self, name: str, row_shape: tuple[int, ...], dtype: DTypeLike) -> Iterator[Callable[[NDArray[Any]], None]]:
        """Stores an array `(n, *row_shape)` block by block, if it does not fit in memory or n is known only at the end.
        Plain writes, not a memory map: a full disk is then an error, not a crash."""
        assert re.fullmatch(r"\w+", name), f"{name!r} cannot name a cached array"
        self._names.append(name)
        count = 0
        with (self._folder / f"{name}.npy").open("wb") as file:
            _write_header(file, (0, *row_shape), dtype)
            start = file.tell()

            def append(rows: NDArray[Any]) -> None:
                nonlocal count
                assert rows.shape[1:] == row_shape and rows.dtype == dtype
                with _disk_errors(self._folder.parent):
                    file.write(np.ascontiguousarray(rows).data)
                count += len(rows)

            yield append
            with _disk_errors(self._folder.parent):
                file.seek(0)
                _write_header(file, (count, *row_shape), dtype)
                # NumPy pads the header so that the first dimension can grow in place.
                assert file.tell() == start
                _flush(file)

    def close(self) -> None:
        with _disk_errors(self._folder.parent), (self._folder / INDEX).open("wb") as file:
            file.write(json.dumps({"arrays": self._names, "notes": self.notes}).encode())
            _flush(file)


ATTEMPTS = 3
"""How often an entry is made again when it is gone as soon as it is there: other processes may mend it just then."""


def cached_entry(key: str, write: Callable[[EntryWriter], None]) -> Entry:
    """The entry stored under `key`; `write` fills it when it does not exist yet or is damaged."""
    root = cache_root() / "arrays"
    final = root / _digest(key)
    entry = _open(final)
    for _ in range(ATTEMPTS):
        if entry is not None:
            return entry
        _make(root, final, write)
        entry = _open(final)
    if entry is None:
        raise InputError("disk", f"The cache entry {final} cannot be read back; set FEDSHIFT_CACHE elsewhere.")
    return entry


def _make(root: Path, final: Path, write: Callable[[EntryWriter], None]) -> None:
    with _disk_errors(root):
        root.mkdir(parents=True, exist_ok=True)
        _remove_abandoned(root)
        made = Path(tempfile.mkdtemp(prefix=UNFINISHED, dir=root))
    try:
        writer = EntryWriter(made)
        write(writer)
        writer.close()
        with _disk_errors(root):
            _publish(made, final)
    finally:
        shutil.rmtree(made, ignore_errors=True)


def _digest(key: str) -> str:
    return hashlib.blake2b(f"{FORMAT}:{key}".encode(), digest_size=20).hexdigest()


def _open(folder: Path) -> Entry | None:
    """The entry in a folder, or None if it is missing or damaged (a short file fails to map)."""
    try:
        index = json.loads((folder / INDEX).read_bytes())
        arrays: dict[str, NDArray[Any]] = {
            name: np.load(folder / f"{name}.npy", mmap_mode="r", allow_pickle=False) for name in index["arrays"]
        }
        return Entry(arrays, index["notes"])
    except OSError as problem:
        refuse_too_many_files(problem)
        return None
    except (ValueError, KeyError, TypeError):
        return None


def _publish(made: Path, final: Path) -> None:
    """Rename the new folder into place. What another process put there first has the same arrays and stays, unless it
    is damaged. This is looked at last: an entry that was missing a moment ago may be complete by now."""
    for _ in range(ATTEMPTS):
        try:
            made.rename(final)
        except OSError as problem:
            if problem.errno not in (errno.ENOTEMPTY, errno.EEXIST):
                raise
        if _open(final) is not None:
            return
        _discard(final, final.parent)


def _discard(damaged: Path, root: Path) -> None:
    """Removes an unreadable entry in one step, so that no other process sees half of it."""
    if damaged.exists():
        grave = Path(tempfile.mkdtemp(prefix=UNFINISHED, dir=root))
        try:
            damaged.rename(grave / "entry")
        except FileNotFoundError:
            pass  # Another process was quicker.
        finally:
            shutil.rmtree(grave, ignore_errors=True)


def _remove_abandoned(root: Path) -> None:
    """Removes what killed processes left behind, a day after their last write."""
    for folder in root.glob(f"{UNFINISHED}*"):
        try:
            last_write = max(path.stat().st_mtime for path in (folder, *folder.iterdir()))
        except OSError:
            continue
        if time.time() - last_write > DAY:
            shutil.rmtree(folder, ignore_errors=True)


@contextmanager
def _disk_errors(root: Path) -> Iterator[None]:
    try:
        yield
    except OSError as problem:
        refuse_too_many_files(problem)
        raise InputError(
            "disk",
            f"The cache in {root} could not be written ({problem.strerror or problem}); "
            "free some space or set FEDSHIFT_CACHE to another folder.",
        ) from problem


def _write_header(file: BinaryIO, shape: tuple[int, ...], dtype: DTypeLike) -> None:
    header = {"shape": shape, "fortran_order": False, "descr": np.lib.format.dtype_to_descr(np.dtype(dtype))}
    np.lib.format.write_array_header_1_0(file, header)


def _flush(file: BinaryIO) -> None:
    """Writes to the disk before the rename; otherwise a power cut could leave a complete entry of zeros."""
    file.flush()
    os.fsync(file.fileno())
