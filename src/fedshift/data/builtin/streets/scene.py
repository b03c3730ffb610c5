"""The standing part of a street picture: ground, houses and sky, found by following each pixel's rays.

The camera looks along a straight street. A ray meets the ground, the row of houses at its side or the end of the
street, whichever is nearest. What it meets is a material: a row of the picture's palette, and a class. Four rays
make a pixel.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from fedshift.data.builtin.raster import Floats, Generator, Ints, per_picture, pixel_grid, smooth_noise, uniform
from fedshift.data.builtin.streets.cities import City
from fedshift.data.domain import VOID

SIZE = 64
FOCAL = 55.0
"""Focal length in pixels: a view of about 60 degrees."""

CLASSES = ("road", "sidewalk", "building", "vegetation", "sky", "car", "person", "pole")
ROAD, SIDEWALK, BUILDING, VEGETATION, SKY, CAR, PERSON, POLE = range(len(CLASSES))

LAMP_LIGHT = np.array([1.0, 0.85, 0.5], np.float32)

_RAYS = 2 * SIZE
_LOTS = 16
"""Houses on one side of a street."""
_FAR = 400.0

# Materials. The houses' walls come last, first the left side's, then the right side's.
_ROAD, _PAVING, _MARKING, _KERB, _GREEN, _SKY, _SKYLINE, _GLASS, _LIT_GLASS, _WALLS = range(10)
_CLASS_OF = np.array([ROAD, SIDEWALK, ROAD, SIDEWALK, VEGETATION, SKY] + [BUILDING] * (3 + 2 * _LOTS), dtype=np.uint8)

Labels = NDArray[np.uint8]
Bools = NDArray[np.bool_]


@dataclass(frozen=True)
class Street:
    """Where things are, one number per picture `(n, 1, 1)`: the point the street runs to, in pixels, the camera's
    height, and metres from the camera's line to the houses and kerbs on the left and right (positive)."""

    vanish_x: Floats
    horizon: Floats
    eye: Floats
    houses: tuple[Floats, Floats]
    kerbs: tuple[Floats, Floats]
    end: Floats

    def __len__(self) -> int:
        return len(self.eye)


@dataclass
class Pictures:
    """Pictures in the making: colour `(n, 64, 64, 3)`, class `(n, 64, 64)` and distance `(n, 64, 64)` of what each
    pixel shows."""

    colour: Floats
    label: Labels
    depth: Floats


@dataclass(frozen=True)
class _Rays:
    """What all materials need to know about the rays, `(n, 128, 128)` each: metres to the surface that is met, its
    height above the ground and its distance to the right of the camera; whether the ray goes to the right."""

    depth: Floats
    height: Floats
    across: Floats
    is_right: Bools


def lay_out(city: City, count: int, rng: Generator) -> Street:
    def draw(low: float, high: float) -> Floats:
        return per_picture(uniform(rng, low, high, count))

    half, off_centre, sidewalk = draw(*city.half_street), draw(-0.35, 0.35), draw(*city.sidewalk)
    left, right = half * (1 + off_centre), half * (1 - off_centre)
    return Street(
        vanish_x=SIZE * draw(0.35, 0.65),
        horizon=SIZE * draw(*city.horizon),
        eye=draw(*city.eye),
        houses=(left, right),
        kerbs=(left - sidewalk, right - sidewalk),
        end=draw(50, 110),
    )


def build(city: City, street: Street, rng: Generator) -> Pictures:
    """Ground, houses and sky of the streets."""
    count = len(street)
    x, y = pixel_grid(_RAYS, _RAYS)
    right = ((x + 0.5) / 2 - street.vanish_x) / FOCAL
    down = ((y + 0.5) / 2 - street.horizon) / FOCAL
    is_right = right > 0
    to_ground = street.eye / np.maximum(down, 1e-3)
    to_houses = np.where(is_right, street.houses[1], street.houses[0]) / np.maximum(np.abs(right), 1e-3)
    depth = np.minimum(np.minimum(to_ground, to_houses), street.end)
    rays = _Rays(depth, street.eye - down * depth, right * depth, is_right)

    material, shade = _skyline(city, street, -down, rng)
    meets_houses = (to_houses < to_ground) & (to_houses < street.end)
    material, shade = _add_houses(city, street, rays, meets_houses, material, shade, rng)
    material, shade = _add_ground(city, street, rays, depth == to_ground, material, shade, rng)

    palette = _palette(city, count, rng)
    colour = palette[np.arange(count).reshape(-1, 1, 1), material] * shade[..., None]
    is_sky = material == _SKY
    colour = np.where(is_sky[..., None], _sky(city, down, count, rng), through_haze(city, colour, depth))
    depth = np.where(is_sky, np.float32(_FAR), depth)
    return Pictures(_mean_of_rays(colour), _vote_of_rays(_CLASS_OF[material]), _mean_of_rays(depth[..., None])[..., 0])


