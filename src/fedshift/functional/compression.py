"""Updates of models in fewer bytes: a list of tensors as a change to another list that the receiver has too.

Three groups of tensors are coded one after another. *Exact*: everything that is not float32, such as counters: their
bytes, as differences. *Narrow*: float32 of at most one dimension, such as biases and the statistics of normalisation:
16 bits for each change, cut off and not rounded, so that a variance never falls below 0. *Wide*: all other float32,
most of a model, in one of these ways:

- `bf16`: 16 bits for each change.
- `int8`, `int4`: whole numbers of at most 127 or 7, times a step for each block of 512 numbers. A step is never so fine
  that entropy coding would be of no use: at least 1/16 or 0.8 of the block's root mean square.
- `topk`: the largest 5 % of all changes as in `int8`, and a bit for each number that says whether it is among them.

With `full` there is nothing to refer to: wide tensors are rounded to bfloat16, all others are exact.

Decoding multiplies, then adds: elementwise operations that every processor rounds alike, so that sender and receiver
have the same numbers afterwards, to the bit.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch
from torch import Tensor

Coding = Literal["full", "bf16", "int8", "int4", "topk"]

BLOCK = 512
SHARE = 0.05
"""Of all changes, those that `topk` keeps."""
_LEVELS = {"int8": 127, "int4": 7}
_FINEST = {"int8": 1 / 16, "int4": 0.8}
"""The smallest step, in root mean squares of a block."""


@dataclass(frozen=True)
class Form:
    """What a receiver knows of a tensor beforehand."""

    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def count(self) -> int:
        return math.prod(self.shape)

    @property
    def bytes(self) -> int:
        return self.count * self.dtype.itemsize

    @property
    def group(self) -> Literal["exact", "narrow", "wide"]:
        if self.dtype != torch.float32:
            return "exact"
        return "wide" if len(self.shape) > 1 else "narrow"


def form_of(tensor: Tensor) -> Form:
    return Form(tensor.dtype, tuple(tensor.shape))


def encode(tensors: Sequence[Tensor], base: Sequence[Tensor] | None, coding: Coding) -> Tensor:
    """The tensors as bytes, `(N,)` uint8, that `decode` turns into nearly the same ones. `base` has tensors of the same
    forms, and is None with `full`."""
    assert (base is None) == (coding == "full")
    parts = []
    for tensor, before in _pairs(tensors, base, "exact"):
        parts.append(_bytes_of(tensor) if before is None else _bytes_of(tensor) ^ _bytes_of(before))
    narrow = _changes(_pairs(tensors, base, "narrow"))
    # An arithmetic shift of the bits cuts the mantissa, towards 0.
    parts.append(_planes(narrow if base is None else (narrow.view(torch.int32) >> 16).to(torch.int16)))
    wide = list(_pairs(tensors, base, "wide"))
    if coding in ("full", "bf16"):
        parts.append(_planes(_changes(wide).to(torch.bfloat16)))
    elif coding == "topk":
        changes = _changes(wide)
        kept = largest(changes, SHARE)
        parts += [torch.from_numpy(np.packbits(kept.numpy())), *_in_steps(_padded([changes[kept]]), "int8")]
    else:
        parts += _in_steps(_padded([_changes([pair]) for pair in wide]), coding)
    return torch.cat(parts)


def decode(data: Tensor, forms: Sequence[Form], base: Sequence[Tensor] | None, coding: Coding) -> list[Tensor]:
    """The tensors of these forms that `encode` made bytes of. ValueError if there are too few bytes or too many;
    numbers may be anything, NaN too."""
    reader = _Reader(data)
    found: list[Tensor | None] = [None] * len(forms)

    def of(group: str) -> list[int]:
        return [place for place, form in enumerate(forms) if form.group == group]

    def put(place: int, change: Tensor) -> None:
        value = change.reshape(forms[place].shape)
        found[place] = value.clone() if base is None else base[place] + value

    for place in of("exact"):
        form = forms[place]
        raw = reader.take(form.bytes)
        own = raw.clone() if base is None else raw ^ _bytes_of(base[place])
        if form.dtype == torch.bool:
            own = (own != 0).to(torch.uint8)
        found[place] = own.view(form.dtype).reshape(form.shape)
    counts = [forms[place].count for place in of("narrow")]
    narrow = reader.planes(sum(counts), torch.float32 if base is None else torch.bfloat16).float()
    for place, change in zip(of("narrow"), narrow.split(counts), strict=True):
        put(place, change)
    counts = [forms[place].count for place in of("wide")]
    if coding in ("full", "bf16"):
        wide = reader.planes(sum(counts), torch.bfloat16).float().split(counts)
    elif coding == "topk":
        bits = reader.take(-(-sum(counts) // 8)).numpy()
        kept = torch.from_numpy(np.unpackbits(bits, count=sum(counts)).view(np.bool_))
        changes = torch.zeros(sum(counts))
        changes[kept] = _from_steps(reader, _blocks(int(kept.sum())), "int8")[: int(kept.sum())]
        wide = changes.split(counts)
    else:
        sizes = [BLOCK * _blocks(count) for count in counts]
        parts = _from_steps(reader, sum(sizes) // BLOCK, coding).split(sizes)
        wide = tuple(part[:count] for part, count in zip(parts, counts, strict=True))
    for place, change in zip(of("wide"), wide, strict=True):
        put(place, change)
    reader.require_end()
    return [tensor for tensor in found if tensor is not None]


def most_bytes(forms: Sequence[Form], coding: Coding) -> int:
    """The most bytes that `encode` makes of tensors of these forms."""
    exact = sum(form.bytes for form in forms if form.group == "exact")
    narrow = sum(form.count for form in forms if form.group == "narrow") * (4 if coding == "full" else 2)
    wide = [form.count for form in forms if form.group == "wide"]
    if coding in ("full", "bf16"):
        return exact + narrow + 2 * sum(wide)
    blocks = _blocks(sum(wide)) if coding == "topk" else sum(map(_blocks, wide))
    mask = -(-sum(wide) // 8) if coding == "topk" else 0
    return exact + narrow + mask + blocks * (4 + (BLOCK // 2 if coding == "int4" else BLOCK))


def largest(values: Tensor, share: float) -> Tensor:
    """Which of the values `(N,)` belong to that share of them with the largest magnitudes, NaN first; never those that
    are 0."""
    count = math.ceil(share * len(values))
    if not count:
        return torch.zeros(len(values), dtype=torch.bool)
    sizes = values.abs().nan_to_num_(nan=math.inf, posinf=math.inf)
    least = float(np.partition(sizes.numpy(), len(values) - count)[len(values) - count])
    return (sizes >= least) & (sizes > 0)


# --- Numbers in steps -----------------------------------------------------------------------------------------------


def _in_steps(values: Tensor, coding: Coding) -> list[Tensor]:
    """Values, whole blocks of them, as the bytes of the blocks' steps and of whole numbers."""
    blocks, most = values.reshape(-1, BLOCK), _LEVELS[coding]
    highest = torch.maximum(blocks.amax(1), -blocks.amin(1)) if len(blocks) else blocks.sum(1)
    steps = torch.maximum(highest / most, blocks.square().mean(1).sqrt_() * _FINEST[coding])
    numbers = (blocks / torch.where(steps == 0, 1.0, steps)[:, None]).round_().clamp_(-most, most)
    codes = numbers.reshape(-1).to(torch.int8)
    if coding == "int4":
        nibbles = codes.view(torch.uint8) & 15
        return [_planes(steps), nibbles[0::2] | nibbles[1::2] << 4]
    return [_planes(steps), codes.view(torch.uint8)]


