from __future__ import annotations

import dataclasses
import json
import struct
from collections.abc import Mapping
from dataclasses import dataclass

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from fedshift.errors import FedshiftError
from fedshift.federation import codec


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
