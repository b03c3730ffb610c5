"""The five cities of `streets`: how each is built, coloured, lit and photographed."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Colour = tuple[float, float, float]
Range = tuple[float, float]


@dataclass(frozen=True)
class City:
    """Lengths in metres, colours in [0, 1], ranges are drawn from anew for each picture."""

    # How it is built.
    half_street: Range
    """From the middle of the road to the houses."""
    sidewalk: Range
    """Its width."""
    house_height: Range
    house_length: Range
    window: tuple[float, float]
    """From one window to the next: along the street, and from floor to floor."""
    gaps: float
    """Share of lots with a hedge instead of a house."""
    verge: float
    """Share of pictures with a strip of grass along the houses."""
    trees: int
    crown: Literal["round", "cone", "palm"]
    cars: int
    people: int
    poles: int

    # How it is coloured.
    facades: tuple[Colour, ...]
    glass: Colour
    road: Colour
    paving: Colour
    marking: Colour
    green: Colour
    car_paints: tuple[Colour, ...]
    clothes: tuple[Colour, ...]
    metal: Colour

    # How it is lit.
    sky_top: Colour
    sky_low: Colour
    clouds: float
    light: Colour
    """Multiplies the colour of everything but the sky and what shines itself."""
    sun_shadow: float
    """How much darker the side without sun is; 0 under clouds and at night."""
    lit_windows: float
    """Share of windows with a lamp behind them."""
    lamps: float
    """How brightly lamps and the lights of cars shine."""
    haze: float
    """Share of the view lost to haze per metre."""

    # How it is photographed.
    horizon: Range
    """Row of the horizon as a share of the picture's height."""
    eye: Range
    """Height of the camera."""
    texture: float
    """Contrast of rough ground and walls."""
    flakes: float
    """Share of pixels with falling snow or glittering rain."""
    blur: float
    grain: float


