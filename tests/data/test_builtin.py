"""The built-in data sets: what is in them, that they never change, and that nothing in a test split was trained on."""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray
from PIL import Image

from fedshift.data.builtin import digits, glyphs, handwriting
from fedshift.data.builtin.raster import blur, moved, placement, to_bytes, warp
from fedshift.data.builtin.streets import objects, scene, streets
from fedshift.data.domain import VOID, Domain, Split
from fedshift.errors import InputError

# In one worker of xdist, where the data sets are drawn once.
pytestmark = pytest.mark.xdist_group("builtin")

Domains = dict[str, Domain]

BUILTIN = {recipe.name: recipe for recipe in (digits.RECIPE, handwriting.RECIPE, streets.RECIPE)}


@pytest.fixture(scope="module")
def all_domains() -> dict[str, Domains]:
    """Each data set drawn once, or read from the cache that all tests share."""
    return {name: {domain: recipe.load(domain) for domain in recipe.domains} for name, recipe in BUILTIN.items()}


def splits_of(domains: Domains) -> list[tuple[str, str, Split]]:
    return [
        (name, split, getattr(domain, split)) for name, domain in domains.items() for split in ("train", "val", "test")
    ]


def picture_hashes(images: NDArray[np.uint8]) -> list[str]:
    return [hashlib.sha256(image.tobytes()).hexdigest() for image in images]


