"""Your own pictures: one folder per site, one folder per class. Which method serves a site that nobody has seen?

python examples/own_folders.py
"""

from __future__ import annotations

import tempfile
from pathlib import Path

import numpy as np
from PIL import Image

import fedshift

SITES = {"north": (1.0, 0.8, 0.6), "south": (0.5, 0.7, 1.0), "west": (0.6, 0.95, 0.55)}
METHODS = ("fedavg", "copa", "single-site")


def draw(kind: str, tint: tuple[float, ...], rng: np.random.Generator) -> Image.Image:
    """A 24 x 24 picture of a spot (malignant) or of stripes (benign) in the colours of a site's scanner."""
    rows, columns = np.mgrid[0:24, 0:24]
    centre, phase = rng.uniform(8, 16, 2), rng.integers(0, 6)
    is_spot = ((rows - centre[0]) ** 2 + (columns - centre[1]) ** 2) < 30
    shape = is_spot if kind == "malignant" else (rows + phase) % 6 < 3
    values = (0.3 + 0.25 * shape[..., None]) * np.array(tint) + rng.normal(0, 0.2, (24, 24, 3))
    return Image.fromarray((255 * values.clip(0, 1)).astype(np.uint8))


def write_scans(root: Path) -> None:
    """root/SITE/CLASS/*.png"""
    rng = np.random.default_rng(0)
    for site, tint in SITES.items():
        for kind in ("benign", "malignant"):
            folder = root / site / kind
            folder.mkdir(parents=True)
            for number in range(60):
                draw(kind, tint, rng).save(folder / f"{number}.png")


def main() -> None:
    folder = Path(tempfile.mkdtemp(prefix="fedshift-example-"))
    write_scans(folder / "scans")
    print(f"{'method':<14}{'accuracy at west':>18}")
    for method in METHODS:
        # `target` is held out: no picture of it is used for training.
        run = fedshift.fit(
            method, data_dir=folder / "scans", target="west", out=folder / method, rounds=8, batch_size=16, lr=0.02
        )
        print(f"{method:<14}{run.results['accuracy']['last']:>18.1%}")
    print(f"runs and models are in {folder}")


if __name__ == "__main__":
    main()
