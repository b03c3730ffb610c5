"""Verifies a site's ledger and sums up what it lists."""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from fedshift.errors import InputError
from fedshift.federation.ledger import HEAD, LEDGER, ORIGIN, read_head

N = TypeVar("N", int, float)


@dataclass
class KindTotal:
    """What left a site of one kind: how often, how many values and bytes, and in which rounds."""

    releases: int = 0
    values: int = 0
    bytes: int = 0
    rounds: set[int] = field(default_factory=set)


@dataclass
class LedgerAudit:
    """A ledger whose chain holds. `codes` counts answers without a release by their code. `head` is the SHA-256 of its
    last line: written down elsewhere, it proves later that nothing before it was changed. `behind`: lines that the
    head file does not know, because the site was stopped while it wrote. `epsilon`: what was spent of its budget of
    privacy by the last answer under one."""

    path: Path
    lines: int = 0
    questions: Counter[str] = field(default_factory=Counter)
    answers: int = 0
    answer_bytes: int = 0
    codes: Counter[str] = field(default_factory=Counter)
    kinds: dict[str, KindTotal] = field(default_factory=dict)
    first: str = ""
    last: str = ""
    head: str = ORIGIN
    behind: int = 0
    epsilon: float | None = None


def find_ledgers(folder: Path) -> list[Path]:
    """The ledgers in the folder of a site, a run (`sites/*`) or a kit (`runs/*`)."""
    found = [path for pattern in ("", "*/", "sites/*/", "runs/*/") for path in sorted(folder.glob(pattern + LEDGER))]
    if not found:
        raise InputError("run-missing", f"there is no {LEDGER} in {folder}: name the folder of a site, a run or a kit")
    return found


def audit_ledger(path: Path) -> LedgerAudit:
    """What a ledger lists; an error that names the line where its chain breaks."""
    found = LedgerAudit(path)
    head, is_known = read_head(path.parent), False
    try:
        data = path.read_bytes()
    except OSError as error:
        raise InputError("ledger-broken", f"{path} cannot be read: {error.strerror or error}") from error
    if data and not data.endswith(b"\n"):
        raise _broken(path, data.count(b"\n") + 1, "it is cut off")
    for number, line in enumerate(data.split(b"\n")[:-1], 1):
        if head is not None and head.lines == number - 1:
            is_known = found.head == head.sha256
        try:
            row = json.loads(line)
            if not isinstance(row, dict) or row.get("prev") != found.head:
                raise _broken(path, number, "it does not follow the line before it")
            _add(found, row)
        except (ValueError, KeyError, TypeError, RecursionError) as error:
            raise _broken(path, number, "it is not a line of a ledger") from error
        found.lines, found.head = number, hashlib.sha256(line).hexdigest()
    if head is None:
        raise InputError("ledger-broken", f"{path}: there is no {HEAD} beside it, so lines may be missing at the end")
    if head.lines > found.lines:
        raise _broken(path, found.lines + 1, f"it is missing, with all up to line {head.lines}")
    if head.lines == found.lines:
        is_known = found.head == head.sha256
    if not is_known:
        raise _broken(path, head.lines, f"it is not the line that {HEAD} names")
    found.behind = found.lines - head.lines
    return found


def _add(found: LedgerAudit, row: dict[str, Any]) -> None:
    """Raises ValueError, KeyError or TypeError for a line that no site writes: what is summed up reaches a terminal."""
    time = _text(row["time"])
    found.first, found.last = found.first or time, time
    if row["event"] == "asked":
        found.questions[_text(row["step"])] += 1
    elif row["event"] == "answered":
        found.answers += 1
        found.answer_bytes += _number(row["bytes"])
        if "epsilon" in row:
            found.epsilon = _number(row["epsilon"], float)
        if row["code"] is not None:
            found.codes[_text(row["code"])] += 1
    elif row["event"] == "left":
        total = found.kinds.setdefault(_text(row["kind"]), KindTotal())
        total.releases += 1
        total.values += _number(row["values"])
        total.bytes += _number(row["bytes"])
        total.rounds.add(_number(row["round"]))
    else:
        raise ValueError("unknown event")


_LONGEST = 200


def _text(value: Any) -> str:
    if type(value) is not str or len(value) > _LONGEST or not value.isprintable():
        raise ValueError("no name")
    return value


def _number(value: Any, kind: type[N] = int) -> N:
    if type(value) is not kind or not 0 <= value < 2**63:
        raise ValueError("no number of anything")
    return value


def _broken(path: Path, number: int, why: str) -> InputError:
    return InputError("ledger-broken", f"{path}, line {number}: {why}")
