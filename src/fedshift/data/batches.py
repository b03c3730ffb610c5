"""Batches from a split: a permutation, then one gather per batch; no Python loop over samples."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from fedshift.beats import beat
from fedshift.data.attacks import with_wrong_labels
from fedshift.data.augment import Augment, PairAugment
from fedshift.data.domain import Split
from fedshift.rng import Rng

_IN_MEMORY_BYTES = 512 * 1024 * 1024


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
    """Gathers batches from images `(n, h, w, 3)` uint8, as float `(b, 3, h, w)` in [0, 1], or from table rows."""

    def __init__(self, split: Split) -> None:
        self._split = split
        self.is_image = split.inputs.ndim == 4
        small = split.inputs.nbytes <= _IN_MEMORY_BYTES
        self._memory = torch.from_numpy(np.array(split.inputs)) if small else None
        self.forget_use()

    def __len__(self) -> int:
        return len(self._split)

    def forget_use(self) -> None:
        self._gathered = torch.zeros(len(self), dtype=torch.bool)
        self._earlier: list[Tensor] = []

    def begin_part(self) -> None:
        self._earlier = self.parts
        self._gathered = torch.zeros(len(self), dtype=torch.bool)

    @property
    def parts(self) -> list[Tensor]:
        return [part for part in (*self._earlier, self._gathered) if bool(part.any())]

    def gather(self, index: Tensor, device: torch.device) -> Tensor:
        beat()
        self._gathered[index] = True
        kept = self._memory
        rows = torch.from_numpy(self._split.inputs[index.numpy()]) if kept is None else kept[index]
        # The bytes stay in the order (h, w, 3): torch's channels_last, in which convolutions are fastest.
        # Moved as bytes, a quarter of the floats.
        rows = moved(rows, device)
        return rows.permute(0, 3, 1, 2).float().div_(255.0) if self.is_image else rows

    def shuffled(self, size: int, epochs: float, rng: Rng) -> Iterator[Tensor]:
        """Index batches of `epochs` passes (fractions allowed)."""
        generator = rng.torch()
        total = math.ceil(epochs * len(self))
        while total > 0:
            order = torch.randperm(len(self), generator=generator)[:total]
            total -= len(order)
            yield from self.cut(order, size)

    def stretch(self, begin: float, end: float, rng: Rng) -> Tensor:
        """The samples from `begin` to `end`, counted in passes, of an endless sequence of passes in random orders.
        Consecutive stretches cover every pass. A stretch has at least two samples (one, if there is only one), because
        batch normalisation cannot train on fewer."""
        count = len(self)
        first = round(begin * count)
        last = max(round(end * count), first + min(2, count))
        numbers = range(first // count, -(-last // count))
        orders = [torch.randperm(count, generator=rng.child("pass", number).torch()) for number in numbers]
        return torch.cat(orders)[first - numbers.start * count : last - numbers.start * count]

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
        yield from torch.split(torch.arange(len(self)), size)


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
        self._inputs = _Inputs(split)
        self._device = device

    def batches(
        self, size: int, rng: Rng, epochs: float = 1, augment: Augment | None = None
    ) -> Iterator[UnlabelledBatch]:
        """Shuffled batches for training."""
        generator = rng.child("augment").torch()
        for index in self._inputs.shuffled(size, epochs, rng):
            x = self._inputs.gather(index, CPU if augment else self._device)
            yield UnlabelledBatch(moved(augment(x, generator) if augment else x, self._device), index)

    def stretch(self, begin: float, end: float, rng: Rng) -> Tensor:
        """Which samples a round takes: see `_Inputs.stretch`."""
        return self._inputs.stretch(begin, end, rng)

    def along(self, order: Tensor, size: int) -> Iterator[UnlabelledBatch]:
        """Batches of the samples `order`, one after the other."""
        for index in self._inputs.cut(order, size):
            yield UnlabelledBatch(self._inputs.gather(index, self._device), index)

    def evenly(self, size: int, samples: Tensor | None = None) -> Iterator[UnlabelledBatch]:
        """Each of `samples` (None: all) once, in batches whose sizes differ by one at most: no sample is left over
        alone."""
        order = torch.arange(len(self)) if samples is None else samples
        for index in torch.tensor_split(order, math.ceil(len(order) / size)):
            yield UnlabelledBatch(self._inputs.gather(index, self._device), index)

    def in_order(self, size: int) -> Iterator[UnlabelledBatch]:
        """Every sample once, in the split's order."""
        for index in self._inputs.in_order(size):
            yield UnlabelledBatch(self._inputs.gather(index, self._device), index)


class LabelledData(_Data):
    """The inputs and labels of a split. At a poisoned site (`poison` > 0) that share of every training batch has wrong
    labels out of `classes`."""

    def __init__(self, split: Split, device: torch.device, poison: float = 0.0, classes: int = 0) -> None:
        assert split.labels is not None
        self._poison = poison
        self._classes = classes
        self._inputs = _Inputs(split)
        self._labels = torch.from_numpy(np.array(split.labels, dtype=np.int64))
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
        generator = rng.child("augment").torch()
        for index in indices:
            # Augmentations draw from generators of the CPU, and work there.
            x, y = self._inputs.gather(index, CPU if augment else self._device), self._labels[index]
            if self._poison:
                y = with_wrong_labels(y, self._poison, self._classes)
            if augment is not None and len(index):
                x, y = augment(x, y, generator)
            yield LabelledBatch(moved(x, self._device), moved(y, self._device), index)

    def in_order(self, size: int) -> Iterator[LabelledBatch]:
        """Every sample once, in the split's order."""
        for index in self._inputs.in_order(size):
            x, y = self._inputs.gather(index, self._device), self._labels[index]
            yield LabelledBatch(moved(x, self._device), moved(y, self._device), index)
