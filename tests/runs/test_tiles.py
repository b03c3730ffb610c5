"""Segmentation in squares of pictures, from training to what is handed over, on lines that vanish when shrunk."""

from __future__ import annotations

import csv
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from PIL import Image
from vessels import SIZES, eye, write_eyes

import fedshift
from fedshift.errors import InputError
from fedshift.handover.adapt import adapt_run
from fedshift.handover.export import export_model
from fedshift.handover.serve import ServedModel
from fedshift.report import write_report
from fedshift.runs.predict import predict_files

KEYS: dict[str, Any] = {"target": "coral", "workers": 0, "batch_size": 4, "train_per_site": 11}


@pytest.fixture(scope="module")
def eyes(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_eyes(tmp_path_factory.mktemp("eyes"))


@pytest.fixture(scope="module")
def run(eyes: Path, tmp_path_factory: pytest.TempPathFactory) -> fedshift.Run:
    out = tmp_path_factory.mktemp("run") / "tiles"
    return fedshift.fit("fedavg", data=eyes, tile=32, rounds=3, out=out, **KEYS)


def vessel_iou(run: fedshift.Run) -> float:
    found = np.array(run.results["confusion"]["coral"])
    return float(found[1, 1] / (found[1].sum() + found[:, 1].sum() - found[1, 1]))


def test_squares_see_what_shrinking_loses(run: fedshift.Run, eyes: Path, tmp_path: Path) -> None:
    shrunk = fedshift.fit(
        "fedavg", data=eyes, image_size=32, arch="unet-small", rounds=12, out=tmp_path / "shrunk", **KEYS
    )
    assert run.results["arch"] == "unet-small"
    assert vessel_iou(run) > 0.5 > 0.1 > vessel_iou(shrunk)


def test_scores_are_of_whole_pictures_and_samples_are_pictures(run: fedshift.Run) -> None:
    height, width = SIZES["coral"]
    assert np.array(run.results["confusion"]["coral"]).sum() == 15 * height * width
    assert run.results["samples"]["coral"]["test"] == 15
    assert run.results["samples"]["amber"]["train"] == 11
    assert "tile: 32" in (run.path / "config.yaml").read_text()


def test_masks_have_the_pictures_own_size_however_they_are_asked_for(run: fedshift.Run, tmp_path: Path) -> None:
    picture, mask = eye((150, 90), (180, 110, 60), 77)
    (tmp_path / "new").mkdir()
    file = tmp_path / "new" / "one.png"
    Image.fromarray(picture).save(file)
    Image.fromarray(picture[:20, :25]).save(tmp_path / "new" / "small.png")  # smaller than a square
    predict_files(run.path, tmp_path / "new", tmp_path / "out.csv")
    written = np.asarray(Image.open(tmp_path / "out_masks" / "one.png"))
    assert written.shape == (150, 90)
    assert np.asarray(Image.open(tmp_path / "out_masks" / "small.png")).shape == (20, 25)
    assert ((written == 1) & (mask == 1)).sum() > 0.7 * mask.sum()
    np.testing.assert_array_equal(run.predict(picture[None])[0], written)
    served = ServedModel(run.path).answer_picture(file.read_bytes())
    with (tmp_path / "out.csv").open() as lines:
        row = next(csv.DictReader(lines))
    assert float(row["share_vessel"]) == pytest.approx(served["shares"]["vessel"], abs=1e-4)


def test_one_picture_counts_once_for_min_samples(eyes: Path, tmp_path: Path) -> None:
    with pytest.raises(InputError, match="'amber' has 11 training samples"):
        fedshift.fit("fedavg", data=eyes, tile=16, rounds=1, out=tmp_path / "few", policy={"min_samples": 12}, **KEYS)


def test_every_engine_gives_the_same_bytes(eyes: Path, tmp_path: Path) -> None:
    keys = KEYS | {"train_per_site": 10, "tile": 48, "rounds": 1, "augment": ["flip", "crop"]}
    found = [
        fedshift.fit("fedavg", data=eyes, out=tmp_path / str(workers), **(keys | {"workers": workers}))
        for workers in (0, 2)
    ]
    assert found[0].results["model_sha256"] == found[1].results["model_sha256"]


@pytest.mark.parametrize("format", ["torch", "safetensors"])
def test_an_exported_file_says_how_pictures_are_cut(run: fedshift.Run, tmp_path: Path, format: Any) -> None:
    (made,) = export_model(run.path, tmp_path / "model", format)
    assert made.largest_difference < 1e-4 and made.samples >= 6
    from fedshift.handover.portable import describe

    said = json.loads(json.dumps(describe(run.model().header, "")))["input"]
    assert (said["side"], said["overlap"], said["shorter_side"], said["shape"]) == (32, 8, None, ["n", 32, 32, 3])


def test_the_documented_stitching_in_numpy_gives_what_predict_gives(run: fedshift.Run) -> None:
    """The function of docs/after-training.md, for programs without fedshift."""
    page = Path(__file__).parents[2] / "docs" / "after-training.md"
    (block,) = [part for part in page.read_text().split("```python") if "def stitched" in part]
    names: dict[str, Any] = {}
    exec(block.partition("```")[0], names)
    picture, _ = eye((70, 81), (180, 110, 60), 5)
    net = run.model().network()

    def model(tiles: NDArray[np.uint8]) -> NDArray[np.float32]:
        import torch

        with torch.inference_mode():
            return np.asarray(net(torch.from_numpy(tiles).permute(0, 3, 1, 2).float() / 255).softmax(1))

    found = names["stitched"](model, picture, 32, 8)
    np.testing.assert_allclose(found, run.predict_proba(picture[None])[0], atol=1e-5)


def test_the_report_shows_parts_of_pictures(run: fedshift.Run, tmp_path: Path) -> None:
    write_report([run.path], tmp_path / "report.html")
    page = (tmp_path / "report.html").read_text()
    assert ">truth</figcaption>" in page and "32 x 32 pixels in its middle" in page


def test_a_new_site_is_adapted_to_in_squares(run: fedshift.Run, tmp_path: Path) -> None:
    (tmp_path / "west").mkdir()
    for i in range(22):
        Image.fromarray(eye((90, 100), (60, 200, 60), i)[0]).save(tmp_path / "west" / f"{i:02}.png")
    adapted = adapt_run(run.path, tmp_path / "west", tmp_path / "adapted", keep="statistics")
    assert adapted.inputs == 22
    assert fedshift.Run(tmp_path / "adapted").predict(eye((90, 100), (60, 200, 60), 0)[0][None]).shape == (1, 90, 100)


def test_methods_that_keep_something_of_each_picture_say_so(eyes: Path, tmp_path: Path) -> None:
    with pytest.raises(InputError, match="dualadapt needs whole pictures, because it keeps the features"):
        fedshift.fit("dualadapt", data=eyes, tile=32, home="amber", rounds=1, out=tmp_path / "run")


@pytest.mark.parametrize("method", ["deepall", "feddg", "fedlooks", "adabn", "fed-mcd", "fed-dan"])
def test_methods_for_masks_train_on_squares(eyes: Path, tmp_path: Path, method: str) -> None:
    keys: dict[str, Any] = {"workers": 0, "batch_size": 8, "train_per_site": 10, "tile": 48, "rounds": 1}
    keys |= {"home": "amber"} if method in ("adabn", "fed-mcd", "fed-dan") else {"target": "coral"}
    trained = fedshift.fit(method, data=eyes, out=tmp_path / "run", **keys)
    assert 0.3 < min(score["last"] for score in trained.results["per_target"].values()) <= 1
