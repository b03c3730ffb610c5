"""What stands and moves in a street: trees, poles, cars and people, drawn to scale where their feet are.

A figure is drawn for many pictures at once. Its shapes are in metres, from the point where it stands: x to the
right, y up. Figures may be added in any order: a nearer one hides a farther one.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from fedshift.data.builtin.raster import Floats, Generator, Ints, per_picture, pixel_grid, smooth_noise, uniform
from fedshift.data.builtin.streets.cities import City, Colour
from fedshift.data.builtin.streets.scene import (
    CAR,
    FOCAL,
    LAMP_LIGHT,
    PERSON,
    POLE,
    SIZE,
    VEGETATION,
    Pictures,
    Street,
    through_haze,
)
from fedshift.data.domain import VOID

_RED_LIGHT = np.array([0.9, 0.1, 0.08], np.float32)


@dataclass(frozen=True)
class Spot:
    """Where a figure stands in some of the pictures: their row numbers `(m,)` and its distance `(m,)`; metres from
    there for each pixel, `(m, 64, 64)`; pixels per metre `(m, 1, 1)`."""

    rows: Ints
    depth: Floats
    x: Floats
    y: Floats
    scale: Floats

    def __len__(self) -> int:
        return len(self.rows)


def stand(street: Street, rows: Ints, depth: Floats, across: Floats) -> Spot:
    """`depth` and `across` `(m,)`: metres ahead of the camera and to its right."""
    scale = per_picture(FOCAL / depth)
    column, row = pixel_grid(SIZE, SIZE)
    foot_x = street.vanish_x[rows] + per_picture(across) * scale
    foot_y = street.horizon[rows] + street.eye[rows] * scale
    return Spot(rows, depth, (column + 0.5 - foot_x) / scale, (foot_y - row - 0.5) / scale, scale)


class Painter:
    """Puts the shapes of one figure into the pictures, in the city's light and air."""

    def __init__(self, city: City, pictures: Pictures, spot: Spot, label: int) -> None:
        self._city, self._spot, self._class = city, spot, label
        # Views: what is drawn appears in `pictures`.
        self._colour = pictures.colour.reshape(-1, 3)
        self._label = pictures.label.reshape(-1)
        self._depth = pictures.depth.reshape(-1)

    def fill(self, inside: Floats, colour: Floats, shines: bool = False) -> None:
        """`inside` `(m, 64, 64)`: metres to the shape's edge, negative outside. `colour`: `(m, 3)` or, for one that
        changes over the shape, `(m, 64, 64, 3)`."""
        spot = self._spot
        cover = np.clip(inside * spot.scale + 0.5, 0, 1).reshape(-1)
        # Shapes are small: from here on only the pixels they touch, as a list.
        touched = np.flatnonzero(cover > 0.05)
        figure, pixel = np.divmod(touched, SIZE * SIZE)
        place = spot.rows[figure] * (SIZE * SIZE) + pixel
        # A figure's own parts may cover one another, so equal distances count as nearer.
        shown = spot.depth[figure] <= self._depth[place]
        touched, figure, place = touched[shown], figure[shown], place[shown]
        cover, depth = cover[touched], spot.depth[figure]

        colour = colour.reshape(-1, 3)[touched] if colour.ndim == 4 else colour[figure]
        if not shines:
            colour = through_haze(self._city, colour * np.asarray(self._city.light, np.float32), depth)
        self._colour[place] += (colour - self._colour[place]) * cover[:, None]
        before = self._label[place]
        is_solid = cover >= 0.6
        label = np.where(is_solid, self._class, np.where(cover > 0.4, VOID, before))
        # A part drawn over its own figure does not blur the figure's edge.
        self._label[place] = np.where(before == self._class, before, label)
        self._depth[place] = np.where(is_solid, depth, self._depth[place])


