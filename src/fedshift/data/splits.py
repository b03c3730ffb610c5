"""Which samples train, which validate, which test: given by the user, or chosen by the hash of a name.

The hash of a name is a position in [0, 1): a sample below 0.8 trains, one below 0.9 validates, the others test. A
sample's position depends on its own name alone, so splits are the same on every machine and do not change when other
samples are added. Tiny classes need more: a class with one sample has it in train, one with two has them in train and
test, and one with three or more has at least one in each split.
"""

from __future__ import annotations

import hashlib
import re
import unicodedata
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Literal

import numpy as np
from numpy.typing import NDArray

SplitName = Literal["train", "val", "test"]

SPLITS: tuple[SplitName, ...] = ("train", "val", "test")
TRAIN, VAL, TEST = range(3)

SPLIT_WORDS: dict[str, SplitName] = {
    "train": "train",
    "train_kfold": "train",
    "val": "val",
    "valid": "val",
    "validation": "val",
    "crossval": "val",
    "crossval_kfold": "val",
    "test": "test",
    "test_kfold": "test",
}
"""The names of splits in folders and lists, including those of public data sets."""


def positions(names: Sequence[str]) -> NDArray[np.float64]:
    """The position of each name in [0, 1), from its hash. Unicode spells an accented letter in two ways and file
    systems differ in which they keep, hence the normal form; file names may not be Unicode, hence surrogates."""
    raw = (unicodedata.normalize("NFC", name).encode("utf-8", "surrogatepass") for name in names)
    heads = b"".join(hashlib.blake2b(name, digest_size=8).digest() for name in raw)
    return np.frombuffer(heads, dtype=">u8").astype(np.float64) / 2.0**64


def choose_splits(names: Sequence[str], groups: Sequence[str]) -> NDArray[np.int64]:
    """80/10/10 within each group (class): an index into `SPLITS` for each sample. Equal names stay together."""
    position = positions(names)
    split = np.empty(len(position), dtype=np.int64)
    for members in _groups(groups):
        distinct, where = np.unique(position[members], return_inverse=True)
        chosen = np.digitize(distinct, [0.8, 0.9])
        if not (chosen == TRAIN).any():
            chosen[0] = TRAIN
        if len(distinct) >= 2 and not (chosen == TEST).any():
            chosen[-1] = TEST
        if len(distinct) >= 3 and not (chosen == VAL).any():
            # In the order of positions, the last training and the first test sample are next to validation.
            boundary = int((chosen == TRAIN).sum())
            chosen[boundary - 1 if boundary >= 2 else boundary] = VAL
        split[members] = chosen[where]
    return split


def hold_out(names: Sequence[str], groups: Sequence[str]) -> NDArray[np.bool_]:
    """The tenth of each group's training samples that validates if no validation samples are given: at least one of
    three or more, never the only one."""
    position = positions(names)
    held = np.empty(len(position), dtype=np.bool_)
    for members in _groups(groups):
        distinct, where = np.unique(position[members], return_inverse=True)
        chosen = distinct >= 0.9
        if len(distinct) >= 3 and not chosen.any():
            chosen[-1] = True
        if chosen.all():
            chosen[0] = False
        held[members] = chosen[where]
    return held


def complete_splits(
    names: Sequence[str], groups: Sequence[str], given: Sequence[SplitName | None]
) -> list[SplitName | None]:
    """Each sample's split from what the user gave; None stays None (a sample that no list names is left out).

    Nothing given, or train alone: 80/10/10. Train and one other: the other tests and a tenth of train validates,
    because methods are chosen by validation and reported by test, and these must not be the same samples."""
    present = set(given) - {None}
    final = list(given)
    if not present or present == {"train"}:
        members = [i for i, split in enumerate(given) if split is not None or not present]
        chosen = choose_splits([names[i] for i in members], [groups[i] for i in members])
        for i, split in zip(members, chosen, strict=True):
            final[i] = SPLITS[split]
    elif "train" in present and len(present) == 2:
        members = [i for i, split in enumerate(given) if split == "train"]
        held = hold_out([names[i] for i in members], [groups[i] for i in members])
        final = ["test" if split == "val" else split for split in given]
        for i, is_held in zip(members, held, strict=True):
            final[i] = "val" if is_held else "train"
    return final


def find_lists(
    folders: Sequence[Path], domain_names: Sequence[str], has_file: Callable[[Path], bool]
) -> dict[Path, SplitName]:
    """The split lists of a domain, `<domain>_<split>.txt`, in the first of the folders that has any."""
    for folder in folders:
        found = {
            path: split
            for word, split in SPLIT_WORDS.items()
            for name in domain_names
            if has_file(path := folder / f"{name}_{word}.txt")
        }
        if found:
            return found
    return {}


def read_list(path: Path, known: Mapping[str, int], depth: int) -> tuple[list[int], list[str]]:
    """The samples a split list names, and the lines that name none.

    `known` maps `<class>/<file>` (depth 2) or `<file>` (depth 1) to a sample; folders before that are ignored. Lines
    are only looked up, never opened as paths, so a line cannot reach outside the domain."""
    samples, unknown = [], []
    for line in path.read_text(encoding="utf-8-sig", errors="surrogateescape").splitlines():
        line = line.strip()
        if not line or line.startswith("#"):
            continue
        # A file name may end in a number after a space, so the line as it stands comes first.
        for text in (line, re.sub(r"\s+\d+$", "", line)):
            key = "/".join(text.replace("\\", "/").split("/")[-depth:])
            if key in known:
                samples.append(known[key])
                break
        else:
            unknown.append(line)
    return samples, unknown


def _groups(groups: Sequence[str]) -> list[NDArray[np.int64]]:
    """The samples of each group."""
    members: dict[str, list[int]] = {}
    for sample, group in enumerate(groups):
        members.setdefault(group, []).append(sample)
    return [np.array(samples) for samples in members.values()]
