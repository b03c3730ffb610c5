"""Masks for segmentation: what their values mean, and how they are read.

A mask holds an id per pixel, in one channel or a palette; 255 is void. `classes.txt` says which class an id is: its
first line names id 0, and so on; `void` names an id that is no class. Without that file, every id found is a class.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from fedshift.data.cache import cached_arrays
from fedshift.data.decoding import Size, UnreadableError, image_size, open_image, reason_of
from fedshift.data.domain import VOID
from fedshift.data.formats.base import CLASS_FILE, Problem, printable
from fedshift.data.index.files import in_parallel, read_limited

VOID_NAME = "void"


class MaskError(UnreadableError):
    """A mask that can be decoded but has no valid meaning."""

    code = "data-labels"


@dataclass(frozen=True)
class MaskCode:
    """What mask values mean: ids -> class numbers, or for masks in colour, RGB -> class numbers. `VOID` is a class
    number too. Ids and colours that are not listed are errors."""

    ids: Mapping[int, int]
    colours: Mapping[tuple[int, int, int], int] | None = None

    def ids_of(self, classes: int) -> tuple[int, ...]:
        """The id of each class number below `classes`, the lowest if there are several; empty if a class has none."""
        lowest = {number: mask_id for mask_id, number in sorted(self.ids.items(), reverse=True)}
        return tuple(lowest[i] for i in range(classes)) if lowest.keys() >= set(range(classes)) else ()


def listed_classes(lines: Sequence[str]) -> tuple[tuple[str, ...], MaskCode]:
    """Classes and mask ids from the lines of a class file: a line's number is its id, and `void` is no class."""
    classes: list[str] = []
    ids: dict[int, int] = {}
    for mask_id, line in enumerate(lines):
        if line.lower() == VOID_NAME:
            ids[mask_id] = VOID
        else:
            ids[mask_id] = len(classes)
            classes.append(line)
    return tuple(classes), MaskCode(ids)


def found_classes(
    name: str, shown_by: Mapping[str, Mapping[int, str]], problems: list[Problem]
) -> tuple[tuple[str, ...], MaskCode, dict[str, dict[str, str]]]:
    """Classes, mask ids and `Dataset.shown_in` where every id found is a class. `shown_by`: domain -> id -> the first
    mask that shows it."""
    ids = sorted({mask_id for shown in shown_by.values() for mask_id in shown})
    if len(ids) < 2:
        problems.append(
            Problem("data-labels", f"The masks of {name} hold {len(ids)} ids; there must be two classes or more.")
        )
    shown_in = {domain: {str(mask_id): mask for mask_id, mask in shown.items()} for domain, shown in shown_by.items()}
    return tuple(map(str, ids)), MaskCode({mask_id: i for i, mask_id in enumerate(ids)}), shown_in


def unlisted_ids(domain: str, shown: Mapping[int, str], code: MaskCode) -> Problem | None:
    """The problem of a domain whose masks hold ids that the class file does not list."""
    beyond = {mask_id: mask for mask_id, mask in shown.items() if mask_id not in code.ids}
    if not beyond:
        return None
    return Problem(
        "data-labels",
        f"Masks of {printable(domain)} hold {tell_ids(beyond)}, beyond the {len(code.ids)} lines of {CLASS_FILE}, the "
        f"first of which is id 0. Add the missing lines (`{VOID_NAME}` if an id is no class), or give such pixels the "
        f"value {VOID}.",
    )


def tell_ids(shown: Mapping[int, str] | Mapping[str, str], limit: int = 8) -> str:
    """Ids in words, with the first mask that shows the first of them."""
    ids = ", ".join(str(mask_id) for mask_id in list(shown)[:limit])
    more = f" and {len(shown) - limit} more" if len(shown) > limit else ""
    return f"{'ids' if len(shown) > 1 else 'the id'} {ids}{more} (first in {next(iter(shown.values()))})"


