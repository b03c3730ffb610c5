"""A domain of image files: looked at once, decoded once, memory-mapped ever after."""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fedshift.data.cache import Entry, EntryWriter, cached_arrays, cached_entry
from fedshift.data.domain import VOID, Domain, Skipped, Split, Task
from fedshift.data.fingerprints import FileFacts, digest_of, image_facts, in_parallel, read_limited
from fedshift.data.images import (
    MaskError,
    Size,
    UnreadableError,
    decode_image,
    decode_mask,
    decode_mask_values,
    grey_ids,
    image_size,
    is_dark,
)
from fedshift.data.listing import Item, Listing
from fedshift.data.raw import Plan, Problem, Progress, Sample, printable
from fedshift.data.splits import SPLITS
from fedshift.errors import InputError

DECODER = 3
"""Part of the cache's keys: raised when the same file would be decoded to other pixels, or more is noted of it."""

MASK_DECODER = 1
"""The same for data with masks."""


@dataclass(frozen=True)
class Decoded:
    """An image and, for segmentation, its mask. `dark` is told in `fedshift.data.images.is_dark`."""

    image: NDArray[np.uint8]
    mask: NDArray[np.uint8] | None
    dark: bool


class ImageFiles:
    """The images, and classes or masks, that a listing found."""

    def __init__(self, name: str, listing: Listing) -> None:
        self.name = name
        self._listing = listing

    @property
    def task(self) -> Task | None:
        return self._listing.task

    @property
    def problems(self) -> tuple[Problem, ...]:
        return tuple(self._listing.problems)

    @property
    def warnings(self) -> tuple[str, ...]:
        return tuple(self._listing.warnings)

    def class_counts(self) -> Counter[str] | None:
        if self.task != "classification":
            return None
        counts = Counter(item.label for item in self._listing.items if item.label is not None)
        counts.update(dict.fromkeys(self._listing.empty_classes, 0))
        return counts

    def sizes(self) -> Counter[Size]:
        found = (self._facts[str(item.path)].size for item in self._listing.items)
        return Counter(size for size in found if size is not None)

    def samples(self) -> list[Sample]:
        return [
            Sample(self._where(item.path), item.split, self._facts[str(item.path)].digest)
            for item in self._listing.items
            if item.split is not None
        ]

    def mask_ids(self) -> dict[int, str]:
        """The ids that the masks hold, `VOID` left out, each with the first mask that shows it. Masks in colour and
        unreadable ones hold none."""
        masks = [item.mask for item in self._listing.items if item.mask is not None]
        digests = [self._facts[str(path)].digest for path in masks]

        def find() -> dict[str, NDArray[Any]]:
            first = np.full(256, -1, dtype=np.int64)
            found = (ids for block in in_parallel(_ids_in, masks) for ids in block)
            for i, ids in enumerate(found):
                first[ids] = np.where(first[ids] < 0, i, first[ids])
            return {"first": first}

        # By position, not by name: another folder with the same content shares this entry.
        first = cached_arrays(_key("first-masks", digests), find)["first"]
        return {i: self._where(masks[first[i]]) for i in range(256) if first[i] >= 0 and i != VOID}

    def refuse(self, problem: Problem) -> None:
        """Adds a problem that is one only beside what others have or say."""
        self._listing.problems.append(problem)

    def read(self, plan: Plan, progress: Progress | None = None) -> Domain:
        number = {name: i for i, name in enumerate(plan.classes)}
        rows = [
            (item.split, number.get(item.label or ""), self._digest(item), self._mask_digest(item))
            for item in self._listing.items
        ]
        code = plan.code and [MASK_DECODER, sorted(plan.code.ids.items()), sorted((plan.code.colours or {}).items())]
        key = _key("images", DECODER, plan.size, plan.fit, code, rows)
        entry = cached_entry(key, lambda writer: self._decode_all(writer, plan, number, progress))
        skipped = tuple(
            Skipped(self._where(_blamed(self._listing.items[i], in_mask)), reason, code)
            for i, reason, code, in_mask in entry.notes["skipped"]
        )
        train, val, test = (_split(entry, name) for name in SPLITS)
        dark = tuple(self._where(self._listing.items[i].path) for i in entry.notes["dark"])
        return Domain(self.name, train, val, test, skipped, self._listing.test_given, dark)

    @cached_property
    def _facts(self) -> dict[str, FileFacts]:
        items = self._listing.items
        paths = [item.path for item in items] + [item.mask for item in items if item.mask is not None]
        facts = image_facts(self._listing.folder, paths)
        return {str(path): fact for path, fact in zip(paths, facts, strict=True)}

    def _digest(self, item: Item) -> str:
        return self._facts[str(item.path)].digest

    def _mask_digest(self, item: Item) -> str | None:
        return self._facts[str(item.mask)].digest if item.mask is not None else None

    def _decode_all(self, writer: EntryWriter, plan: Plan, number: dict[str, int], progress: Progress | None) -> None:
        done, total = 0, len(self._listing.items)
        writer.notes["skipped"], writer.notes["dark"] = [], []

        def tick(count: int) -> None:
            nonlocal done
            done += count
            if progress is not None:
                progress(self.name, done, total)

        for split in SPLITS:
            positions = [i for i, item in enumerate(self._listing.items) if item.split == split]
            self._decode_split(writer, split, positions, plan, number, tick)

    def _decode_split(
        self,
        writer: EntryWriter,
        split: str,
        positions: Sequence[int],
        plan: Plan,
        number: dict[str, int],
        tick: Callable[[int], None],
    ) -> None:
        assert plan.size is not None
        items = self._listing.items
        has_masks = self.task == "segmentation" and (not positions or any(items[i].mask for i in positions))
        labels: list[int] = []
        remaining = iter(positions)
        with ExitStack() as files:
            add_images = files.enter_context(writer.rows(f"{split}_inputs", (*plan.size, 3), np.uint8))
            if has_masks:
                add_masks = files.enter_context(writer.rows(f"{split}_labels", plan.size, np.uint8))
            for block in in_parallel(lambda i: self._decode(items[i], plan), positions):
                usable: list[Decoded] = []
                for result, i in zip(block, remaining, strict=False):
                    if isinstance(result, UnreadableError):
                        # By position, not by name: another folder with the same content shares this entry.
                        writer.notes["skipped"].append((i, str(result), result.code, result.in_mask))
                        continue
                    usable.append(result)
                    if result.dark:
                        writer.notes["dark"].append(i)
                    label = items[i].label
                    if label is not None:
                        labels.append(number[label])
                if usable:
                    add_images(np.stack([result.image for result in usable]))
                if usable and has_masks:
                    add_masks(np.stack([result.mask for result in usable if result.mask is not None]))
                tick(len(block))
        if self.task == "classification":
            writer.add(f"{split}_labels", np.array(labels, dtype=np.int64))

    def _decode(self, item: Item, plan: Plan) -> Decoded | UnreadableError:
        try:
            data = self._read(item.path)
            image = decode_image(data, plan.size, plan.fit)
            dark, size = is_dark(data), image_size(data)
        except UnreadableError as problem:
            return problem
        try:
            return Decoded(image, None if item.mask is None else self._decode_mask(item.mask, size, plan), dark)
        except UnreadableError as problem:
            problem.in_mask = True
            return problem

    def _decode_mask(self, path: Path, of_image: Size, plan: Plan) -> NDArray[np.uint8]:
        assert plan.code is not None
        data = self._read(path)
        of_mask = image_size(data)
        if of_image != of_mask:
            raise MaskError(
                f"the mask is {of_mask[1]} x {of_mask[0]}, its image {of_image[1]} x {of_image[0]} (save the mask at "
                "the image's size, without interpolation)"
            )
        return decode_mask(data, plan.code, plan.size)

    def _read(self, path: Path) -> bytes:
        data = read_limited(path)
        if digest_of(data) != self._facts[str(path)].digest:
            # Its pixels would be stored under the hash of what it was before.
            raise InputError("data-unreadable", f"{printable(path)} changed while it was read; run again.")
        return data

    def _where(self, path: Path) -> str:
        return printable(path.relative_to(self._listing.folder.parent))


def _split(entry: Entry, name: str) -> Split:
    labels = entry.arrays.get(f"{name}_labels")
    if labels is not None and labels.ndim == 1:
        labels = np.array(labels)
    return Split(entry.arrays[f"{name}_inputs"], labels)


def _blamed(item: Item, in_mask: bool) -> Path:
    return item.mask if in_mask and item.mask is not None else item.path


def _ids_in(mask: Path) -> NDArray[np.uint8]:
    try:
        ids = grey_ids(decode_mask_values(read_limited(mask)))
    except UnreadableError:
        ids = None
    return np.empty(0, dtype=np.uint8) if ids is None else np.unique(ids)


def _key(*parts: object) -> str:
    return hashlib.blake2b(json.dumps(parts).encode(), digest_size=20).hexdigest()
