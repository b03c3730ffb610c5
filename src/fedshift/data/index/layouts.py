"""What a domain's folder holds: which files are samples, of which class, in which split. Nothing is decoded.

A folder in a wrong layout gives problems instead of an exception, so that a check can report all of them at once. The
layouts (names of splits, `images` and `masks` in any case):

    <domain>/<class>/*.jpg                                    classification
    <domain>/{train,val,test}/<class>/*.jpg                   the same, split by folders
    <domain>/images/<class>/*.jpg                             the same, one folder deeper
    <domain>/*.jpg, <domain>/{train,test}/*.jpg               no labels
    <domain>/images/*.jpg with <domain>/masks/*.png           segmentation, paired by name
    <domain>/images/{train,test}/ with masks/{train,test}/    the same, split by folders; a split may lack masks
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from fedshift.data.decoding import SUFFIXES
from fedshift.data.domain import Task
from fedshift.data.formats.base import TOLERATED, Problem, Unread, printable
from fedshift.data.index.files import FileIndex
from fedshift.data.splits import SPLIT_WORDS, SplitName, complete_splits, find_lists, read_list

IMAGE_FOLDERS = ("images", "image")
MASK_FOLDERS = ("masks", "labels", "annotations")
EVERYTHING = "full"
"""A folder beside train and test that repeats all their images."""


@dataclass(frozen=True)
class Item:
    """One image file. `name` is `<class>/<file>`, or `<file>` without a class; it decides the split."""

    path: Path
    name: str
    label: str | None = None
    mask: Path | None = None
    split: SplitName | None = None


@dataclass(frozen=True)
class Reading:
    """How a public data set differs from the plain layouts.

    `class_names` maps the folder names of classes (lower case, `_` for spaces and hyphens) to class names; other
    folders are left out. `label_in_name` finds the class in a file's name. A mask has the name of its image plus one of
    `mask_suffixes`."""

    class_names: Mapping[str, str] | None = None
    label_in_name: str | None = None
    mask_suffixes: tuple[str, ...] = ("",)


@dataclass
class Listing:
    """A domain's samples, sorted by name, and what is wrong with them. `test_given`: a folder or list names a test
    split. `told`: files that a warning or problem speaks of; `unread`: the other files that are no samples."""

    folder: Path
    task: Task | None
    items: list[Item] = field(default_factory=list)
    empty_classes: list[str] = field(default_factory=list)
    problems: list[Problem] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)
    test_given: bool = False
    told: set[Path] = field(default_factory=set)
    unread: list[Unread] = field(default_factory=list)


def plain_name(name: str) -> str:
    """A name in the form that names are compared in where public data sets spell them differently."""
    return re.sub(r"[\s-]+", "_", name.lower())


def list_domain(
    index: FileIndex, folder: Path, names: Sequence[str], list_folders: Sequence[Path], reading: Reading
) -> Listing:
    """What a domain's folder holds. Split lists are looked for in `list_folders`, under any of `names`."""
    listing = _find_items(index, folder, reading)
    if not listing.items:
        message = f"There is no image ({', '.join(SUFFIXES)}) in {printable(folder)} or its class folders."
        listing.problems.append(Problem("data-empty", message))
        return listing
    if all(item.split is None for item in listing.items):
        _apply_lists(listing, find_lists(list_folders, names, index.has_file))
    settle_splits(listing)
    return listing


MOST_LEVELS = 12
"""How deep folders are looked through for files that are not read: links may go round in circles."""


def find_unread(index: FileIndex, listing: Listing) -> None:
    """Adds to a listing every file below its folder that is no sample, counted by reason."""
    used = {path for item in listing.items for path in (item.path, item.mask)} | listing.told
    masks = {item.mask.parent for item in listing.items if item.mask is not None}
    found: dict[str, list[str]] = {}

    def look(folder: Path, level: int) -> None:
        for name, why in index.others(folder):
            found.setdefault(why, []).append(_below(listing.folder, folder / name))
        for path in index.files(folder, ("",)):
            if path not in used:
                found.setdefault(_why_unread(path, folder in masks), []).append(_below(listing.folder, path))
        for inner in index.folders(folder):
            if level < MOST_LEVELS:
                look(inner, level + 1)
            else:
                found.setdefault("the folder lies too deep", []).append(_below(listing.folder, inner))

    look(listing.folder, 0)
    listing.unread += [Unread(len(names), why, names[0]) for why, names in sorted(found.items())]


