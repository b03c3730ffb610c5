"""Batches from a split: a permutation, then one gather per batch; no Python loop over samples."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from fedshift.beats import beat
from fedshift.data.attacks import with_wrong_labels
from fedshift.data.augment import Augment, PairAugment
from fedshift.data.domain import VOID, Split
from fedshift.functional.tiles import grid
from fedshift.rng import Rng

_IN_MEMORY_BYTES = 512 * 1024 * 1024
AROUND_A_CLASS = 1 / 3
"""This share of training squares is cut out around a pixel of a class, drawn from those of the picture."""


@dataclass(frozen=True)
class UnlabelledBatch:
    """Inputs only: there is no `y` to misuse. `index` says which samples of the split these are."""

    x: Tensor
    index: Tensor


@dataclass(frozen=True)
class LabelledBatch:
    x: Tensor
    y: Tensor
    index: Tensor


CPU = torch.device("cpu")


def moved(values: Tensor, device: torch.device) -> Tensor:
    """`values` on `device`. A copy to a CUDA device comes from pinned memory and is not waited for."""
    if device.type == "cuda" and values.device.type == "cpu":
        return values.pin_memory().to(device, non_blocking=True)
    return values.to(device)


class _Inputs:
    """Gathers batches from images `(n, h, w, 3)` uint8, as float `(b, 3, h, w)` in [0, 1], or from table rows; with
    labels as whole numbers, if the split has any."""

    def __init__(self, split: Split) -> None:
        self._split = split
        self.is_image = split.inputs.ndim == 4
        self._read()
        self.forget_use()

    def _read(self) -> None:
        split = self._split
        small = split.inputs.nbytes <= _IN_MEMORY_BYTES
        self._memory = torch.from_numpy(np.array(split.inputs)) if small else None
        self._labels = None if split.labels is None else torch.from_numpy(np.array(split.labels, dtype=np.int64))

    def __len__(self) -> int:
        return len(self._split)

    @property
    def owners(self) -> Tensor:
        """The sample that each part of a pass belongs to: samples are their own only part."""
        return torch.arange(len(self))

    def count(self, index: Tensor) -> None:
        beat()
        self._gathered[index] = True

    def forget_use(self) -> None:
        self._gathered = torch.zeros(len(self), dtype=torch.bool)
        self._earlier: list[Tensor] = []

    def begin_part(self) -> None:
        self._earlier = self.parts
        self._gathered = torch.zeros(len(self), dtype=torch.bool)

    @property
    def parts(self) -> list[Tensor]:
        return [part for part in (*self._earlier, self._gathered) if bool(part.any())]

    def parts_of(self, samples: Tensor) -> Tensor:
        """The numbers of all parts of these samples."""
        return samples

    def random(self, index: Tensor, device: torch.device, rng: torch.Generator | None) -> tuple[Tensor, Tensor | None]:
        """Samples and their labels, for training. Of pictures that are cut, a part that `rng` chooses, or without it
        the middle."""
        return self.gather(index, device), None if self._labels is None else self._labels[index]

    def part(self, index: Tensor, device: torch.device) -> tuple[Tensor, Tensor | None]:
        """The parts with these numbers, and their labels."""
        return self.random(index, device, None)

    def gather(self, index: Tensor, device: torch.device) -> Tensor:
        self.count(index)
        kept = self._memory
        rows = torch.from_numpy(self._split.inputs[index.numpy()]) if kept is None else kept[index]
        return self._as_floats(rows, device)

    def _as_floats(self, rows: Tensor, device: torch.device) -> Tensor:
        # The bytes stay in the order (h, w, 3): torch's channels_last, in which convolutions are fastest.
        # Moved as bytes, a quarter of the floats.
        rows = moved(rows, device)
        return rows.permute(0, 3, 1, 2).float().div_(255.0) if self.is_image else rows

    def shuffled(self, size: int, epochs: float, rng: Rng) -> Iterator[Tensor]:
        """Index batches of `epochs` passes (fractions allowed)."""
        generator, owners = rng.torch(), self.owners
        total = math.ceil(epochs * len(owners))
        while total > 0:
            order = torch.randperm(len(owners), generator=generator)[:total]
            total -= len(order)
            yield from self.cut(owners[order], size)

    def stretch(self, begin: float, end: float, rng: Rng) -> Tensor:
        """The samples from `begin` to `end`, counted in passes, of an endless sequence of passes in random orders.
        Consecutive stretches cover every pass. A stretch has at least two samples (one, if there is only one), because
        batch normalisation cannot train on fewer."""
        owners = self.owners
        count = len(owners)
        first = round(begin * count)
        last = max(round(end * count), first + min(2, count))
        numbers = range(first // count, -(-last // count))
        orders = [torch.randperm(count, generator=rng.child("pass", number).torch()) for number in numbers]
        return owners[torch.cat(orders)[first - numbers.start * count : last - numbers.start * count]]

    def cut(self, order: Tensor, size: int) -> Iterator[Tensor]:
        """The samples in this order, in batches. One that would be alone, on which batch normalisation cannot train, is
        in the batch before: were it left out, a pass would say of two samples which of them it was made of."""
        rest = len(order)
        for index in torch.split(order, size):
            if rest == size + 1 > 2:
                yield order[-rest:]
                return
            yield index
            rest -= len(index)

    def in_order(self, size: int) -> Iterator[Tensor]:
        yield from torch.split(torch.arange(len(self.owners)), size)


class _Tiles(_Inputs):
    """Squares of pictures, which stay where they are: on disk, if they were read from files. Their parts are the fewest
    squares that cover them, and a pass has as many, at random places. Use is counted by picture."""

    def _read(self) -> None:
        tiles = self._split.tiles
        assert tiles is not None
        self.side, self._sizes = tiles.side, tiles.sizes
        places = [grid(int(height), int(width), self.side) for height, width in tiles.sizes]
        self._places = [place for own in places for place in own]
        self._owners = torch.repeat_interleave(torch.tensor([len(own) for own in places], dtype=torch.int64))

    @property
    def owners(self) -> Tensor:
        return self._owners

    def parts_of(self, samples: Tensor) -> Tensor:
        return torch.isin(self._owners, samples).nonzero()[:, 0]

    def random(self, index: Tensor, device: torch.device, rng: torch.Generator | None) -> tuple[Tensor, Tensor | None]:
        drawn = torch.full((len(index), 4), 0.5) if rng is None else torch.rand(len(index), 4, generator=rng)
        places = [self._place(*pair) for pair in zip(index.tolist(), drawn.tolist(), strict=True)]
        return self._cut_out(index, places, device)

    def part(self, index: Tensor, device: torch.device) -> tuple[Tensor, Tensor | None]:
        return self._cut_out(self._owners[index], [self._places[number] for number in index.tolist()], device)

    def whole(self, number: int) -> tuple[Tensor, Tensor]:
        """A picture `(h, w, 3)` uint8 at its own size, and its mask."""
        self.count(torch.tensor([number]))
        height, width = self._sizes[number]
        picture, mask = self._split.inputs[number, :height, :width], self._split.labels
        assert mask is not None
        return torch.from_numpy(np.array(picture)), torch.from_numpy(np.array(mask[number, :height, :width]))

    def _place(self, number: int, drawn: list[float]) -> tuple[int, int]:
        """Where a training square is cut out: anywhere, or around a pixel of a class of that picture, so that rare ones
        are seen too."""
        room = [max(int(length) - self.side, 0) for length in self._sizes[number]]
        if self._split.labels is not None and drawn[0] < AROUND_A_CLASS:
            height, width = self._sizes[number]
            mask = self._split.labels[number, :height, :width]
            present = np.flatnonzero(np.bincount(mask.ravel(), minlength=VOID + 1)[:VOID])
            if len(present):
                pixels = np.flatnonzero(mask == present[int(drawn[1] * len(present))])
                centre = divmod(int(pixels[int(drawn[2] * len(pixels))]), int(width))
                top, left = (min(max(at - self.side // 2, 0), most) for at, most in zip(centre, room, strict=True))
                return top, left
        return round(drawn[2] * room[0]), round(drawn[3] * room[1])

    def _cut_out(
        self, index: Tensor, places: Sequence[tuple[int, int]], device: torch.device
    ) -> tuple[Tensor, Tensor | None]:
        self.count(index)
        found = [
            (number, slice(top, top + self.side), slice(left, left + self.side))
            for number, (top, left) in zip(index.tolist(), places, strict=True)
        ]
        pixels, masks = self._split.inputs, self._split.labels
        x = np.stack([pixels[at] for at in found]) if found else pixels[:0, : self.side, : self.side]
        rows = self._as_floats(torch.from_numpy(np.array(x)), device)
        if masks is None:
            return rows, None
        y = np.stack([masks[at] for at in found]) if found else masks[:0, : self.side, : self.side]
        return rows, torch.from_numpy(np.array(y, dtype=np.int64))


def _inputs(split: Split) -> _Inputs:
    return _Inputs(split) if split.tiles is None else _Tiles(split)


class _Data:
    """What labelled and unlabelled data have in common: how much of them was used."""

    _inputs: _Inputs

    def __len__(self) -> int:
        return len(self._inputs)

    @property
    def parts(self) -> list[Tensor]:
        """For each part of the step so far, which samples `(n,)` were handed out in it."""
        return self._inputs.parts

    @property
    def used(self) -> int:
        """How many different samples have been handed out since the step began."""
        return int(torch.stack(self.parts).any(dim=0).sum()) if self.parts else 0

    @property
    def seen(self) -> int:
        """The same of that part of the step which had the least."""
        return min((int(part.sum()) for part in self.parts), default=0)

    def begin_part(self) -> None:
        """Something else that leaves is made from here on: it must be made of enough samples by itself."""
        self._inputs.begin_part()

    def forget_use(self) -> None:
        """Begins to count anew."""
        self._inputs.forget_use()


class UnlabelledData(_Data):
    """The inputs of a split whose labels are unknown or hidden from the method."""

    def __init__(self, split: Split, device: torch.device) -> None:
        self._inputs = _inputs(split.without_labels())
        self._device = device

    def batches(
        self, size: int, rng: Rng, epochs: float = 1, augment: Augment | None = None
    ) -> Iterator[UnlabelledBatch]:
        """Shuffled batches for training."""
        generator, places = rng.child("augment").torch(), rng.child("places").torch()
        for index in self._inputs.shuffled(size, epochs, rng):
            x, _ = self._inputs.random(index, CPU if augment else self._device, places)
            yield UnlabelledBatch(moved(augment(x, generator) if augment else x, self._device), index)

    def stretch(self, begin: float, end: float, rng: Rng) -> Tensor:
        """Which samples a round takes: see `_Inputs.stretch`."""
        return self._inputs.stretch(begin, end, rng)

    def along(self, order: Tensor, size: int) -> Iterator[UnlabelledBatch]:
        """Batches of the samples `order`, one after the other."""
        for index in self._inputs.cut(order, size):
            yield UnlabelledBatch(self._inputs.random(index, self._device, None)[0], index)

    def evenly(self, size: int, samples: Tensor | None = None) -> Iterator[UnlabelledBatch]:
        """Each of `samples` (None: all) once, in batches whose sizes differ by one at most: no sample is left over
        alone."""
        owners = self._inputs.owners
        order = torch.arange(len(owners)) if samples is None else self._inputs.parts_of(samples)
        for index in torch.tensor_split(order, math.ceil(len(order) / size)):
            yield UnlabelledBatch(self._inputs.part(index, self._device)[0], owners[index])

    def in_order(self, size: int) -> Iterator[UnlabelledBatch]:
        """Every sample once, in the split's order."""
        owners = self._inputs.owners
        for index in self._inputs.in_order(size):
            yield UnlabelledBatch(self._inputs.part(index, self._device)[0], owners[index])


