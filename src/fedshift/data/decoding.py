"""Images from files: decoded safely, turned upright, in RGB, at one size.

Files are not trusted: only the parsers of `FORMATS` run, nothing above a pixel limit is decoded, and a truncated file
is unreadable, not half an image. Of several frames or pages, the first is read. DICOM is read by `fedshift.data.dicom`.

The size. With `image_size` N, images for classification become N x N: the shorter side is scaled to N, then the centre
is cut out. Images for segmentation get a shorter side of N at the most common aspect ratio, so no pixel of a street
scene is cut away. Without `image_size`, images that all have one size of at most 256 pixels stay as they are; others
get N = the largest of the domains' median shorter sides, at most 128, which a machine without a GPU can train on.
"""

from __future__ import annotations

import io
import warnings
from collections import Counter
from collections.abc import Sequence
from types import ModuleType
from typing import Literal

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageOps, UnidentifiedImageError

from fedshift.data.domain import Task

SUFFIXES = (".jpg", ".jpeg", ".png", ".tif", ".tiff", ".gif", ".webp", ".bmp", ".dcm", ".dicom")
FORMATS = ("JPEG", "PNG", "TIFF", "GIF", "WEBP", "BMP")
READABLE = "JPEG, PNG, TIFF, GIF, WebP, BMP or DICOM"
MAX_PIXELS = 64 * 1024 * 1024
MAX_BYTES = 256 * 1024 * 1024
KEEP_UP_TO = 256
DEFAULT_SIZE = 128
DARK_BELOW = 4096
PNG_HEADER = b"\x89PNG\r\n\x1a\n"
TIFF_HEADERS = (b"II*\0", b"MM\0*")
WITH_FRAMES = (*TIFF_HEADERS, b"GIF8", b"RIFF")
"""How files begin that may hold several pictures. (Animated PNGs show their first frame to all who know no others.)"""
DICOM_MARK = b"DICM"
DICOM_MARK_AT = 128
BITS_PER_SAMPLE = 258
"""The TIFF tag with the number of bits of each channel."""
ORIENTATION = 0x0112
"""The EXIF tag that says how the camera was held."""

# What is wrong with a file is told by its name; Pillow would print it without one.
warnings.filterwarnings("ignore", module=r"PIL\.TiffImagePlugin")

Size = tuple[int, int]
"""Height, width."""

Fit = Literal["crop", "stretch", "tiles"]
"""How an image of another shape is brought to size: its centre is cut out, or it is stretched. With `tiles` it keeps
its shape, and is in the corner of an array that has room for the largest."""


class UnreadableError(Exception):
    """An image that cannot be used. The message is the reason, without the file's name; `in_mask` says that the mask is
    the cause."""

    code = "data-unreadable"
    in_mask = False


def fit_of(task: Task) -> Fit:
    """Classification looks at the centre of an image; segmentation needs every pixel."""
    return "stretch" if task == "segmentation" else "crop"


def image_size(data: bytes) -> Size:
    """Height and width of an encoded image as it will be shown, from its header alone."""
    try:
        if is_dicom(data):
            size: Size = _dicom().dicom_size(data)
            return size
        with open_image(data) as image:
            width, height = image.size
            return (width, height) if _orientation(image) >= 5 else (height, width)
    except UnreadableError:
        raise
    except Exception as problem:  # Pillow raises nearly every built-in exception on broken files.
        raise UnreadableError(reason_of(problem)) from problem


def decode_image(data: bytes, size: Size | None = None, fit: Fit = "crop") -> NDArray[np.uint8]:
    """An encoded image as `(height, width, 3)` uint8, at its own size or at the one asked for."""
    try:
        with _dicom().dicom_image(data) if is_dicom(data) else open_image(data) as image:
            if size is not None:
                _decode_small(image, size)
            upright = ImageOps.exif_transpose(image) if _orientation(image) != 1 else image
            _refuse_unknown_white(upright)
            rgb = to_rgb(upright)
            return np.asarray(rgb if size is None else resize(rgb, size, fit))
    except UnreadableError:
        raise
    except Exception as problem:  # As above: any failure of a decoder means one unreadable file.
        raise UnreadableError(reason_of(problem)) from problem


def scaled_size(size: Size, shorter: int | None) -> Size:
    """A size with the same shape and a shorter side of so many pixels; None: as it is."""
    if shorter is None:
        return size
    scale = shorter / min(size)
    return max(1, round(size[0] * scale)), max(1, round(size[1] * scale))


def decode_whole(data: bytes, shorter: int | None) -> NDArray[np.uint8]:
    """An encoded image in its own shape, at its own size or with a shorter side of so many pixels."""
    return decode_image(data, None if shorter is None else scaled_size(image_size(data), shorter), "stretch")


def in_corner(pixels: NDArray[np.uint8], size: Size, beyond: int | None = None) -> NDArray[np.uint8]:
    """An array `(h, w, ...)` in the top left of a larger one; what is beyond is mirrored, or has a value."""
    room = [(0, size[0] - pixels.shape[0]), (0, size[1] - pixels.shape[1]), *[(0, 0)] * (pixels.ndim - 2)]
    if beyond is None:
        return np.pad(pixels, room, mode="symmetric")
    return np.pad(pixels, room, constant_values=beyond)


