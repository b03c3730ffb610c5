"""Images and masks from files: decoded safely, turned upright, in RGB, at one size.

Files are not trusted: only the JPEG and PNG parsers run, nothing above a pixel cap is decoded, and a
truncated file is unreadable, not half an image.

The size. With `image_size` N, images for classification become N x N (the shorter side is scaled to N, then
the centre is cut out), images for segmentation get a shorter side of N at the most common aspect ratio (no
pixel of a street scene is cut away). Without it, images that all share one size no longer than 256 stay as
they are; others get N = the largest of the domains' median shorter sides, at most 128, which a machine
without a GPU can train on."""

from __future__ import annotations

import io
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageOps, UnidentifiedImageError

from fedshift.data.domain import VOID, Task

SUFFIXES = (".jpg", ".jpeg", ".png")
MAX_PIXELS = 64 * 1024 * 1024
MAX_BYTES = 256 * 1024 * 1024
KEEP_UP_TO = 256
DEFAULT_SIZE = 128
DARK_BELOW = 4096
PNG_HEADER = b"\x89PNG\r\n\x1a\n"
ORIENTATION = 0x0112
"""The EXIF tag that says how the camera was held."""

Size = tuple[int, int]
"""Height, width."""

Fit = Literal["crop", "stretch"]
"""How an image of another shape comes to size: its centre is cut out, or it is stretched."""


class UnreadableError(Exception):
    """An image that cannot be used; the message is the reason, without the file's name. `in_mask` says that its mask
    is to blame."""

    code = "data-unreadable"
    in_mask = False


class MaskError(UnreadableError):
    """A mask that can be decoded but does not mean anything."""

    code = "data-labels"


@dataclass(frozen=True)
class MaskCode:
    """What mask values mean: ids to class numbers, or for masks in colour, RGB to class numbers. `VOID` is a
    class number too. Ids and colours that are not listed are errors."""

    ids: Mapping[int, int]
    colours: Mapping[tuple[int, int, int], int] | None = None

    def ids_of(self, classes: int) -> tuple[int, ...]:
        """The id of each class number below `classes`, the lowest where it has several; nothing where one has none."""
        lowest = {number: mask_id for mask_id, number in sorted(self.ids.items(), reverse=True)}
        return tuple(lowest[i] for i in range(classes)) if lowest.keys() >= set(range(classes)) else ()


def fit_of(task: Task) -> Fit:
    """A class shows in the middle of a picture; of a scene no pixel is cut away."""
    return "stretch" if task == "segmentation" else "crop"


def image_size(data: bytes) -> Size:
    """Height and width of an encoded image as it will be shown, from its header alone."""
    try:
        with _open(data) as image:
            width, height = image.size
            return (width, height) if _orientation(image) >= 5 else (height, width)
    except UnreadableError:
        raise
    except Exception as problem:  # Pillow raises nearly every built-in exception on broken files.
        raise UnreadableError(_reason(problem)) from problem


def decode_image(data: bytes, size: Size | None = None, fit: Fit = "crop") -> NDArray[np.uint8]:
    """An encoded image as `(height, width, 3)` uint8, at its own size or at the one asked for."""
    try:
        with _open(data) as image:
            if size is not None:
                _decode_small(image, size)
            upright = ImageOps.exif_transpose(image) if _orientation(image) != 1 else image
            rgb = _to_rgb(upright)
            return np.asarray(rgb if size is None else resize(rgb, size, fit))
    except UnreadableError:
        raise
    except Exception as problem:  # As above: whatever goes wrong in a decoder means one unreadable file.
        raise UnreadableError(_reason(problem)) from problem


def is_dark(data: bytes) -> bool:
    """Whether an image file has 16 bits a value but none above 4095, as cameras and scanners of 10 to 12 bits write
    them: of white it makes 15 of 255. Their brightness is not guessed at, because a picture may be of the night."""
    if not data.startswith(PNG_HEADER) or data[24:25] != b"\x10":
        return False
    with _open(data) as image:
        # Pillow keeps the 16 bits of a grey image; of one in colour it keeps the high bytes.
        values = np.asarray(image)
        colours = values[..., :-1] if image.mode in ("LA", "RGBA") else values
        return int(colours.max()) < (DARK_BELOW if image.mode.startswith("I") else DARK_BELOW >> 8)