def _from_steps(reader: _Reader, blocks: int, coding: Coding) -> Tensor:
    steps = reader.planes(blocks, torch.float32)
    if coding == "int4":
        pairs = reader.take(blocks * BLOCK // 2)
        nibbles = torch.stack([pairs & 15, pairs >> 4], dim=1).reshape(-1)
        codes = (nibbles ^ 8).to(torch.int8) - 8  # In two's complement, as whole bytes are.
    else:
        codes = reader.take(blocks * BLOCK).view(torch.int8)
    return codes.reshape(-1, BLOCK).float().mul_(steps[:, None]).reshape(-1)


def _blocks(count: int) -> int:
    return -(-count // BLOCK)


def _padded(parts: Sequence[Tensor]) -> Tensor:
    """The parts behind each other, each filled up with zeros to whole blocks."""
    sizes = [BLOCK * _blocks(len(part)) for part in parts]
    filled = torch.zeros(sum(sizes))
    for place, part in zip(filled.split(sizes), parts, strict=True):
        place[: len(part)] = part
    return filled


# --- Bytes ----------------------------------------------------------------------------------------------------------


def _pairs(
    tensors: Sequence[Tensor], base: Sequence[Tensor] | None, group: str
) -> Iterator[tuple[Tensor, Tensor | None]]:
    for place, tensor in enumerate(tensors):
        if form_of(tensor).group == group:
            yield tensor, None if base is None else base[place]


def _changes(pairs: Iterable[tuple[Tensor, Tensor | None]]) -> Tensor:
    """All changes behind each other, `(N,)` float32."""
    parts = [(tensor if before is None else tensor - before).reshape(-1) for tensor, before in pairs]
    return torch.cat(parts) if parts else torch.zeros(0)


def _bytes_of(tensor: Tensor) -> Tensor:
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8)


def _planes(values: Tensor) -> Tensor:
    """First the first byte of every number, then the second of every number: bytes that are alike stand together."""
    return _bytes_of(values).reshape(-1, values.dtype.itemsize).T.reshape(-1)


class _Reader:
    def __init__(self, data: Tensor) -> None:
        self._data, self._at = data, 0

    def take(self, count: int) -> Tensor:
        part = self._data[self._at : self._at + count]
        if len(part) != count:
            raise ValueError("too few bytes")
        self._at += count
        return part

    def planes(self, count: int, dtype: torch.dtype) -> Tensor:
        raw = self.take(count * dtype.itemsize).reshape(dtype.itemsize, -1)
        return raw.T.clone(memory_format=torch.contiguous_format).reshape(-1).view(dtype)

    def require_end(self) -> None:
        if self._at != len(self._data):
            raise ValueError("too many bytes")