def through_haze(city: City, colour: Floats, depth: Floats) -> Floats:
    """Colours `(..., 3)` seen over `depth` `(...)` metres of the city's air."""
    clear: Floats = np.exp(depth * np.float32(-city.haze))[..., None]
    haze = np.asarray(city.sky_low, np.float32)
    return (colour - haze) * clear + haze


def _palette(city: City, count: int, rng: Generator) -> Floats:
    """The colour of each material in each picture, in the city's light, `(count, materials, 3)`."""
    facades = np.asarray(city.facades, np.float32)
    palette = np.zeros((count, _WALLS + 2 * _LOTS, 3), np.float32)
    palette[:, _ROAD], palette[:, _PAVING], palette[:, _MARKING] = city.road, city.paving, city.marking
    palette[:, _KERB] = np.asarray(city.paving) * 0.7
    palette[:, _GREEN] = city.green
    palette[:, _SKYLINE] = facades.mean(axis=0) * 0.85
    palette[:, _GLASS] = city.glass
    palette[:, _WALLS:] = facades[rng.integers(len(facades), size=(count, 2 * _LOTS))]
    palette *= uniform(rng, 0.88, 1.12, (count, palette.shape[1], 1)) * np.asarray(city.light, np.float32)
    palette[:, _LIT_GLASS] = LAMP_LIGHT
    return palette


def _sky(city: City, down: Floats, count: int, rng: Generator) -> Floats:
    low, top = np.asarray(city.sky_low, np.float32), np.asarray(city.sky_top, np.float32)
    share = np.clip(down * (-2 * FOCAL / SIZE), 0, 1)
    clouds = smooth_noise(rng, count, _RAYS, (8, 4)) * smooth_noise(rng, count, _RAYS, (14, 8))
    sky: Floats = low + (top - low) * share[..., None] + (clouds * np.float32(city.clouds))[..., None]
    return sky


