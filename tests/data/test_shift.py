"""How different sites look, from means and deviations."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner

from fedshift.cli.app import app
from fedshift.data import DataSource, open_dataset
from fedshift.data.shift import SiteLook, distance, image_features, measure_shift


def test_features_of_images_are_what_they_are_called() -> None:
    images = np.zeros((3, 4, 4, 3), dtype=np.uint8)
    images[1, ..., 0] = 255
    images[2, ::2, ::2] = images[2, 1::2, 1::2] = 255  # a chessboard
    black, red, board = image_features(images)
    np.testing.assert_allclose(black, 0)
    np.testing.assert_allclose(red, [0.299, 0, 0.701, -0.299, -0.299, 1, 0], atol=1e-6)
    # Half of the pixels are white, and each white one has four black neighbours.
    np.testing.assert_allclose(board, [0.5, 0.5, 0, 0, 0, 0, 4], atol=1e-6)


def test_distance_is_the_difference_of_means_in_deviations() -> None:
    def look(name: str, x: float, y: float) -> SiteLook:
        return SiteLook(name, 9, {"x": x, "y": y}, {"x": 1.0, "y": 2.0}, {}, None)

    # 3 deviations in x and 4 / 2 in y: the root of (9 + 4) / 2.
    assert distance(look("a", 0, 0), look("b", 3, 4)) == pytest.approx((13 / 2) ** 0.5)
    assert distance(look("a", 0, 0), look("a", 0, 0)) == 0


@pytest.fixture
def sites(tmp_path: Path) -> Path:
    rng, folder = np.random.default_rng(0), tmp_path / "sites"
    folder.mkdir()
    for name, light, count in (("a", 60, 40), ("b", 62, 40), ("c", 200, 40), ("d", 60, 3)):
        # Each image has a light of its own, and its pixels vary around it.
        lights = light + rng.integers(-25, 25, (count, 1, 1, 1))
        images = (lights + rng.integers(-20, 20, (count, 24, 24, 3)) * rng.random((count, 1, 1, 1))).astype(np.uint8)
        np.savez(folder / f"{name}.npz", images=images, labels=np.arange(count) % 2)
    return folder


def test_the_site_that_looks_unlike_the_others_is_named(sites: Path) -> None:
    found = measure_shift(open_dataset(DataSource(data_dir=sites)))
    assert found.unlike == ("c",) and found.too_small == ("d",)
    assert found.reasons("c")[0] == "higher brightness"
    assert found.between("a", "c") == found.between("c", "a") > 1 and [s.name for s in found.sites] == ["a", "b", "c"]
    assert found.sites[0].classes == {"0": 0.5, "1": 0.5}


def test_columns_of_tables_and_missing_values(tmp_path: Path) -> None:
    for name, gap in (("a", ""), ("b", "1")):
        rows = [f"{age},{gap},{age % 2}" for age in range(40, 60)]
        (tmp_path / f"{name}.csv").write_text("\n".join(["age,chol,label", *rows]) + "\n")
    one, other = measure_shift(open_dataset(DataSource(data_dir=tmp_path))).sites
    assert one.means == {"age": 49.5} and one.missing == {"chol": 1.0}
    assert other.means == {"age": 49.5, "chol": 1.0} and other.missing == {}


def test_check_data_shows_the_shift(sites: Path) -> None:
    shown = CliRunner().invoke(app, ["check-data", str(sites), "--shift"])
    assert shown.exit_code == 0 and "c looks unlike the others: higher brightness" in shown.stdout
    told = json.loads(CliRunner().invoke(app, ["check-data", str(sites), "--shift", "--json"]).stdout)
    assert told["shift"]["unlike"] == ["c"] and told["shift"]["distances"]["a / c"] > 1
