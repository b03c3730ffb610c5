"""Augmentation of whole batches: floats `(B, 3, H, W)` in [0, 1] in, a new tensor of that shape out.

Every sample draws its own numbers from the given generator; there is no loop over samples.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import torch
from torch import Tensor

from fedshift.data.randaugment import rand_augment
from fedshift.errors import InputError, nearest

__all__ = [
    "STEPS",
    "Augment",
    "PairAugment",
    "build_augment",
    "build_pair_augment",
    "color_jitter",
    "cutout",
    "mixup",
    "rand_augment",
    "random_crop",
    "random_crop_pair",
    "random_flip",
    "random_flip_pair",
    "random_grey",
    "resized_crop",
    "resized_crop_pair",
]

Augment = Callable[[Tensor, torch.Generator], Tensor]
PairAugment = Callable[[Tensor, Tensor, torch.Generator], tuple[Tensor, Tensor]]

GREY = 0.5

LUMA = (0.299, 0.587, 0.114)
"""Shares of red, green and blue in the brightness of a pixel (ITU-R 601-2)."""

WIDEST = 4 / 3
"""Sides of a resized crop are stretched against each other by up to this factor, as usual for photographs."""


def random_crop(x: Tensor, padding: int, generator: torch.Generator) -> Tensor:
    """Moves each image by up to `padding` pixels in both directions; pixels from outside are mirrored."""
    return _pick_pixels(x, _crop_index(x, padding, generator))


def random_crop_pair(x: Tensor, mask: Tensor, padding: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """The same `random_crop` for images and their masks `(B, H, W)`. Mirrored pixels keep their true labels."""
    _require_mask(x, mask)
    index = _crop_index(x, padding, generator)
    return _pick_pixels(x, index), _pick_pixels(mask[:, None], index)[:, 0]


def resized_crop(x: Tensor, smallest: float, generator: torch.Generator) -> Tensor:
    """Each image becomes a random rectangle of itself, with a share of its area from `smallest` to 1, scaled back to
    the whole size by linear interpolation."""
    return _interpolate(x, *_crop_positions(x, smallest, generator))


def resized_crop_pair(x: Tensor, mask: Tensor, smallest: float, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """The same `resized_crop` for images and their masks `(B, H, W)`. A pixel of the mask has the label of the nearest
    one, since labels cannot be mixed."""
    _require_mask(x, mask)
    rows, columns = _crop_positions(x, smallest, generator)
    index = rows.round().long()[:, :, None] * x.shape[3] + columns.round().long()[:, None, :]
    return _interpolate(x, rows, columns), _pick_pixels(mask[:, None], index.flatten(start_dim=1))[:, 0]


def random_flip(x: Tensor, generator: torch.Generator) -> Tensor:
    """Mirrors each image left to right with probability 1/2."""
    return _flip(x, _coin(len(x), generator))


def random_flip_pair(x: Tensor, mask: Tensor, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """The same `random_flip` for images and their masks `(B, H, W)`."""
    _require_mask(x, mask)
    flipped = _coin(len(x), generator)
    return _flip(x, flipped), _flip(mask, flipped)


def color_jitter(x: Tensor, strength: float, generator: torch.Generator) -> Tensor:
    """Multiplies each image's brightness, contrast and saturation by factors from 1 - `strength` to 1 + `strength`.

    DIFFERS: torchvision's ColorJitter applies them in random order and clips after each. Here it is always this order,
    clipped once, which makes all of it one matrix per image. Hue stays.
    """
    if not 0 <= strength <= 1:
        raise ValueError(f"colour jitter needs a strength from 0 to 1, not {strength}")
    drawn = torch.rand(3, len(x), 1, 1, generator=generator, dtype=x.dtype)
    brightness, contrast, saturation = 1 + strength * (2 * drawn - 1)
    luma = torch.tensor(LUMA, dtype=x.dtype)
    pixels = x.flatten(start_dim=2)
    mean = brightness * (pixels.mean(dim=2) @ luma)[:, None, None]
    # The image away from its mean grey, then each pixel away from its own grey (mean and grey of a grey pixel are one).
    matrix = brightness * contrast * (saturation * torch.eye(3, dtype=x.dtype) + (1 - saturation) * luma)
    return torch.baddbmm((1 - contrast) * mean, matrix, pixels).clamp_(0, 1).reshape(x.shape)


def random_grey(x: Tensor, probability: float, generator: torch.Generator) -> Tensor:
    """Makes each image grey with this probability: all channels have its brightness."""
    chosen = (torch.rand(len(x), generator=generator) < probability).nonzero().squeeze(1)
    result = x.clone()
    result[chosen] = torch.einsum("bchw,c->bhw", x[chosen], torch.tensor(LUMA, dtype=x.dtype))[:, None]
    return result.clamp_(0, 1)


def cutout(x: Tensor, size: int, generator: torch.Generator) -> Tensor:
    """Paints a square of `size` x `size` pixels grey (DeVries and Taylor: Cutout, 2017).

    Its centre is any pixel of the image, so it may reach over the edge, which leaves a smaller hole.
    """
    rows = _square_side(len(x), x.shape[2], size, generator)
    columns = _square_side(len(x), x.shape[3], size, generator)
    hole = (rows[:, None, :, None] & columns[:, None, None, :]).to(x.dtype)
    # Arithmetic with exact zeros and ones: torch fills through a broadcast mask at a tenth of this speed.
    return (x * (1 - hole)).add_(hole * GREY)


def mixup(
    x: Tensor, p: Tensor, alpha: float, generator: torch.Generator, *, per_batch: bool = False
) -> tuple[Tensor, Tensor, Tensor]:
    """lam x + (1 - lam) x', lam p + (1 - lam) p' and lam, (x', p') being another sample of the batch (Zhang et al.:
    mixup, ICLR 2018).

    `p` is `(B, ...)`: probabilities, or anything else to mix in the same way; it may be on another device than x. lam
    `(B,)` is drawn from Beta(alpha, alpha), for each sample or, with `per_batch`, once for all.
    """
    if alpha <= 0:
        raise ValueError(f"mixup needs an alpha above 0, not {alpha}")
    if len(p) != len(x):
        raise ValueError(f"mixup got {len(x)} samples but {len(p)} targets")
    # torch cannot draw from Beta with an explicit generator, so it seeds one of numpy's.
    seed = int(torch.randint(2**63 - 1, (), generator=generator))
    drawn = np.random.default_rng(seed).beta(alpha, alpha, size=1 if per_batch else len(x))
    lam = torch.from_numpy(drawn).to(x.dtype).expand(len(x))
    partner = torch.randperm(len(x), generator=generator)
    return _mix(x, partner, lam), _mix(p, partner, lam), lam


def _mix(values: Tensor, partner: Tensor, lam: Tensor) -> Tensor:
    weight = lam.to(values).reshape(-1, *[1] * (values.ndim - 1))
    return torch.lerp(values.index_select(0, partner.to(values.device)), values, weight)


def _crop_index(x: Tensor, padding: int, generator: torch.Generator) -> Tensor:
    """The source of every pixel, `(B, H * W)`, as positions in the flattened image."""
    batch, _, height, width = x.shape
    if not 0 <= padding < min(height, width):
        raise ValueError(f"a crop of {height} x {width} images cannot be padded by {padding} pixels")
    shift = torch.randint(-padding, padding + 1, (2, batch, 1), generator=generator)
    rows = _mirror(torch.arange(height) + shift[0], height)
    columns = _mirror(torch.arange(width) + shift[1], width)
    return (rows[:, :, None] * width + columns[:, None, :]).flatten(start_dim=1)


def _crop_positions(x: Tensor, smallest: float, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """For random rectangles of the images, the row `(B, H)` and the column `(B, W)` of each pixel's source. Between
    two pixels they have fractions."""
    if not 0 < smallest <= 1:
        raise ValueError(f"a crop has a share of the area above 0 and up to 1, not {smallest}")
    area, stretch, down, right = torch.rand(4, len(x), 1, generator=generator, dtype=torch.float64)
    area = smallest + (1 - smallest) * area
    # DIFFERS: torchvision draws again until a rectangle fits, which favours small ones. Here the stretch is drawn from
    # those that fit, so all areas are equally likely. It is relative to the shape of the image.
    widest = (1 / area).clamp(max=WIDEST)
    stretch = widest ** (2 * stretch - 1)
    sides = (area / stretch).sqrt().clamp(max=1), (area * stretch).sqrt().clamp(max=1)
    rows = _positions(x.shape[2], sides[0], down)
    columns = _positions(x.shape[3], sides[1], right)
    return rows.to(x.dtype), columns.to(x.dtype)


def _positions(length: int, side: Tensor, place: Tensor) -> Tensor:
    """`length` positions spread evenly over a window that is `side` of the length, at `place` of the free space."""
    start = place * length * (1 - side)
    # Pixel i reaches from i to i + 1; its centre is at i + 1/2.
    return (start + (torch.arange(length) + 0.5) * side - 0.5).clamp(0, length - 1)


def _interpolate(x: Tensor, rows: Tensor, columns: Tensor) -> Tensor:
    """Values of `(B, C, H, W)` at fractional `rows` `(B, H)` and `columns` `(B, W)`."""
    down, across = _hats(rows), _hats(columns)
    # Two products of matrices per channel: at these sizes faster than fetching four neighbours of every pixel.
    return (down[:, None] @ x @ across[:, None].mT).clamp_(0, 1)


def _hats(position: Tensor) -> Tensor:
    """Weights `(B, L, L)` of the pixels in linear interpolation at `position` `(B, L)`: 1 at a pixel, 0 at the next."""
    distance = position[:, :, None] - torch.arange(position.shape[1])
    return (1 - distance.abs_()).clamp_(min=0)


def _mirror(position: Tensor, length: int) -> Tensor:
    """Reflect positions up to one `length` outside 0..length-1 back inside, without repeating the edge."""
    return (length - 1) - ((length - 1) - position.abs()).abs()


def _pick_pixels(values: Tensor, index: Tensor) -> Tensor:
    """Pixels of `(B, C, H, W)` at `index` `(B, H * W)`."""
    channels = values.shape[1]
    return values.flatten(start_dim=2).gather(2, index[:, None].expand(-1, channels, -1)).reshape(values.shape)


def _coin(batch: int, generator: torch.Generator) -> Tensor:
    """The numbers of a random half of the samples."""
    return torch.randint(2, (batch,), generator=generator).nonzero().squeeze(1)


def _flip(values: Tensor, samples: Tensor) -> Tensor:
    result = values.clone()
    result[samples] = values[samples].flip(-1)
    return result


def _square_side(batch: int, length: int, size: int, generator: torch.Generator) -> Tensor:
    """Which of `length` positions lie within `size` positions around a random one, `(B, length)` bool."""
    start = torch.randint(length, (batch, 1), generator=generator) - size // 2
    position = torch.arange(length)
    return (position >= start) & (position < start + size)


def _require_mask(x: Tensor, mask: Tensor) -> None:
    if mask.shape != (x.shape[0], *x.shape[2:]):
        raise ValueError(f"masks of shape {tuple(mask.shape)} do not belong to images {tuple(x.shape)}")


def _side(x: Tensor) -> int:
    return min(x.shape[2:])


def _standard(x: Tensor, mask: Tensor, generator: torch.Generator, *, flips: bool) -> tuple[Tensor, Tensor]:
    """What networks for photographs are usually trained with: crops, flips, and changes of colour."""
    x, mask = resized_crop_pair(x, mask, 0.8, generator)
    if flips:
        x, mask = random_flip_pair(x, mask, generator)
    return random_grey(color_jitter(x, 0.4, generator), 0.1, generator), mask


PAIR_STEPS: dict[str, PairAugment] = {
    "crop": lambda x, mask, generator: random_crop_pair(x, mask, _side(x) // 8, generator),
    "flip": random_flip_pair,
    "resized-crop": lambda x, mask, generator: resized_crop_pair(x, mask, 0.75, generator),
    "jitter": lambda x, mask, generator: (color_jitter(x, 0.4, generator), mask),
    "grey": lambda x, mask, generator: (random_grey(x, 0.1, generator), mask),
    "standard": lambda x, mask, generator: _standard(x, mask, generator, flips=True),
    "standard-unflipped": lambda x, mask, generator: _standard(x, mask, generator, flips=False),
}
"""The augmentations that can move a mask along with its image, by the name a configuration uses, sized to the image."""


def _of_images(step: PairAugment) -> Augment:
    """A step for images without masks."""
    return lambda x, generator: step(x, x[:, 0], generator)[0]


STEPS: dict[str, Augment] = {
    **{name: _of_images(step) for name, step in PAIR_STEPS.items()},
    "randaugment": rand_augment,
    "cutout": lambda x, generator: cutout(x, _side(x) // 2, generator),
}
"""All augmentations by the name a configuration uses."""


def build_augment(names: Sequence[str]) -> Augment:
    """The named augmentations one after the other, in the order given; without any, the batch does not change."""
    for name in names:
        if name not in STEPS:
            raise InputError("config-value", f"There is no augmentation {name!r}. {nearest(name, STEPS)}")
    steps = [STEPS[name] for name in names]

    def augment(x: Tensor, generator: torch.Generator) -> Tensor:
        for step in steps:
            x = step(x, generator)
        return x

    return augment


def build_pair_augment(names: Sequence[str]) -> PairAugment:
    """The named augmentations for images and their masks."""
    for name in names:
        if name not in PAIR_STEPS:
            known = ", ".join(sorted(PAIR_STEPS))
            raise InputError("config-value", f"augment: {name!r} cannot be used with masks; {known} can.")
    steps = [PAIR_STEPS[name] for name in names]

    def augment(x: Tensor, mask: Tensor, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        for step in steps:
            x, mask = step(x, mask, generator)
        return x, mask

    return augment