def _why_unread(path: Path, is_mask: bool) -> str:
    suffix = path.suffix.lower()
    if suffix not in SUFFIXES:
        return f"{printable(suffix)} is no format that is read" if suffix else "the name has no ending"
    return "a mask without an image" if is_mask else "the layout has no image there (deeper than class folders?)"


def _below(folder: Path, path: Path) -> str:
    return printable(path.relative_to(folder.parent))


def _find_items(index: FileIndex, folder: Path, reading: Reading) -> Listing:
    folders = index.folders(folder)
    images = _named(folders, IMAGE_FOLDERS)
    masks = _named(folders, MASK_FOLDERS)
    if images and masks:
        return _find_pairs(index, folder, images, masks, reading)
    if images and len(folders) == 1 and not index.images(folder):
        inner = _find_items(index, images, reading)
        inner.folder = folder
        return inner
    parts = _split_folders(index, folders)
    listing = Listing(folder, "classification")
    for part, split in parts.items() if parts else {folder: None}.items():
        classes, loose = index.folders(part), index.images(part)
        if classes:
            _add_classes(index, listing, classes, split, reading)
            if loose:
                listing.told.update(loose)
                listing.warnings.append(
                    f"{len(loose)} images lie in {printable(part)} beside the class folders; they have no class "
                    "and are left out."
                )
        else:
            _add_loose(listing, loose, split, reading)
    if all(item.label is None for item in listing.items) and not listing.empty_classes:
        listing.task = None
    listing.items.sort(key=lambda item: (item.name, item.split or ""))
    return listing


def _add_classes(
    index: FileIndex, listing: Listing, classes: list[Path], split: SplitName | None, reading: Reading
) -> None:
    left_out = []
    for folder in classes:
        label = unicodedata.normalize("NFC", folder.name)
        if reading.class_names is not None:
            if plain_name(label) not in reading.class_names:
                left_out.append(label)
                continue
            label = reading.class_names[plain_name(label)]
        if not label.isprintable():
            listing.problems.append(
                Problem(
                    "data-classes",
                    f"The class folder {printable(folder)} has unprintable characters in its name; rename it.",
                )
            )
        files = index.images(folder)
        if not files:
            listing.empty_classes.append(label)
        listing.items.extend(Item(path, f"{folder.name}/{path.name}", label=label, split=split) for path in files)
    if left_out:
        listing.warnings.append(
            f"{printable(listing.folder)}: {len(left_out)} folders are not classes of this data set and are left "
            f"out ({printable(', '.join(left_out[:5]))})."
        )


def _add_loose(listing: Listing, files: list[Path], split: SplitName | None, reading: Reading) -> None:
    if reading.label_in_name is None:
        listing.items.extend(Item(path, path.name, split=split) for path in files)
        return
    labels = [re.search(reading.label_in_name, path.stem) for path in files]
    listing.items.extend(
        Item(path, path.name, label=label.group(1), split=split)
        for path, label in zip(files, labels, strict=True)
        if label
    )
    if None in labels:
        listing.told.update(files)
        listing.warnings.append(
            f"{labels.count(None)} images of {printable(listing.folder)} have no label in their name and are left out."
        )


def _find_pairs(index: FileIndex, folder: Path, images: Path, masks: Path, reading: Reading) -> Listing:
    listing = Listing(folder, "segmentation")
    parts = _split_folders(index, index.folders(images)) or {images: None}
    for part, split in parts.items():
        mask_folder = masks if part == images else _named(index.folders(masks), (part.name.lower(),))
        masks_of_part = index.images(mask_folder) if mask_folder else []
        add_pairs(listing, index.images(part), masks_of_part, split, reading.mask_suffixes)
    listing.items.sort(key=lambda item: (item.name, item.split or ""))
    return listing


