"""DICOM files: the first frame as a grey or colour picture, and nothing else of the file.

Of a file's elements only those in `ELEMENTS` are parsed, which describe pixels. Names, dates and all else that says who
the patient is are never looked at, and no reason that this module gives quotes the file.

Grey values become what a viewer shows: rescaled (slope and intercept), seen through the file's first window or its VOI
table (without either, the whole range of the stored bits), inverted for MONOCHROME1, and stored with 8 bits. Read are
pixels without compression and JPEG Baseline, whose decoders need no more memory than the header announces. The package
pydicom, the extra `dicom`, is needed.
"""

from __future__ import annotations

import importlib
import importlib.util
import io
import logging
import math
import warnings
from functools import cache
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from fedshift.data.decoding import MAX_PIXELS, Size, UnreadableError

ELEMENTS = (
    *("Rows", "Columns", "SamplesPerPixel", "PhotometricInterpretation", "PlanarConfiguration", "NumberOfFrames"),
    *("BitsAllocated", "BitsStored", "HighBit", "PixelRepresentation", "PixelData"),
    *("RescaleSlope", "RescaleIntercept", "ModalityLUTSequence"),
    *("WindowCenter", "WindowWidth", "VOILUTFunction", "VOILUTSequence"),
    *("RedPaletteColorLookupTableDescriptor", "RedPaletteColorLookupTableData"),
    *("GreenPaletteColorLookupTableDescriptor", "GreenPaletteColorLookupTableData"),
    *("BluePaletteColorLookupTableDescriptor", "BluePaletteColorLookupTableData"),
)
UNCOMPRESSED = ("1.2.840.10008.1.2", "1.2.840.10008.1.2.1", "1.2.840.10008.1.2.2")
JPEG_BASELINE = "1.2.840.10008.1.2.4.50"
DEFLATED = b"1.2.840.10008.1.2.1.99"
"""Such a file is unpacked before anything can be checked, to any size: refused by its name."""

MISSING = "DICOM needs pydicom: install fedshift with the extra `dicom`"


def is_readable() -> bool:
    """Whether pydicom is installed."""
    return importlib.util.find_spec("pydicom") is not None


def dicom_size(data: bytes) -> Size:
    """Height and width of the picture."""
    found = _elements(data)
    return int(found.Rows), int(found.Columns)


def dicom_frames(data: bytes) -> int:
    """How many pictures the file says it has."""
    return max(1, int(_number(_elements(data), "NumberOfFrames", 1.0)))


def dicom_image(data: bytes) -> Image.Image:
    """The first frame with 8 bits, in grey or colour."""
    found = _elements(data)
    try:
        return _decoded(found)
    except UnreadableError:
        raise
    except Exception:  # As its parser.
        raise UnreadableError("its pixels are not what its header says, or cut off") from None


def _decoded(found: Any) -> Image.Image:
    syntax = str(found.file_meta.get("TransferSyntaxUID", ""))
    if syntax == JPEG_BASELINE:
        return _from_jpeg(found)
    if syntax not in UNCOMPRESSED:
        raise UnreadableError("its compression is not read: save it uncompressed or as JPEG Baseline (8 bits)")
    values = _pydicom("pixels").pixel_array(found, index=0)
    kind = str(found.PhotometricInterpretation)
    if kind in ("MONOCHROME1", "MONOCHROME2"):
        return _grey(_shown(values, found), kind)
    if kind == "PALETTE COLOR":
        values, white = _pydicom("pixels").apply_color_lut(values, found), 0
        white = np.iinfo(values.dtype).max
    else:
        white = 2 ** int(found.BitsStored) - 1
    if values.ndim != 3 or values.shape[2] != 3:
        raise UnreadableError("its colours are none that are read (photometric interpretation)")
    return Image.fromarray(np.round(values / white * 255).clip(0, 255).astype(np.uint8))


def _elements(data: bytes) -> Any:
    """The parsed elements of a file whose size and kind of pixels can be dealt with."""
    if not is_readable():
        raise UnreadableError(MISSING)
    if DEFLATED in data:
        raise UnreadableError("it is deflated, which is not read: save it uncompressed")
    try:
        found = _pydicom().dcmread(io.BytesIO(data), specific_tags=list(ELEMENTS))
        height, width, samples = int(found.Rows), int(found.Columns), int(found.SamplesPerPixel)
        bits, stored = int(found.BitsAllocated), int(found.BitsStored)
    except Exception:  # Its parser raises nearly every exception on broken files, with words from the file.
        raise UnreadableError("it is a broken DICOM file, or one without a picture") from None
    if height < 1 or width < 1 or height * width > MAX_PIXELS:
        raise UnreadableError(f"it is {width} x {height}: more than {MAX_PIXELS // 2**20} megapixels, or nothing")
    if bits not in (8, 16) or not 1 <= stored <= bits or samples not in (1, 3):
        raise UnreadableError("its pixels are not 8 or 16 bits in one channel or three")
    return found


