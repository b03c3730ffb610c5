"""Masks that do not fit end a run before it begins, by name; across machines only a code is said of them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from listening import Heard
from numpy.typing import NDArray
from PIL import Image

import fedshift
from fedshift.data import DataSource, open_dataset
from fedshift.errors import InputError
from fedshift.federation import codec
from fedshift.federation.site import SiteHost, SiteSpec
from fedshift.federation.step import Request, answer
from fedshift.federation.survey import answer_survey
from fedshift.runs.config import make_config
from fedshift.runs.planning import prepare

RUNS: dict[str, dict[str, Any]] = {
    "multi-adapt": {"method": "dualadapt", "home": "home"},
    "generalize": {"method": "fedavg", "target": "west"},
    "generalize, held out": {"method": "fedavg", "target": "east"},
    "adapt": {"method": "fedavg", "target": "east", "setting": "adapt"},
}


def put(path: Path, pixels: NDArray[np.uint8]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(pixels).save(path)


def write_city(root: Path, name: str, count: int = 12, seed: int = 0) -> None:
    """Images of 24 x 16 with masks of the ids 0, 1 and 2."""
    rng = np.random.default_rng(seed)
    for i in range(count):
        ids = np.roll(np.array([[0, 1, 2], [2, 1, 0]], dtype=np.uint8), i).repeat(8, axis=0).repeat(8, axis=1)
        put(root / name / "images" / f"f{i}.png", (80 * ids[..., None] + rng.integers(0, 40, (16, 24, 3))).astype("u1"))
        put(root / name / "masks" / f"f{i}.png", ids)


@pytest.fixture
def cities(tmp_path: Path) -> Path:
    root = tmp_path / "cities"
    for seed, name in enumerate(("home", "east", "west")):
        write_city(root, name, seed=seed)
    return root


def paint(mask: Path, value: int) -> None:
    ids = np.array(Image.open(mask))
    ids[:2] = value
    put(mask, ids)


def refused(root: Path, out: Path, **keys: Any) -> InputError:
    """The error that ends a run; nothing was begun."""
    with pytest.raises(InputError) as caught:
        fedshift.fit(data_dir=root, rounds=1, out=out, **keys)
    assert caught.value.exit_code == 2 and not out.exists()
    return caught.value


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("keys", RUNS.values(), ids=RUNS)
def test_a_mask_of_another_size_is_named(cities: Path, tmp_path: Path, keys: dict[str, Any], workers: int) -> None:
    put(cities / "east" / "masks" / "f3.png", np.zeros((8, 9), dtype=np.uint8))
    error = refused(cities, tmp_path / "run", workers=workers, **keys)
    assert error.code == "data-labels"
    assert "1 of 12 samples of east" in error.message
    assert "east/masks/f3.png: the mask is 9 x 8, its image 24 x 16" in error.message


def test_domains_that_take_no_part_are_not_read(cities: Path) -> None:
    put(cities / "east" / "masks" / "f3.png", np.zeros((8, 9), dtype=np.uint8))
    keys = {"home": "home", "targets": ["west"], "policy": {"min_samples": 2}}
    assert fedshift.fit("fed-dan", data_dir=cities, rounds=1, workers=0, **keys).results["per_target"].keys() == {
        "west"
    }


def test_few_masks_of_another_size_are_left_out_and_the_first_is_named(cities: Path) -> None:
    write_city(cities, "east", count=120, seed=7)
    put(cities / "east" / "masks" / "f3.png", np.zeros((8, 9), dtype=np.uint8))
    heard = Heard()
    keys = {"target": "west", "rounds": 1, "workers": 0, "train_per_site": 8, "policy": {"min_samples": 2}}
    run = fedshift.fit("fedavg", data_dir=cities, progress=heard, **keys)
    assert run.results["counters"] == {"skipped.files": 1}
    assert any("1 samples of east are left out; the first is east/masks/f3.png" in words for words in heard.messages)


@pytest.mark.parametrize("keys", RUNS.values(), ids=RUNS)
def test_an_id_beyond_the_class_file_is_named(cities: Path, tmp_path: Path, keys: dict[str, Any]) -> None:
    (cities / "classes.txt").write_text("sky\nroad\ncar\n")
    paint(cities / "east" / "masks" / "f5.png", 7)
    error = refused(cities, tmp_path / "run", **keys)
    assert error.code == "data-labels"
    assert "Masks of east hold the id 7 (first in east/masks/f5.png)" in error.message
    (cities / "classes.txt").write_text("sky\nroad\ncar\nvoid\nvoid\nvoid\nvoid\nvoid\n")
    assert prepare(make_config({**keys, "data_dir": cities})).plan.model.classes == ("sky", "road", "car")


@pytest.mark.parametrize("keys", [RUNS["multi-adapt"], RUNS["generalize, held out"], RUNS["adapt"]])
def test_an_id_that_no_labelled_site_shows_is_no_class(cities: Path, tmp_path: Path, keys: dict[str, Any]) -> None:
    paint(cities / "east" / "masks" / "f5.png", 7)
    error = refused(cities, tmp_path / "run", **keys)
    assert error.code == "data-labels"
    assert "masks of 'east' hold the id 7 (first in east/masks/f5.png)" in error.message
    assert "classes.txt" in error.message and "255" in error.message
    paint(cities / "east" / "masks" / "f5.png", 255)
    assert prepare(make_config({**keys, "data_dir": cities})).plan.model.classes == ("0", "1", "2")


def test_an_id_that_a_labelled_site_shows_is_a_class(cities: Path) -> None:
    paint(cities / "east" / "masks" / "f5.png", 7)
    for keys in ({"method": "fedavg", "target": "west"}, {"method": "oracle", "target": "east"}):
        prepared = prepare(make_config({**keys, "data_dir": cities}))
        assert prepared.plan.model.classes == ("0", "1", "2", "7") and prepared.dataset.warnings == ()


def test_an_id_that_only_others_show_is_told(cities: Path) -> None:
    paint(cities / "east" / "masks" / "f5.png", 7)
    prepared = prepare(make_config({"method": "dualadapt", "home": "home", "targets": ["west"], "data_dir": cities}))
    (warning,) = prepared.dataset.warnings
    assert "masks of 'east' hold the id 7 (first in east/masks/f5.png), but no mask of home does" in warning


def test_from_a_site_elsewhere_only_a_code_comes_and_its_log_has_the_name(cities: Path, tmp_path: Path) -> None:
    plan = prepare(make_config({"method": "dualadapt", "home": "home", "data_dir": cities})).plan
    put(cities / "east" / "masks" / "f3.png", np.zeros((8, 9), dtype=np.uint8))
    spec = SiteSpec("east", "unlabelled", DataSource(data_dir=cities), ("east",), tmp_path / "site")
    body = codec.pack({"rewind_to": 0})
    reply = answer(SiteHost(spec, plan, open_dataset), Request("east", "handshake.introduce", 0, "1", body))
    assert codec.unpack(reply)["code"] == "data-labels" and b"f3" not in reply
    (cities / "classes.txt").write_text("sky\nroad\n")
    reply = answer_survey(spec, Request("east", "survey.look", 0, "2", codec.pack({})))
    assert codec.unpack(reply)["code"] == "data-labels" and b"masks" not in reply
    log = (tmp_path / "site" / "site.log").read_text()
    assert "east/masks/f3.png: the mask is 9 x 8" in log and "hold the id 2 (first in" in log
