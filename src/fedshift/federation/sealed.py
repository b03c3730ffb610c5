"""Trees of tensors and plain values in files that carry their own checksum: what is damaged is never used."""

from __future__ import annotations

import json
import os
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from fedshift.errors import FedshiftError, InputError
from fedshift.federation import codec
from fedshift.files import is_plain_file, open_without_waiting, write_atomically

_LARGEST_HEADER = 64 * 2**20
_OLD_DIGEST = 32
"""Checkpoints of 0.1.0 have a SHA-256 in front."""


def write_sealed(path: Path, tree: Any, about: Mapping[str, Any]) -> None:
    """`tree`: dictionaries, lists, dataclasses, numbers, text and tensors. `about` says in JSON what the file is."""
    tensors, values = codec.flatten(tree)
    write_atomically(path, codec.seal(tensors, {**about, "values": values}))


def read_tensor_file(path: Path) -> bytes:
    """The bytes of a safetensors file, once its size is the one that it declares. Otherwise, and where there is no such
    file, it is one `run-corrupt` error that names it."""
    try:
        with open(path, "rb", opener=open_without_waiting) as file:
            if not is_plain_file(file):
                raise InputError("run-corrupt", f"{path} is not a file")
            size = os.fstat(file.fileno()).st_size
            if not any(_declares(file, start, size) for start in (0, _OLD_DIGEST)):
                raise InputError("run-corrupt", f"{path} is damaged: its size is not the one that it declares")
            file.seek(0)
            return file.read(size)
    except OSError as error:
        raise InputError("run-corrupt", f"{path} cannot be read: {error.strerror or error}") from error


def _declares(file: Any, start: int, size: int) -> bool:
    """Whether a safetensors file of just this size starts there."""
    file.seek(start)
    head = file.read(8)
    if len(head) < 8:
        return False
    (length,) = struct.unpack("<Q", head)
    if length > min(_LARGEST_HEADER, size - start - 8):
        return False
    try:
        entries = json.loads(file.read(length))
        ends = [entry["data_offsets"][1] for name, entry in entries.items() if name != "__metadata__"]
        return bool(start + 8 + length + max(ends, default=0) == size)
    except (ValueError, KeyError, IndexError, TypeError, AttributeError, RecursionError):
        return False


def unseal(data: bytes) -> tuple[Any, dict[str, Any]]:
    """The tree that was written and what the file says about itself. Anything else is a `message-invalid` error."""
    tensors, metadata = codec.read_safetensors(data)
    header = codec.read_header(metadata)
    codec.verify_seal(tensors, header)
    return codec.unflatten(tensors, header.get("values")), header


def damaged(path: Path, error: FedshiftError) -> FedshiftError:
    return FedshiftError("run-corrupt", f"{path} is damaged: {error.message}")
