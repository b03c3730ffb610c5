"""A domain of image files: decoded once, memory-mapped from then on."""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from fedshift.data.cache import Entry, EntryWriter, cached_entry
from fedshift.data.decoding import (
    Size,
    UnreadableError,
    decode_image,
    decode_whole,
    has_more_frames,
    image_size,
    in_corner,
    is_dark,
)
from fedshift.data.dicom import is_readable
from fedshift.data.domain import VOID, Domain, Skipped, Split, Task, Tiles
from fedshift.data.formats.base import InputFormat, Problem, Progress, Sample, Unread, printable
from fedshift.data.formats.masks import decode_mask_of, first_masks
from fedshift.data.index.files import FileIndex, Fingerprint, digest_of, in_parallel, read_limited
from fedshift.data.index.layouts import Item, Listing
from fedshift.data.splits import SPLITS
from fedshift.errors import InputError

DECODER = 4
"""Part of the cache's keys: raised when the same file would give other pixels or other notes."""

MASK_DECODER = 1
"""The same for data with masks."""


@dataclass(frozen=True)
class Decoded:
    """An image and, for segmentation, its mask. `dark` and `more`: see `is_dark` and `has_more_frames`. `size`: without
    the room around it."""

    image: NDArray[np.uint8]
    mask: NDArray[np.uint8] | None
    dark: bool
    more: bool
    size: Size


