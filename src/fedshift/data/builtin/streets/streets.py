"""Street scenes of five invented cities, 64x64 pixels with a class for each: for segmentation."""

from __future__ import annotations

import numpy as np

from fedshift.data.builtin.generated import GeneratedDataset
from fedshift.data.builtin.raster import Floats, Generator, blur, per_picture, pixel_grid, uniform
from fedshift.data.builtin.streets.cities import CITIES, City
from fedshift.data.builtin.streets.objects import add_people, park_cars, plant_trees, put_poles
from fedshift.data.builtin.streets.scene import CLASSES, SIZE, Labels, build, lay_out

COUNTS = {"train": 200, "val": 25, "test": 75}

_BLOCK = 25
"""Pictures drawn at once: few enough for the processor's cache, which makes drawing faster."""


def draw(city: str, split: str, rng: Generator) -> tuple[Floats, Labels]:
    """Pictures `(n, 64, 64, 3)` in [0, 1] and masks `(n, 64, 64)`."""
    blocks = [_draw_block(CITIES[city], _BLOCK, rng) for _ in range(COUNTS[split] // _BLOCK)]
    return np.concatenate([picture for picture, _ in blocks]), np.concatenate([mask for _, mask in blocks])


def _draw_block(city: City, count: int, rng: Generator) -> tuple[Floats, Labels]:
    street = lay_out(city, count, rng)
    pictures = build(city, street, rng)
    plant_trees(city, street, pictures, rng)
    put_poles(city, street, pictures, rng)
    park_cars(city, street, pictures, rng)
    add_people(city, street, pictures, rng)
    return _photograph(city, pictures.colour, rng), pictures.label


def _photograph(city: City, colour: Floats, rng: Generator) -> Floats:
    """Falling snow or rain, a lens that is darker in the corners and a little out of focus, a noisy sensor."""
    count = len(colour)
    falling = rng.random((count, SIZE, SIZE), dtype=np.float32) < city.flakes
    colour = np.where(falling[..., None], 0.4 * colour + 0.6, colour)
    colour = blur(colour, np.full(count, city.blur, np.float32))
    x, y = pixel_grid(SIZE, SIZE)
    from_centre = ((x - SIZE / 2) ** 2 + (y - SIZE / 2) ** 2) / (SIZE * SIZE / 2)
    exposure = uniform(rng, 0.75, 1.25, (count, 1)) * uniform(rng, 0.93, 1.07, (count, 3))
    colour = colour * per_picture(exposure) * (1 - 0.25 * from_centre)[..., None]
    return colour + rng.standard_normal(colour.shape, dtype=np.float32) * np.float32(city.grain)


RECIPE = GeneratedDataset(
    name="streets",
    task="segmentation",
    classes=CLASSES,
    domains=tuple(CITIES),
    input_shape=(3, SIZE, SIZE),
    revision=2,
    draw=draw,
)
