"""The methods for one home and many clients on pictures whose every pixel has a class."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from PIL import Image

import fedshift
from fedshift.runs.predict import predict_files

SKIES = {"dusk": 150, "noon": 230, "rain": 190}


@pytest.fixture(scope="module")
def cities(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Sky above road, void between; every city has a sky of its own."""
    root = tmp_path_factory.mktemp("cities")
    (root / "classes.txt").write_text("sky\nroad\n")
    for name, sky in SKIES.items():
        rng = np.random.default_rng(sky)
        for kind in ("images", "masks"):
            (root / name / kind).mkdir(parents=True)
        for number in range(15):
            horizon = int(rng.integers(10, 22))
            mask = np.zeros((32, 32), dtype=np.uint8)
            mask[horizon:], mask[horizon] = 1, 255
            image = np.where(mask[..., None] == 0, sky, 60) + rng.integers(-15, 15, (32, 32, 3))
            Image.fromarray(image.astype(np.uint8)).save(root / name / "images" / f"{number:02d}.png")
            Image.fromarray(mask).save(root / name / "masks" / f"{number:02d}.png")
    return root


CASES = {
    "dualadapt": {"pretrain_epochs": 6.0, "points": 400},
    "fed-oracle": {"pretrain_epochs": 6.0},
    "fed-mcd": {"repeats": 1},
    "cent-mcd": {"repeats": 1},
    "fed-dan": {},
    "fed-dann": {},
}


@pytest.mark.parametrize("method", CASES)
def test_learns_to_label_pixels(method: str, cities: Path, tmp_path: Path) -> None:
    rounds = 1 if method in ("dualadapt", "fed-oracle") else 5
    run = fedshift.fit(
        method, data_dir=cities, home="noon", rounds=rounds, batch_size=4, lr=0.02, workers=0, **{method: CASES[method]}
    )
    assert run.results["task"] == "segmentation" and run.results["arch"] == "segnet-small"
    assert set(run.results["per_target"]) == {"dusk", "rain"} and run.results["miou"]["last"] > 0.6
    if method == "dualadapt":
        used = {row["name"]: row["value"] for row in run.metrics if row["site"] == "rain"}
        assert used["components"] == 1  # a dozen pictures: one component of 10 or more, however many pixels
        assert "trust" not in used and 0 < used["discrepancy"] < 2
        counts = predict_files(run.path, cities / "rain" / "images", tmp_path / "masks.csv", site="rain")
        assert counts.predicted == 15


def test_deeplab_clients_send_the_last_layer_only(cities: Path) -> None:
    run = fedshift.fit(
        "dualadapt",
        data_dir=cities,
        home="noon",
        targets=["rain"],
        rounds=1,
        batch_size=8,
        workers=0,
        train_per_site=12,
        arch="deeplab_mobilenet_v2_half",
        dualadapt={"pretrain_epochs": 0.5, "server_epochs": 0.5, "points": 200},
    )
    sent = [line for line in (run.path / "sites/rain/ledger.jsonl").read_text().splitlines() if "classifier" in line]
    assert len(sent) == 1 and f'"values": {256 * 2 + 2}' in sent[0]