class ImageFiles:
    """The images, and classes or masks, that a listing found in an index."""

    def __init__(self, name: str, listing: Listing, index: FileIndex) -> None:
        self.name = name
        self._listing = listing
        self._index = index

    @property
    def task(self) -> Task | None:
        return self._listing.task

    @property
    def problems(self) -> tuple[Problem, ...]:
        return tuple(self._listing.problems)

    @property
    def warnings(self) -> tuple[str, ...]:
        return tuple(self._listing.warnings)

    @property
    def unread(self) -> tuple[Unread, ...]:
        return tuple(self._listing.unread)

    def class_counts(self) -> Counter[str] | None:
        if self.task != "classification":
            return None
        counts = Counter(item.label for item in self._listing.items if item.label is not None)
        counts.update(dict.fromkeys(self._listing.empty_classes, 0))
        return counts

    def sizes(self) -> Counter[Size]:
        found = (self._fingerprints[item.path].size for item in self._listing.items)
        return Counter(size for size in found if size is not None)

    def samples(self) -> list[Sample]:
        return [
            Sample(self._where(item.path), item.split, self._fingerprints[item.path].digest)
            for item in self._listing.items
            if item.split is not None
        ]

    def mask_ids(self) -> dict[int, str]:
        """The ids that the masks hold, each with the first mask that shows it."""
        masks = [item.mask for item in self._listing.items if item.mask is not None]
        digests = [self._fingerprints[path].digest for path in masks]
        return {i: self._where(mask) for i, mask in first_masks(masks, _key("first-masks", digests)).items()}

    def refuse(self, problem: Problem) -> None:
        """Adds a problem that shows only in comparison with other domains or with the class list."""
        self._listing.problems.append(problem)

    def read(self, form: InputFormat, progress: Progress | None = None) -> Domain:
        number = {name: i for i, name in enumerate(form.classes)}
        rows = [
            (item.split, number.get(item.label or ""), self._digest(item.path), self._digest(item.mask))
            for item in self._listing.items
        ]
        code = form.code and [MASK_DECODER, sorted(form.code.ids.items()), sorted((form.code.colours or {}).items())]
        scaled = [form.scaled_to] if form.tile else []
        key = _key("images", DECODER, is_readable(), form.size, form.fit, code, rows, *scaled)
        entry = cached_entry(key, lambda writer: self._decode_all(writer, form, number, progress))
        skipped = tuple(
            Skipped(self._where(_blamed(self._listing.items[i], in_mask)), reason, code)
            for i, reason, code, in_mask in entry.notes["skipped"]
        )
        train, val, test = (_split(entry, name, form.tile) for name in SPLITS)
        dark = tuple(self._where(self._listing.items[i].path) for i in entry.notes["dark"])
        frames = tuple(self._where(self._listing.items[i].path) for i in entry.notes["frames"])
        return Domain(self.name, train, val, test, skipped, self._listing.test_given, dark, frames=frames)

    @cached_property
    def _fingerprints(self) -> dict[Path, Fingerprint]:
        items = self._listing.items
        paths = [item.path for item in items] + [item.mask for item in items if item.mask is not None]
        found = self._index.fingerprints(self._listing.folder, paths, self.name)
        return dict(zip(paths, found, strict=True))

    def _digest(self, path: Path | None) -> str | None:
        return None if path is None else self._fingerprints[path].digest

    def _decode_all(
        self, writer: EntryWriter, form: InputFormat, number: dict[str, int], progress: Progress | None
    ) -> None:
        done, total = 0, len(self._listing.items)
        writer.notes |= {"skipped": [], "dark": [], "frames": []}

        def tick(count: int) -> None:
            nonlocal done
            done += count
            if progress is not None:
                progress(self.name, done, total)

        for split in SPLITS:
            positions = [i for i, item in enumerate(self._listing.items) if item.split == split]
            self._decode_split(writer, split, positions, form, number, tick)

    def _decode_split(
        self,
        writer: EntryWriter,
        split: str,
        positions: Sequence[int],
        form: InputFormat,
        number: dict[str, int],
        tick: Callable[[int], None],
    ) -> None:
        assert form.size is not None
        items = self._listing.items
        has_masks = self.task == "segmentation" and (not positions or any(items[i].mask for i in positions))
        labels: list[int] = []
        own_sizes: list[Size] = []
        remaining = iter(positions)
        with ExitStack() as files:
            add_images = files.enter_context(writer.rows(f"{split}_inputs", (*form.size, 3), np.uint8))
            if has_masks:
                add_masks = files.enter_context(writer.rows(f"{split}_labels", form.size, np.uint8))
            for block in in_parallel(lambda i: self._decode(items[i], form), positions):
                usable: list[Decoded] = []
                for result, i in zip(block, remaining, strict=False):
                    if isinstance(result, UnreadableError):
                        # By position, not by name: another folder with the same content shares this entry.
                        writer.notes["skipped"].append((i, str(result), result.code, result.in_mask))
                        continue
                    usable.append(result)
                    if result.dark:
                        writer.notes["dark"].append(i)
                    if result.more:
                        writer.notes["frames"].append(i)
                    own_sizes.append(result.size)
                    label = items[i].label
                    if label is not None:
                        labels.append(number[label])
                if usable:
                    add_images(np.stack([result.image for result in usable]))
                if usable and has_masks:
                    add_masks(np.stack([result.mask for result in usable if result.mask is not None]))
                tick(len(block))
        if form.tile:
            writer.add(f"{split}_sizes", np.array(own_sizes, dtype=np.int64).reshape(-1, 2))
        if self.task == "classification":
            writer.add(f"{split}_labels", np.array(labels, dtype=np.int64))

    def _decode(self, item: Item, form: InputFormat) -> Decoded | UnreadableError:
        try:
            data = self._read(item.path)
            image = decode_whole(data, form.scaled_to) if form.tile else decode_image(data, form.size, form.fit)
            dark, more, size = is_dark(data), has_more_frames(data), image_size(data)
        except UnreadableError as problem:
            return problem
        own: Size = image.shape[:2]
        try:
            mask = None if item.mask is None else self._decode_mask(item.mask, size, own, form)
        except UnreadableError as problem:
            problem.in_mask = True
            return problem
        if form.tile:
            assert form.size is not None
            image, mask = in_corner(image, form.size), None if mask is None else in_corner(mask, form.size, VOID)
        return Decoded(image, mask, dark, more, own)

    def _decode_mask(self, path: Path, of_image: Size, scaled: Size, form: InputFormat) -> NDArray[np.uint8]:
        assert form.code is not None
        return decode_mask_of(of_image, self._read(path), form.code, scaled)

    def _read(self, path: Path) -> bytes:
        data = read_limited(path)
        if digest_of(data) != self._digest(path):
            # Its pixels would be stored under the hash of its old content.
            raise InputError("data-unreadable", f"{printable(path)} changed while it was read; run again.")
        return data

    def _where(self, path: Path) -> str:
        return printable(path.relative_to(self._listing.folder.parent))


def _split(entry: Entry, name: str, tile: int | None) -> Split:
    labels = entry.arrays.get(f"{name}_labels")
    if labels is not None and labels.ndim == 1:
        labels = np.array(labels)
    tiles = Tiles(tile, np.array(entry.arrays[f"{name}_sizes"])) if tile else None
    return Split(entry.arrays[f"{name}_inputs"], labels, tiles)


def _blamed(item: Item, in_mask: bool) -> Path:
    return item.mask if in_mask and item.mask is not None else item.path


def _key(*parts: object) -> str:
    return hashlib.blake2b(json.dumps(parts).encode(), digest_size=20).hexdigest()
