"""What came back from the sites, in the order of their names. Large replies wait on disk, not in memory."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Generic, TypeVar

from fedshift.federation import codec
from fedshift.federation.kinds import Release
from fedshift.federation.step import Step

R = TypeVar("R", bound=Release)

IN_MEMORY_BYTES = 256 * 1024 * 1024


class Replies(Generic[R]):
    """Iterates `(site, release)` of the admitted replies, sorted by site, as often as needed.

    Up to `IN_MEMORY_BYTES` are held decoded; what comes after is kept in a temporary folder and decoded when its turn
    comes, so that an average over a thousand sites needs the memory of a few.
    """

    def __init__(self, step: Step[R]) -> None:
        self._step = step
        self._held: dict[str, R] = {}
        self._spilled: dict[str, Path] = {}
        self._bytes = 0
        self._folder: tempfile.TemporaryDirectory[str] | None = None
        self.refused: dict[str, str] = {}
        self.missing: dict[str, str] = {}

    def add(self, site: str, release: R, size: int) -> None:
        if self._bytes + size <= IN_MEMORY_BYTES:
            self._bytes += size
            self._held[site] = release
            return
        if self._folder is None:
            self._folder = tempfile.TemporaryDirectory(prefix="fedshift-replies-")
        path = Path(self._folder.name) / f"{len(self._spilled)}.safetensors"
        path.write_bytes(codec.pack(release))
        self._spilled[site] = path

    @property
    def answered(self) -> tuple[str, ...]:
        return tuple(sorted([*self._held, *self._spilled]))

    def __len__(self) -> int:
        return len(self._held) + len(self._spilled)

    def __getitem__(self, site: str) -> R:
        if site in self._held:
            return self._held[site]
        return codec.restore(self._step.release, codec.unpack(self._spilled[site].read_bytes()))

    def __iter__(self) -> Iterator[tuple[str, R]]:
        return ((site, self[site]) for site in self.answered)

    def absent(self) -> Mapping[str, str]:
        """Who is not among the answers, and why."""
        return {**self.refused, **self.missing}