def plant_trees(city: City, street: Street, pictures: Pictures, rng: Generator) -> None:
    for number in range(city.trees):
        rows = _some(len(street), 0.8, rng)
        spot = _beside_road(street, rows, (6 + 5 * number, 11 + 5 * number), 0.35, rng)
        painter = Painter(city, pictures, spot, VEGETATION)
        bark = np.broadcast_to(np.array([0.34, 0.26, 0.2], np.float32), (len(rows), 3))
        leaves = np.asarray(city.green, np.float32) * uniform(rng, 0.75, 1.2, (len(rows), 1))
        mottle = 0.55 + 0.8 * smooth_noise(rng, len(rows), SIZE, 22)
        ragged = smooth_noise(rng, len(rows), SIZE, 16) - 0.5
        tall = per_picture(uniform(rng, 0.8, 1.25, len(rows)))
        if city.crown == "palm":
            painter.fill(_box(spot, 0, 2.6 * tall, 0.16, 2.6 * tall), bark)
            drooping = np.abs(spot.x) * 0.45
            crown = _ellipse(spot.x, spot.y + drooping, 0, 5.6 * tall, 2.0, 0.85) + 0.4 * ragged
        elif city.crown == "cone":
            painter.fill(_box(spot, 0, 0.5, 0.18, 0.5), bark)
            crown = np.minimum(1.7 * (1 - (spot.y - 0.8) / (5.5 * tall)) - np.abs(spot.x), spot.y - 0.8) + 0.5 * ragged
        else:
            painter.fill(_box(spot, 0, 1.4 * tall, 0.17, 1.4 * tall), bark)
            crown = _ellipse(spot.x, spot.y, 0, 4.2 * tall, 1.9, 1.8) + 0.7 * ragged
        painter.fill(crown, per_picture(leaves) * mottle[..., None])


def put_poles(city: City, street: Street, pictures: Pictures, rng: Generator) -> None:
    """Street lamps and traffic signs along the kerbs."""
    signs = np.array([[0.85, 0.1, 0.1], [0.1, 0.25, 0.7], [0.95, 0.8, 0.1]], np.float32)
    for number in range(city.poles):
        rows = _some(len(street), 0.75, rng)
        spot = _beside_road(street, rows, (5 + 5 * number, 9 + 6 * number), 0.3, rng)
        painter = Painter(city, pictures, spot, POLE)
        metal = np.broadcast_to(np.asarray(city.metal, np.float32), (len(rows), 3))
        is_lamp = number % 2 == 0
        top = 2.9 if is_lamp else 1.5
        # A pole thinner than a pixel would cover no pixel.
        half = np.maximum(np.float32(0.09), 0.62 / spot.scale)
        painter.fill(_box(spot, 0, top, half, top), metal)
        if is_lamp:
            bright = metal * (1 - np.float32(city.lamps)) + LAMP_LIGHT * np.float32(city.lamps)
            painter.fill(_box(spot, 0, 2 * top, 0.45, 0.16), bright, shines=city.lamps > 0)
        else:
            face = signs[rng.integers(len(signs), size=len(rows))]
            painter.fill(_ellipse(spot.x, spot.y, 0, 2 * top, 0.42, 0.42), face)


def park_cars(city: City, street: Street, pictures: Pictures, rng: Generator) -> None:
    """Cars seen from behind or in front: some parked along the kerbs, some driving."""
    for number in range(city.cars):
        rows = _some(len(street), 0.75, rng)
        depth = uniform(rng, 5.5 + 3.5 * number, 9 + 5 * number, len(rows))
        left, right = (kerb[rows, 0, 0] for kerb in street.kerbs)
        is_parked = rng.random(len(rows)) < 0.5
        inset = np.where(is_parked, 1.1, 2.8) + rng.uniform(0, 0.3, len(rows))
        across = np.where(rng.random(len(rows)) < 0.5, inset - left, right - inset).astype(np.float32)
        _draw_car(city, pictures, stand(street, rows, depth, across), rng)


