"""What the last run knew of its sites, kept beside the coordinator's kits for `fedshift status`."""

from __future__ import annotations

import json
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

from fedshift.files import write_atomically


class Status:
    """`{"run": ..., "round": ..., "sites": {name: {"last": ..., "time": ..., "version": ...}}}`."""

    def __init__(self, file: Path) -> None:
        self._file = file
        self.known: dict[str, Any] = {"run": None, "round": 0, "sites": {}}
        with suppress(OSError, ValueError):
            self.known |= json.loads(file.read_text())

    def note(self, site: str, last: str, **more: Any) -> None:
        """What a site did last: `answered`, or why not."""
        self.known["sites"].setdefault(site, {}).update({"last": last, "time": time.time(), **more})

    def save(self, run: str, round: int) -> None:
        self.known |= {"run": run, "round": round}
        write_atomically(self._file, json.dumps(self.known, indent=2).encode())