def is_dark(data: bytes) -> bool:
    """Whether an image file has 16 bits per value but none above 4095, as cameras and scanners of 10 to 12 bits write
    them: white becomes 15 of 255. The true brightness is not guessed, because the picture may show a dark scene."""
    is_png, is_tiff = data.startswith(PNG_HEADER) and data[24:25] == b"\x10", data.startswith(TIFF_HEADERS)
    if is_dicom(data) or not (is_png or is_tiff):
        return False
    try:
        with open_image(data) as image:
            if is_tiff and 16 not in (getattr(image, "tag_v2", {}).get(BITS_PER_SAMPLE) or ()):
                return False
            # Pillow keeps all 16 bits of a grey image, but only the high bytes of one in colour.
            values = np.asarray(image)
            colours = values[..., :-1] if image.mode in ("LA", "RGBA") else values
            return int(colours.max()) < (DARK_BELOW if image.mode.startswith("I") else DARK_BELOW >> 8)
    except Exception:  # Whether it can be read at all is for `decode_image` to say.
        return False


def has_more_frames(data: bytes) -> bool:
    """Whether a file holds more pictures than its first, which is the one that is read."""
    if not is_dicom(data) and not data.startswith(WITH_FRAMES):
        return False
    try:
        if is_dicom(data):
            return bool(_dicom().dicom_frames(data) > 1)
        with open_image(data) as image:
            return bool(getattr(image, "is_animated", False))
    except Exception:  # What follows the first picture is broken: there is something.
        return True


def is_dicom(data: bytes) -> bool:
    return data[DICOM_MARK_AT : DICOM_MARK_AT + len(DICOM_MARK)] == DICOM_MARK


def resize(image: Image.Image, size: Size, fit: Fit) -> Image.Image:
    """An RGB image at another size; untouched where it has that size already."""
    height, width = size
    if image.size == (width, height):
        return image
    if fit == "crop":
        return ImageOps.fit(image, (width, height), Image.Resampling.BILINEAR)
    return image.resize((width, height), Image.Resampling.BILINEAR)


def to_rgb(image: Image.Image) -> Image.Image:
    """An image of any mode in RGB."""
    if image.mode.startswith("I"):  # 16-bit grey: the high byte, where Pillow would clip at 255.
        values = np.asarray(image).astype(np.int64) >> 8
        image = Image.fromarray(values.clip(0, 255).astype(np.uint8))
    if image.mode in ("RGBA", "LA", "PA") or "transparency" in image.info:
        # Pixels under full transparency are arbitrary, often black: show them on white.
        image = image.convert("RGBA")
        paper = Image.new("RGBA", image.size, "white")
        image = Image.alpha_composite(paper, image)
    return image.convert("RGB")


def common_size(domains: Sequence[Counter[Size]], wanted: int | None, fit: Fit) -> Size:
    """The one size for all images of a data set, by the rule above. `domains` has the sizes found in each."""
    sizes: Counter[Size] = sum(domains, Counter())
    if wanted is None and len(sizes) == 1 and max(next(iter(sizes))) <= KEEP_UP_TO:
        return next(iter(sizes))
    if wanted is None:
        wanted = min(DEFAULT_SIZE, max(median_shorter_side(found) for found in domains if found))
    if fit == "crop":
        return wanted, wanted
    # The smallest of equally common sizes: the choice must not depend on the order of files.
    height, width = min(sizes, key=lambda size: (-sizes[size], size))
    scale = wanted / min(height, width)
    return round(height * scale), round(width * scale)


def median_shorter_side(sizes: Counter[Size]) -> int:
    return int(np.median([min(size) for size in sizes.elements()]))


def open_image(data: bytes) -> Image.Image:
    """A picture whose header was read; its pixels are decoded on first use."""
    image = Image.open(io.BytesIO(data), formats=FORMATS)
    width, height = image.size
    if width * height > MAX_PIXELS:
        raise UnreadableError(f"it is {width} x {height}, more than {MAX_PIXELS // 2**20} megapixels")
    return image


def _orientation(image: Image.Image) -> int:
    # Pillow turns a TIFF itself. Asking a PNG without EXIF data for it would decode the whole image.
    if image.format == "TIFF":
        return 1
    if image.format == "JPEG" or "exif" in image.info:
        return int(image.getexif().get(ORIENTATION, 1))
    return 1


def _refuse_unknown_white(image: Image.Image) -> None:
    """Refuses numbers of which nobody can say how bright they are: what is white would be a guess."""
    if image.mode == "F":
        raise UnreadableError("its pixels are floating-point numbers, of which white is not known: save 8 or 16 bits")
    if image.mode == "I" and not ((values := np.asarray(image)).min() >= 0 and values.max() <= 0xFFFF):
        raise UnreadableError("its pixels are 32-bit numbers outside of 0 to 65535: save it with 8 or 16 bits")


def _dicom() -> ModuleType:
    from fedshift.data import dicom

    return dicom


def _decode_small(image: Image.Image, size: Size) -> None:
    """Lets the JPEG decoder skip detail that resizing would remove, down to twice the size asked for."""
    shorter, wanted = min(image.size), 2 * max(size)
    if image.format == "JPEG" and shorter > wanted:
        scale = wanted / shorter
        image.draft(None, (round(image.size[0] * scale), round(image.size[1] * scale)))


def reason_of(problem: Exception) -> str:
    """Why Pillow gave up, without the memory address that its messages contain."""
    if isinstance(problem, UnidentifiedImageError):
        return f"it is not a {READABLE} image"
    if isinstance(problem, Image.DecompressionBombError):
        return f"it declares more than {MAX_PIXELS // 2**20} megapixels"
    return str(problem) or type(problem).__name__