def decode_mask_values(data: bytes) -> NDArray[np.uint8]:
    """The values of a mask: ids `(height, width)` (a palette's indices, not its colours), or `(height, width, 3)`
    when its file has colours."""
    try:
        with _open(data) as image:
            values = np.asarray(image.convert("RGB") if image.mode == "RGBA" else image)
    except UnreadableError:
        raise
    except Exception as problem:  # As above.
        raise UnreadableError(_reason(problem)) from problem
    if values.ndim == 3 and values.shape[2] != 3:
        raise MaskError("the mask is neither single-channel nor RGB")
    if values.min() < 0 or values.max() > 255:
        raise MaskError(f"the mask holds the id {values.max()}; ids go up to 255")
    return values.astype(np.uint8)


def grey_ids(values: NDArray[np.uint8]) -> NDArray[np.uint8] | None:
    """The ids `(height, width)` of a mask; also of one that some tool saved as RGB with three equal channels."""
    if values.ndim == 2:
        return values
    return values[..., 0] if (values == values[..., :1]).all() else None


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


def resize(image: Image.Image, size: Size, fit: Fit) -> Image.Image:
    """An RGB image at another size; untouched where it has that size already."""
    height, width = size
    if image.size == (width, height):
        return image
    if fit == "crop":
        return ImageOps.fit(image, (width, height), Image.Resampling.BILINEAR)
    return image.resize((width, height), Image.Resampling.BILINEAR)


def common_size(domains: Sequence[Counter[Size]], wanted: int | None, fit: Fit) -> Size:
    """The one size for all images of a data set, by the rule above; `domains` count the sizes found in
    each."""
    sizes: Counter[Size] = sum(domains, Counter())
    if wanted is None and len(sizes) == 1 and max(next(iter(sizes))) <= KEEP_UP_TO:
        return next(iter(sizes))
    if wanted is None:
        wanted = min(DEFAULT_SIZE, max(_median_shorter_side(found) for found in domains if found))
    if fit == "crop":
        return wanted, wanted
    # Of equally common sizes the smallest: the choice must not depend on the order of files.
    height, width = min(sizes, key=lambda size: (-sizes[size], size))
    scale = wanted / min(height, width)
    return round(height * scale), round(width * scale)


def _median_shorter_side(sizes: Counter[Size]) -> int:
    return int(np.median([min(size) for size in sizes.elements()]))


def _open(data: bytes) -> Image.Image:
    image = Image.open(io.BytesIO(data), formats=("JPEG", "PNG"))
    width, height = image.size
    if width * height > MAX_PIXELS:
        raise UnreadableError(f"it is {width} x {height}, more than {MAX_PIXELS // 2**20} megapixels")
    return image


def _orientation(image: Image.Image) -> int:
    # Asking a PNG without EXIF data for it would decode the whole image.
    if image.format == "JPEG" or "exif" in image.info:
        return int(image.getexif().get(ORIENTATION, 1))
    return 1


def _decode_small(image: Image.Image, size: Size) -> None:
    """Let the JPEG decoder skip detail that resizing would throw away, down to twice the size asked for."""
    shorter, wanted = min(image.size), 2 * max(size)
    if image.format == "JPEG" and shorter > wanted:
        scale = wanted / shorter
        image.draft(None, (round(image.size[0] * scale), round(image.size[1] * scale)))


def _to_rgb(image: Image.Image) -> Image.Image:
    if image.mode.startswith("I"):  # 16-bit grey: the high byte, where Pillow would clip at 255.
        values = np.asarray(image).astype(np.int64) >> 8
        image = Image.fromarray(values.clip(0, 255).astype(np.uint8))
    if image.mode in ("RGBA", "LA", "PA") or "transparency" in image.info:
        # What lies under full transparency is arbitrary, often black: show it as on paper.
        image = image.convert("RGBA")
        paper = Image.new("RGBA", image.size, "white")
        image = Image.alpha_composite(paper, image)
    return image.convert("RGB")


def _numbers_of_ids(values: NDArray[np.uint8], known: Mapping[int, int]) -> NDArray[np.uint8]:
    ids = grey_ids(values)
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


def _reason(problem: Exception) -> str:
    """Why Pillow gave up, without the memory address it likes to print."""
    if isinstance(problem, UnidentifiedImageError):
        return "it is not a JPEG or PNG image"
    if isinstance(problem, Image.DecompressionBombError):
        return f"it declares more than {MAX_PIXELS // 2**20} megapixels"
    return str(problem) or type(problem).__name__
