"""Spectra of images: low-frequency amplitudes hold the look of an image, phases its content."""

from __future__ import annotations

import math

import torch
from torch import Tensor


def window_radius(height: int, width: int, share: float) -> int:
    """Frequencies in a window to either side of 0: `share` of the shorter image side. 0 is the mean alone."""
    return math.floor(share * min(height, width))


def low_amplitudes(images: Tensor, radius: int) -> Tensor:
    """Amplitudes of the frequencies -radius..radius of images `(B, C, H, W)`, as `(B, C, 2r+1, 2r+1)`.

    Frequency 0, the sum over the image, is in the middle.
    """
    spectrum = torch.fft.fft2(images)
    rows, columns = _window(spectrum, radius)
    low: Tensor = spectrum[..., rows, columns]
    return low.abs()


def interpolate_low_amplitudes(images: Tensor, amplitudes: Tensor, ratio: Tensor) -> Tensor:
    """Images whose low-frequency amplitudes are (1 - ratio) of their own and ratio of the given ones.

    `images` `(B, C, H, W)`, `amplitudes` `(B, C, 2r+1, 2r+1)` as from `low_amplitudes`, `ratio` `(B,)` in [0, 1].
    All phases and the amplitudes outside the window stay. The result may leave the range of the images.
    """
    spectrum = torch.fft.fft2(images)
    rows, columns = _window(spectrum, amplitudes.shape[-1] // 2)
    low = spectrum[..., rows, columns]
    ratio = ratio.reshape(-1, 1, 1, 1)
    mixed = (1 - ratio) * low.abs() + ratio * amplitudes
    spectrum[..., rows, columns] = torch.polar(mixed, low.angle())
    # The spectrum of a real image is symmetric: there is no imaginary part to lose unless the amplitudes are not.
    changed: Tensor = torch.fft.ifft2(spectrum).real
    return changed


def _window(spectrum: Tensor, radius: int) -> tuple[Tensor, Tensor]:
    """Row and column numbers of the frequencies -radius..radius in a spectrum `(..., H, W)`; negative ones are last."""
    height, width = spectrum.shape[-2:]
    if 2 * radius + 1 > min(height, width):
        raise ValueError(f"a window of radius {radius} does not fit into a spectrum of {height}x{width}")
    around = torch.arange(-radius, radius + 1, device=spectrum.device)
    return (around % height)[:, None], (around % width)[None, :]
