"""Where replies wait that are too many to be held in memory."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from typing import IO, Generic, TypeVar

import torch

from fedshift.federation import codec
from fedshift.federation.releases import Release
from fedshift.federation.step import Step

R = TypeVar("R", bound=Release)

_ALIGNED = 16
"""Bytes that the beginning of a tensor is a multiple of."""
_Layout = tuple[tuple[str, torch.dtype, torch.Size, int, int], ...]
"""Of each tensor its name, type, shape, first byte and number of values."""


class Shelf(Generic[R]):
    """Releases that wait in a temporary file. What was checked is written as it is in memory: to read it again takes a
    fraction of the time that decoding a message does, and averages read every reply several times."""

    def __init__(self, step: Step[R]) -> None:
        self._step = step
        # Read until the replies are gone, so there is no block to open it for.
        self._file: IO[bytes] = tempfile.TemporaryFile(prefix="fedshift-replies-")  # noqa: SIM115
        self._places: dict[str, tuple[int, int, int, _Layout]] = {}  # Begin, bytes of tensors, bytes of JSON, layout.
        self._layouts: dict[_Layout, _Layout] = {}

    def add(self, site: str, release: R) -> None:
        tensors, text = codec.flatten(release)
        layout, parts, size = [], [], 0
        for name, tensor in tensors.items():
            parts.append(tensor.reshape(-1).view(torch.uint8).numpy().data)
            layout.append((name, tensor.dtype, tensor.shape, size, tensor.numel()))
            padding = -len(parts[-1]) % _ALIGNED
            size += len(parts[-1]) + padding
            parts.append(memoryview(bytes(padding)))
        begin, values = self._file.seek(0, os.SEEK_END), text.encode()
        self._file.writelines([*parts, values])
        known = self._layouts.setdefault(tuple(layout), tuple(layout))
        self._places[site] = (begin, size, len(values), known)

    def __getitem__(self, site: str) -> R:
        begin, size, length, layout = self._places[site]
        self._file.seek(begin)
        data = bytearray(self._file.read(size + length))
        tensors = {
            name: torch.frombuffer(data, dtype=dtype, count=count, offset=offset).reshape(shape)
            if count
            else torch.empty(shape, dtype=dtype)
            for name, dtype, shape, offset, count in layout
        }
        return codec.restore(self._step.release, codec.unflatten(tensors, data[size:].decode()))

    def __iter__(self) -> Iterator[str]:
        return iter(self._places)
