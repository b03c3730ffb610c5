"""Trees of tensors and plain values to bytes and back: safetensors with a JSON header, never pickle.

The same code carries messages between sites, checkpoints and the state that a site keeps for itself.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import json
import struct
import sys
import types
import typing
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn, TypeVar

import torch
from torch import Tensor

from fedshift.errors import FedshiftError
from fedshift.federation import tensorfile

T = TypeVar("T")

_HEADER_KEY = "fedshift"
_DIGEST = "sha256"
_TENSOR = "~tensor"
_MAX_DEPTH = 32
_NODES_PER_TENSOR = 16
_MAX_FLOAT = int(sys.float_info.max)


@dataclass(frozen=True)
class Limits:
    """How much a message may hold: `data`, bytes of tensors; `header`, bytes of JSON; `tensors`; and `nodes`, values of
    the JSON that belong to no tensor. These are counted in the text: parsed, they take many times as much memory."""

    data: int = 2**40
    header: int = 64 * 1024 * 1024
    tensors: int = 50_000
    nodes: int = 1_000_000

    @property
    def size(self) -> int:
        return self.data + self.header + struct.calcsize("<Q")

    def __add__(self, other: Limits) -> Limits:
        return Limits(
            self.data + other.data,
            self.header + other.header,
            self.tensors + other.tensors,
            self.nodes + other.nodes,
        )


ANY = Limits()


def pack(tree: Any) -> bytes:
    """Dicts with string keys, lists, tuples, dataclasses, numbers, strings, None and tensors -> bytes.

    Equal trees give equal bytes. A NaN or infinite number outside a tensor is refused (JSON has none).
    """
    tensors, header = flatten(tree)
    return tensorfile.write(tensors, {_HEADER_KEY: header})


def unpack(data: bytes, limits: Limits = ANY) -> Any:
    """The inverse of `pack`, for bytes from anywhere: anything malformed, or larger than `limits`, is one
    `message-invalid` error."""
    tensors, metadata = read_safetensors(data, limits)
    return _tree_of(tensors, metadata.pop(_HEADER_KEY, ""), limits)


def flatten(tree: Any) -> tuple[dict[str, Tensor], str]:
    """The tensors of a tree by number, and all else as JSON."""
    tensors: dict[str, Tensor] = {}
    return tensors, json.dumps(_lift(tree, tensors), allow_nan=False, separators=(",", ":"))


def unflatten(tensors: Mapping[str, Tensor], header: str | None, limits: Limits = ANY) -> Any:
    """The inverse of `flatten`. Anything malformed, or larger than `limits`, is one `message-invalid` error."""
    return _tree_of(dict(tensors), header or "", limits)


def _tree_of(left: dict[str, Tensor], text: str, limits: Limits) -> Any:
    """The tree of a text, with its tensors taken out of `left`."""
    try:
        # Unlike the outer one, this text may hold characters that were written as escapes there.
        _require_few_nodes(text, limits)
        # Each tensor is put in its place while the text is read: a dictionary for every one takes more than small ones.
        tree = json.loads(text, parse_constant=_not_a_number, object_hook=functools.partial(_lowered, left))
        _require_shallow(tree, _MAX_DEPTH)
        if left:
            raise ValueError("tensors that belong nowhere")
        return tree
    # A hostile message can fail in any of the parsers; what it was is of no use to the reader.
    except Exception as error:
        raise _undecodable(error) from error


def read_safetensors(data: bytes, limits: Limits = ANY) -> tuple[dict[str, Tensor], dict[str, str]]:
    """The tensors and the metadata of a safetensors file. Anything malformed, or larger than `limits`, is one
    `message-invalid` error."""
    try:
        if len(data) > limits.size:
            raise ValueError("larger than anything that was expected")
        return tensorfile.read(data, limits.header, lambda header: _require_few_nodes(header, limits))
    except Exception as error:
        raise _undecodable(error) from error


def seal(tensors: Mapping[str, Tensor], header: Mapping[str, Any]) -> bytes:
    """A safetensors file with a JSON header that also holds the SHA-256 of all else. Equal content gives equal bytes:
    there is one key of metadata, because safetensors writes several in any order."""
    owned = {key: value.detach().cpu().contiguous() for key, value in tensors.items()}
    text = json.dumps({**header, _DIGEST: content_digest(owned, header)}, separators=(",", ":"))
    return tensorfile.write(owned, {_HEADER_KEY: text})


def read_header(metadata: Mapping[str, str]) -> dict[str, Any]:
    """The JSON header of a file. Anything malformed is one `message-invalid` error."""
    try:
        return dict(json.loads(metadata[_HEADER_KEY]))
    except Exception as error:
        raise _undecodable(error) from error


def verify_seal(tensors: Mapping[str, Tensor], header: Mapping[str, Any]) -> None:
    """Refuses what a sealed file held if it does not match its digest, or if there is none (`message-invalid`)."""
    others = {key: value for key, value in header.items() if key != _DIGEST}
    if header.get(_DIGEST) != content_digest(tensors, others):
        raise FedshiftError("message-invalid", "the content does not match its checksum")


def content_digest(tensors: Mapping[str, Tensor], header: Mapping[str, Any]) -> str:
    """SHA-256 over the header, and over names, types, shapes and bytes of tensors in the order of their names."""
    digest = hashlib.sha256(json.dumps(header, sort_keys=True, default=list).encode())
    for name in sorted(tensors):
        tensor = tensors[name].contiguous()
        digest.update(json.dumps([name, str(tensor.dtype), list(tensor.shape)]).encode())
        digest.update(tensor.reshape(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()


def sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def _require_few_nodes(text: Any, limits: Limits) -> None:
    """Every value of JSON but the first follows one of these characters; in names and texts they count too."""
    marks = (b"[", b"{", b",") if isinstance(text, bytes) else ("[", "{", ",")
    if sum(text.count(mark) for mark in marks) > limits.nodes + _NODES_PER_TENSOR * limits.tensors:
        raise ValueError("more values than anything that was expected")


def _not_a_number(name: str) -> NoReturn:
    raise ValueError(f"{name} is not JSON")


def _undecodable(error: Exception) -> FedshiftError:
    return FedshiftError("message-invalid", f"a message could not be decoded ({type(error).__name__})")


def plain(value: Any) -> Any:
    """A dataclass (nested) as JSON-ready values; paths become strings."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {f.name: plain(getattr(value, f.name)) for f in dataclasses.fields(value)}
    if isinstance(value, Mapping):
        return {str(k): plain(v) for k, v in value.items()}
    if isinstance(value, list | tuple | set | frozenset):
        return [plain(v) for v in (sorted(value) if isinstance(value, set | frozenset) else value)]
    return str(value) if isinstance(value, Path) else value


