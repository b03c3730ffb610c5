"""Time of RandAugment on a batch, relative to a loop over Pillow's operations, with one thread.

Run: python benchmarks/augment.py
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image, ImageEnhance, ImageOps
from torch import Tensor

from fedshift.data.augment import rand_augment

GREY = (128, 128, 128)
STRENGTH = 0.9
REPEATS = 25
CASES = ((32, 64), (128, 32))  # (side, batch)


def _affine(image: Image.Image, *matrix: float) -> Image.Image:
    return image.transform(image.size, Image.Transform.AFFINE, matrix, fillcolor=GREY)


PILLOW: tuple[Callable[[Image.Image, float], Image.Image], ...] = (
    lambda image, s: image,
    lambda image, s: ImageOps.autocontrast(image),
    lambda image, s: ImageOps.equalize(image),
    lambda image, s: ImageOps.solarize(image, round(256 * (1 - abs(s)))),
    lambda image, s: ImageOps.posterize(image, 8 - round(4 * abs(s))),
    lambda image, s: ImageEnhance.Brightness(image).enhance(1 + 0.9 * s),
    lambda image, s: ImageEnhance.Contrast(image).enhance(1 + 0.9 * s),
    lambda image, s: ImageEnhance.Color(image).enhance(1 + 0.9 * s),
    lambda image, s: ImageEnhance.Sharpness(image).enhance(1 + 0.9 * s),
    lambda image, s: image.rotate(30 * s, fillcolor=GREY),
    lambda image, s: _affine(image, 1, 0.3 * s, 0, 0, 1, 0),
    lambda image, s: _affine(image, 1, 0, 0, 0.3 * s, 1, 0),
    lambda image, s: _affine(image, 1, 0, s * image.width * 150 / 331, 0, 1, 0),
    lambda image, s: _affine(image, 1, 0, 0, 0, 1, s * image.height * 150 / 331),
)


def pillow_loop(images: NDArray[np.uint8], draws: random.Random) -> Tensor:
    """Applies two operations to each image of `(B, H, W, 3)` bytes; returns floats `(B, 3, H, W)` for a network."""
    augmented = []
    for pixels in images:
        image = Image.fromarray(pixels)
        for _ in range(2):
            image = draws.choice(PILLOW)(image, draws.choice((-STRENGTH, STRENGTH)))
        augmented.append(np.asarray(image))
    return torch.from_numpy(np.stack(augmented)).permute(0, 3, 1, 2).float().div_(255).contiguous()


def milliseconds(run: Callable[[], object]) -> float:
    """Processor time of this thread in milliseconds, so that other programs matter as little as possible."""
    start = time.thread_time()
    run()
    return (time.thread_time() - start) * 1000


def main() -> None:
    torch.set_num_threads(1)
    generator, draws = torch.Generator().manual_seed(0), random.Random(0)
    for side, batch in CASES:
        x = torch.rand(batch, 3, side, side, generator=generator)
        images = (x * 255).to(torch.uint8).permute(0, 2, 3, 1).contiguous().numpy()
        ours, theirs = [], []
        for _ in range(REPEATS):  # alternating, so that other load affects both alike
            ours.append(milliseconds(lambda x=x: rand_augment(x, generator)) / batch)
            theirs.append(milliseconds(lambda images=images: pillow_loop(images, draws)) / batch)
        ours_median, theirs_median = float(np.median(ours)), float(np.median(theirs))
        print(
            f"{side:4d} px, batch {batch}: ours {ours_median:.3f} ms per image, "
            f"Pillow loop {theirs_median:.3f} ms, ratio {ours_median / theirs_median:.2f}"
        )


if __name__ == "__main__":
    main()
