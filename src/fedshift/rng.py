"""Randomness derived from names, so that nothing depends on the order in which things happen."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

import numpy as np
import torch


@dataclass(frozen=True)
class Rng:
    """A path of names below a seed. Two equal paths give the same numbers on every machine and engine."""

    path: tuple[str, ...]

    @classmethod
    def of(cls, *names: str | int) -> Rng:
        return cls(tuple(str(name) for name in names))

    def child(self, *names: str | int) -> Rng:
        return Rng(self.path + tuple(str(name) for name in names))

    def seed(self) -> int:
        """A 63-bit number. Each name is length-prefixed: ('a', 'bc') and ('ab', 'c') must differ."""
        text = b"".join(f"{len(name.encode())}:".encode() + name.encode() for name in self.path)
        return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "big") >> 1

    def torch(self) -> torch.Generator:
        return torch.Generator().manual_seed(self.seed())

    def numpy(self) -> np.random.Generator:
        return np.random.default_rng(self.seed())
