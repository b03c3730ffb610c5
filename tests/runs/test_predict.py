"""Predictions fit the user's own files: masks with their ids at their size, the model of the site that is meant."""

from __future__ import annotations

import csv
import json
import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from PIL import Image
from tinydata import write_domain
from torch.nn import functional as F

import fedshift
from fedshift.errors import InputError
from fedshift.federation import codec
from fedshift.runs.files.model import load_model
from fedshift.runs.predict import likeliest, predict_files

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
    assert list(rows[0]) == ["file", "mask", "share_0", "share_5", "share_9", "note", "model"]
    masks = [predicted(tmp_path / row["mask"]) for row in rows]
    assert all(mask.shape == (height, width) and set(np.unique(mask)) == {0, 5, 9} for mask in masks)
    assert np.mean([mask == truths[i] for i, mask in enumerate(masks)]) > 0.85
    for row, mask in zip(rows, masks, strict=True):
        shares = [float(row[f"share_{mask_id}"]) for mask_id in (0, 5, 9)]
        assert shares == pytest.approx([(mask == mask_id).mean() for mask_id in (0, 5, 9)], abs=1e-3)


def test_line_numbers_of_the_class_file_are_the_ids(tmp_path: Path) -> None:
    run = train(write_cities(tmp_path / "data", (1, 2, 4), "void\nroad\nwall\nvoid\nsky\n"))
    for select in ("last", "source-val"):
        assert run.model(select).header.mask_ids == (1, 2, 4)  # type: ignore[arg-type]
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


def accept(folder: Path) -> None:
    """Makes the model of a run, which a test has changed, the one that the run's results speak of."""
    results = json.loads((folder / "results.json").read_text())
    results["model_sha256"] = codec.sha256((folder / "model.safetensors").read_bytes())
    (folder / "results.json").write_text(json.dumps(results))
    (folder / "done").write_text("")


def test_models_of_older_versions_give_class_numbers(found_ids: fedshift.Run, tmp_path: Path) -> None:
    shutil.copytree(found_ids.path, tmp_path / "run")
    file = tmp_path / "run" / "model.safetensors"
    tensors, metadata = codec.read_safetensors(file.read_bytes())
    about = json.loads(metadata["fedshift"])
    assert about.pop("mask_ids") == [0, 5, 9]
    file.write_bytes(codec.seal(tensors, {key: value for key, value in about.items() if key != "sha256"}))
    assert load_model(file).header.mask_ids == ()
    accept(tmp_path / "run")
    image, _ = scene((0, 5, 9), 32, 64, 7)
    image.save(tmp_path / "a.png")
    predict_files(tmp_path / "run", tmp_path / "a.png", tmp_path / "out.csv")
    assert set(np.unique(predicted(tmp_path / "out_masks" / "a.png"))) == {0, 1, 2}


def test_class_by_class_gives_what_all_at_once_would() -> None:
    shares = torch.rand(5, 6, 9, generator=torch.Generator().manual_seed(0)).softmax(0)
    whole = F.interpolate(shares[None], (13, 31), mode="bilinear", align_corners=False)[0].argmax(0)
    np.testing.assert_array_equal(likeliest(shares, (13, 31)), whole.numpy())
    np.testing.assert_array_equal(likeliest(shares, (6, 9)), shares.argmax(0).numpy())
    assert (likeliest(torch.full((3, 2, 2), 1 / 3), (2, 2)) == 0).all()


# --- Whose model ---------------------------------------------------------------------------------------------------

KEYS = {"rounds": 2, "batch_size": 8, "workers": 0, "policy": {"min_samples": 2}}


@pytest.fixture(scope="module")
def picture(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("pictures") / "one.png"
    Image.new("RGB", (16, 16)).save(path)
    return path


@pytest.fixture(scope="module")
def adapted(tmp_path_factory: pytest.TempPathFactory, tiny_data: Path) -> fedshift.Run:
    """DualAdapt with the clients blue, coral and dim, of which dim has nothing to learn from."""
    root = tmp_path_factory.mktemp("adapted")
    shutil.copytree(tiny_data, root / "data")
    write_domain(root / "data", "dim", train=0)
    return fedshift.fit("dualadapt", data_dir=root / "data", home="amber", arch="digits-dualadapt", **KEYS)


def models_in(path: Path) -> set[str]:
    return {row["model"] for row in csv.DictReader(path.open())}


def test_a_name_that_is_nearly_a_clients_is_an_error(adapted: fedshift.Run, picture: Path, tmp_path: Path) -> None:
    out = tmp_path / "out.csv"
    for name in ("bleu", "BLUE", "corals"):
        with pytest.raises(InputError) as caught:
            predict_files(adapted.path, picture, out, site=name)
        assert caught.value.code == "unknown-name" and caught.value.exit_code == 2 and not out.exists()
        assert f"--site: this run has no model of {name!r}. Did you mean" in caught.value.message
        assert "blue, coral; leave --site out for the shared model" in caught.value.message
    with pytest.raises(InputError, match="Did you mean 'blue'"):
        adapted.predict(np.zeros((1, 16, 16, 3), dtype=np.uint8), site="bleu")


def test_a_site_that_took_no_part_gets_the_shared_model(adapted: fedshift.Run, picture: Path, tmp_path: Path) -> None:
    out = tmp_path / "out.csv"
    counts = predict_files(adapted.path, picture, out, site="zzz")
    assert counts.model == "the shared model (this run has none of zzz's own, only of blue, coral)"
    assert models_in(out) == {"shared"}
    assert predict_files(adapted.path, picture, out, site="blue").model == "the model of blue"
    assert models_in(out) == {"blue"}


def test_a_client_that_was_left_out_is_told_so(adapted: fedshift.Run, picture: Path, tmp_path: Path) -> None:
    assert "dim" not in adapted.model().models and adapted.results["counters"]["skipped.dim.site-policy"] == 2
    counts = predict_files(adapted.path, picture, tmp_path / "out.csv", site="dim")
    why = "client 'dim' was left out of training (site-policy) and has no model of its own"
    assert counts.model == f"the shared model, because {why}"
    home = predict_files(adapted.path, picture, tmp_path / "out.csv", site="amber")
    assert home.model == "the shared model (this run has none of amber's own, only of blue, coral)"
    saved = adapted.model()
    without_shared = replace(saved, models={name: saved.models[name] for name in saved.own})
    with pytest.raises(InputError) as caught:
        adapted.choose(without_shared, "dim")
    assert caught.value.message == f"{why}, and there is none to share: name one of blue, coral with --site"


def test_without_a_shared_model_the_wrong_name_is_named(tiny_data: Path, picture: Path, tmp_path: Path) -> None:
    keys = {"home": "amber", "arch": "digits-dualadapt", "cent-mcd": {"form": "one-to-one"}, **KEYS}
    run = fedshift.fit("cent-mcd", data_dir=tiny_data, out=tmp_path / "run", **{**keys, "rounds": 1})
    for name, says in {
        "bleu": "no model of 'bleu'. Did you mean 'blue'? Clients with a model of their own: blue, coral, dim",
        "zzz": "no model of 'zzz', only a model for each of blue, coral, dim and none to share: name one with --site",
        None: "a model for each of blue, coral, dim and none to share: name one with --site",
    }.items():
        with pytest.raises(InputError) as caught:
            predict_files(run.path, picture, tmp_path / "out.csv", site=name)
        assert says in caught.value.message and "--site" in caught.value.message
