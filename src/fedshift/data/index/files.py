"""The files below a folder, looked at once: which there are, what each holds.

A `FileIndex` lists every folder once and takes the fingerprint of every file once: a hash of its bytes and, for an
image, its size. Whatever reads a data set shares one index, so all of it sees the same state of the folder.

The cache of decoded images must never show an old image under a new file's name, so its keys come from content.
Reading every file on every start would be slow, so fingerprints are remembered on disk by path, size, time of
modification and time of change. Tools that preserve times (`cp -p`, `rsync -t`, archives) cannot set back the last of
these. A file changed within the last two seconds is not remembered: it could change again without its times moving.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from fedshift.data.decoding import MAX_BYTES, SUFFIXES, Size, UnreadableError, image_size
from fedshift.data.dicom import is_readable
from fedshift.errors import InputError
from fedshift.files import cache_root, write_atomically

VERSION = 2
SETTLED_NS = 2_000_000_000
BLOCK = 256
"""Files given to the thread pool at a time: what is decoded but not yet stored must fit in memory."""

TASK = 16
"""Files that one thread takes at a time: handing out one file costs as much as decoding a thumbnail."""

NOT_DATA = "__MACOSX"
"""A folder that archive tools leave behind."""

Item = TypeVar("Item")
Result = TypeVar("Result")


@dataclass(frozen=True)
class Fingerprint:
    """The hash of a file's content; for an image, its size or the reason why it cannot be read."""

    digest: str
    size: Size | None
    problem: str | None


@dataclass(frozen=True)
class _Entries:
    """The visible content of one folder, sorted by name."""

    folders: list[Path]
    files: dict[str, Path]
    others: list[tuple[str, str]]
    """The name of what is not data, and why."""


class FileIndex:
    """What folders and files held when this index first looked at them. Make a new one for every data set that is
    opened: folders change."""

    def __init__(self) -> None:
        self._entries: dict[Path, _Entries] = {}
        self._fingerprints: dict[Path, Fingerprint] = {}

    def folders(self, folder: Path) -> list[Path]:
        """The folders in a folder, sorted; hidden ones and `__MACOSX` are not data."""
        return self._list(folder).folders

    def files(self, folder: Path, suffixes: tuple[str, ...]) -> list[Path]:
        """The files in a folder whose names end in one of the suffixes (lower case), sorted. Hidden files, pipes and
        devices do not count."""
        return [path for name, path in self._list(folder).files.items() if name.lower().endswith(suffixes)]

    def images(self, folder: Path) -> list[Path]:
        return self.files(folder, SUFFIXES)

    def others(self, folder: Path) -> list[tuple[str, str]]:
        """The names in a folder that are never data, each with the reason."""
        return self._list(folder).others

    def has_file(self, path: Path) -> bool:
        return path.name in self._list(path.parent).files

    def fingerprints(self, folder: Path, paths: Sequence[Path], domain: str) -> list[Fingerprint]:
        """Those of a domain's images below a folder."""
        return self._look(folder, paths, _look_at_image, f"images of {domain}")

    def digest(self, path: Path) -> str:
        """The content hash of one file of any size."""
        return self._look(path.parent, [path], _hash_whole_file, path.name)[0].digest

    def _list(self, folder: Path) -> _Entries:
        if folder not in self._entries:
            self._entries[folder] = _list_folder(folder)
        return self._entries[folder]

    def _look(
        self, folder: Path, paths: Sequence[Path], look: Callable[[Path], Fingerprint], purpose: str
    ) -> list[Fingerprint]:
        new = [path for path in dict.fromkeys(paths) if path not in self._fingerprints]
        if new:
            found = _remembered(folder, new, look, purpose)
            self._fingerprints.update(zip(new, found, strict=True))
        return [self._fingerprints[path] for path in paths]


def read_limited(path: Path) -> bytes:
    """The bytes of an image file, unless it is absurdly large or cannot be read."""
    try:
        with path.open("rb") as file:
            if os.fstat(file.fileno()).st_size > MAX_BYTES:
                raise UnreadableError(f"the file is larger than {MAX_BYTES // 2**20} MB")
            return file.read()
    except OSError as problem:
        raise UnreadableError(problem.strerror or str(problem)) from problem


def digest_of(data: bytes) -> str:
    """The content hash of bytes."""
    return hashlib.blake2b(data, digest_size=20).hexdigest()


