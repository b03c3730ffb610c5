from __future__ import annotations

import dataclasses
import json
import struct
from collections.abc import Mapping
from dataclasses import dataclass

import pytest
import safetensors.torch
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from fedshift.errors import FedshiftError
from fedshift.federation import checks, codec


@dataclass(frozen=True)
class Inner:
    names: tuple[str, ...]
    table: Mapping[str, Tensor]


@dataclass(frozen=True)
class Outer:
    inner: Inner
    value: float
    maybe: int | None


def test_dataclasses_and_tensors_come_back_exactly() -> None:
    table = {"a.b": torch.randn(3, 2), "count": torch.tensor(7), "half": torch.ones(2, dtype=torch.bfloat16)}
    sent = Outer(Inner(("x", "é"), table), 0.1, None)
    got = codec.restore(Outer, codec.unpack(codec.pack(sent)))
    assert got.inner.names == ("x", "é") and got.value == 0.1 and got.maybe is None
    for key, tensor in table.items():
        assert got.inner.table[key].dtype == tensor.dtype
        assert torch.equal(got.inner.table[key], tensor)


def test_equal_trees_give_equal_bytes_and_views_are_unshared() -> None:
    base = torch.arange(12.0).reshape(3, 4)
    tree = {"whole": base, "row": base[1], "turned": base.T}
    assert codec.pack(tree) == codec.pack({key: value.clone() for key, value in tree.items()})
    assert torch.equal(codec.unpack(codec.pack(tree))["turned"], base.T)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_non_finite_number_cannot_be_sent(value: float) -> None:
    with pytest.raises(ValueError):
        codec.pack({"loss": value})


def test_objects_cannot_be_sent() -> None:
    with pytest.raises(TypeError, match="cannot be packed"):
        codec.pack({"x": object()})


@given(st.binary(max_size=200))
@settings(max_examples=100, deadline=None)
def test_garbage_is_one_kind_of_error(data: bytes) -> None:
    with pytest.raises(FedshiftError) as caught:
        codec.unpack(data)
    assert caught.value.code == "message-invalid"


def test_a_header_longer_than_the_message_is_refused() -> None:
    with pytest.raises(FedshiftError):
        codec.unpack(struct.pack("<Q", 1 << 60) + b"{}")


def test_a_header_that_points_at_a_missing_tensor_is_refused() -> None:
    good = codec.pack({"a": torch.ones(1)})
    (length,) = struct.unpack("<Q", good[:8])
    header = json.loads(good[8 : 8 + length])
    header["__metadata__"]["fedshift"] = json.dumps({"a": {"~tensor": "9"}})
    text = json.dumps(header).encode()
    with pytest.raises(FedshiftError):
        codec.unpack(struct.pack("<Q", len(text)) + text + good[8 + length :])


def with_text(text: str, tensors: dict[str, Tensor] | None = None) -> bytes:
    """A message whose JSON is `text`."""
    data = safetensors.torch.save(tensors or {}, metadata={"fedshift": text})
    return bytes(data)


@pytest.mark.parametrize(
    "text",
    [
        "[" + "[]," * 2_000_000 + "[]]",
        "[" * 1_000_000,
        "[" * 40 + "]" * 40,
        '{"a": NaN}',
        '{"a": {"~tensor": "0"}, "b": {"~tensor": "0"}}',
        '{"a": {"~tensor": "0", "b": 1}}',
        '{"a": {"~tensor": ["0"]}}',
        "{}",
    ],
    ids=["many", "deep", "deeper than anything", "NaN", "one tensor twice", "not only", "no name", "one left over"],
)
def test_what_pack_does_not_write_is_not_read(text: str) -> None:
    unpacked = codec.unpack(with_text('{"a": {"~tensor": "0"}}', {"0": torch.ones(2)}))
    assert torch.equal(unpacked["a"], torch.ones(2))
    with pytest.raises(FedshiftError, match="decoded"):
        codec.unpack(with_text(text, {"0": torch.ones(2)}))


def test_values_that_are_written_as_escapes_are_counted_too() -> None:
    limits = codec.Limits(nodes=100, tensors=0)
    header = json.dumps({"__metadata__": {"fedshift": "~"}}).replace("~", "\\u005b\\u005d\\u002c" * 1000).encode()
    assert header.count(b"[") == 0
    with pytest.raises(FedshiftError, match="ValueError"):
        codec.unpack(struct.pack("<Q", len(header)) + header, limits)


