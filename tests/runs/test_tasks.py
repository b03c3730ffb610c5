"""The same path for tables and for segmentation: train, score, predict."""

from __future__ import annotations

import csv
import shutil
from pathlib import Path

import numpy as np
import pytest
from listening import Heard
from PIL import Image
from tinydata import write_domain

import fedshift
from fedshift.errors import InputError, SiteError
from fedshift.runs.predict import predict_files


def write_hospital(path: Path, rows: int, shift: float, seed: int) -> None:
    """Sick when pressure + sugar is high; hospitals measure on different scales and leave cells empty."""
    rng = np.random.default_rng(seed)
    values = rng.normal(0, 1, (rows, 3))
    sick = (values[:, 0] + values[:, 1] > 0).astype(int)
    lines = [["pressure", "sugar", "age", "target"]]
    for number, (row, label) in enumerate(zip(values, sick, strict=True)):
        cells = [f"{value + shift:.3f}" for value in row]
        if number % 9 == 0:
            cells[2] = "?"
        lines.append([*cells, str(label)])
    path.write_text("\n".join(",".join(line) for line in lines) + "\n")


@pytest.fixture(scope="module")
def hospitals(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("hospitals")
    for seed, (name, shift) in enumerate({"east": 0.0, "north": 0.2, "south": -0.2, "west": 0.1}.items()):
        write_hospital(root / f"{name}.csv", 160, shift, seed)
    return root


def test_tables_with_missing_values(hospitals: Path, tmp_path: Path) -> None:
    run = fedshift.fit(
        "fedavg", data_dir=hospitals, label_column="target", target="west", rounds=15, batch_size=16, workers=0
    )
    assert run.results["arch"] == "mlp" and run.results["accuracy"]["last"] > 0.75
    new = tmp_path / "new.csv"
    new.write_text("age,sugar,pressure\n?,2.5,2.5\n0.1,-2.5,-2.5\n")
    counts = predict_files(run.path, new, tmp_path / "out.csv")
    rows = list(csv.DictReader((tmp_path / "out.csv").open()))
    # Columns are matched by name, whatever their order in the new file.
    assert counts.predicted == 2 and [row["prediction"] for row in rows] == ["1", "0"]
    new.write_text("age,sugar\n1,2\n")
    with pytest.raises(InputError, match="no column 'pressure'"):
        predict_files(run.path, new, tmp_path / "out.csv")


def write_city(root: Path, name: str, sky: int, count: int, seed: int) -> None:
    """Sky above a horizon, road below it, and a band of void between."""
    rng = np.random.default_rng(seed)
    for kind in ("images", "masks"):
        (root / name / kind).mkdir(parents=True)
    for number in range(count):
        horizon = int(rng.integers(10, 22))
        mask = np.zeros((32, 32), dtype=np.uint8)
        mask[horizon:], mask[horizon] = 1, 255
        image = np.where(mask[..., None] == 0, sky, 60) + rng.integers(-15, 15, (32, 32, 3))
        Image.fromarray(image.clip(0, 255).astype(np.uint8)).save(root / name / "images" / f"{number:02d}.png")
        Image.fromarray(mask).save(root / name / "masks" / f"{number:02d}.png")


@pytest.fixture(scope="module")
def cities(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("cities")
    (root / "classes.txt").write_text("sky\nroad\n")
    for seed, (name, sky) in enumerate({"dusk": 150, "noon": 230, "rain": 190}.items()):
        write_city(root, name, sky, 30, seed)
    return root


@pytest.mark.parametrize("roles", [{"target": "rain"}, {"home": "noon"}], ids=["generalize", "multi-adapt"])
def test_segmentation_is_scored_by_mean_iou_over_labelled_pixels(cities: Path, roles: dict[str, str]) -> None:
    run = fedshift.fit("fedavg", data_dir=cities, rounds=10, batch_size=4, workers=0, augment=["flip"], **roles)
    assert run.results["arch"] == "segnet-small" and "accuracy" not in run.results
    assert run.results["miou"]["last"] > 0.7


def test_segmentation_predicts_masks(cities: Path, tmp_path: Path) -> None:
    run = fedshift.fit("fedavg", data_dir=cities, target="rain", rounds=4, batch_size=6, workers=0)
    counts = predict_files(run.path, cities / "rain" / "images", tmp_path / "seen.csv")
    assert counts.predicted == 30
    mask = np.asarray(Image.open(tmp_path / "seen_masks" / "00.png"))
    assert mask.shape == (32, 32) and set(np.unique(mask)) <= {0, 1}
    rows = list(csv.DictReader((tmp_path / "seen.csv").open()))
    assert float(rows[0]["share_road"]) == pytest.approx((mask == 1).mean(), abs=1e-3)


def test_an_augmentation_that_would_tear_masks_from_images_is_refused(cities: Path) -> None:
    with pytest.raises(InputError, match="cannot be used with masks"):
        fedshift.fit("fedavg", data_dir=cities, target="rain", rounds=1, workers=0, augment=["randaugment"])


def test_labels_of_a_target_are_left_alone_and_the_run_says_so(tiny_data: Path) -> None:
    heard = Heard()
    fedshift.fit("fedavg", data_dir=tiny_data, setting="adapt", target="dim", rounds=1, workers=0, progress=heard)
    assert "dim: its training labels are not used, only its inputs are" in heard.messages


def test_a_target_without_images_is_named(tiny_data: Path, tmp_path: Path) -> None:
    shutil.copytree(tiny_data, tmp_path / "data")
    write_domain(tmp_path / "data", "dim", train=0)
    with pytest.raises(InputError, match="target 'dim' has no training data to adapt to"):
        fedshift.fit("fedavg", data_dir=tmp_path / "data", setting="adapt", target="dim", rounds=1, workers=0)


def write_pictures(root: Path, sites: tuple[str, ...]) -> None:
    """Twelve plain pictures of each of two classes at every site."""
    for site in sites:
        for label in ("a", "b"):
            (root / site / label).mkdir(parents=True)
            for number in range(12):
                Image.new("RGB", (16, 16), (20 * number, 0, 0)).save(root / site / label / f"{label}{number}.png")


def test_few_test_samples_and_attacks_are_told(tiny_data: Path, tmp_path: Path) -> None:
    heard = Heard()
    run = fedshift.fit(
        "fedavg", data_dir=tiny_data, target="dim", rounds=1, workers=0, attack=["noise:blue"], progress=heard
    )
    assert {"dim is scored on 30 test samples only", "attack: noise:blue"} <= set(heard.messages)
    card = run.directory.card.read_text()
    assert "Trained under simulated attack:** noise:blue" in card and "| dim | 30 |" in card


def test_predictions_say_whose_model_made_them(tiny_data: Path, tmp_path: Path) -> None:
    pictures = tmp_path / "new"
    pictures.mkdir()
    Image.new("RGB", (16, 16)).save(pictures / "one.png")
    run = fedshift.fit("fedavg", data_dir=tiny_data, target="dim", rounds=1, workers=0)
    assert predict_files(run.path, pictures, tmp_path / "out.csv").model == "the shared model"
    typo = predict_files(run.path, pictures, tmp_path / "out.csv", site="bleu")
    assert typo.model == "the shared model (this run has none of bleu's own)"
    (pictures / "one.png").write_bytes(b"not a picture")
    with pytest.raises(InputError, match=r"nothing in .*new could be read: one.png"):
        predict_files(run.path, pictures, tmp_path / "out.csv")


@pytest.mark.parametrize("workers", [0, 2])
def test_a_run_that_a_site_stops_names_its_log_but_not_its_words(tmp_path: Path, workers: int) -> None:
    root = tmp_path / "data"
    write_pictures(root, ("north", "south", "west"))
    out = tmp_path / "run"
    keys = {"data_dir": root, "target": "west", "rounds": 1, "workers": workers, "policy": {"allow": ["facts"]}}
    with pytest.raises(SiteError) as caught:
        fedshift.fit("fedavg", out=out, **keys)
    log = out / "sites" / "north" / "site.log"
    assert "north, south: site-policy (A site's own policy forbids" in caught.value.message
    assert f"What happened is in {log};" in caught.value.message and "'weights'" not in caught.value.message
    assert "the site's policy does not allow 'weights' to leave it" in log.read_text()


@pytest.mark.parametrize("workers", [0, 2])
def test_a_file_that_cannot_be_read_is_named_before_the_run_begins(tmp_path: Path, workers: int) -> None:
    root, out = tmp_path / "data", tmp_path / "run"
    write_pictures(root, ("north", "south", "west"))
    (root / "south" / "a" / "a3.png").write_bytes(b"not a picture")
    with pytest.raises(
        InputError, match=r"south/a/a3.png: it is not a JPEG, PNG, TIFF, GIF, WebP, BMP or DICOM image"
    ) as caught:
        fedshift.fit("fedavg", data_dir=root, target="west", rounds=1, workers=workers, out=out)
    assert caught.value.code == "data-unreadable" and not out.exists()


def test_nearly_black_images_of_sixteen_bits_are_told_and_counted(tmp_path: Path) -> None:
    root = tmp_path / "data"
    write_pictures(root, ("north", "south"))
    Image.fromarray(np.full((16, 16), 4095, dtype=np.uint16)).save(root / "north" / "a" / "a3.png")
    heard = Heard()
    run = fedshift.fit("fedavg", data_dir=root, target="south", rounds=1, workers=0, progress=heard)
    assert "north: 1 16-bit images are nearly black (see fedshift check-data)" in heard.messages
    assert run.results["counters"] == {"dark.files": 1}
