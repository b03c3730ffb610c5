"""The safetensors format, read and written without more copies than one: a header in JSON with the place of every
tensor, then their bytes."""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

_NAMES = {
    **{torch.uint64: "U64", torch.int64: "I64", torch.float64: "F64", torch.complex64: "C64", torch.float32: "F32"},
    **{torch.uint32: "U32", torch.int32: "I32", torch.bfloat16: "BF16", torch.float16: "F16", torch.uint16: "U16"},
    **{torch.int16: "I16", torch.float8_e4m3fn: "F8_E4M3", torch.float8_e5m2: "F8_E5M2", torch.int8: "I8"},
    **{torch.uint8: "U8", torch.bool: "BOOL"},
}
"""Types as safetensors calls them, in the order in which it writes tensors: then all of them are aligned."""
_ORDER = {dtype: place for place, dtype in enumerate(_NAMES)}
_DTYPES = {name: dtype for dtype, name in _NAMES.items()}
_LENGTH = struct.Struct("<Q")
_METADATA = "__metadata__"
_KEYS = {"dtype", "shape", "data_offsets"}
_SMALL = 4096
"""Bytes up to which tensors share memory: one of their own takes half a kilobyte, whatever is in it."""
_ALIGNED = 16
_MOST_DIMENSIONS = 64


def write(tensors: Mapping[str, Tensor], metadata: Mapping[str, str]) -> bytes:
    """A file with these tensors."""
    entries: dict[str, Any] = {_METADATA: dict(metadata)}
    parts: list[Any] = []
    at = 0
    for name in sorted(tensors, key=lambda name: (_ORDER[tensors[name].dtype], name)):
        tensor = tensors[name].detach().cpu().contiguous()
        entries[name] = {
            "dtype": _NAMES[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [at, at + tensor.nbytes],
        }
        parts.append(tensor.reshape(-1).view(torch.uint8).numpy().data)
        at += tensor.nbytes
    text = json.dumps(entries, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)
    return b"".join([_LENGTH.pack(len(text)), text, *parts])


def read(data: bytes, most: int, check: Callable[[bytes], None]) -> tuple[dict[str, Tensor], dict[str, str]]:
    """The tensors of a file and its metadata. Any exception for what is no such file: the places of tensors have to
    follow each other from the first byte to the last. The header has `most` bytes at most, and passes the `check`
    before it is parsed."""
    (length,) = _LENGTH.unpack(data[: _LENGTH.size])
    if length > min(most, len(data) - _LENGTH.size):
        raise ValueError("header longer than the message")
    start = _LENGTH.size + length
    entries = _parsed(data[_LENGTH.size : start], check)
    metadata = dict(entries.pop(_METADATA))
    names = sorted(entries, key=lambda name: entries[name]["data_offsets"], reverse=True)
    rooms = (_room(*entries[name]["data_offsets"]) for name in names)
    shared = _Shared(min(sum(room for room in rooms if room <= _SMALL), len(data) + _ALIGNED * len(names)))
    found: dict[str, Tensor] = {}
    at = 0
    while names:
        entry = entries.pop(
            name := names.pop()
        )  # What is parsed goes as tensors come: many small ones take more than their bytes.
        dtype, shape, (begin, end) = _DTYPES[entry["dtype"]], entry["shape"], entry["data_offsets"]
        if set(entry) != _KEYS or not _are_sizes([*shape, begin, end]) or len(shape) > _MOST_DIMENSIONS or begin != at:
            raise ValueError("a tensor is not where the one before ends")
        if end - begin != math.prod(shape) * dtype.itemsize or start + end > len(data):
            raise ValueError("a tensor has another size than its place")
        content = memoryview(data)[start + begin : start + end]
        if _room(begin, end) <= _SMALL and dtype != torch.bool:
            found[name] = shared.tensor(content, dtype, shape)
        else:
            memory = torch.empty(len(content), dtype=torch.uint8)
            memory.numpy()[:] = content
            found[name] = (memory.ne_(0) if dtype == torch.bool else memory).view(dtype).reshape(shape)
        at = end
    if start + at != len(data):
        raise ValueError("bytes that belong to no tensor")
    return found, metadata


def _parsed(header: bytes, check: Callable[[bytes], None]) -> dict[str, Any]:
    check(header)
    return dict(json.loads(header))


class _Shared:
    """Memory for many small tensors."""

    def __init__(self, size: int) -> None:
        self._bytes = torch.empty(size, dtype=torch.uint8)
        self._memory, self._used = self._bytes.numpy(), 0
        self._as: dict[torch.dtype, Tensor] = {}

    def tensor(self, content: memoryview, dtype: torch.dtype, shape: list[int]) -> Tensor:
        begin = self._used
        self._memory[begin : begin + len(content)] = content
        self._used += _room(0, len(content))
        if dtype not in self._as:
            self._as[dtype] = self._bytes.view(dtype)
        strides = [math.prod(shape[place + 1 :]) for place in range(len(shape))]
        # One view of the whole: a view of a view, as slicing and reshaping make them, takes half as much again.
        return torch.as_strided(self._as[dtype], shape, strides, begin // dtype.itemsize)


def _room(begin: int, end: int) -> int:
    return -(-(end - begin) // _ALIGNED) * _ALIGNED


def _are_sizes(values: list[Any]) -> bool:
    return all(type(value) is int and value >= 0 for value in values)
