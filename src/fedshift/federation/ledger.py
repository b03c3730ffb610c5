"""A site's own record of all that left it, and its log of what went wrong there."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from torch import Tensor

from fedshift.federation.releases import Release, kinds


class Ledger:
    """`ledger.jsonl` (one line a field that left: round, step, field, kind, values, bytes) and `site.log`."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def record(self, round: int, step: str, release: Release) -> None:
        lines = [
            json.dumps(
                {"round": round, "step": step, "field": field, "kind": kind.name} | _size(getattr(release, field))
            )
            for field, kind in kinds(type(release)).items()
        ]
        self._append("ledger.jsonl", lines)

    def log(self, text: str) -> None:
        self._append("site.log", [f"{datetime.now(UTC).isoformat(timespec='seconds')} {text}"])

    def _append(self, name: str, lines: list[str]) -> None:
        self._folder.mkdir(parents=True, exist_ok=True)
        with (self._folder / name).open("a") as file:
            file.write("".join(line + "\n" for line in lines))


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
