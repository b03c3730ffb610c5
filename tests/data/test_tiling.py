"""Pictures that networks see in squares: what is read, what is cut out, and what counts as a sample."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from vessels import SIZES, eye, write_eyes

from fedshift.data import VOID, DataSource, dataset_from, open_dataset
from fedshift.data.batches import AROUND_A_CLASS, LabelledData, UnlabelledData
from fedshift.data.domain import Split, Tiles
from fedshift.data.tiling import in_tiles, middles
from fedshift.errors import InputError
from fedshift.rng import Rng

CPU = torch.device("cpu")


def numbered(count: int = 3, size: tuple[int, int] = (40, 50), side: int = 16) -> Split:
    """Pictures whose mask is their red channel, so that a square shows whether both were cut at one place."""
    rng = np.random.default_rng(0)
    inputs = rng.integers(0, 200, (count, *size, 3), dtype=np.uint8)
    sizes = np.array([[size[0] - 4 * i, size[1] - 6 * i] for i in range(count)])
    labels = inputs[..., 0].copy()
    for i, (height, width) in enumerate(sizes):
        labels[i, height:] = labels[i, :, width:] = VOID
    return Split(inputs, labels, Tiles(side, sizes))


def test_training_squares_are_cut_with_their_masks_at_places_that_the_seed_decides() -> None:
    def drawn(seed: int) -> list[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]:
        data = LabelledData(numbered(), CPU)
        return [(batch.x, batch.y, batch.index) for batch in data.batches(4, Rng.of(seed))]

    one, again, other = drawn(0), drawn(0), drawn(1)
    for x, y, index in one:
        assert x.shape[1:] == (3, 16, 16) and y.shape[1:] == (16, 16) and len(x) == len(y) == len(index)
        assert torch.equal((x[:, 0] * 255).round().long(), y)  # never beyond a picture's own size
    # 40 x 50 takes 12 squares of 16 pixels, 36 x 44 takes 9, 32 x 38 takes 6: an epoch has that many.
    assert sorted(torch.cat([index for _, _, index in one]).bincount().tolist()) == [6, 9, 12]
    assert all(torch.equal(a[0], b[0]) for a, b in zip(one, again, strict=True))
    assert not any(torch.equal(a[0], b[0]) for a, b in zip(one, other, strict=True))


def test_a_hundred_squares_of_a_picture_are_one_sample() -> None:
    data = LabelledData(numbered(), CPU)
    list(data.batches(4, Rng.of(0), epochs=5))
    assert len(data) == 3 and data.seen == 3 and data.used == 3
    one = UnlabelledData(numbered(1), CPU)
    list(one.evenly(4))
    assert len(one) == 1 and one.seen == 1


def test_in_order_every_pixel_comes_once_or_more_and_none_from_beyond() -> None:
    split = numbered(1)
    marked = Split(split.inputs, np.arange(40 * 50, dtype=np.int64).reshape(1, 40, 50), split.tiles)
    seen = torch.cat([batch.y.flatten() for batch in LabelledData(marked, CPU).in_order(5)])
    assert set(seen.tolist()) == set(range(40 * 50))
    assert len(seen) == 12 * 16 * 16


def test_a_rare_class_is_seen_more_often_than_it_is_frequent() -> None:
    inputs = np.zeros((1, 200, 200, 3), dtype=np.uint8)
    labels = np.zeros((1, 200, 200), dtype=np.uint8)
    labels[0, 100, 100] = 1
    data = LabelledData(Split(inputs, labels, Tiles(16, np.array([[200, 200]]))), CPU)
    batches = data.batches(32, Rng.of(0), epochs=5)
    shown = torch.cat([(batch.y == 1).flatten(1).any(1) for batch in batches]).float().mean().item()
    # Of the squares around a class, half are around this one; at random places one in 140 would show it.
    assert shown == pytest.approx(AROUND_A_CLASS / 2, abs=0.06)


def test_folders_are_read_at_their_own_sizes(tmp_path: Path) -> None:
    root = write_eyes(tmp_path / "eyes", count=3)
    dataset = open_dataset(DataSource(data_dir=root, tile=32))
    assert (dataset.input_shape, dataset.tile, dataset.scaled_to) == ((3, 32, 32), 32, None)
    picture, mask = eye(SIZES["amber"], (180, 110, 60), 0)
    amber = dataset.load("amber")
    found = {
        split.inputs[i, :104, :112].tobytes(): split
        for split in (amber.train, amber.val, amber.test)
        for i in range(len(split))
    }
    split = found[picture.tobytes()]
    assert split.tiles is not None and split.tiles.sizes.tolist() == [[104, 112]] * len(split)
    assert (
        split.labels is not None and (split.labels[0, :104, :112] <= 1).all() and (split.labels[:, 104:] == VOID).all()
    )
    assert split.inputs.shape[1:3] == (128, 132)
    np.testing.assert_array_equal(split.inputs[:, 104], split.inputs[:, 103])  # mirrored
    assert mask.sum() in [
        int((part.labels[i] == 1).sum()) for part in (amber.train, amber.val, amber.test) for i in range(len(part))
    ]


def test_image_size_scales_before_squares_are_cut(tmp_path: Path) -> None:
    root = write_eyes(tmp_path / "eyes", count=3)
    dataset = open_dataset(DataSource(data_dir=root, tile=32, image_size=64))
    assert dataset.scaled_to == 64
    for name, (height, width) in SIZES.items():
        train = dataset.load(name).train
        assert train.tiles is not None
        assert train.tiles.sizes[0].tolist() == [
            round(height * 64 / min(height, width)),
            round(width * 64 / min(height, width)),
        ]


def test_auto_cuts_pictures_that_would_lose_much(tmp_path: Path) -> None:
    write_eyes(tmp_path / "small", count=2, sites=("amber", "blue"))
    assert open_dataset(DataSource(data_dir=tmp_path / "small", tile="auto")).tile is None
    for kind in ("images", "masks"):
        for path in (tmp_path / "small").glob(f"*/{kind}/*.png"):
            with Image.open(path) as image:
                image.resize((220, 200), Image.Resampling.NEAREST).save(path)
    large = open_dataset(DataSource(data_dir=tmp_path / "small", tile="auto"))
    assert large.tile == 128 and large.input_shape == (3, 128, 128)
    shrunk = open_dataset(DataSource(data_dir=tmp_path / "small", image_size=100))
    assert any("200 pixels are shrunk to 100" in warning and "tile=auto" in warning for warning in shrunk.warnings)


@pytest.mark.parametrize(("tile", "words"), [(4, "8 to 2048"), (4096, "8 to 2048")])
def test_a_tile_out_of_range_is_an_error(tmp_path: Path, tile: int, words: str) -> None:
    write_eyes(tmp_path / "eyes", count=2)
    with pytest.raises(InputError, match=words):
        open_dataset(DataSource(data_dir=tmp_path / "eyes", tile=tile))


def test_arrays_and_built_in_scenes_are_cut_too() -> None:
    x, y = np.zeros((20, 24, 30, 3), dtype=np.uint8), np.tile(np.arange(30, dtype=np.uint8) % 2, (20, 24, 1))
    cut = in_tiles(dataset_from({"a": (x, y), "b": (x, y)}), 16)
    train = cut.load("a").train
    assert cut.input_shape == (3, 16, 16) and train.tiles is not None and train.tiles.sizes[0].tolist() == [24, 30]
    assert open_dataset(DataSource("streets", tile=32)).tile == 32
    with pytest.raises(InputError, match="take fewer"):
        in_tiles(dataset_from({"a": (x, y), "b": (x, y)}), 25)
    with pytest.raises(InputError, match="for segmentation"):
        open_dataset(DataSource("digits", tile=16))
    assert open_dataset(DataSource("digits", tile="auto")).tile is None


def test_middles_are_plain_samples() -> None:
    split = numbered()
    found = middles(split, 2)
    assert found.tiles is None and found.inputs.shape == (2, 16, 16, 3)
    np.testing.assert_array_equal(found.inputs[1], split.inputs[1, 10:26, 14:30])
    np.testing.assert_array_equal(found.labels, found.inputs[..., 0])