def _from_jpeg(found: Any) -> Image.Image:
    """The JPEG inside, whose own header must agree with the file's before it is decoded."""
    frames = int(found.get("NumberOfFrames") or 1)
    data = _pydicom("encaps").get_frame(found.PixelData, 0, number_of_frames=frames)
    image = Image.open(io.BytesIO(data), formats=("JPEG",))
    if image.size != (int(found.Columns), int(found.Rows)):
        raise UnreadableError("its picture has another size than its header")
    if image.mode != "L":
        return image.convert("RGB")
    return _grey(_shown(np.asarray(image), found), str(found.PhotometricInterpretation))


def _shown(stored: NDArray[Any], found: Any) -> NDArray[np.float64]:
    """Stored values as brightness in [0, 1]: rescaled, then seen through the window."""
    if found.get("ModalityLUTSequence"):
        raise UnreadableError("it has a modality table, which is not read: save it with rescale slope and intercept")
    slope, intercept = _number(found, "RescaleSlope", 1.0), _number(found, "RescaleIntercept", 0.0)
    values: NDArray[np.float64] = stored.astype(np.float64) * slope + intercept
    centre, width = _number(found, "WindowCenter"), _number(found, "WindowWidth")
    if centre is not None and width is not None:
        return windowed(values, centre, width, str(found.get("VOILUTFunction") or "LINEAR"))
    if found.get("VOILUTSequence"):
        table = found.VOILUTSequence[0]
        looked_up = _pydicom("pixels").apply_voi(values.round().astype(np.int64), found, index=0)
        return np.asarray(looked_up / (2.0 ** int(table.LUTDescriptor[2]) - 1), dtype=np.float64)
    bits, is_signed = int(found.BitsStored), int(found.get("PixelRepresentation") or 0) == 1
    lowest = -(2 ** (bits - 1)) if is_signed else 0
    ends = sorted((lowest * slope + intercept, (lowest + 2**bits - 1) * slope + intercept))
    return np.asarray((values - ends[0]) / max(ends[1] - ends[0], 1e-12))


def windowed(values: NDArray[np.float64], centre: float, width: float, function: str) -> NDArray[np.float64]:
    """Brightness in [0, 1] of values seen through a window, by the three formulas of the standard (PS3.3 C.11.2.1)."""
    if function == "SIGMOID":
        return np.asarray(1 / (1 + np.exp((-4 * (values - centre) / max(width, 1e-6)).clip(-700, 700))))
    if function == "LINEAR_EXACT":
        return np.asarray(((values - centre) / max(width, 1e-6) + 0.5).clip(0, 1))
    return np.asarray(((values - (centre - 0.5)) / max(width - 1, 1e-6) + 0.5).clip(0, 1))


def _grey(brightness: NDArray[np.float64], kind: str) -> Image.Image:
    upright = 1 - brightness if kind == "MONOCHROME1" else brightness
    return Image.fromarray(np.round(upright.clip(0, 1) * 255).astype(np.uint8))


def _number(found: Any, name: str, otherwise: float | None = None) -> Any:
    """An element's number, the first of several; one that is no finite number counts as absent."""
    value = found.get(name)
    if value is None or (not isinstance(value, int | float | str) and not hasattr(value, "__float__")):
        value = value[0] if value is not None and len(value) else None
    try:
        number = float(value)
    except (TypeError, ValueError):
        return otherwise
    return number if math.isfinite(number) else otherwise


@cache
def _pydicom(part: str = "") -> Any:
    """pydicom or a part of it, told not to print what it thinks of a file: its words may quote the file."""
    package = importlib.import_module("pydicom")
    package.config.settings.reading_validation_mode = package.config.IGNORE
    logging.getLogger("pydicom").setLevel(logging.CRITICAL + 1)
    warnings.filterwarnings("ignore", module=r"pydicom")
    return importlib.import_module(f"pydicom.{part}") if part else package