def first_masks(masks: Sequence[Path], key: str) -> dict[int, Path]:
    """The ids that masks hold, without `VOID`, each with the first mask that shows it. Masks in colour and unreadable
    ones hold none. `key` names the content of the masks in the cache."""

    def find() -> dict[str, NDArray[Any]]:
        first = np.full(256, -1, dtype=np.int64)
        found = (ids for block in in_parallel(_ids_in, masks) for ids in block)
        for i, ids in enumerate(found):
            first[ids] = np.where(first[ids] < 0, i, first[ids])
        return {"first": first}

    # By position, not by name: another folder with the same content shares this entry.
    first = cached_arrays(key, find)["first"]
    return {i: masks[first[i]] for i in range(256) if first[i] >= 0 and i != VOID}


def decode_mask_of(image: Size, data: bytes, code: MaskCode, size: Size | None) -> NDArray[np.uint8]:
    """The mask of an image, which must have the size that the image has in its file."""
    of_mask = image_size(data)
    if image != of_mask:
        raise MaskError(
            f"the mask is {of_mask[1]} x {of_mask[0]}, its image {image[1]} x {image[0]} (save the mask at the image's "
            "size, without interpolation)"
        )
    return decode_mask(data, code, size)


def decode_mask(data: bytes, code: MaskCode, size: Size | None = None) -> NDArray[np.uint8]:
    """A mask as class numbers `(height, width)` uint8, `VOID` where there is no label."""
    values = decode_mask_values(data)
    if values.ndim == 3 and code.colours is not None:
        numbers = _numbers_of_colours(values, code.colours)
    else:
        numbers = _numbers_of_ids(values, code.ids)
    if size is None or numbers.shape == size:
        return numbers
    return np.asarray(Image.fromarray(numbers).resize((size[1], size[0]), Image.Resampling.NEAREST))


def decode_mask_values(data: bytes) -> NDArray[np.uint8]:
    """The values of a mask: ids `(height, width)` (a palette's indices, not its colours), or `(height, width, 3)` for a
    file in colour."""
    try:
        with open_image(data) as image:
            if image.mode == "F":
                raise MaskError("the mask holds floating-point numbers; ids are whole numbers")
            values = np.asarray(image.convert("RGB") if image.mode == "RGBA" else image)
    except UnreadableError:
        raise
    except Exception as problem:  # Pillow raises nearly every built-in exception on broken files.
        raise UnreadableError(reason_of(problem)) from problem
    if values.ndim == 3 and values.shape[2] != 3:
        raise MaskError("the mask is neither single-channel nor RGB")
    if values.min() < 0 or values.max() > 255:
        raise MaskError(f"the mask holds the id {values.max()}; ids go up to 255")
    return values.astype(np.uint8)


def _grey_ids(values: NDArray[np.uint8]) -> NDArray[np.uint8] | None:
    """The ids `(height, width)` of a mask; also of one that some tool saved as RGB with three equal channels."""
    if values.ndim == 2:
        return values
    return values[..., 0] if (values == values[..., :1]).all() else None


def _ids_in(mask: Path) -> NDArray[np.uint8]:
    try:
        ids = _grey_ids(decode_mask_values(read_limited(mask)))
    except UnreadableError:
        ids = None
    return np.empty(0, dtype=np.uint8) if ids is None else np.unique(ids)


def _numbers_of_ids(values: NDArray[np.uint8], known: Mapping[int, int]) -> NDArray[np.uint8]:
    ids = _grey_ids(values)
    if ids is None:
        raise MaskError("the mask is in colour; it must hold class ids in a single channel or a palette")
    numbers = np.full(256, -1, dtype=np.int64)
    numbers[VOID] = VOID
    for value, number in known.items():
        numbers[value] = number
    found = numbers[ids]
    if (found < 0).any():
        raise MaskError(f"the mask holds the id {ids[found < 0].max()}, which no class has")
    return found.astype(np.uint8)


def _numbers_of_colours(values: NDArray[np.uint8], known: Mapping[tuple[int, int, int], int]) -> NDArray[np.uint8]:
    packed = values.astype(np.int64) @ np.array([65536, 256, 1])
    table = sorted((red * 65536 + green * 256 + blue, number) for (red, green, blue), number in known.items())
    keys, numbers = np.array(table, dtype=np.int64).T
    at = np.searchsorted(keys, packed).clip(max=len(keys) - 1)
    if (keys[at] != packed).any():
        red, green, blue = values[keys[at] != packed][0]
        raise MaskError(f"the mask holds the colour ({red}, {green}, {blue}), which no class has")
    return np.asarray(numbers[at], dtype=np.uint8)
