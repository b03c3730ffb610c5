"""The spectrum against a slow NumPy twin and numbers computed by hand."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor

from fedshift.functional.spectrum import interpolate_low_amplitudes, low_amplitudes, window_radius


def images(count: int = 2, height: int = 8, width: int = 8, seed: int = 0) -> Tensor:
    return torch.rand(count, 3, height, width, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def transform(plane: np.ndarray, u: int, v: int) -> complex:
    """One coefficient of the discrete Fourier transform, as its definition says."""
    height, width = plane.shape
    total = 0j
    for y in range(height):
        for x in range(width):
            total += plane[y, x] * np.exp(-2j * np.pi * (u * y / height + v * x / width))
    return total


def interpolated_slowly(plane: np.ndarray, other: np.ndarray, radius: int, ratio: float) -> np.ndarray:
    """One channel: every coefficient, then every pixel, in plain loops."""
    height, width = plane.shape
    result = np.zeros((height, width), dtype=complex)
    for u in range(-(height // 2), height - height // 2):
        for v in range(-(width // 2), width - width // 2):
            own = transform(plane, u, v)
            amplitude, phase = abs(own), np.angle(own)
            if abs(u) <= radius and abs(v) <= radius:
                amplitude = (1 - ratio) * amplitude + ratio * abs(transform(other, u, v))
            for y in range(height):
                for x in range(width):
                    wave = np.exp(2j * np.pi * (u * y / height + v * x / width))
                    result[y, x] += amplitude * np.exp(1j * phase) * wave / (height * width)
    return result.real


@pytest.mark.parametrize(("share", "radius"), [(0.01, 0), (0.1, 3), (0.49, 15)])
def test_the_window_is_a_share_of_the_shorter_side(share: float, radius: int) -> None:
    assert window_radius(48, 32, share) == radius
    assert low_amplitudes(images(1, 48, 32), radius).shape == (1, 3, 2 * radius + 1, 2 * radius + 1)


def test_the_paper_window_on_its_own_images_is_seven_wide() -> None:
    assert 2 * window_radius(384, 384, 0.01) + 1 == 7


def test_the_middle_is_the_sum_over_the_image() -> None:
    x = images()
    torch.testing.assert_close(low_amplitudes(x, 2)[..., 2, 2], x.sum((2, 3)))


def test_amplitudes_of_a_cosine() -> None:
    """1 + cos(2 pi x / 8) on 4x8 pixels: 32 at frequency 0, 16 at (0, +-1), nothing elsewhere."""
    x = (1 + torch.cos(2 * torch.pi * torch.arange(8, dtype=torch.float64) / 8)).expand(1, 1, 4, 8)
    expected = torch.tensor([[0.0, 0.0, 0.0], [16.0, 32.0, 16.0], [0.0, 0.0, 0.0]], dtype=torch.float64)
    torch.testing.assert_close(low_amplitudes(x, 1)[0, 0], expected)


def test_amplitudes_match_the_definition() -> None:
    x = images(1, 5, 6)
    found = low_amplitudes(x, 2)[0]
    for channel in range(3):
        for u in range(-2, 3):
            for v in range(-2, 3):
                expected = abs(transform(x[0, channel].numpy(), u, v))
                assert found[channel, u + 2, v + 2].item() == pytest.approx(expected, abs=1e-9)


@pytest.mark.parametrize(("height", "width", "radius"), [(6, 6, 0), (5, 7, 2), (8, 6, 1)])
def test_interpolation_matches_the_slow_twin(height: int, width: int, radius: int) -> None:
    x, other, ratio = images(2, height, width), images(2, height, width, seed=1), torch.tensor([0.3, 0.8])
    found = interpolate_low_amplitudes(x, low_amplitudes(other, radius), ratio.double())
    for sample in range(2):
        for channel in range(3):
            plane, foreign = x[sample, channel].numpy(), other[sample, channel].numpy()
            slow = interpolated_slowly(plane, foreign, radius, float(ratio[sample]))
            np.testing.assert_allclose(found[sample, channel].numpy(), slow, atol=1e-6)


def test_ratio_0_and_own_amplitudes_change_nothing() -> None:
    x, other = images(), images(seed=1)
    torch.testing.assert_close(interpolate_low_amplitudes(x, low_amplitudes(other, 2), torch.zeros(2)), x)
    torch.testing.assert_close(interpolate_low_amplitudes(x, low_amplitudes(x, 2), torch.tensor([0.4, 1.0])), x)


def test_ratio_1_takes_the_others_amplitudes_and_keeps_every_phase() -> None:
    x, other = images(), images(seed=1)
    found = interpolate_low_amplitudes(x, low_amplitudes(other, 2), torch.ones(2))
    torch.testing.assert_close(low_amplitudes(found, 2), low_amplitudes(other, 2))
    before, after = torch.fft.fft2(x), torch.fft.fft2(found)
    torch.testing.assert_close(after / after.abs(), before / before.abs())
    outside = torch.ones(8, 8, dtype=torch.bool)
    low = torch.arange(-2, 3) % 8
    outside[low[:, None], low[None, :]] = False
    torch.testing.assert_close(after[..., outside], before[..., outside])
    assert not torch.allclose(found, x, atol=0.01)


def test_radius_0_moves_the_mean_alone() -> None:
    x, other = images(), images(seed=1)
    found = interpolate_low_amplitudes(x, low_amplitudes(other, 0), torch.tensor([0.25, 1.0]))
    share = torch.tensor([0.25, 1.0], dtype=torch.float64)[:, None, None, None]
    means, others = x.mean((2, 3), keepdim=True), other.mean((2, 3), keepdim=True)
    torch.testing.assert_close(found, x + share * (others - means))


def test_inputs_are_left_as_they_were() -> None:
    x = images()
    before = x.clone()
    interpolate_low_amplitudes(x, low_amplitudes(images(seed=1), 1), torch.ones(2))
    assert torch.equal(x, before)


def test_a_window_larger_than_the_image_is_refused() -> None:
    with pytest.raises(ValueError, match="radius 4 does not fit into a spectrum of 8x8"):
        low_amplitudes(images(), 4)