def restore(hint: type[T], value: Any, where: str = "") -> T:
    """Decoded values as `hint` (a dataclass, container or plain type), checked strictly on the way."""
    return typing.cast(T, _restore(hint, value, where or getattr(hint, "__name__", str(hint))))


def completed(kind: type[Any], value: Any) -> Any:
    """Decoded values of the dataclass `kind`, as another version of fedshift wrote them: unknown keys are dropped,
    missing ones that have a default get it. What `restore` then cannot use is really unusable."""
    if not isinstance(value, dict):
        return value
    hints = typing.get_type_hints(kind)
    found = {}
    for field in dataclasses.fields(kind):
        if field.name in value:
            found[field.name] = _completed_items(hints[field.name], value[field.name])
        elif field.default is not dataclasses.MISSING:
            found[field.name] = plain(field.default)
        elif field.default_factory is not dataclasses.MISSING:
            found[field.name] = plain(field.default_factory())
    return found


def _completed_items(hint: Any, value: Any) -> Any:
    """`completed` for a field that is a dataclass, or a list or mapping of dataclasses."""
    inner = (typing.get_args(hint) or (None,))[-1]
    if dataclasses.is_dataclass(hint):
        return completed(typing.cast(Any, hint), value)
    if isinstance(value, list) and dataclasses.is_dataclass(inner):
        return [completed(typing.cast(Any, inner), item) for item in value]
    if isinstance(value, dict) and dataclasses.is_dataclass(inner):
        return {key: completed(typing.cast(Any, inner), item) for key, item in value.items()}
    return value


def expected(hint: Any) -> str:
    """What a value of type `hint` is, in words for people who write configurations."""
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if origin is typing.Annotated:
        return expected(arguments[0])
    if origin in (typing.Union, types.UnionType):
        return _either(arguments)
    if origin is typing.Literal:
        names = ", ".join(str(argument) for argument in arguments)
        return f"one of {names}" if len(arguments) > 1 else names
    if origin in (tuple, list, frozenset) or origin is typing.get_origin(Sequence[Any]):
        return "a list such as [a, b]" if arguments[:1] == (str,) else "a list such as [1, 2]"
    return _WORDS.get(hint, getattr(hint, "__name__", str(hint)))


