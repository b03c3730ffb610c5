"""A site's own record of all that it was asked and all that left it, and its log of what went wrong there."""

from __future__ import annotations

import hashlib
import json
import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from torch import Tensor

from fedshift.errors import InputError
from fedshift.federation.compression import coded_bytes
from fedshift.federation.releases import Release, kinds

LEDGER, HEAD = "ledger.jsonl", "ledger.head"
HANDSHAKE = "handshake.introduce"
"""The step with which a run begins and is resumed."""
_HEAD_BYTES = 256
_APPEND = os.O_WRONLY | os.O_APPEND | os.O_CREAT
_LONGEST_ENTRY = 20_000
"""Characters of the log."""
ORIGIN = "0" * 64
"""What stands for the line before the first."""


@dataclass(frozen=True)
class Head:
    """How far a ledger is: its lines and bytes, the SHA-256 of the last line, how many questions it lists, and how many
    of these began or resumed the run. Kept in a file of its own, so that lines which are cut off at the end are missed.
    """

    lines: int = 0
    bytes: int = 0
    sha256: str = ORIGIN
    questions: int = 0
    starts: int = 0


_HEAD_TYPES = {name: type(value) for name, value in vars(Head()).items()}


class Ledger:
    """`ledger.jsonl` (a line for each question, each field that left and each answer) and `site.log`. Each line holds
    the SHA-256 of the line before it: one that is changed, added or removed later breaks the chain.

    A line is written before what it tells of happens: no step runs before its question is listed, and no byte leaves
    before its answer is.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._known: Head | None = None

    def asked(self, step: str, round: int, nonce: str, body: bytes) -> Head:
        """Lists a question; returns how far the ledger is then."""
        return self._append(
            [_event("asked", step, round) | {"nonce": nonce, "bytes": len(body), "sha256": _sha256(body)}]
        )

    def answered(
        self,
        step: str,
        round: int,
        fields: Sequence[Mapping[str, Any]],
        code: str | None,
        seconds: str,
        clipped: int,
        data: bytes,
        epsilon: float | None = None,
    ) -> None:
        """Lists an answer, `data` as it leaves: each of the `fields_left`, then all else that crosses with them.
        `epsilon` is what was spent of the site's budget of privacy, if it has one: it stays here."""
        left = [_event("left", step, round) | dict(one) for one in fields]
        told = {"code": code, "seconds": seconds, "clipped": clipped, "bytes": len(data), "sha256": _sha256(data)}
        spent = {} if epsilon is None else {"epsilon": round_up(epsilon)}
        self._append([*left, _event("answered", step, round) | told | spent])

    def log(self, text: str) -> None:
        """The text may quote what came from elsewhere: it steers no terminal, and no line of it looks like another
        entry."""
        cut = text if len(text) <= _LONGEST_ENTRY else text[:_LONGEST_ENTRY] + " ..."
        lines = ["".join(c if c.isprintable() else repr(c)[1:-1] for c in line) for line in cut.split("\n")]
        self._write("site.log", f"{_now()} " + "\n    ".join(lines) + "\n")

    def _append(self, events: Sequence[Mapping[str, Any]]) -> Head:
        head, now = self._head(), _now()
        lines = []
        for event in events:
            line = json.dumps({"time": now, **event, "prev": head.sha256})
            lines.append(line + "\n")
            head = Head(
                lines=head.lines + 1,
                bytes=head.bytes + len(line) + 1,
                sha256=_sha256(line.encode()),
                questions=head.questions + _is_question(line),
                starts=head.starts + _is_start(line),
            )
        self._write(LEDGER, "".join(lines))
        self._write_head(head)
        self._known = head
        return head

    def _write_head(self, head: Head) -> None:
        try:
            # In place, in one write of always the same length: a disk is in no hurry to take it, whereas a file that
            # replaces another is waited for. A head that is behind or damaged is made again from the lines.
            file = os.open(self._folder / HEAD, os.O_WRONLY | os.O_CREAT, 0o666)
            try:
                os.write(file, json.dumps(vars(head)).ljust(_HEAD_BYTES).encode())
            finally:
                os.close(file)
        except OSError as error:
            raise _unwritable(self._folder / HEAD, error) from error

    def _head(self) -> Head:
        """Where to go on. Lines without a head were written by a process that was killed before it wrote the head.
        After lines that were cut off, the chain goes on from the head and so shows the gap."""
        path = self._folder / LEDGER
        try:
            size = path.stat().st_size
        except OSError:
            size = 0
        if self._known is not None and self._known.bytes == size:
            return self._known  # Nobody else has written since this ledger did.
        known = read_head(self._folder) or Head()
        return head_of(path.read_bytes()) if size > known.bytes else known

    def _write(self, name: str, text: str) -> None:
        path = self._folder / name
        try:
            try:
                file = os.open(path, _APPEND, 0o666)
            except FileNotFoundError:
                self._folder.mkdir(parents=True, exist_ok=True)
                file = os.open(path, _APPEND, 0o666)
            with os.fdopen(file, "ab", buffering=0) as stream:
                stream.write(text.encode())
        except OSError as error:
            raise _unwritable(self._folder / name, error) from error