def _draw_car(city: City, pictures: Pictures, spot: Spot, rng: Generator) -> None:
    painter = Painter(city, pictures, spot, CAR)
    paint = _pick(city.car_paints, len(spot), rng)
    tall = per_picture(uniform(rng, 0.95, 1.3, len(spot)))
    dark = np.full((len(spot), 3), 0.07, np.float32)
    glass = np.broadcast_to(np.asarray(city.glass, np.float32) * 0.6, (len(spot), 3))
    for side in (-0.68, 0.68):
        painter.fill(_box(spot, side, 0.28, 0.16, 0.28), dark)
    painter.fill(_box(spot, 0, 0.62 * tall, 0.92, 0.36 * tall, rounded=0.12), paint)
    narrowing = 0.22 * (spot.y - 0.95 * tall)
    roof = np.minimum(0.78 - narrowing - np.abs(spot.x), 0.34 * tall - np.abs(spot.y - 1.2 * tall))
    painter.fill(roof, paint * np.float32(0.85))
    painter.fill(roof - 0.1, glass)
    painter.fill(_box(spot, 0, 0.3, 0.5, 0.09), dark)
    # Coming or going: white or red lights.
    is_coming = rng.random((len(spot), 1)) < 0.5
    lights = np.where(is_coming, np.array([1.0, 0.97, 0.85], np.float32), _RED_LIGHT)
    for side in (-0.7, 0.7):
        painter.fill(_box(spot, side, 0.72 * tall, 0.17, 0.11), lights, shines=city.lamps > 0.5)


def add_people(city: City, street: Street, pictures: Pictures, rng: Generator) -> None:
    """People on the sidewalks."""
    skins = ((0.9, 0.72, 0.6), (0.55, 0.38, 0.28), (0.75, 0.56, 0.42))
    for number in range(city.people):
        rows = _some(len(street), 0.75, rng)
        spot = _beside_road(street, rows, (4.5 + 1.5 * number, 7 + 2.5 * number), 1.0, rng, spread=0.7)
        painter = Painter(city, pictures, spot, PERSON)
        shirt, trousers, skin = (_pick(colours, len(rows), rng) for colours in (city.clothes, city.clothes, skins))
        stride = per_picture(uniform(rng, 0.06, 0.2, len(rows)))
        for side in (-1, 1):
            leg_x = side * stride * (1 - spot.y / 0.9) + side * 0.08
            painter.fill(
                np.minimum(0.12 - np.abs(spot.x - leg_x), 0.47 - np.abs(spot.y - 0.45)), trousers * np.float32(0.6)
            )
        painter.fill(_box(spot, 0, 1.15, 0.27, 0.34, rounded=0.12), shirt)
        painter.fill(_ellipse(spot.x, spot.y, 0, 1.66, 0.15, 0.18), skin)


def _some(count: int, share: float, rng: Generator) -> Ints:
    return np.flatnonzero(rng.random(count) < share)


def _pick(colours: tuple[Colour, ...], count: int, rng: Generator) -> Floats:
    chosen = np.asarray(colours, np.float32)[rng.integers(len(colours), size=count)]
    return chosen * uniform(rng, 0.85, 1.15, (count, 1))


def _beside_road(
    street: Street, rows: Ints, depths: tuple[float, float], from_kerb: float, rng: Generator, spread: float = 0.0
) -> Spot:
    """Spots on the sidewalks, `from_kerb` metres from the kerb on either side."""
    depth = uniform(rng, *depths, len(rows))
    past = from_kerb + uniform(rng, -spread, spread, len(rows))
    left, right = (kerb[rows, 0, 0] for kerb in street.kerbs)
    return stand(street, rows, depth, np.where(rng.random(len(rows)) < 0.5, -left - past, right + past))


def _box(
    spot: Spot, x: float, y: Floats | float, half_width: Floats | float, half_height: Floats | float, rounded: float = 0
) -> Floats:
    """Metres inside a box around (x, y)."""
    past_x = np.abs(spot.x - x) - half_width + rounded
    past_y = np.abs(spot.y - y) - half_height + rounded
    outside: Floats = np.maximum(past_x, past_y)
    if rounded:
        corner = np.sqrt(np.maximum(past_x, 0) ** 2 + np.maximum(past_y, 0) ** 2)
        outside = np.minimum(outside, 0) + corner - rounded
    return -outside


def _ellipse(
    x: Floats, y: Floats, centre_x: float, centre_y: Floats | float, radius_x: float, radius_y: float
) -> Floats:
    """Metres inside an ellipse; exact for a circle, approximate otherwise."""
    reach = np.sqrt(((x - centre_x) / radius_x) ** 2 + ((y - centre_y) / radius_y) ** 2)
    return (1 - reach) * min(radius_x, radius_y)