def test_a_number_that_no_float_holds_is_refused() -> None:
    with pytest.raises(FedshiftError, match="a number of that size"):
        codec.restore(float, 10**400, "seconds")


@pytest.mark.parametrize(
    "change",
    [{"value": "0.1"}, {"maybe": 1.5}, {"inner": {"names": ["x"], "table": {"a": 1}}}, {"extra": 1}],
    ids=["text for a number", "float for an int", "number for a tensor", "undeclared field"],
)
def test_what_does_not_fit_its_type_is_refused(change: dict[str, object]) -> None:
    fields = {"inner": {"names": ["x"], "table": {}}, "value": 1.0, "maybe": 3}
    assert codec.restore(Outer, fields) == Outer(Inner(("x",), {}), 1.0, 3)
    with pytest.raises(FedshiftError, match="Outer"):
        codec.restore(Outer, fields | change)


def test_a_missing_field_is_refused() -> None:
    assert {f.name for f in dataclasses.fields(Inner)} == {"names", "table"}
    with pytest.raises(FedshiftError, match="exactly the fields"):
        codec.restore(Inner, {"names": []})


def test_files_are_those_of_the_safetensors_package_and_are_read_alike() -> None:
    """Of all types, of no, one and many dimensions, small tensors that share memory and large ones, and empty ones."""
    generator = torch.Generator().manual_seed(0)
    tensors = {
        "scalar": torch.tensor(2.5),
        "empty": torch.zeros(0, 3),
        "large": torch.rand(50, 60, generator=generator),
    }
    for number, dtype in enumerate((*checks.DTYPES, torch.complex64, torch.uint16)):
        drawn = torch.randint(0, 2, (number + 1, 2, 3), generator=generator)
        tensors[f"{number}"] = drawn.to(dtype)
    data = bytes(safetensors.torch.save(tensors, metadata={"fedshift": "{}"}))
    found, metadata = codec.read_safetensors(data)
    assert metadata == {"fedshift": "{}"} and found.keys() == tensors.keys()
    for name, tensor in tensors.items():
        assert found[name].dtype == tensor.dtype and torch.equal(found[name], tensor) and found[name].is_contiguous()
    found["0"].fill_(0)
    assert all(torch.equal(found[name], tensor) for name, tensor in tensors.items() if name != "0"), "none overlap"
    theirs = safetensors.torch.load(codec.pack({"a": tensors["large"], "b": tensors["3"]}))
    assert torch.equal(theirs["0"], tensors["large"]) and torch.equal(theirs["1"], tensors["3"])


@pytest.mark.parametrize(
    "change",
    [
        {"data_offsets": [0, 7]},
        {"data_offsets": [4, 12]},
        {"data_offsets": [8, 0]},
        {"data_offsets": [0, 8, 8]},
        {"data_offsets": [False, 8]},
        {"data_offsets": [0, 2**62]},
        {"shape": [-1, -2]},
        {"shape": [2**62, 4]},
        {"shape": [True, 2]},
        {"shape": [1] * 65 + [2]},
        {"shape": [2.0]},
        {"dtype": "F4"},
        {"dtype": "F64", "shape": [2]},
        {"extra": 1},
    ],
    ids=str,
)
def test_a_tensor_has_the_place_that_its_size_takes(change: dict[str, object]) -> None:
    def file(entry: dict[str, object], rest: bytes = b"") -> bytes:
        text = json.dumps({"__metadata__": {"fedshift": "{}"}, "a": entry}).encode()
        return struct.pack("<Q", len(text)) + text + bytes(8) + rest

    good: dict[str, object] = {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}
    assert torch.equal(codec.read_safetensors(file(good))[0]["a"], torch.zeros(2))
    for data in (file(good | change), file(good, b"x"), file(good)[:-1]):
        with pytest.raises(FedshiftError, match="decoded"):
            codec.read_safetensors(data)


def test_a_bool_is_0_or_1_whatever_its_byte_is() -> None:
    data = bytearray(safetensors.torch.save({"a": torch.ones(3, dtype=torch.bool)}, metadata={"fedshift": "{}"}))
    data[-3:] = b"\x07\x00\xff"
    found = codec.read_safetensors(bytes(data))[0]["a"]
    assert found.view(torch.uint8).tolist() == [1, 0, 1]