class LabelledData(_Data):
    """The inputs and labels of a split. At a poisoned site (`poison` > 0) that share of every training batch has wrong
    labels out of `classes`."""

    def __init__(self, split: Split, device: torch.device, poison: float = 0.0, classes: int = 0) -> None:
        assert split.labels is not None
        self._poison = poison
        self._classes = classes
        self._inputs = _inputs(split)
        self._device = device

    def batches(
        self, size: int, rng: Rng, epochs: float = 1, augment: PairAugment | None = None
    ) -> Iterator[LabelledBatch]:
        """Shuffled batches for training; `augment` sees inputs and labels, so that masks move with their images."""
        return self._batches(self._inputs.shuffled(size, epochs, rng), rng, augment)

    def stretch(
        self, begin: float, end: float, order: Rng, size: int, rng: Rng, augment: PairAugment | None = None
    ) -> Iterator[LabelledBatch]:
        """Batches for training on the samples from `begin` to `end` of endless passes in the order of `order`: see
        `_Inputs.stretch`."""
        return self._batches(self._inputs.cut(self._inputs.stretch(begin, end, order), size), rng, augment)

    def chosen(
        self, indices: Iterable[Tensor], rng: Rng, augment: PairAugment | None = None
    ) -> Iterator[LabelledBatch]:
        """Batches of these samples. A batch may be empty."""
        return self._batches(indices, rng, augment)

    def _batches(self, indices: Iterable[Tensor], rng: Rng, augment: PairAugment | None) -> Iterator[LabelledBatch]:
        generator, places = rng.child("augment").torch(), rng.child("places").torch()
        for index in indices:
            # Augmentations draw from generators of the CPU, and work there.
            x, y = self._inputs.random(index, CPU if augment else self._device, places)
            assert y is not None
            if self._poison:
                y = with_wrong_labels(y, self._poison, self._classes)
            if augment is not None and len(index):
                x, y = augment(x, y, generator)
            yield LabelledBatch(moved(x, self._device), moved(y, self._device), index)

    def in_order(self, size: int) -> Iterator[LabelledBatch]:
        """Every sample once, in the split's order."""
        owners = self._inputs.owners
        for index in self._inputs.in_order(size):
            x, y = self._inputs.part(index, self._device)
            assert y is not None
            yield LabelledBatch(x, moved(y, self._device), owners[index])

    def pictures(self) -> Iterator[tuple[Tensor, Tensor]] | None:
        """Where pictures are cut into squares: each as it is, `(h, w, 3)` uint8 at its own size, and its mask."""
        tiles = self._inputs
        return (tiles.whole(number) for number in range(len(tiles))) if isinstance(tiles, _Tiles) else None

    @property
    def side(self) -> int:
        """Of the squares that pictures are cut into."""
        return self._inputs.side if isinstance(self._inputs, _Tiles) else 0
