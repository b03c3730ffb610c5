"""A checkpoint: everything a run needs to continue, as one safetensors file.

The metadata has one key, `fedshift`, with a JSON object: `format`, `written_by` (the version of fedshift), `values`
(everything that is no tensor, as JSON) and `sha256`, the checksum of all else. Tensors are numbered.
"""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

from fedshift._version import __version__
from fedshift.errors import FedshiftError
from fedshift.federation import codec
from fedshift.federation.sealed import damaged, read_tensor_file, unseal, write_sealed

FORMAT = 2
"""1, of fedshift 0.1.0, was not a safetensors file: 32 bytes of SHA-256 stood in front of one."""


def write_checkpoint(path: Path, tree: Any) -> None:
    """`tree`: dictionaries, lists, dataclasses, numbers, text and tensors."""
    write_sealed(path, tree, {"format": FORMAT, "written_by": __version__})


def read_checkpoint(path: Path) -> Any:
    """The tree that was written. A `run-corrupt` error says what is wrong with the file."""
    data = read_tensor_file(path)
    try:
        if hashlib.sha256(data[32:]).digest() == data[:32]:
            return codec.unpack(data[32:])
        tree, header = unseal(data)
    except FedshiftError as error:
        raise damaged(path, error) from error
    if header.get("format") != FORMAT:
        raise FedshiftError(
            "run-corrupt",
            f"{path.name} was written by fedshift {header.get('written_by', '(unknown)')} in format"
            f" {header.get('format')}, and this is {__version__}: continue the run with that version",
        )
    return tree
