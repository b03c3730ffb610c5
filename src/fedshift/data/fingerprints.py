"""What a file is, told by its bytes: a hash of its content, and for an image its size.

The cache of decoded images must never show an old image under a new file's name, so its keys come from
content. Reading every file on every start would be slow, so hashes are remembered by path, size, time of
modification and time of change. The last cannot be set back by tools that preserve times, as `cp -p`,
`rsync -t` and archives do. A file changed within the last two seconds is not remembered: it could change
again without its times moving."""

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

from fedshift.data.images import MAX_BYTES, Size, UnreadableError, image_size
from fedshift.errors import InputError
from fedshift.files import cache_root, write_atomically

VERSION = 1
SETTLED_NS = 2_000_000_000
BLOCK = 256
"""Files handed to the thread pool at a time: what is decoded but not yet stored must fit in memory."""

TASK = 16
"""Files that a thread takes at a time: taking one costs as much as decoding a thumbnail."""

Item = TypeVar("Item")
Result = TypeVar("Result")


@dataclass(frozen=True)
class FileFacts:
    """A file's content hash, its size when it is an image whose header can be read, else why it cannot."""

    digest: str
    size: Size | None
    problem: str | None


def read_limited(path: Path) -> bytes:
    """The bytes of an image file, unless it is absurdly large or cannot be read."""
    try:
        if path.stat().st_size > MAX_BYTES:
            raise UnreadableError(f"the file is larger than {MAX_BYTES // 2**20} MB")
        return path.read_bytes()
    except OSError as problem:
        raise UnreadableError(problem.strerror or str(problem)) from problem


def digest_of(data: bytes) -> str:
    """The content hash of bytes."""
    return hashlib.blake2b(data, digest_size=20).hexdigest()


def image_facts(folder: Path, paths: Sequence[Path]) -> list[FileFacts]:
    """Facts of images below a folder, from memory where the file has not changed."""
    return _remembered(folder, paths, _look_at_image)


def content_digest(path: Path) -> str:
    """The content hash of one file of any size."""
    return _remembered(path.parent, [path], _hash_whole_file, purpose=path.name)[0].digest


def in_parallel(work: Callable[[Item], Result], items: Sequence[Item]) -> Iterator[list[Result]]:
    """`work` done on all items by threads (hashing and decoding release the interpreter), in order, in
    blocks."""

    def do(some: Sequence[Item]) -> list[Result]:
        return [work(item) for item in some]

    with ThreadPoolExecutor(max_workers=min(8, os.cpu_count() or 1)) as pool:
        for start in range(0, len(items), BLOCK):
            block = items[start : start + BLOCK]
            done = pool.map(do, [block[i : i + TASK] for i in range(0, len(block), TASK)])
            yield [result for some in done for result in some]


def _look_at_image(path: Path) -> FileFacts:
    try:
        data = read_limited(path)
    except UnreadableError as problem:
        return FileFacts("", None, str(problem))
    digest = digest_of(data)
    try:
        return FileFacts(digest, image_size(data), None)
    except UnreadableError as problem:
        return FileFacts(digest, None, str(problem))


def _hash_whole_file(path: Path) -> FileFacts:
    with path.open("rb") as file:
        return FileFacts(hashlib.file_digest(file, _hasher).hexdigest(), None, None)


def _hasher() -> Any:
    return hashlib.blake2b(digest_size=20)


def _remembered(
    folder: Path, paths: Sequence[Path], look: Callable[[Path], FileFacts], purpose: str = "images"
) -> list[FileFacts]:
    memory = cache_root() / "facts" / f"{_name_of(folder, purpose)}.json"
    known = _load(memory)
    stamps = [_stamp(path) for path in paths]
    facts = [_recall(known.get(str(path)), stamp) for path, stamp in zip(paths, stamps, strict=True)]
    missing = [i for i, fact in enumerate(facts) if fact is None]
    if missing:
        found = (fact for block in in_parallel(look, [paths[i] for i in missing]) for fact in block)
        for i, fact in zip(missing, found, strict=True):
            facts[i] = fact
        now = time.time_ns()
        settled = {
            str(path): [*stamp, fact.digest, fact.size, fact.problem]
            for path, stamp, fact in zip(paths, stamps, facts, strict=True)
            if fact is not None and fact.digest and now - max(stamp[1:]) > SETTLED_NS
        }
        _store(memory, settled)
    return [fact for fact in facts if fact is not None]


def _name_of(folder: Path, purpose: str) -> str:
    text = json.dumps([VERSION, str(folder.resolve()), purpose])
    return hashlib.blake2b(text.encode(), digest_size=20).hexdigest()


def _stamp(path: Path) -> list[int]:
    """Size, time of modification, time of change; zeros for a file that is gone, which no facts match."""
    try:
        status = path.stat()
    except OSError:
        return [0, 0, 0]
    return [status.st_size, status.st_mtime_ns, status.st_ctime_ns]


def _recall(entry: list[Any] | None, stamp: list[int]) -> FileFacts | None:
    if entry is None or entry[:3] != stamp:
        return None
    digest, size, problem = entry[3:]
    return FileFacts(digest, None if size is None else (size[0], size[1]), problem)


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