def add_pairs(
    listing: Listing,
    images: Sequence[Path],
    masks: Sequence[Path],
    split: SplitName | None,
    mask_suffixes: Sequence[str],
) -> None:
    """Adds images with the masks of the same name. Without any mask, the images have no labels."""
    by_stem = {path.stem: path for path in masks}
    lonely = []
    for path in images:
        mask = next((by_stem[path.stem + end] for end in mask_suffixes if path.stem + end in by_stem), None)
        if masks and mask is None:
            lonely.append(path)
        else:
            listing.items.append(Item(path, path.name, mask=mask, split=split))
    if lonely:
        listing.told.update(lonely)
        message = (
            f"{len(lonely)} of {len(images)} images in {printable(lonely[0].parent)} have no mask of the same "
            f"name in {printable(masks[0].parent)}; the first is {printable(lonely[0].name)}."
        )
        if len(lonely) > TOLERATED * len(images):
            remedy = (
                f"Name masks like their images ({printable(lonely[0].stem)}.png for this one), add those that are"
                " missing, or move images without a mask out of the folder."
            )
            listing.problems.append(Problem("data-labels", f"{message} {remedy}"))
        else:
            listing.warnings.append(f"{message} They are left out.")


def _split_folders(index: FileIndex, folders: list[Path]) -> dict[Path, SplitName | None]:
    """The folders that are splits, if all are. A single folder `train` of images may be a class: trains."""
    words = {path: path.name.lower().removesuffix("_images") for path in folders}
    if not folders or not set(words.values()) <= {*SPLIT_WORDS, EVERYTHING}:
        return {}
    if len(folders) == 1 and not index.folders(folders[0]):
        return {}
    parts: dict[Path, SplitName | None] = {
        path: SPLIT_WORDS[word] for path, word in words.items() if word != EVERYTHING
    }
    return parts or dict.fromkeys(folders)


def _apply_lists(listing: Listing, lists: Mapping[Path, SplitName]) -> None:
    if not lists:
        return
    depth = listing.items[0].name.count("/") + 1
    known = {item.name: i for i, item in enumerate(listing.items)}
    if depth == 1:
        known |= {item.path.stem: i for i, item in enumerate(listing.items)}
    chosen: dict[int, SplitName] = {}
    repeated = 0
    for path, split in lists.items():
        samples, unknown = read_list(path, known, depth)
        if unknown:
            message = (
                f"{len(unknown)} lines of {printable(path)} name no image in {printable(listing.folder)}; the "
                f"first is {printable(unknown[0])!r}."
            )
            if len(unknown) > TOLERATED * (len(samples) + len(unknown)):
                listing.problems.append(Problem("data-missing", message))
            else:
                listing.warnings.append(f"{message} They are ignored.")
        for sample in samples:
            repeated += chosen.setdefault(sample, split) != split
    if repeated:
        listing.warnings.append(
            f"{repeated} images of {printable(listing.folder.name)} are in several split lists; each stays in the "
            "first of train, val, test."
        )
    listing.items = [replace(item, split=chosen.get(i)) for i, item in enumerate(listing.items)]
    unlisted = len(listing.items) - len(chosen)
    if unlisted:
        listing.told.update(item.path for item in listing.items if item.split is None)
        listing.warnings.append(
            f"{unlisted} images of {printable(listing.folder.name)} are in no split list and are left out."
        )


def settle_splits(listing: Listing) -> None:
    """Give every item a split, and drop those that the given splits leave out."""
    items = listing.items
    listing.test_given = any(item.split == "test" for item in items)
    splits = complete_splits(
        [item.name for item in items], [item.label or "" for item in items], [item.split for item in items]
    )
    listing.items = [replace(item, split=split) for item, split in zip(items, splits, strict=True) if split is not None]
    if not any(item.split == "train" for item in listing.items):
        listing.problems.append(
            Problem("data-empty", f"The splits of {printable(listing.folder)} leave no image to train on.")
        )


def _named(folders: Sequence[Path], names: Sequence[str]) -> Path | None:
    return next((path for path in folders if path.name.lower() in names), None)