def test_data_sets_say_what_they_hold_before_anything_is_drawn(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FEDSHIFT_CACHE", str(tmp_path))
    data = {name: recipe() for name, recipe in BUILTIN.items()}
    assert list(data) == ["digits", "rotated-digits", "streets"]
    assert all(name == dataset.name for name, dataset in data.items())
    assert data["digits"].domains == ("handwritten", "photo", "typeset", "street", "chalk")
    assert data["rotated-digits"].domains == ("M0", "M15", "M30", "M45", "M60", "M75")
    assert len(data["streets"].domains) == 5 and len(data["streets"].classes) == 8
    assert data["digits"].classes == data["rotated-digits"].classes == tuple("0123456789")
    assert [dataset.task for dataset in data.values()] == ["classification", "classification", "segmentation"]
    assert [dataset.input_shape for dataset in data.values()] == [(3, 32, 32), (3, 32, 32), (3, 64, 64)]
    assert list(tmp_path.iterdir()) == []


def test_listing_the_data_sets_imports_no_heavy_package() -> None:
    code = (
        "import sys; from fedshift.data import list_datasets; assert list_datasets()[0].domains;"
        "print(sorted({'sklearn', 'matplotlib', 'scipy', 'torch', 'pydantic'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    assert done.stdout.strip() == "[]"


def test_an_unknown_domain_is_named_with_its_nearest() -> None:
    with pytest.raises(
        InputError, match=r"'digits' has no domain 'handwriting'. Did you mean 'handwritten'\?"
    ) as raised:
        BUILTIN["digits"].load("handwriting")
    assert raised.value.code == "unknown-name"


@pytest.mark.parametrize(
    ("name", "per_class"),
    [("digits", digits.PER_CLASS), ("rotated-digits", handwriting.PER_CLASS)],
)
def test_digits_are_balanced_and_shuffled(
    all_domains: dict[str, Domains], name: str, per_class: dict[str, int]
) -> None:
    for domain, split, data in splits_of(all_domains[name]):
        assert data.inputs.shape == (10 * per_class[split], 32, 32, 3), (domain, split)
        assert data.inputs.dtype == np.uint8 and data.labels is not None and data.labels.dtype == np.int64
        assert np.bincount(data.labels, minlength=10).tolist() == [per_class[split]] * 10
        assert len(set(data.labels[:20].tolist())) > 4, "a capped training set must not lose whole classes"


def test_streets_have_masks_of_known_classes(all_domains: dict[str, Domains]) -> None:
    for city, split, data in splits_of(all_domains["streets"]):
        assert data.inputs.shape == (streets.COUNTS[split], 64, 64, 3) and data.inputs.dtype == np.uint8
        assert data.labels is not None
        assert data.labels.shape == data.inputs.shape[:3] and data.labels.dtype == np.uint8
        share = np.bincount(data.labels.ravel(), minlength=256) / data.labels.size
        assert share[len(scene.CLASSES) : VOID].sum() == 0
        assert 0.005 < share[VOID] < 0.06, (city, split)
        assert share[: len(scene.CLASSES)].min() > 0.003, (city, split)


def test_streets_look_down_a_road_under_a_sky(all_domains: dict[str, Domains]) -> None:
    for city, domain in all_domains["streets"].items():
        masks = domain.train.labels
        assert masks is not None
        assert (masks[:, -4:] == scene.ROAD).mean() > 0.5, city
        assert (masks[:, -4:] == scene.SKY).sum() == 0, city
        assert (masks[:, :20] == scene.ROAD).sum() == 0, city
        assert np.isin(masks[:, :4], [scene.SKY, scene.BUILDING, scene.VEGETATION, scene.POLE, VOID]).all(), city


def test_cities_differ_in_colour_more_than_halves_of_one_city(all_domains: dict[str, Domains]) -> None:
    means = {city: domain.train.inputs.mean(axis=(1, 2)) for city, domain in all_domains["streets"].items()}
    within = max(np.abs(mean[:100].mean(0) - mean[100:].mean(0)).max() for mean in means.values())
    centres = [mean.mean(0) for mean in means.values()]
    between = min(np.abs(one - other).max() for i, one in enumerate(centres) for other in centres[:i])
    assert between > 2 * within


@pytest.mark.parametrize("name", list(BUILTIN))
def test_no_picture_is_in_two_splits(all_domains: dict[str, Domains], name: str) -> None:
    """Over all domains: a picture tested on at one site must not have been trained on at another."""
    found: dict[str, set[str]] = {"train": set(), "val": set(), "test": set()}
    for domain, split, data in splits_of(all_domains[name]):
        hashes = picture_hashes(data.inputs)
        assert len(set(hashes)) == len(hashes), (domain, split)
        found[split] |= set(hashes)
    assert not found["train"] & found["test"]
    assert not found["train"] & found["val"]
    assert not found["val"] & found["test"]


def test_cuts_of_the_handwriting_are_where_a_new_form_begins() -> None:
    """Each form begins with the digits in order, three times: if a cut were inside one, a writer would be split."""
    labels = handwriting.read_handwriting().labels
    assert handwriting.CUTS["train"][0] == 0 and handwriting.CUTS["test"][1] == len(labels) == 1797
    assert handwriting.CUTS["train"][1] == handwriting.CUTS["val"][0]
    assert handwriting.CUTS["val"][1] == handwriting.CUTS["test"][0]
    for first, _ in handwriting.CUTS.values():
        assert labels[first : first + 30].tolist() == [*range(10)] * 3


def test_handwriting_is_chosen_inside_its_split_and_never_twice() -> None:
    written = handwriting.read_handwriting()
    for split, (first, end) in handwriting.CUTS.items():
        rows = written.choose(split, 10, np.random.default_rng(0))
        assert len(set(rows.tolist())) == 100 and rows.min() >= first and rows.max() < end
        assert np.bincount(written.labels[rows]).tolist() == [10] * 10


def test_no_typeface_is_in_two_splits() -> None:
    every = [face for faces in glyphs.TYPEFACES.values() for face in faces]
    assert len(every) == len(set(every)) == 22
    drawn = glyphs.read_glyphs()
    outlines = picture_hashes(to_bytes(drawn.distance > 0))
    assert len(outlines) == len(set(outlines)) == 220
    rng = np.random.default_rng(0)
    seven = np.full(500, 7)
    used = {split: set(drawn.choose(seven, split, rng).tolist()) for split in glyphs.TYPEFACES}
    assert [len(rows) for rows in used.values()] == [13, 2, 7]
    assert set.union(*used.values()) == {10 * face + 7 for face in range(22)}
    assert drawn.in_same_typeface(np.array([13, 207]), np.array([5, 0])).tolist() == [15, 200]


def test_photo_tiles_of_the_splits_do_not_overlap() -> None:
    groups = [group for tiles in digits._PHOTO_TILES.values() for group in tiles]
    assert sorted(groups) == [0, 1, 2, 3, 4]


def test_a_photo_under_the_ink_is_inverted(all_domains: dict[str, Domains]) -> None:
    """Where there is no ink |piece - ink| is the photo itself: the frame around the digit stays in its colours."""
    inputs = all_domains["digits"]["photo"].train.inputs
    frame, middle = inputs[:, :3].astype(float), inputs[:, 12:20, 12:20].astype(float)
    assert frame.std(axis=(1, 2)).mean() < middle.std(axis=(1, 2)).mean()


def test_every_angle_shows_the_same_samples(all_domains: dict[str, Domains]) -> None:
    domains = all_domains["rotated-digits"]
    for split in ("train", "val", "test"):
        labels = [getattr(domain, split).labels for domain in domains.values()]
        assert all(np.array_equal(labels[0], other) for other in labels[1:])


def test_no_rotation_leaves_the_handwriting_as_it_is(all_domains: dict[str, Domains]) -> None:
    written = handwriting.read_handwriting()
    base = {picture.tobytes() for picture in to_bytes(written.ink[slice(*handwriting.CUTS["test"])])}
    unturned = all_domains["rotated-digits"]["M0"].test.inputs
    assert all(image[..., 0].tobytes() in base for image in unturned)
    assert (unturned[..., 0] == unturned[..., 2]).all()


def test_a_figure_stands_where_the_ground_is() -> None:
    """The camera is 1.5 m up and the horizon in row 32; 10 m away a metre is 5.5 pixels."""
    one = np.ones((1, 1, 1), np.float32)
    street = scene.Street(32 * one, 32 * one, 1.5 * one, (5 * one, 5 * one), (3 * one, 3 * one), 60 * one)
    spot = objects.stand(street, np.array([0]), np.array([10.0]), np.array([2.0]))
    np.testing.assert_allclose(spot.scale.item(), 5.5)
    np.testing.assert_allclose(spot.x[0, 0, 43], (43.5 - (32 + 2 * 5.5)) / 5.5)
    np.testing.assert_allclose(spot.y[0, 39, 0], ((32 + 1.5 * 5.5) - 39.5) / 5.5)


@pytest.mark.parametrize("nearer_first", [True, False])
def test_a_nearer_figure_hides_a_farther_one_in_any_order(nearer_first: bool) -> None:
    one = np.ones((1, 1, 1), np.float32)
    street = scene.Street(32 * one, 32 * one, 1.5 * one, (5 * one, 5 * one), (3 * one, 3 * one), 60 * one)
    pictures = scene.Pictures(
        np.zeros((1, 64, 64, 3), np.float32),
        np.full((1, 64, 64), scene.SKY, np.uint8),
        np.full((1, 64, 64), 400, np.float32),
    )
    near = (5.0, scene.PERSON, np.array([[1.0, 0, 0]], np.float32))
    far = (10.0, scene.CAR, np.array([[0, 1.0, 0]], np.float32))
    for depth, label, colour in (near, far) if nearer_first else (far, near):
        spot = objects.stand(street, np.array([0]), np.array([depth], np.float32), np.zeros(1, np.float32))
        inside = np.minimum(1 - np.abs(spot.x), 1.2 - np.abs(spot.y - 1))
        objects.Painter(streets.CITIES["riviera"], pictures, spot, label).fill(inside, colour, shines=True)
    # The near one covers rows 24..50 and columns 21..42; the far one lies wholly behind it.
    assert pictures.label[0, 35, 32] == scene.PERSON and pictures.colour[0, 35, 32].tolist() == [1, 0, 0]
    assert (pictures.label == scene.CAR).sum() == 0
    assert (pictures.depth[pictures.label == scene.PERSON] == 5).all()


def test_rotated_digits_stay_as_they_were_drawn_for_the_kept_results(all_domains: dict[str, Domains]) -> None:
    upright, turned = (all_domains["rotated-digits"][name].test.inputs[..., 0] for name in ("M0", "M45"))
    both = {
        sign: np.stack(
            [np.asarray(Image.fromarray(x.copy()).rotate(sign * 45, Image.Resampling.BILINEAR)) for x in upright]
        )
        for sign in (1, -1)
    }
    error = {sign: np.abs(images.astype(float) - turned).mean() for sign, images in both.items()}
    assert error[1] < 1 < 40 < error[-1]  # counter-clockwise, unlike Rotated MNIST


def test_placement_turns_counter_clockwise() -> None:
    picture = np.zeros((1, 8, 8), np.float32)
    picture[0, 3:5, 6] = 1  # A stroke at the right: after a quarter turn it is at the top.
    turned = warp(picture, placement(scale=1, degrees=90), 8)
    np.testing.assert_allclose(turned[0], np.rot90(picture[0]), atol=1e-6)
    np.testing.assert_array_equal(warp(picture, placement(scale=1), 8), picture)


def test_moved_shifts_the_picture_right_and_down() -> None:
    picture = np.zeros((1, 8, 8), np.float32)
    picture[0, 2, 3] = 1
    shifted = warp(picture, moved(placement(scale=1), dx=2 / 4, dy=1 / 4), 8)
    assert np.argwhere(shifted[0] > 0.999).tolist() == [[3, 5]]


def test_blur_spreads_but_keeps_the_sum() -> None:
    picture = np.zeros((2, 15, 15), np.float32)
    picture[:, 7, 7] = 1
    soft = blur(picture, np.array([0.0, 1.0], np.float32))
    np.testing.assert_array_equal(soft[0], picture[0])
    np.testing.assert_allclose(soft[1].sum(), 1, rtol=1e-5)
    weights = np.exp(-0.5 * np.arange(-4, 5) ** 2)
    np.testing.assert_allclose(soft[1, 7, 7], (1 / weights.sum()) ** 2, rtol=1e-5)


def test_a_second_load_reads_the_cache_read_only(
    all_domains: dict[str, Domains], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(handwriting.RECIPE.__class__, "arrays", lambda *_: pytest.fail("drawn again"))
    again = BUILTIN["rotated-digits"].load("M45")
    np.testing.assert_array_equal(again.test.inputs, all_domains["rotated-digits"]["M45"].test.inputs)
    assert not again.train.inputs.flags.writeable


_DRAWN_AGAIN = (("digits", "photo"), ("digits", "street"), ("rotated-digits", "M30"), ("streets", "neonbay"))

_PRINT_HASHES = f"""
import hashlib
from fedshift.data.registry import DATASETS
for name, domain in {_DRAWN_AGAIN}:
    data = DATASETS[name](None).load(domain)
    for split in (data.train, data.val, data.test):
        print(hashlib.sha256(split.inputs.tobytes() + split.labels.tobytes()).hexdigest())
"""


@pytest.mark.slow
def test_another_process_with_another_cache_draws_the_same_bytes(
    all_domains: dict[str, Domains], tmp_path: Path
) -> None:
    environment = {**os.environ, "FEDSHIFT_CACHE": str(tmp_path), "OMP_NUM_THREADS": "2", "PYTHONHASHSEED": "7"}
    done = subprocess.run(
        [sys.executable, "-c", _PRINT_HASHES], capture_output=True, text=True, check=True, timeout=240, env=environment
    )
    drawn = [all_domains[name][domain] for name, domain in _DRAWN_AGAIN]
    expected = [
        hashlib.sha256(split.inputs.tobytes() + split.labels.tobytes()).hexdigest()
        for data in drawn
        for split in (data.train, data.val, data.test)
    ]
    assert done.stdout.split() == expected


def test_pictures_and_masks_at_another_size() -> None:
    data = BUILTIN["streets"](32)
    assert data.input_shape == (3, 32, 32)
    drawn, smaller = BUILTIN["streets"].load("dunes"), data.load("dunes")
    assert smaller.test.inputs.shape[1:] == (32, 32, 3)
    assert smaller.test.labels.shape[1:] == (32, 32)
    assert set(np.unique(smaller.test.labels)) <= set(np.unique(drawn.test.labels))
    # Averages of pixels keep the mean of a picture.
    assert abs(smaller.test.inputs[0].mean() - drawn.test.inputs[0].mean()) < 2


def test_a_size_that_is_the_drawn_one_changes_nothing() -> None:
    data = BUILTIN["rotated-digits"](32).load("M30")
    assert np.array_equal(data.train.inputs, BUILTIN["rotated-digits"].load("M30").train.inputs)