_WORDS: dict[Any, str] = {
    bool: "true or false",
    int: "a whole number (digits only)",
    float: "a number",
    str: "text",
    Tensor: "a tensor",
    type(None): "null",
}


def _either(options: Sequence[Any]) -> str:
    return " or ".join(expected(option) for option in options)


def _lift(value: Any, tensors: dict[str, Tensor]) -> Any:
    if isinstance(value, Tensor):
        name = str(len(tensors))
        tensors[name] = value.detach()
        return {_TENSOR: name}
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {f.name: _lift(getattr(value, f.name), tensors) for f in dataclasses.fields(value)}
    if isinstance(value, Mapping):
        if not all(isinstance(key, str) for key in value) or _TENSOR in value:
            raise TypeError("only string keys can be packed")
        return {key: _lift(item, tensors) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_lift(item, tensors) for item in value]
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, Path):
        return str(value)
    raise TypeError(f"a {type(value).__name__} cannot be packed")


def _lowered(tensors: dict[str, Tensor], value: dict[str, Any]) -> Any:
    """Takes a tensor out of `tensors` where its place is: none is in two places."""
    if _TENSOR not in value:
        return value
    (name,) = value.values()
    return tensors.pop(name)


def _require_shallow(value: Any, depth: int) -> None:
    if depth == 0:
        raise ValueError("nested too deeply")
    if isinstance(value, dict | list):
        for item in value.values() if isinstance(value, dict) else value:
            _require_shallow(item, depth - 1)


def _restore(hint: Any, value: Any, where: str) -> Any:
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if origin is typing.Annotated:
        return _restore(arguments[0], value, where)
    if hint is Any:
        return value
    if origin in (typing.Union, types.UnionType):
        return _restore_union(arguments, value, where)
    if origin is typing.Literal:
        _require(any(type(value) is type(one) and value == one for one in arguments), where, expected(hint))
        return value
    if dataclasses.is_dataclass(hint):
        return _restore_dataclass(typing.cast(Any, hint), value, where)
    if origin in (dict, Mapping) or origin is typing.get_origin(Mapping[str, Any]):
        _require(isinstance(value, dict), where, "a mapping")
        if arguments[1] is Tensor and all(isinstance(item, Tensor) for item in value.values()):
            return dict(value)  # What most messages are, and large ones: word for word the same as below.
        return {key: _restore(arguments[1], item, f"{where}.{key}") for key, item in value.items()}
    if origin in (tuple, list, frozenset) or origin is typing.get_origin(Sequence[Any]):
        return _restore_items(origin, arguments, value, where)
    if hint is float and isinstance(value, int) and not isinstance(value, bool):
        _require(abs(value) <= _MAX_FLOAT, where, "a number of that size")
        return float(value)
    if hint is Path:
        _require(isinstance(value, str), where, "a path")
        return Path(value)
    _require(type(value) is hint or (hint is Tensor and isinstance(value, torch.Tensor)), where, expected(hint))
    return value


def _restore_union(options: Sequence[Any], value: Any, where: str) -> Any:
    if value is None and type(None) in options:
        return None
    for option in options:
        if option is not type(None):
            try:
                return _restore(option, value, where)
            except FedshiftError:
                continue
    _require(False, where, _either(options))
    return None


def _restore_dataclass(hint: Any, value: Any, where: str) -> Any:
    _require(isinstance(value, dict), where, "a mapping")
    hints = _type_hints(hint)
    names = {f.name for f in dataclasses.fields(hint)}
    _require(set(value) == names, where, f"exactly the fields {sorted(names)}")
    return hint(**{name: _restore(hints[name], value[name], f"{where}.{name}") for name in names})


@functools.cache
def _type_hints(kind: type[Any]) -> dict[str, Any]:
    return typing.get_type_hints(kind, include_extras=True)


def _restore_items(origin: Any, arguments: Sequence[Any], value: Any, where: str) -> Any:
    _require(isinstance(value, list | tuple), where, "a list")
    if origin is tuple and not (len(arguments) == 2 and arguments[1] is Ellipsis):
        _require(len(value) == len(arguments), where, f"{len(arguments)} items")
        return tuple(_restore(a, v, f"{where}[{i}]") for i, (a, v) in enumerate(zip(arguments, value, strict=True)))
    items = [_restore(arguments[0], item, f"{where}[{i}]") for i, item in enumerate(value)]
    return items if origin is list else frozenset(items) if origin is frozenset else tuple(items)


def _require(condition: bool, where: str, expected: str) -> None:
    if not condition:
        raise FedshiftError("message-invalid", f"{where} is not {expected}")