def in_parallel(work: Callable[[Item], Result], items: Sequence[Item]) -> Iterator[list[Result]]:
    """`work` done on all items by threads (hashing and decoding release the interpreter), in order, in blocks."""

    def do(some: Sequence[Item]) -> list[Result]:
        return [work(item) for item in some]

    with ThreadPoolExecutor(max_workers=min(8, os.cpu_count() or 1)) as pool:
        for start in range(0, len(items), BLOCK):
            block = items[start : start + BLOCK]
            done = pool.map(do, [block[i : i + TASK] for i in range(0, len(block), TASK)])
            yield [result for some in done for result in some]


def _list_folder(folder: Path) -> _Entries:
    """A folder that is not there or cannot be listed counts as empty."""
    found = _Entries([], {}, [])
    try:
        with os.scandir(folder) as entries:
            everything = sorted(entries, key=lambda entry: entry.name)
    except OSError as problem:
        found.others.append((folder.name, f"the folder cannot be listed ({problem.strerror})"))
        return found
    for entry in everything:
        if entry.name.startswith(".") or entry.name == NOT_DATA:
            found.others.append((entry.name, "hidden, or left by an archive tool"))
            continue
        with contextlib.suppress(OSError):  # A link that leads to itself is neither.
            if entry.is_dir():
                found.folders.append(folder / entry.name)
                continue
            if entry.is_file():
                found.files[entry.name] = folder / entry.name
                continue
        found.others.append((entry.name, "no file: a broken link, a pipe or a device"))
    return found


def _look_at_image(path: Path) -> Fingerprint:
    try:
        data = read_limited(path)
    except UnreadableError as problem:
        return Fingerprint("", None, str(problem))
    digest = digest_of(data)
    try:
        return Fingerprint(digest, image_size(data), None)
    except UnreadableError as problem:
        return Fingerprint(digest, None, str(problem))


def _hash_whole_file(path: Path) -> Fingerprint:
    with path.open("rb") as file:
        return Fingerprint(hashlib.file_digest(file, _hasher).hexdigest(), None, None)


def _hasher() -> Any:
    return hashlib.blake2b(digest_size=20)


def _remembered(
    folder: Path, paths: Sequence[Path], look: Callable[[Path], Fingerprint], purpose: str
) -> list[Fingerprint]:
    """Fingerprints from disk where a file has not changed since; the others are taken and remembered."""
    memory = cache_root() / "facts" / f"{_name_of(folder, purpose)}.json"
    known = _load(memory)
    stamps = [_stamp(path) for path in paths]
    recalled = [_recall(known.get(str(path)), stamp) for path, stamp in zip(paths, stamps, strict=True)]
    unknown = [path for path, found in zip(paths, recalled, strict=True) if found is None]
    if not unknown:
        return [found for found in recalled if found is not None]
    taken = (found for block in in_parallel(look, unknown) for found in block)
    fingerprints = [found if found is not None else next(taken) for found in recalled]
    now = time.time_ns()
    settled = {
        str(path): [*stamp, found.digest, found.size, found.problem]
        for path, stamp, found in zip(paths, stamps, fingerprints, strict=True)
        if found.digest and now - max(stamp[1:]) > SETTLED_NS
    }
    _store(memory, settled)
    return fingerprints


def _name_of(folder: Path, purpose: str) -> str:
    # What could not be read without pydicom is looked at again once that is there.
    text = json.dumps([VERSION, is_readable(), str(folder.resolve()), purpose])
    return hashlib.blake2b(text.encode(), digest_size=20).hexdigest()


def _stamp(path: Path) -> list[int]:
    """Size, time of modification, time of change; zeros for a file that is gone, which no memory matches."""
    try:
        status = path.stat()
    except OSError:
        return [0, 0, 0]
    return [status.st_size, status.st_mtime_ns, status.st_ctime_ns]


def _recall(entry: list[Any] | None, stamp: list[int]) -> Fingerprint | None:
    if entry is None or entry[:3] != stamp:
        return None
    digest, size, problem = entry[3:]
    return Fingerprint(digest, None if size is None else (size[0], size[1]), problem)


def _load(memory: Path) -> dict[str, list[Any]]:
    try:
        known = json.loads(memory.read_bytes())
    except (OSError, ValueError):
        return {}
    return known if isinstance(known, dict) else {}


def _store(memory: Path, known: dict[str, list[Any]]) -> None:
    # Without memory only speed is lost; a cache that cannot be written is reported where arrays are stored.
    with contextlib.suppress(InputError):
        write_atomically(memory, json.dumps(known).encode())
