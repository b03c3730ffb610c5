"""Segmentation: pictures and masks. Each site has `images/` and `masks/` with files of the same names.

python examples/segmentation.py
"""

from __future__ import annotations

import tempfile
from pathlib import Path

import numpy as np
from PIL import Image

import fedshift

LIGHT = {"north": 1.0, "south": 0.6, "west": 0.8}
SIDE = 32


def scene(light: float, rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
    """A bright disc on a grey ground, `(32, 32, 3)`, and its mask `(32, 32)`: 1 is the disc, 0 the ground."""
    rows, columns = np.mgrid[0:SIDE, 0:SIDE]
    row, column = rng.uniform(8, SIDE - 8, 2)
    mask = (rows - row) ** 2 + (columns - column) ** 2 < rng.uniform(20, 60)
    grey = light * (0.4 + 0.5 * mask) + rng.normal(0, 0.06, (SIDE, SIDE))
    image = (255 * grey.clip(0, 1)).astype(np.uint8)
    return np.repeat(image[..., None], 3, axis=2), mask.astype(np.uint8)


def write_sites(root: Path) -> None:
    """root/SITE/images/*.png, root/SITE/masks/*.png, and the names of the ids in masks in root/classes.txt"""
    rng = np.random.default_rng(0)
    for site, light in LIGHT.items():
        for kind in ("images", "masks"):
            (root / site / kind).mkdir(parents=True)
        for number in range(60):
            image, mask = scene(light, rng)
            Image.fromarray(image).save(root / site / "images" / f"{number}.png")
            Image.fromarray(mask).save(root / site / "masks" / f"{number}.png")
    (root / "classes.txt").write_text("ground\ncell\n")


def main() -> None:
    folder = Path(tempfile.mkdtemp(prefix="fedshift-example-"))
    write_sites(folder / "cells")
    run = fedshift.fit(
        "fedavg", data_dir=folder / "cells", target="west", out=folder / "run", rounds=15, batch_size=8, lr=0.05
    )
    print(f"{'class':<10}{'pixels predicted':>18}")
    image, _ = scene(LIGHT["west"], np.random.default_rng(1))
    predicted = run.predict(image[None])[0]  # class numbers, (32, 32)
    for number, name in enumerate(run.results["classes"]):
        print(f"{name:<10}{(predicted == number).sum():>18}")
    print(f"\n{'site':<10}{'mean IoU':>10}")
    print(f"{'west':<10}{run.results['miou']['last']:>10.1%}")


if __name__ == "__main__":
    main()
