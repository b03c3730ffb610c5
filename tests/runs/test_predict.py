"""Predictions fit the user's own files: masks with their ids at their size."""

from __future__ import annotations

import csv
import json
import shutil
import struct
from pathlib import Path

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from PIL import Image
from torch.nn import functional as F

import fedshift
from fedshift.runs.model_file import load_model
from fedshift.runs.predict import _likeliest, predict_files

GREYS = (40, 130, 220)


def scene(ids: tuple[int, int, int], height: int, width: int, seed: int) -> tuple[Image.Image, NDArray[np.uint8]]:
    """Three stripes side by side, dark to bright, and the mask of their ids. Cropped to a square, a wide one loses the
    outer two."""
    rng = np.random.default_rng(seed)
    first, second = sorted(rng.choice(np.arange(width // 6, width - width // 6), 2, replace=False))
    stripe = np.digitize(np.arange(width), [first, second])[None].repeat(height, axis=0)
    pixels = np.array(GREYS)[stripe][..., None] + rng.integers(-10, 10, (height, width, 3))
    return Image.fromarray(pixels.astype(np.uint8)), np.array(ids, dtype=np.uint8)[stripe]


def write_cities(root: Path, ids: tuple[int, int, int], lines: str | None) -> Path:
    for number, city in enumerate(("dusk", "noon", "rain")):
        for kind in ("images", "masks"):
            (root / city / kind).mkdir(parents=True)
        for i in range(14):
            image, mask = scene(ids, 32, 64, 100 * number + i)
            image.save(root / city / "images" / f"{i}.png")
            Image.fromarray(mask).save(root / city / "masks" / f"{i}.png")
    if lines is not None:
        (root / "classes.txt").write_text(lines)
    return root


def train(root: Path) -> fedshift.Run:
    keys = {"target": "rain", "image_size": 16, "rounds": 12, "batch_size": 4, "lr": 0.05, "policy": {"min_samples": 2}}
    return fedshift.fit("fedavg", data_dir=root, workers=0, **keys)


@pytest.fixture(scope="module")
def found_ids(tmp_path_factory: pytest.TempPathFactory) -> fedshift.Run:
    """Learned at 32 x 16 from masks of 64 x 32 with the ids 0, 5 and 9."""
    return train(write_cities(tmp_path_factory.mktemp("found"), (0, 5, 9), None))


def predicted(path: Path) -> NDArray[np.uint8]:
    with Image.open(path) as mask:
        assert mask.mode == "L"
        return np.asarray(mask)


@pytest.mark.parametrize(("height", "width"), [(32, 64), (40, 200), (90, 50), (8, 12)])
def test_masks_have_the_ids_and_the_size_of_the_users_own(
    found_ids: fedshift.Run, tmp_path: Path, height: int, width: int
) -> None:
    (tmp_path / "new").mkdir()
    truths = {}
    for i in range(4):
        image, truths[i] = scene((0, 5, 9), height, width, 900 + i)
        image.save(tmp_path / "new" / f"{i}.png")
    predict_files(found_ids.path, tmp_path / "new", tmp_path / "out.csv")
    rows = list(csv.DictReader((tmp_path / "out.csv").open()))
    assert list(rows[0]) == ["file", "mask", "share_0", "share_5", "share_9", "note"]
    masks = [predicted(tmp_path / row["mask"]) for row in rows]
    assert all(mask.shape == (height, width) and set(np.unique(mask)) == {0, 5, 9} for mask in masks)
    assert np.mean([mask == truths[i] for i, mask in enumerate(masks)]) > 0.85
    for row, mask in zip(rows, masks, strict=True):
        shares = [float(row[f"share_{mask_id}"]) for mask_id in (0, 5, 9)]
        assert shares == pytest.approx([(mask == mask_id).mean() for mask_id in (0, 5, 9)], abs=1e-3)


def test_line_numbers_of_the_class_file_are_the_ids(tmp_path: Path) -> None:
    run = train(write_cities(tmp_path / "data", (1, 2, 4), "void\nroad\nwall\nvoid\nsky\n"))
    for select in ("last", "source-val"):
        assert run.model(select).mask_ids == (1, 2, 4)  # type: ignore[arg-type]
    predict_files(run.path, tmp_path / "data" / "rain" / "images", tmp_path / "out.csv")
    pairs = [
        (predicted(tmp_path / "out_masks" / f"{i}.png"), predicted(tmp_path / "data" / "rain" / "masks" / f"{i}.png"))
        for i in range(14)
    ]
    assert np.mean([mask == truth for mask, truth in pairs]) > 0.85
    images = np.stack([np.asarray(scene((1, 2, 4), 16, 32, 900 + i)[0]) for i in range(3)])
    numbers = run.predict(images)
    assert numbers.shape == (3, 16, 32) and set(np.unique(numbers)) == {0, 1, 2}
    np.testing.assert_array_equal(run.model().to_ids(numbers), np.array([1, 2, 4])[numbers])


def test_a_photo_taken_upright_gets_a_mask_as_it_is_shown(found_ids: fedshift.Run, tmp_path: Path) -> None:
    exif = Image.Exif()
    exif[0x0112] = 6
    scene((0, 5, 9), 32, 64, 7)[0].save(tmp_path / "phone.jpg", exif=exif)
    predict_files(found_ids.path, tmp_path / "phone.jpg", tmp_path / "out.csv")
    assert predicted(tmp_path / "out_masks" / "phone.png").shape == (64, 32)


def test_pictures_that_differ_in_their_suffix_alone_have_a_mask_each(found_ids: fedshift.Run, tmp_path: Path) -> None:
    (tmp_path / "new").mkdir()
    for seed, suffix in enumerate(("jpg", "png")):
        scene((0, 5, 9), 32, 64, seed)[0].save(tmp_path / "new" / f"a.{suffix}")
    predict_files(found_ids.path, tmp_path / "new", tmp_path / "out.csv")
    rows = list(csv.DictReader((tmp_path / "out.csv").open()))
    assert [row["mask"] for row in rows] == ["out_masks/a.png", "out_masks/a.png.png"]
    assert not np.array_equal(*(predicted(tmp_path / row["mask"]) for row in rows))


def test_models_of_older_versions_give_class_numbers(found_ids: fedshift.Run, tmp_path: Path) -> None:
    shutil.copytree(found_ids.path, tmp_path / "run")
    file = tmp_path / "run" / "model.safetensors"
    data = file.read_bytes()
    (length,) = struct.unpack("<Q", data[:8])
    header = json.loads(data[8 : 8 + length])
    about = json.loads(header["__metadata__"]["fedshift"])
    assert about.pop("mask_ids") == [0, 5, 9]
    header["__metadata__"]["fedshift"] = json.dumps(about)
    text = json.dumps(header).encode()
    file.write_bytes(struct.pack("<Q", len(text)) + text + data[8 + length :])
    assert load_model(file).mask_ids == ()
    image, _ = scene((0, 5, 9), 32, 64, 7)
    image.save(tmp_path / "a.png")
    predict_files(tmp_path / "run", tmp_path / "a.png", tmp_path / "out.csv")
    assert set(np.unique(predicted(tmp_path / "out_masks" / "a.png"))) == {0, 1, 2}


def test_class_by_class_gives_what_all_at_once_would() -> None:
    shares = torch.rand(5, 6, 9, generator=torch.Generator().manual_seed(0)).softmax(0)
    whole = F.interpolate(shares[None], (13, 31), mode="bilinear", align_corners=False)[0].argmax(0)
    np.testing.assert_array_equal(_likeliest(shares, (13, 31)), whole.numpy())
    np.testing.assert_array_equal(_likeliest(shares, (6, 9)), shares.argmax(0).numpy())
    assert (_likeliest(torch.full((3, 2, 2), 1 / 3), (2, 2)) == 0).all()
