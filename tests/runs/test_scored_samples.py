"""How many samples a score comes from: all of a held-out domain, unless its data came with a test split."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from listening import Heard
from PIL import Image
from tinydata import TINTS, shapes

import fedshift
from fedshift.data import open_dataset
from fedshift.data.domain import DataSource

HELD_OUT = 45


@pytest.fixture(scope="module")
def unsplit(tiny_data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny data with 45 pictures of `dim` in class folders, in no split."""
    root = tmp_path_factory.mktemp("unsplit")
    for name in ("amber", "blue"):
        shutil.copy(tiny_data / f"{name}.npz", root)
    images, labels = shapes(HELD_OUT, TINTS["dim"], 0.1, 3)
    for number, (image, label) in enumerate(zip(images, labels, strict=True)):
        folder = root / "dim" / str(label)
        folder.mkdir(parents=True, exist_ok=True)
        Image.fromarray(image).save(folder / f"{number:02}.png")
    return root


def fit(root: Path, method: str = "fedavg", **keys: Any) -> tuple[dict[str, Any], list[str]]:
    heard = Heard()
    run = fedshift.fit(method, data_dir=root, target="dim", rounds=1, workers=0, progress=heard, **keys)
    return run.results, heard.messages


def scored(results: dict[str, Any]) -> int:
    """From the confusion matrix itself: nobody's word on it."""
    return int(np.sum(results["confusion"]["dim"]))


def test_a_held_out_domain_without_a_test_split_is_scored_whole(unsplit: Path) -> None:
    results, said = fit(unsplit)
    assert scored(results) == HELD_OUT
    assert results["samples"]["dim"] == {"train": 0, "val": 0, "test": HELD_OUT}
    assert "dim is scored on all its 45 labelled samples (its data has no test split of its own)" in said


def test_an_adapted_domain_is_scored_on_its_test_split(unsplit: Path) -> None:
    results, said = fit(unsplit, setting="adapt")
    sizes = results["samples"]["dim"]
    assert sum(sizes.values()) == HELD_OUT and 0 < sizes["test"] < 15
    assert scored(results) == sizes["test"]
    assert f"dim is scored on {sizes['test']} test samples only" in said


@pytest.mark.parametrize(("method", "setting"), [("deepall", "adapt"), ("oracle", "generalize")])
def test_baselines_are_scored_on_what_may_be_compared(unsplit: Path, method: str, setting: str) -> None:
    """Pooled sources beside methods that adapt to `dim`, and a method that trains on it."""
    adapted, _ = fit(unsplit, setting="adapt")
    results, _ = fit(unsplit, method, setting=setting)
    assert scored(results) == scored(adapted)


def test_a_given_test_split_is_kept(unsplit: Path, tmp_path: Path) -> None:
    root = tmp_path / "listed"
    shutil.copytree(unsplit, root)
    names = sorted(f"{path.parent.name}/{path.name}" for path in (root / "dim").glob("*/*.png"))
    (root / "splits").mkdir()
    (root / "splits" / "dim_train.txt").write_text("\n".join(names[:30]))
    (root / "splits" / "dim_test.txt").write_text("\n".join(names[30:]))
    results, _ = fit(root)
    assert scored(results) == 15


def test_lists_for_training_and_validation_are_no_test_split(unsplit: Path, tmp_path: Path) -> None:
    root = tmp_path / "listed"
    shutil.copytree(unsplit, root)
    names = sorted(f"{path.parent.name}/{path.name}" for path in (root / "dim").glob("*/*.png"))
    (root / "splits").mkdir()
    (root / "splits" / "dim_train.txt").write_text("\n".join(names[:30]))
    (root / "splits" / "dim_crossval.txt").write_text("\n".join(names[30:40]))
    results, _ = fit(root)
    assert scored(results) == 40, "five pictures are in no list"


def test_which_data_have_a_test_split_of_their_own(unsplit: Path, tmp_path: Path) -> None:
    images, labels = shapes(30, TINTS["dim"], 0.1, 3)
    np.savez(tmp_path / "loose.npz", images=images, labels=labels)
    np.savez(tmp_path / "split.npz", train_images=images, train_labels=labels, test_images=images, test_labels=labels)
    arrays = open_dataset(DataSource(data_dir=tmp_path))
    assert not arrays.load("loose").test_given and arrays.load("split").test_given
    assert not open_dataset(DataSource(data_dir=unsplit)).load("dim").test_given
    assert open_dataset(DataSource("digits")).load("chalk").test_given
    table = tmp_path / "tables"
    table.mkdir()
    (table / "a.csv").write_text("x,label\n" + "".join(f"{number},{number % 2}\n" for number in range(20)))
    assert not open_dataset(DataSource(data_dir=table)).load("a").test_given


def test_what_is_scored_does_not_change_what_is_trained(unsplit: Path, tmp_path: Path) -> None:
    root = tmp_path / "arrays"
    shutil.copytree(unsplit, root)
    shutil.rmtree(root / "dim")
    images, labels = shapes(21, TINTS["dim"], 0.2, 8)
    np.savez(root / "dim.npz", train_images=images, train_labels=labels, test_images=images, test_labels=labels)
    (whole, _), (split, _) = fit(unsplit), fit(root)
    assert (scored(whole), scored(split)) == (45, 21)
    assert whole["model_sha256"] == split["model_sha256"]


def test_a_held_out_domain_with_a_single_picture_a_class_is_scored_too(unsplit: Path, tmp_path: Path) -> None:
    """Its test split, chosen by name, is empty."""
    root = tmp_path / "few"
    shutil.copytree(unsplit, root)
    for folder in (root / "dim").iterdir():
        for path in sorted(folder.glob("*.png"))[1:]:
            path.unlink()
    results, said = fit(root)
    assert scored(results) == 3
    assert "dim is scored on all its 3 labelled samples (its data has no test split of its own)" in said
