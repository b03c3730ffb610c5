from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
import pytest
from datafiles import picture, png_of_declared_size, save, write_classes
from PIL import Image

from fedshift.data import DataSource, check_data, open_dataset
from fedshift.errors import InputError


def check(root: Path):
    return check_data(DataSource(data_dir=root))


def test_good_data_has_counts_and_nothing_else(root: Path) -> None:
    write_classes(root / "a", {"x": 40, "y": 30})
    write_classes(root / "b", {"x": 10, "y": 10}, seed=5000)
    report = check(root)
    assert report.ok
    assert (report.problems, report.warnings, report.duplicates) == ((), (), ())
    assert report.classes == ("x", "y")
    assert report.input_shape == (3, 12, 12)
    domain = open_dataset(DataSource(data_dir=root)).load("a")
    a = report.domains[0]
    assert a.splits == {"train": len(domain.train), "val": len(domain.val), "test": len(domain.test)}
    assert sum(a.classes["x"].values()) == 40
    assert a.classes["y"]["train"] == int((domain.train.labels == 1).sum())
    assert a.sizes == {(12, 12): 70}
    assert a.skipped == ()


def test_images_of_twelve_bits_in_sixteen_are_counted_and_the_first_is_named(root: Path) -> None:
    write_classes(root / "a", {"x": 4, "y": 4})
    write_classes(root / "b", {"x": 4, "y": 4}, seed=5000)
    for number in (1, 3):
        scan = np.random.default_rng(number).integers(0, 4096, (12, 12), dtype=np.uint16)
        Image.fromarray(scan).save(root / "b" / "y" / f"{number:03}.png")
    report = check(root)
    assert report.ok
    (warning,) = [warning for warning in report.warnings if "16 bits" in warning]
    assert warning.startswith("2 images of b have 16 bits per value but none above 4095, so they are nearly black; ")
    assert "the first is b/y/001.png." in warning and "(12 bits: by 16)" in warning
    again = open_dataset(DataSource(data_dir=root)).load("b")
    assert sorted(again.dark) == ["b/y/001.png", "b/y/003.png"], "remembered with what was decoded"


def test_every_problem_is_reported_not_just_the_first(root: Path) -> None:
    write_classes(root / "a", {"Dog": 5, "cat": 5, "nothing": 0})
    write_classes(root / "b", {"dog": 5, "cat": 5}, seed=5000)
    (root / "b" / "dog" / "001.png").write_bytes(b"broken")
    (root / "b" / "cat" / "001.png").write_bytes(png_of_declared_size(60_000, 60_000))
    (root / "c" / "cat").mkdir(parents=True)
    np.savez(root / "d.npz", images=np.zeros((3, 8, 8), dtype=np.uint8), labels=np.array([0, 1, -5]))
    report = check(root)
    assert not report.ok
    assert sorted(problem.code for problem in report.problems) == [
        "data-classes",
        "data-empty",
        "data-empty",
        "data-labels",
        "data-unreadable",
    ]
    (b,) = [domain for domain in report.domains if domain.name == "b"]
    assert [(skipped.file, bool(skipped.reason)) for skipped in b.skipped] == [
        ("b/cat/001.png", True),
        ("b/dog/001.png", True),
    ]
    # What only decoding can find is not known when the data set is opened.
    with pytest.raises(InputError, match="3 more"):
        open_dataset(DataSource(data_dir=root))


def test_few_unreadable_images_are_a_warning(root: Path) -> None:
    write_classes(root / "a", {"x": 60, "y": 60})
    (root / "a" / "x" / "001.png").write_bytes(b"broken")
    report = check(root)
    assert report.ok
    assert any("1 of 120 samples of a cannot be used" in warning for warning in report.warnings)


def test_all_images_unreadable(root: Path) -> None:
    for name in ("x/1.png", "y/1.jpg"):
        (root / "a" / name).parent.mkdir(parents=True)
        (root / "a" / name).write_bytes(b"broken")
    report = check(root)
    assert {problem.code for problem in report.problems} >= {"data-unreadable"}
    assert len(report.domains[0].skipped) == 2


def test_duplicates_across_domains_and_splits_but_not_within_one(root: Path) -> None:
    write_classes(root / "a", {"x": 30, "y": 30})
    write_classes(root / "b", {"x": 5, "y": 5}, seed=5000)
    shutil.copy(root / "a" / "y" / "003.png", root / "b" / "y" / "copy.png")
    (root / "splits").mkdir()
    lines = [f"{label}/{i:03}.png" for label in "xy" for i in range(30)]
    (root / "splits" / "a_train.txt").write_text("\n".join([*lines[:40], "x/same.png"]))
    (root / "splits" / "a_test.txt").write_text("\n".join([*lines[40:], "x/leak.png"]))
    shutil.copy(root / "a" / "x" / "000.png", root / "a" / "x" / "same.png")
    shutil.copy(root / "a" / "x" / "001.png", root / "a" / "x" / "leak.png")
    report = check(root)
    found = {(duplicate.first, duplicate.second, duplicate.across) for duplicate in report.duplicates}
    assert ("a/y/003.png", "b/y/copy.png", "domains") in found
    assert ("a/x/001.png", "a/x/leak.png", "splits") in found
    # The copy within train counts only where validation took one of the two.
    assert {pair[1] for pair in found} <= {"b/y/copy.png", "a/x/leak.png", "a/x/same.png"}
    assert any("across domains" in warning for warning in report.warnings)
    assert report.ok


def test_class_with_nothing_to_train_on_is_a_warning(root: Path) -> None:
    write_classes(root / "a" / "train", {"x": 5, "y": 0})
    write_classes(root / "a" / "val", {"x": 5, "y": 5}, seed=100)
    write_classes(root / "a" / "test", {"x": 5, "y": 5}, seed=200)
    report = check(root)
    assert report.ok
    assert "a has samples of 'y', but none to train on." in report.warnings


def test_missing_folder_is_a_problem_not_an_exception(root: Path) -> None:
    report = check(root / "nowhere")
    assert [problem.code for problem in report.problems] == ["data-missing"]
    assert report.domains == ()


def test_arrays_report_places_in_the_array(root: Path) -> None:
    images = np.stack([picture(i) for i in range(20)])
    images[19] = images[0]
    np.savez(
        root / "a.npz",
        train_images=images[:15],
        train_labels=np.arange(15) % 2,
        test_images=images[15:],
        test_labels=np.arange(5) % 2,
    )
    (duplicate,) = check(root).duplicates
    assert (duplicate.first, duplicate.second) == ("a: train_images[0]", "a: test_images[4]")
    assert duplicate.across == "splits"


def test_loose_images_beside_classes_are_a_warning(root: Path) -> None:
    write_classes(root / "a", {"x": 5, "y": 5})
    save(root / "a" / "stray.png", picture(77))
    report = check(root)
    assert any("1 images lie in" in warning for warning in report.warnings)
    assert sum(report.domains[0].splits.values()) == 10
