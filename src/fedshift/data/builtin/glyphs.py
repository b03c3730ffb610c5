"""Printed digits: the typefaces that matplotlib ships, as distance fields.

A distance field holds, for each pixel, how far inside (positive) or outside (negative) the stroke it lies; cut
at another level it gives a bolder, a lighter or an outlined digit of the same typeface.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from fedshift.data.builtin.raster import Floats, Generator, Ints

_PLAIN, _DOUBLE_STRUCK, _SANS, _TYPEWRITER = 0x30, 0x1D7D8, 0x1D7E2, 0x1D7F6
"""Where the digit zero is in Unicode: STIX has further alphabets among the mathematical symbols."""

TYPEFACES: dict[str, tuple[tuple[str, int], ...]] = {
    "train": (
        ("DejaVuSans", _PLAIN),
        ("DejaVuSans-Bold", _PLAIN),
        ("DejaVuSans-Oblique", _PLAIN),
        ("DejaVuSans-BoldOblique", _PLAIN),
        ("DejaVuSansMono", _PLAIN),
        ("DejaVuSansMono-Bold", _PLAIN),
        ("STIXGeneral", _PLAIN),
        ("STIXGeneralBol", _PLAIN),
        ("STIXGeneralItalic", _PLAIN),
        ("STIXGeneralBolIta", _PLAIN),
        ("STIXGeneral", _DOUBLE_STRUCK),
        ("cmtt10", _PLAIN),
        ("cmti10", _PLAIN),
    ),
    "val": (("STIXGeneral", _TYPEWRITER), ("cmb10", _PLAIN)),
    "test": (
        ("DejaVuSerif", _PLAIN),
        ("DejaVuSerif-Bold", _PLAIN),
        ("DejaVuSerif-Italic", _PLAIN),
        ("DejaVuSerif-BoldItalic", _PLAIN),
        ("STIXGeneral", _SANS),
        ("cmr10", _PLAIN),
        ("cmss10", _PLAIN),
    ),
}
"""File name and alphabet of each typeface; no typeface is in two splits."""

SIZE = 64
_DIGIT_HEIGHT = 40


@dataclass(frozen=True)
class Glyphs:
    """Distance fields `(n, 64, 64)`, one of each typeface (in the order of TYPEFACES) and digit, and the digits'
    widths `(n,)`. Both are in half-widths of the picture; every digit is centred and 40 pixels high at most."""

    distance: Floats
    width: Floats

    def choose(self, digits: Ints, split: str, rng: Generator) -> Ints:
        """Row numbers: each digit in a typeface of the split."""
        names = list(TYPEFACES)
        before = sum(len(TYPEFACES[name]) for name in names[: names.index(split)])
        return (before + rng.integers(len(TYPEFACES[split]), size=len(digits))) * 10 + digits

    def in_same_typeface(self, rows: Ints, digits: Ints) -> Ints:
        """Row numbers: `digits` in the typefaces of `rows`."""
        return rows // 10 * 10 + digits


@cache
def read_glyphs() -> Glyphs:
    from scipy.ndimage import distance_transform_edt

    fields, widths = [], []
    for typefaces in TYPEFACES.values():
        for file, zero in typefaces:
            for inside in _draw_digits(file, zero):
                signed = distance_transform_edt(inside) - distance_transform_edt(~inside)
                fields.append(signed / (SIZE / 2))
                widths.append(np.flatnonzero(inside.any(axis=0)).size / (SIZE / 2))
    return Glyphs(np.asarray(fields, np.float32), np.asarray(widths, np.float32))


def _draw_digits(file: str, zero: int) -> NDArray[np.bool_]:
    """The ten digits of a typeface `(10, 64, 64)`: True is ink."""
    from matplotlib import get_data_path
    from PIL import Image, ImageDraw, ImageFont

    path = str(Path(get_data_path()) / "fonts" / "ttf" / f"{file}.ttf")
    # The basic layout engine: the other one is not part of every Pillow.
    open_font = partial(ImageFont.truetype, path, layout_engine=ImageFont.Layout.BASIC)
    texts = [chr(zero + digit) for digit in range(10)]
    tallest = max(box[3] - box[1] for box in map(open_font(size=100).getbbox, texts))
    font = open_font(size=round(100 * _DIGIT_HEIGHT / tallest))
    drawn = []
    for text in texts:
        left, top, right, bottom = font.getbbox(text)
        picture = Image.new("L", (SIZE, SIZE))
        place = ((SIZE - left - right) / 2, (SIZE - top - bottom) / 2)
        ImageDraw.Draw(picture).text(place, text, fill=255, font=font)
        drawn.append(np.asarray(picture) > 127)
    return np.stack(drawn)
