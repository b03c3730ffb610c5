"""Randomness derived from names, so that nothing depends on the order in which things happen."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray


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


def secret_normals(key: bytes, count: int) -> NDArray[np.float64]:
    """Independent numbers with a standard normal distribution (Box and Muller), made from a key."""
    half = -(-count // 2)
    uniform = secret_uniforms(key, 2 * half)
    radius, angle = np.sqrt(-2 * np.log1p(-uniform[:half])), 2 * np.pi * uniform[half:]
    return np.concatenate([radius * np.cos(angle), radius * np.sin(angle)])[:count]


def secret_uniforms(key: bytes, count: int) -> NDArray[np.float64]:
    """Independent numbers from 0 to below 1, made from a key."""
    stream = hashlib.shake_256(key).digest(8 * count)
    return (np.frombuffer(stream, dtype="<u8") >> 11).astype(np.float64) / 2**53
