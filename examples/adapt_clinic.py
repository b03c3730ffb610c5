"""A clinic without labels joins: three labelled hospitals, and pictures of a fourth place that nobody has labelled.

python examples/adapt_clinic.py
"""

from __future__ import annotations

import tempfile
from pathlib import Path

import numpy as np
from PIL import Image

import fedshift

HOSPITALS = {"north": (0.0, 1.0), "south": (0.1, 0.8), "west": (0.2, 0.7)}
CLINIC = (0.5, 0.3)  # a faded picture on a bright ground
KINDS = ("bar", "blob", "ring")


def draw(kind: str, look: tuple[float, float], rng: np.random.Generator) -> np.ndarray:
    """A 20 x 20 picture, `(20, 20, 3)` uint8. `look` is the brightness of the ground and the contrast of the shape."""
    rows, columns = np.mgrid[0:20, 0:20]
    centre = rng.uniform(8, 12, 2)
    distance = np.hypot(rows - centre[0], columns - centre[1])
    shape = {"bar": abs(rows - centre[0]) < 2, "blob": distance < 5, "ring": abs(distance - 6) < 1.5}[kind]
    ground, contrast = look
    grey = ground + contrast * shape + rng.normal(0, 0.15, (20, 20))
    return np.repeat((255 * grey.clip(0, 1)).astype(np.uint8)[..., None], 3, axis=2)


def main() -> None:
    rng = np.random.default_rng(0)
    root = Path(tempfile.mkdtemp(prefix="fedshift-example-"))
    for site, look in HOSPITALS.items():
        for kind in KINDS:
            folder = root / "scans" / site / kind
            folder.mkdir(parents=True)
            for number in range(40):
                Image.fromarray(draw(kind, look, rng)).save(folder / f"{number}.png")
    # The clinic has one folder of pictures, without classes.
    (root / "scans" / "clinic").mkdir()
    for number in range(120):
        Image.fromarray(draw(KINDS[number % 3], CLINIC, rng)).save(root / "scans" / "clinic" / f"{number}.png")

    # Somebody labels a few pictures afterwards, to find out whether adapting helped.
    images = np.stack([draw(KINDS[number % 3], CLINIC, rng) for number in range(60)])
    labels = np.arange(60) % 3  # places in the sorted list of classes

    print(f"{'method':<14}{'accuracy at the clinic':>24}")
    for method in ("source-only", "kd3a", "shot"):
        run = fedshift.fit(
            method, setting="adapt", data_dir=root / "scans", target="clinic", rounds=8, batch_size=16, lr=0.02
        )
        print(f"{method:<14}{run.score(images, labels):>24.1%}")


if __name__ == "__main__":
    main()