CITIES: dict[str, City] = {
    "riviera": City(
        half_street=(6, 8),
        sidewalk=(2.8, 4),
        house_height=(7, 12),
        house_length=(8, 13),
        window=(2.4, 3.2),
        gaps=0.12,
        verge=0.3,
        trees=5,
        crown="palm",
        cars=4,
        people=5,
        poles=3,
        facades=((0.95, 0.85, 0.68), (0.96, 0.93, 0.88), (0.93, 0.7, 0.58), (0.98, 0.9, 0.6)),
        glass=(0.35, 0.5, 0.6),
        road=(0.52, 0.51, 0.5),
        paving=(0.8, 0.75, 0.68),
        marking=(0.97, 0.97, 0.95),
        green=(0.3, 0.55, 0.2),
        car_paints=((0.9, 0.9, 0.92), (0.8, 0.15, 0.12), (0.15, 0.35, 0.7), (0.2, 0.2, 0.22)),
        clothes=((0.9, 0.3, 0.25), (0.2, 0.35, 0.75), (0.95, 0.95, 0.95), (0.2, 0.6, 0.5)),
        metal=(0.3, 0.3, 0.32),
        sky_top=(0.32, 0.55, 0.88),
        sky_low=(0.75, 0.87, 0.97),
        clouds=0.6,
        light=(1.0, 0.98, 0.94),
        sun_shadow=0.4,
        lit_windows=0,
        lamps=0,
        haze=0.002,
        horizon=(0.42, 0.52),
        eye=(1.5, 2.1),
        texture=0.08,
        flakes=0,
        blur=0.3,
        grain=0.018,
    ),
    "milltown": City(
        half_street=(4.6, 5.8),
        sidewalk=(1.7, 2.4),
        house_height=(9, 15),
        house_length=(6, 9),
        window=(1.8, 2.9),
        gaps=0.04,
        verge=0.0,
        trees=2,
        crown="round",
        cars=5,
        people=4,
        poles=4,
        facades=((0.55, 0.26, 0.2), (0.48, 0.3, 0.24), (0.62, 0.36, 0.26), (0.42, 0.38, 0.36)),
        glass=(0.5, 0.55, 0.6),
        road=(0.33, 0.34, 0.37),
        paving=(0.55, 0.55, 0.55),
        marking=(0.85, 0.8, 0.45),
        green=(0.3, 0.38, 0.2),
        car_paints=((0.15, 0.16, 0.18), (0.5, 0.52, 0.55), (0.3, 0.1, 0.12), (0.1, 0.2, 0.22)),
        clothes=((0.15, 0.15, 0.18), (0.35, 0.3, 0.2), (0.75, 0.7, 0.2), (0.3, 0.3, 0.4)),
        metal=(0.15, 0.16, 0.16),
        sky_top=(0.62, 0.65, 0.68),
        sky_low=(0.8, 0.81, 0.82),
        clouds=0.35,
        light=(0.9, 0.92, 0.95),
        sun_shadow=0,
        lit_windows=0.05,
        lamps=0.3,
        haze=0.008,
        horizon=(0.36, 0.46),
        eye=(2.2, 3.0),
        texture=0.15,
        flakes=0.006,
        blur=0.55,
        grain=0.02,
    ),
    "neonbay": City(
        half_street=(6, 8),
        sidewalk=(2.8, 3.8),
        house_height=(14, 32),
        house_length=(10, 18),
        window=(1.6, 2.4),
        gaps=0.02,
        verge=0.0,
        trees=2,
        crown="round",
        cars=6,
        people=6,
        poles=4,
        facades=((0.4, 0.42, 0.5), (0.3, 0.32, 0.4), (0.5, 0.45, 0.45), (0.35, 0.4, 0.45)),
        glass=(0.3, 0.35, 0.45),
        road=(0.36, 0.36, 0.4),
        paving=(0.6, 0.56, 0.58),
        marking=(0.9, 0.9, 0.85),
        green=(0.2, 0.35, 0.22),
        car_paints=((0.85, 0.7, 0.1), (0.15, 0.15, 0.2), (0.6, 0.6, 0.65), (0.5, 0.1, 0.15)),
        clothes=((0.3, 0.25, 0.4), (0.5, 0.2, 0.3), (0.2, 0.3, 0.4), (0.6, 0.55, 0.5)),
        metal=(0.5, 0.5, 0.55),
        sky_top=(0.24, 0.27, 0.52),
        sky_low=(0.78, 0.56, 0.6),
        clouds=0.1,
        light=(0.88, 0.82, 0.95),
        sun_shadow=0,
        lit_windows=0.25,
        lamps=0.8,
        haze=0.006,
        horizon=(0.5, 0.6),
        eye=(1.3, 1.8),
        texture=0.1,
        flakes=0,
        blur=0.5,
        grain=0.025,
    ),
    "northfjord": City(
        half_street=(5.5, 7.5),
        sidewalk=(2.2, 3.2),
        house_height=(5, 8),
        house_length=(7, 11),
        window=(2.6, 2.8),
        gaps=0.3,
        verge=0.5,
        trees=6,
        crown="cone",
        cars=3,
        people=4,
        poles=3,
        facades=((0.65, 0.2, 0.18), (0.9, 0.75, 0.35), (0.25, 0.4, 0.5), (0.88, 0.88, 0.86)),
        glass=(0.25, 0.28, 0.33),
        road=(0.52, 0.54, 0.58),
        paving=(0.86, 0.88, 0.92),
        marking=(0.7, 0.72, 0.75),
        green=(0.42, 0.54, 0.48),
        car_paints=((0.75, 0.77, 0.8), (0.2, 0.3, 0.5), (0.6, 0.15, 0.15), (0.25, 0.3, 0.28)),
        clothes=((0.8, 0.35, 0.1), (0.15, 0.25, 0.45), (0.5, 0.1, 0.2), (0.2, 0.2, 0.2)),
        metal=(0.4, 0.42, 0.45),
        sky_top=(0.6, 0.69, 0.84),
        sky_low=(0.92, 0.9, 0.9),
        clouds=0.3,
        light=(0.9, 0.95, 1.03),
        sun_shadow=0.15,
        lit_windows=0.2,
        lamps=0.4,
        haze=0.008,
        horizon=(0.42, 0.52),
        eye=(1.6, 2.2),
        texture=0.12,
        flakes=0.02,
        blur=0.4,
        grain=0.015,
    ),
    "dunes": City(
        half_street=(5, 8),
        sidewalk=(2.2, 4),
        house_height=(4, 9),
        house_length=(9, 16),
        window=(4.2, 3.4),
        gaps=0.1,
        verge=0.0,
        trees=3,
        crown="palm",
        cars=4,
        people=6,
        poles=3,
        facades=((0.82, 0.66, 0.46), (0.76, 0.58, 0.4), (0.88, 0.74, 0.56), (0.7, 0.56, 0.44)),
        glass=(0.3, 0.22, 0.18),
        road=(0.58, 0.5, 0.42),
        paving=(0.78, 0.67, 0.52),
        marking=(0.76, 0.66, 0.52),
        green=(0.4, 0.46, 0.2),
        car_paints=((0.92, 0.9, 0.85), (0.7, 0.65, 0.55), (0.45, 0.4, 0.35), (0.75, 0.4, 0.2)),
        clothes=((0.95, 0.92, 0.88), (0.15, 0.13, 0.14), (0.5, 0.3, 0.2), (0.35, 0.4, 0.5)),
        metal=(0.4, 0.33, 0.28),
        sky_top=(0.62, 0.68, 0.72),
        sky_low=(0.9, 0.85, 0.74),
        clouds=0.3,
        light=(1.0, 0.92, 0.8),
        sun_shadow=0.3,
        lit_windows=0,
        lamps=0,
        haze=0.012,
        horizon=(0.46, 0.58),
        eye=(1.4, 2.0),
        texture=0.14,
        flakes=0,
        blur=0.45,
        grain=0.02,
    ),
}