def fields_left(release: Release, coded: Mapping[str, Any]) -> list[dict[str, Any]]:
    """What a ledger says of the fields of a release. Those that are `coded` leave in so many bytes."""
    return [
        {"field": field, "kind": kind.name}
        | _size(getattr(release, field))
        | ({"bytes": coded_bytes(coded[field])} if field in coded else {})
        for field, kind in kinds(type(release)).items()
    ]


def read_head(folder: Path) -> Head | None:
    """The head beside a ledger; None if there is none that can be read."""
    try:
        file = os.open(folder / HEAD, os.O_RDONLY)
        try:
            told = json.loads(os.read(file, 2 * _HEAD_BYTES))
        finally:
            os.close(file)
    except (OSError, ValueError, RecursionError):
        return None
    # Read for every question: strictly, but without the machinery for any type.
    if type(told) is not dict or {name: type(value) for name, value in told.items()} != _HEAD_TYPES:
        return None
    return Head(**told)


def head_of(ledger: bytes) -> Head:
    """The head that belongs to the lines of a ledger."""
    lines = ledger.splitlines()
    texts = [line.decode(errors="replace") for line in lines]
    questions, starts = sum(map(_is_question, texts)), sum(map(_is_start, texts))
    return Head(len(lines), len(ledger), _sha256(lines[-1]) if lines else ORIGIN, questions, starts)


def _is_question(line: str) -> bool:
    # Values are names and numbers: no text from outside can hold these quotes.
    return '"event": "asked"' in line


def _is_start(line: str) -> bool:
    return _is_question(line) and f'"step": "{HANDSHAKE}"' in line


def round_up(epsilon: float) -> float:
    return math.ceil(epsilon * 1e4) / 1e4


def _event(name: str, step: str, round: int) -> dict[str, Any]:
    return {"event": name, "round": round, "step": step}


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="milliseconds")


def _sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def _unwritable(path: Path, error: OSError) -> InputError:
    return InputError("disk", f"cannot write {path}: {error.strerror or error}. Nothing leaves a site unlisted.")


def _size(value: Any) -> dict[str, int]:
    """How many values and bytes a released field holds."""
    if isinstance(value, Tensor):
        return {"values": value.numel(), "bytes": value.numel() * value.element_size()}
    if isinstance(value, Mapping):
        parts = [_size(item) for item in value.values()]
    elif isinstance(value, list | tuple):
        parts = [_size(item) for item in value]
    else:
        text = 8 if isinstance(value, int | float) and math.isfinite(value) else len(str(value))
        return {"values": 1, "bytes": text}
    return {key: sum(part[key] for part in parts) for key in ("values", "bytes")}