def _skyline(city: City, street: Street, slope: Floats, rng: Generator) -> tuple[Ints, Floats]:
    """Sky, and distant houses below the slope at which their roofs are seen. -> materials and shades"""
    blocks = 24
    roofs = rng.random((len(street), 1, blocks), dtype=np.float32)
    roofs = np.repeat(roofs, -(-_RAYS // blocks), axis=2)[:, :, :_RAYS]
    low, high = city.house_height
    is_house = (slope < (low + roofs * (high - low)) / street.end) & (roofs > city.gaps)
    is_house = np.broadcast_to(is_house, (len(street), _RAYS, _RAYS))
    return np.where(is_house, _SKYLINE, _SKY), np.ones(is_house.shape, np.float32)


def _add_houses(
    city: City, street: Street, rays: _Rays, meets: Bools, material: Ints, shade: Floats, rng: Generator
) -> tuple[Ints, Floats]:
    """Facades with windows, and hedges where a lot is empty."""
    count = len(street)
    roof = uniform(rng, *city.house_height, (count, 2 * _LOTS))
    is_hedge = rng.random((count, 2 * _LOTS)) < city.gaps
    length = per_picture(uniform(rng, *city.house_length, count))
    along = rays.depth / length + per_picture(uniform(rng, 0, 1, count))
    lot = np.minimum(along.astype(np.int64), _LOTS - 1) + _LOTS * rays.is_right
    picture = np.arange(count).reshape(-1, 1, 1)
    top = np.where(is_hedge, np.float32(2.6), roof)[picture, lot]
    hedge = is_hedge[picture, lot]

    column, floor = rays.depth / city.window[0], rays.height / city.window[1]
    is_pane = (np.abs(_repeat(column, 1) - 0.5) < 0.24) & (np.abs(_repeat(floor, 1) - 0.55) < 0.24)
    is_pane &= rays.height < top - 0.4
    # Far windows are narrower than the distance between rays: they are left out, because they would flicker.
    wall = np.where(rays.is_right, street.houses[1], street.houses[0])
    is_pane &= rays.depth * rays.depth < wall * (FOCAL * city.window[0] * 0.7)
    has_lamp = rng.random((count, 2 * _LOTS, 8, 8)) < city.lit_windows
    is_lit = has_lamp[picture, lot, column.astype(np.int64) & 7, floor.astype(np.int64) & 7]
    surface = np.where(is_pane, np.where(is_lit, _LIT_GLASS, _GLASS), _WALLS + lot)

    rough = smooth_noise(rng, count, _RAYS, 40) - 0.5
    # One side of the street has the sun.
    in_shade = np.float32(city.sun_shadow) * (rays.is_right == per_picture(rng.random(count) < 0.5))
    facade_shade = (1 + np.float32(city.texture) * rough) * (1 - in_shade)
    visible = meets & (rays.height < top)
    material = np.where(visible, np.where(hedge, _GREEN, surface), material)
    return material, np.where(visible, np.where(hedge, 0.9 + rough, facade_shade), shade)


def _add_ground(
    city: City, street: Street, rays: _Rays, meets: Bools, material: Ints, shade: Floats, rng: Generator
) -> tuple[Ints, Floats]:
    """Road with markings, kerbs, paved sidewalks and strips of grass along the houses."""
    count = len(street)
    past_kerb = np.maximum(-rays.across - street.kerbs[0], rays.across - street.kerbs[1])
    to_houses = np.minimum(rays.across + street.houses[0], street.houses[1] - rays.across)
    is_road = past_kerb < 0
    is_verge = ~is_road & (to_houses < 0.9) & per_picture(rng.random(count) < city.verge)
    middle = (street.kerbs[1] - street.kerbs[0]) / 2
    is_dash = np.abs(rays.across - middle) < 0.12
    is_dash &= _repeat(rays.depth + per_picture(uniform(rng, 0, 6, count)), 6) < 0.5
    is_line = is_dash | (np.abs(past_kerb + 0.35) < 0.07)
    surface = np.where(is_road, np.where(is_line, _MARKING, _ROAD), np.where(past_kerb < 0.2, _KERB, _PAVING))
    surface = np.where(is_verge, _GREEN, surface)

    near = np.clip(1.4 - rays.depth / 18, 0, 1)
    is_joint = ~is_road & ~is_verge & ((_repeat(rays.depth, 1.4) < 0.09) | (_repeat(past_kerb, 1.2) < 0.09))
    fine = rng.random(rays.depth.shape, dtype=np.float32) - 0.5
    coarse = smooth_noise(rng, count, _RAYS, (24, 8)) - 0.5
    ground_shade = 1 + np.float32(city.texture) * (1.5 * fine * near + coarse) - np.float32(0.25) * near * is_joint
    is_shaded = (rays.across > per_picture(uniform(rng, -4, 4, count))) == per_picture(rng.random(count) < 0.5)
    ground_shade = ground_shade * (1 - np.float32(city.sun_shadow) * is_shaded)
    return np.where(meets, surface, material), np.where(meets, ground_shade, shade)


def _repeat(values: Floats, period: float) -> Floats:
    """Where in its period a value is, in [0, 1); many times faster than the remainder operator."""
    turns: Floats = values * np.float32(1 / period)
    whole: Floats = np.floor(turns)
    return turns - whole


def _mean_of_rays(values: Floats) -> Floats:
    """`(n, 128, 128, c)` -> `(n, 64, 64, c)`"""
    rows = values[:, 0::2] + values[:, 1::2]
    return (rows[:, :, 0::2] + rows[:, :, 1::2]) / 4


def _vote_of_rays(label: Labels) -> Labels:
    """The class that at least three of a pixel's four rays have, or VOID. `(n, 128, 128)` -> `(n, 64, 64)`"""
    ordered = np.sort(
        np.stack([label[:, 0::2, 0::2], label[:, 0::2, 1::2], label[:, 1::2, 0::2], label[:, 1::2, 1::2]]), axis=0
    )
    agreed = (ordered[0] == ordered[2]) | (ordered[1] == ordered[3])
    return np.where(agreed, ordered[1], np.uint8(VOID))
