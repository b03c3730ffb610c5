from __future__ import annotations

import typing
from collections.abc import Callable

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image, ImageEnhance, ImageOps
from torch import Tensor

from fedshift.data.augment import (
    STEPS,
    build_augment,
    build_pair_augment,
    color_jitter,
    cutout,
    mixup,
    rand_augment,
    random_crop,
    random_crop_pair,
    random_flip,
    random_flip_pair,
    random_grey,
    resized_crop,
    resized_crop_pair,
)
from fedshift.data.randaugment import OPERATIONS, apply_operations
from fedshift.errors import InputError
from fedshift.runs.config import RunConfig

GREY = (128, 128, 128)


def seeded(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def pictures(count: int, height: int, width: int, seed: int = 0) -> np.ndarray:
    """Smooth blobs of different exposure with some grain, `(B, 3, H, W)` uint8: every operation changes them."""
    generator = seeded(seed)
    coarse = torch.rand(count, 3, 4, 4, generator=generator)
    smooth = torch.nn.functional.interpolate(coarse, size=(height, width), mode="bilinear")
    exposure = torch.rand(count, 1, 1, 1, generator=generator)
    grain = torch.rand(count, 3, height, width, generator=generator) * 0.2
    return ((smooth * exposure + grain).clamp(0, 1) * 255).to(torch.uint8).numpy()


def as_floats(levels: np.ndarray) -> Tensor:
    return torch.from_numpy(levels).float() / 255


# --- RandAugment against Pillow ---------------------------------------------------------------------------------


def affine(image: Image.Image, *matrix: float) -> Image.Image:
    return image.transform(image.size, Image.Transform.AFFINE, matrix, fillcolor=GREY)


PILLOW: dict[str, Callable[[Image.Image, float], Image.Image]] = {
    "identity": lambda image, s: image,
    "autocontrast": lambda image, s: ImageOps.autocontrast(image),
    "equalize": lambda image, s: ImageOps.equalize(image),
    "solarize": lambda image, s: ImageOps.solarize(image, round(256 * (1 - abs(s)))),
    "posterize": lambda image, s: ImageOps.posterize(image, 8 - round(4 * abs(s))),
    "brightness": lambda image, s: ImageEnhance.Brightness(image).enhance(1 + 0.9 * s),
    "contrast": lambda image, s: ImageEnhance.Contrast(image).enhance(1 + 0.9 * s),
    "color": lambda image, s: ImageEnhance.Color(image).enhance(1 + 0.9 * s),
    "sharpness": lambda image, s: ImageEnhance.Sharpness(image).enhance(1 + 0.9 * s),
    "rotate": lambda image, s: image.rotate(30 * s, fillcolor=GREY),
    "shear-x": lambda image, s: affine(image, 1, 0.3 * s, 0, 0, 1, 0),
    "shear-y": lambda image, s: affine(image, 1, 0, 0, 0.3 * s, 1, 0),
    "translate-x": lambda image, s: affine(image, 1, 0, s * image.width * 150 / 331, 0, 1, 0),
    "translate-y": lambda image, s: affine(image, 1, 0, 0, 0, 1, s * image.height * 150 / 331),
}


def with_pillow(levels: np.ndarray, name: str, strength: float) -> np.ndarray:
    """One sample `(3, H, W)` through Pillow."""
    image = Image.fromarray(np.ascontiguousarray(levels.transpose(1, 2, 0)))
    return np.asarray(PILLOW[name](image, strength)).transpose(2, 0, 1)


def test_the_operations_are_the_papers_fourteen() -> None:
    assert len(OPERATIONS) == 14
    assert set(OPERATIONS) == set(PILLOW)


@pytest.mark.parametrize("size", [(32, 32), (48, 21), (7, 30), (2, 5)])
@pytest.mark.parametrize("name", OPERATIONS)
def test_operation_equals_pillows_to_the_last_level(name: str, size: tuple[int, int]) -> None:
    """Tolerance: none. All 8-bit levels are equal, also of the pixels that come from outside."""
    strengths = np.array([-1.0, -0.9, -0.73, -0.5, -0.1, 0.0, 0.2, 0.37, 0.5, 0.64, 0.9, 1.0])
    levels = pictures(len(strengths), *size)
    ours = apply_operations(levels, np.full(len(strengths), OPERATIONS.index(name)), strengths)
    theirs = np.stack([with_pillow(*pair) for pair in zip(levels, [name] * len(strengths), strengths, strict=True)])
    np.testing.assert_array_equal(ours, theirs)


@pytest.mark.parametrize("name", OPERATIONS)
def test_operation_on_extreme_images_equals_pillows(name: str) -> None:
    """One level only, two levels, a single bright pixel, all levels alike, saturated noise."""
    levels = np.zeros((6, 3, 16, 16), dtype=np.uint8)
    levels[1] = 255
    levels[2, :, :8] = 200
    levels[3, 0, 5, 5] = 255
    levels[4] = np.arange(256).reshape(16, 16)
    levels[5] = np.random.default_rng(0).choice([0, 255], (3, 16, 16))
    ours = apply_operations(levels, np.full(6, OPERATIONS.index(name)), np.full(6, 0.9))
    np.testing.assert_array_equal(ours, np.stack([with_pillow(sample, name, 0.9) for sample in levels]))


def test_every_operation_changes_the_pictures_it_is_tested_on() -> None:
    levels = pictures(len(OPERATIONS), 32, 32)
    changed = apply_operations(levels, np.arange(len(OPERATIONS)), np.full(len(OPERATIONS), 0.9))
    share = (changed != levels).mean(axis=(1, 2, 3))
    assert share[0] == 0
    assert (share[1:] > 0.2).all()


def test_hand_computed_levels() -> None:
    row = np.array([0, 10, 25, 26, 200, 255], dtype=np.uint8)
    image = np.broadcast_to(row, (1, 3, 1, 6))

    def result(name: str, strength: float) -> list[int]:
        return apply_operations(image, np.array([OPERATIONS.index(name)]), np.array([strength]))[0, 1, 0].tolist()

    assert result("solarize", 0.9) == [0, 10, 25, 229, 55, 0]  # threshold 26
    assert result("posterize", 0.9) == [0, 0, 16, 16, 192, 240]  # four bits lost
    assert result("brightness", 0.5) == [0, 14, 36, 37, 255, 255]  # times 1.45
    assert result("contrast", -1.0) == [77, 78, 79, 80, 97, 102]  # mean 86: 86 + 0.1 (v - 86), rounded down
    assert result("translate-x", 1.0) == [26, 200, 255, 128, 128, 128]  # by 2.72, nearest pixel: 3


def test_mixed_batch_equals_one_sample_at_a_time_through_pillow() -> None:
    levels = pictures(70, 24, 24)
    result = rand_augment(as_floats(levels), seeded(5), ops=3, magnitude=7)
    generator = seeded(5)
    expected = list(levels)
    for _ in range(3):
        choice = torch.randint(14, (70,), generator=generator).tolist()
        sign = (torch.randint(2, (70,), generator=generator) * 2 - 1).tolist()
        assert len(set(choice)) == 14
        expected = [with_pillow(v, OPERATIONS[c], 0.7 * s) for v, c, s in zip(expected, choice, sign, strict=True)]
    assert torch.equal((result * 255).round(), torch.from_numpy(np.stack(expected)).float())


def test_samples_draw_their_own_operations() -> None:
    same = np.repeat(pictures(1, 16, 16), 64, axis=0)
    augmented = rand_augment(as_floats(same), seeded())
    assert len(torch.unique(augmented.flatten(start_dim=1), dim=0)) > 40


def test_magnitude_zero_leaves_all_but_the_histogram_operations_as_they_are() -> None:
    levels = pictures(14, 16, 16)
    result = apply_operations(levels, np.arange(14), np.zeros(14))
    different = [OPERATIONS[i] for i in range(14) if not np.array_equal(result[i], levels[i])]
    assert different == ["autocontrast", "equalize"]


def test_magnitudes_can_be_drawn_for_each_operation(monkeypatch: pytest.MonkeyPatch) -> None:
    """Uniform from 0 to the given one, in both directions; without draws the numbers are those of before."""
    seen: list[np.ndarray] = []

    def note(levels: np.ndarray, choice: np.ndarray, strength: np.ndarray) -> np.ndarray:
        seen.append(strength)
        return levels

    monkeypatch.setattr("fedshift.data.randaugment.apply_operations", note)
    x = torch.zeros(4000, 3, 2, 2)
    rand_augment(x, seeded(), ops=2, magnitude=6)
    assert all(set(np.abs(strength)) == {0.6} for strength in seen)
    seen.clear()
    rand_augment(x, seeded(), ops=2, magnitude=6, draw="uniform")
    first, second = seen
    for strength in seen:
        assert strength.shape == (4000,) and np.abs(strength).max() <= 0.6
        assert np.quantile(np.abs(strength), [0.25, 0.5, 0.75]) == pytest.approx([0.15, 0.3, 0.45], abs=0.02)
        assert (strength > 0).mean() == pytest.approx(0.5, abs=0.04)
    assert abs(np.corrcoef(np.abs(first), np.abs(second))[0, 1]) < 0.06


@pytest.mark.parametrize("magnitude", [-1, 10.5, float("nan")])
def test_magnitude_off_the_scale_is_refused(magnitude: float) -> None:
    with pytest.raises(ValueError, match=r"outside 0\.\.10"):
        rand_augment(torch.zeros(1, 3, 4, 4), seeded(), magnitude=magnitude)


def test_no_operation_returns_the_levels_themselves() -> None:
    levels = pictures(4, 8, 8)
    assert torch.equal(
        (rand_augment(as_floats(levels), seeded(), ops=0) * 255).round(), torch.from_numpy(levels).float()
    )


def test_memory_layout_and_precision_do_not_matter() -> None:
    x = as_floats(pictures(16, 16, 16))
    plain = rand_augment(x, seeded())
    assert torch.equal(rand_augment(x.to(memory_format=torch.channels_last), seeded()), plain)
    double = rand_augment(x.double(), seeded())
    assert double.dtype == torch.float64
    torch.testing.assert_close(double.float(), plain)


def test_values_outside_the_range_are_clipped_not_wrapped() -> None:
    x = torch.full((1, 3, 4, 4), 1.5)
    x[..., :2] = -0.5
    result = rand_augment(x, seeded(), ops=0)
    assert torch.equal(result, x.clamp(0, 1))


@settings(deadline=None, max_examples=30)
@given(
    height=st.integers(1, 20),
    width=st.integers(1, 20),
    batch=st.integers(1, 6),
    magnitude=st.integers(0, 10),
    seed=st.integers(0, 1000),
)
def test_any_shape_stays_in_range(height: int, width: int, batch: int, magnitude: int, seed: int) -> None:
    x = torch.rand(batch, 3, height, width, generator=seeded(seed))
    result = rand_augment(x, seeded(seed), magnitude=magnitude)
    assert result.shape == x.shape
    assert 0 <= float(result.min()) <= float(result.max()) <= 1


# --- Crop, flip, cutout, mixup ----------------------------------------------------------------------------------


def test_crop_equals_cutting_from_a_mirrored_border() -> None:
    x = torch.rand(12, 3, 9, 7, generator=seeded())
    shift = torch.randint(-3, 4, (2, 12, 1), generator=seeded(1)).squeeze(2)
    padded = torch.nn.functional.pad(x, (3, 3, 3, 3), mode="reflect")
    expected = [
        padded[i, :, 3 + down : 3 + down + 9, 3 + right : 3 + right + 7]
        for i, (down, right) in enumerate(shift.T.tolist())
    ]
    assert torch.equal(random_crop(x, 3, seeded(1)), torch.stack(expected))


def test_crop_without_padding_changes_nothing() -> None:
    x = torch.rand(2, 3, 5, 5, generator=seeded())
    assert torch.equal(random_crop(x, 0, seeded()), x)


@pytest.mark.parametrize("padding", [-1, 5])
def test_crop_refuses_padding_it_cannot_mirror(padding: int) -> None:
    with pytest.raises(ValueError, match="cannot be padded"):
        random_crop(torch.zeros(2, 3, 5, 8), padding, seeded())


def test_flip_mirrors_about_half_of_the_samples_whole() -> None:
    x = torch.rand(400, 3, 2, 3, generator=seeded())
    result = random_flip(x, seeded())
    kept = (result == x).flatten(start_dim=1).all(dim=1)
    mirrored = (result == x.flip(3)).flatten(start_dim=1).all(dim=1)
    assert bool((kept ^ mirrored).all())
    assert 150 < int(mirrored.sum()) < 250


def test_pairs_move_together() -> None:
    mask = torch.randint(0, 256, (30, 16, 12), generator=seeded(), dtype=torch.uint8)
    x = mask[:, None].expand(-1, 3, -1, -1).float() / 255
    for image, labels in (random_flip_pair(x, mask, seeded(1)), random_crop_pair(x, mask, 4, seeded(1))):
        assert labels.dtype == torch.uint8
        assert not torch.equal(labels, mask)
        assert torch.equal((image[:, 2] * 255).round().to(torch.uint8), labels)


def test_pairs_draw_what_the_image_alone_draws() -> None:
    x, mask = torch.rand(8, 3, 16, 16, generator=seeded()), torch.zeros(8, 16, 16, dtype=torch.int64)
    assert torch.equal(random_flip_pair(x, mask, seeded(3))[0], random_flip(x, seeded(3)))
    assert torch.equal(random_crop_pair(x, mask, 2, seeded(3))[0], random_crop(x, 2, seeded(3)))


def test_masks_of_another_size_are_refused() -> None:
    x, mask = torch.zeros(2, 3, 8, 8), torch.zeros(2, 4, 4)
    with pytest.raises(ValueError, match=r"masks of shape \(2, 4, 4\)"):
        random_flip_pair(x, mask, seeded())
    with pytest.raises(ValueError, match=r"masks of shape \(2, 4, 4\)"):
        random_crop_pair(x, mask, 1, seeded())


@pytest.mark.parametrize("size", [1, 4, 5])
def test_cutout_paints_one_grey_square_per_sample(size: int) -> None:
    x = torch.rand(2000, 3, 12, 10, generator=seeded()) * 0.4
    result = cutout(x, size, seeded(1))
    hole = (result == 0.5).all(dim=1)
    assert torch.equal(result[~hole[:, None].expand_as(x)], x[~hole[:, None].expand_as(x)])
    rows, columns = hole.any(dim=2).sum(dim=1), hole.any(dim=1).sum(dim=1)
    assert torch.equal(hole.sum(dim=(1, 2)), rows * columns)  # a full rectangle
    assert int(rows.max()) == int(columns.max()) == size
    assert int(rows.min()) >= (size + 1) // 2  # cut off at the edge, but the centre is inside
    assert bool((hole.any(dim=0)).all())  # every pixel can be hit


def test_mixup_by_hand() -> None:
    x = torch.arange(4.0).reshape(4, 1, 1, 1).expand(4, 3, 2, 2)
    p = torch.eye(4)
    mixed, targets, lam = mixup(x, p, 0.2, seeded())
    generator = seeded()
    torch.randint(2**63 - 1, (), generator=generator)
    partner = torch.randperm(4, generator=generator)
    for i in range(4):
        j, w = int(partner[i]), float(lam[i])
        assert float(mixed[i, 0, 0, 0]) == pytest.approx(w * i + (1 - w) * j, abs=1e-6)
        expected = w * p[i] + (1 - w) * p[j]
        torch.testing.assert_close(targets[i], expected)


def test_mixup_draws_one_lambda_per_sample_or_per_batch() -> None:
    x, p = torch.rand(50, 3, 2, 2, generator=seeded()), torch.rand(50, 4, generator=seeded())
    assert len(mixup(x, p, 2.0, seeded())[2].unique()) == 50
    _, _, lam = mixup(x, p, 2.0, seeded(), per_batch=True)
    assert lam.shape == (50,)
    assert len(lam.unique()) == 1


@pytest.mark.parametrize("alpha", [0.2, 2.0])
def test_mixup_lambda_has_the_moments_of_beta(alpha: float) -> None:
    x, p = torch.zeros(20_000, 1), torch.zeros(20_000, 1)
    lam = mixup(x, p, alpha, seeded())[2]
    assert float(lam.mean()) == pytest.approx(0.5, abs=0.01)
    assert float(lam.var()) == pytest.approx(1 / (4 * (2 * alpha + 1)), rel=0.03)


def test_mixup_refuses_what_it_cannot_mix() -> None:
    with pytest.raises(ValueError, match="alpha above 0"):
        mixup(torch.zeros(2, 3), torch.zeros(2, 4), 0.0, seeded())
    with pytest.raises(ValueError, match="2 samples but 1 targets"):
        mixup(torch.zeros(2, 3), torch.zeros(1, 4), 0.2, seeded())


# --- Crops that are scaled back, colour ---------------------------------------------------------------------------


def test_a_crop_of_the_whole_image_is_the_image() -> None:
    x, mask = torch.rand(6, 3, 13, 9, generator=seeded()), torch.randint(5, (6, 13, 9), generator=seeded())
    image, labels = resized_crop_pair(x, mask, 1.0, seeded(1))
    assert torch.equal(image, x)
    assert torch.equal(labels, mask)


def test_resized_crops_have_the_areas_and_shapes_they_should() -> None:
    """An image whose levels are its own positions shows from where each pixel was taken."""
    side, count = 60, 800
    ramp = (torch.arange(side) + 0.5) / side
    down = ramp[:, None].expand(count, 1, side, side)
    across = ramp.expand(count, 1, side, side)
    crops = resized_crop(torch.cat([down, across, across], dim=1), 0.5, seeded())
    middle = crops[:, :2, 20:40, 20:40]  # away from edges: there the level of the outermost pixel goes on
    height = (middle[:, 0, -1, 0] - middle[:, 0, 0, 0]) / (19 / side)
    width = (middle[:, 1, 0, -1] - middle[:, 1, 0, 0]) / (19 / side)
    area, shape = height * width, width / height
    assert 0.499 < float(area.min()) < 0.51
    assert 0.99 < float(area.max()) < 1.001
    assert float(area.mean()) == pytest.approx(0.75, abs=0.02)  # evenly spread
    assert 0.749 < float(shape.min()) < 0.78
    assert 1.29 < float(shape.max()) < 1.334
    assert float(shape.log().mean()) == pytest.approx(0, abs=0.02)
    centre = crops[:, 0].mean(dim=(1, 2))
    assert float(centre.min()) < 0.4 < 0.6 < float(centre.max())


def test_interpolation_by_hand() -> None:
    """Half of a row of four pixels, from its second pixel on: centres fall a quarter before and after pixel centres."""
    from fedshift.data.augment import _interpolate, _positions

    positions = _positions(4, torch.tensor([[0.5]]), torch.tensor([[0.5]]))
    assert positions.tolist() == [[0.75, 1.25, 1.75, 2.25]]
    row = torch.tensor([0.0, 0.4, 0.8, 0.2]).expand(1, 3, 4, 4)
    result = _interpolate(row, torch.arange(4.0)[None], positions)
    torch.testing.assert_close(result[0, 1, 2], torch.tensor([0.3, 0.5, 0.7, 0.65]))


def test_masks_follow_resized_crops() -> None:
    """Blocks of one label and one level: inside of a block, image and mask agree after any crop."""
    mask = torch.arange(16).reshape(4, 4).repeat_interleave(12, 0).repeat_interleave(12, 1).expand(20, -1, -1)
    x = (mask[:, None] / 16).expand(-1, 3, -1, -1).contiguous()
    for name in ("resized-crop", "standard-unflipped", "standard"):
        image, labels = build_pair_augment([name])(x, mask, seeded(2))
        assert labels.dtype == mask.dtype
        assert not torch.equal(labels, mask)
        if name == "resized-crop":
            agree = ((image[:, 0] * 16).round() == labels).float().mean()
            assert float(agree) > 0.9  # all but the pixels between two blocks
            assert float(((image[:, 0] * 16).round() == mask).float().mean()) < 0.9


def test_colours_of_masks_stay() -> None:
    x, mask = torch.rand(8, 3, 6, 6, generator=seeded()), torch.randint(9, (8, 6, 6), generator=seeded())
    for name in ("jitter", "grey"):
        image, labels = build_pair_augment([name])(x, mask, seeded(4))
        assert torch.equal(labels, mask)
        assert not torch.equal(image, x)


def test_jitter_equals_brightness_then_contrast_then_saturation() -> None:
    x = 0.3 + 0.3 * torch.rand(10, 3, 5, 7, generator=seeded())  # nothing is clipped
    factors = 0.6 + 0.8 * torch.rand(3, 10, 1, 1, generator=seeded(3))
    luma = torch.tensor([0.299, 0.587, 0.114]).reshape(3, 1, 1)
    expected = []
    for image, brightness, contrast, saturation in zip(x, *factors, strict=True):
        bright = image * brightness
        mean = (bright * luma).sum(dim=0).mean()
        clear = mean + contrast * (bright - mean)
        grey = (clear * luma).sum(dim=0)
        expected.append(grey + saturation * (clear - grey))
    torch.testing.assert_close(color_jitter(x, 0.4, seeded(3)), torch.stack(expected).clamp(0, 1))


def test_jitter_without_strength_changes_nothing() -> None:
    x = torch.rand(3, 3, 4, 4, generator=seeded())
    torch.testing.assert_close(color_jitter(x, 0.0, seeded()), x)


def test_grey_images_have_equal_channels_and_the_others_stay() -> None:
    x = torch.rand(500, 3, 3, 2, generator=seeded())
    result = random_grey(x, 0.1, seeded())
    is_grey = ((result[:, 0] == result[:, 1]) & (result[:, 1] == result[:, 2])).flatten(1).all(dim=1)
    assert 30 < int(is_grey.sum()) < 70
    assert torch.equal(result[~is_grey], x[~is_grey])
    red = torch.tensor([1.0, 0, 0]).reshape(1, 3, 1, 1).expand(1, 3, 2, 2)
    torch.testing.assert_close(random_grey(red, 1.0, seeded()), torch.full((1, 3, 2, 2), 0.299))


def test_what_no_crop_or_jitter_can_be_is_refused() -> None:
    for smallest in (0.0, 1.1):
        with pytest.raises(ValueError, match="share of the area"):
            resized_crop(torch.zeros(1, 3, 4, 4), smallest, seeded())
    with pytest.raises(ValueError, match="strength from 0 to 1"):
        color_jitter(torch.zeros(1, 3, 4, 4), 1.5, seeded())


def test_standard_is_crop_flip_jitter_and_grey() -> None:
    x = torch.rand(16, 3, 12, 12, generator=seeded())
    generator = seeded(7)
    expected = random_flip(resized_crop(x, 0.8, generator), generator)
    expected = random_grey(color_jitter(expected, 0.4, generator), 0.1, generator)
    assert torch.equal(build_augment(["standard"])(x, seeded(7)), expected)


def test_unflipped_images_stay_the_right_way_round() -> None:
    """Dark left, bright right: a mirrored digit would be another character."""
    x = torch.linspace(0.2, 0.8, 16).expand(64, 3, 16, 16)

    def mirrored(name: str) -> int:
        result = build_augment([name])(x, seeded(1)).mean(dim=(1, 2))
        return int((result[:, 0] > result[:, -1]).sum())

    assert mirrored("standard-unflipped") == 0
    assert 20 < mirrored("standard") < 44


def test_a_configuration_can_name_every_augmentation() -> None:
    kind = typing.get_args(RunConfig.model_fields["augment"].annotation)[0]
    assert set(typing.get_args(kind)) == set(STEPS)


# --- What holds for all of them ---------------------------------------------------------------------------------


@pytest.mark.parametrize("name", STEPS)
def test_step_is_reproducible_in_range_and_leaves_its_input(name: str) -> None:
    x = torch.rand(24, 3, 16, 24, generator=seeded())
    before = x.clone()
    step = build_augment([name])
    first, again, other = step(x, seeded(1)), step(x, seeded(1)), step(x, seeded(2))
    assert torch.equal(x, before)
    assert first.shape == x.shape
    assert torch.equal(first, again)
    assert not torch.equal(first, other)
    assert 0 <= float(first.min()) <= float(first.max()) <= 1


def test_mixup_is_reproducible_and_leaves_its_input() -> None:
    x, p = torch.rand(6, 3, 4, 4, generator=seeded()), torch.rand(6, 5, generator=seeded())
    before = x.clone(), p.clone()
    first, again = mixup(x, p, 0.2, seeded(1)), mixup(x, p, 0.2, seeded(1))
    assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))
    assert torch.equal(x, before[0])
    assert torch.equal(p, before[1])


def test_augment_runs_its_steps_in_order_with_sizes_relative_to_the_image() -> None:
    x = torch.rand(8, 3, 32, 48, generator=seeded())
    generator = seeded(4)
    expected = cutout(random_flip(random_crop(x, 4, generator), generator), 16, generator)
    assert torch.equal(build_augment(["crop", "flip", "cutout"])(x, seeded(4)), expected)


def test_no_names_leave_the_batch() -> None:
    x = torch.rand(2, 3, 4, 4, generator=seeded())
    assert torch.equal(build_augment([])(x, seeded()), x)


def test_unknown_name_is_an_error_that_names_the_nearest() -> None:
    with pytest.raises(InputError, match="'randaugment'") as caught:
        build_augment(["flip", "rand_augment"])
    assert caught.value.code == "config-value"
