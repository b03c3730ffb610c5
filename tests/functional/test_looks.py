"""Random looks against numbers worked out by hand, and against one image at a time."""

from __future__ import annotations

import pytest
import torch

from fedshift.functional.looks import filtered, random_looks
from fedshift.functional.norms import standardised


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def test_each_image_meets_its_own_filter() -> None:
    """Two images of one channel: the first filter takes the pixel to the right, the second doubles the pixel itself."""
    images = torch.tensor([[[[1.0, 2.0], [3.0, 4.0]]], [[[5.0, 6.0], [7.0, 8.0]]]])
    filters = torch.zeros(2, 1, 3, 3)
    filters[0, 0, 1, 2] = 1
    filters[1, 0, 1, 1] = 2
    found = filtered(images, filters)
    assert found[0, 0].tolist() == [[2.0, 2.0], [4.0, 4.0]]  # Beyond the edge the edge goes on.
    assert found[1, 0].tolist() == [[10.0, 12.0], [14.0, 16.0]]


def test_channels_are_mixed() -> None:
    images = torch.tensor([1.0, 10.0, 100.0]).view(1, 3, 1, 1).expand(1, 3, 4, 4)
    filters = torch.zeros(3, 3, 3, 3)
    filters[0, :, 1, 1] = torch.tensor([1.0, 1.0, 1.0])
    filters[1, :, 1, 1] = torch.tensor([0.0, 0.0, 2.0])
    found = filtered(images, filters)
    assert found[0, :, 2, 2].tolist() == [111.0, 200.0, 0.0]


def test_standardised_by_hand() -> None:
    """Mean 2, variance 1; a flat channel has no variance."""
    channels = torch.tensor([[1.0, 3.0], [5.0, 5.0]]).view(1, 2, 1, 2)
    found = standardised(channels).view(2, 2)
    assert found[0].tolist() == pytest.approx([-1.0, 1.0], abs=1e-4)
    assert found[1].tolist() == [0.0, 0.0]


def test_looks_are_images_again_and_differ_from_each_other() -> None:
    x = torch.rand(1, 3, 12, 12, generator=generator()).expand(6, 3, 12, 12)
    looks = random_looks(x, generator(1), depth=3, spread=0.5)
    assert looks.shape == x.shape and float(looks.min()) >= 0 and float(looks.max()) <= 1
    assert len({round(float(look.mean()), 5) for look in looks}) == 6
    assert torch.equal(looks, random_looks(x, generator(1), depth=3, spread=0.5))


def test_the_same_look_of_two_images_depends_on_nothing_but_the_image() -> None:
    """No image knows of the others in its batch."""
    x = torch.rand(4, 3, 8, 8, generator=generator())
    other = x.clone()
    other[1:] = torch.rand(3, 3, 8, 8, generator=generator(5))
    one, two = (random_looks(images, generator(1), depth=2, spread=0.5) for images in (x, other))
    assert torch.allclose(one[0], two[0], atol=1e-6) and not torch.allclose(one[1], two[1], atol=1e-3)


def test_shapes_stay() -> None:
    """Where an image is flat its look is flat too, away from edges: content stays where it was."""
    x = torch.zeros(8, 3, 16, 16)
    x[..., 8:] = 1
    looks = random_looks(x, generator(2), depth=1, spread=0.5)
    left, right = looks[..., :6], looks[..., 10:]
    assert float((left - left[..., :1]).abs().max()) < 1e-5
    assert float((right - right[..., -1:]).abs().max()) < 1e-5
    assert float((left.mean((2, 3)) - right.mean((2, 3))).abs().mean()) > 0.1
