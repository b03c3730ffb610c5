from __future__ import annotations

import json
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


def test_every_file_is_read_or_counted_with_a_reason(root: Path) -> None:
    write_classes(root / "a", {"x": 5, "y": 5})
    write_classes(root / "b", {"x": 5, "y": 5}, seed=5000)
    save(root / "a" / "x" / "patient7" / "scan.png", picture(77))
    for name in ("notes.txt", "x/table.xlsx", "x/.DS_Store", "x/slide.svs", "y/slide.svs", "y/raw"):
        (root / "a" / name).write_bytes(b"?")
    (root / "a" / "y" / "gone.png").symlink_to(root / "nowhere.png")
    (root / "README.md").write_text("about the data")
    (root / "b" / "y" / "loop").symlink_to(root / "b" / "y")
    report = check(root)
    assert report.ok
    a = {unread.why: (unread.count, unread.first) for unread in report.domains[0].unread}
    assert a == {
        ".svs is no format that is read": (2, "a/x/slide.svs"),
        ".txt is no format that is read": (1, "a/notes.txt"),
        ".xlsx is no format that is read": (1, "a/x/table.xlsx"),
        "hidden, or left by an archive tool": (1, "a/x/.DS_Store"),
        "no file: a broken link, a pipe or a device": (1, "a/y/gone.png"),
        "the layout has no image there (deeper than class folders?)": (1, "a/x/patient7/scan.png"),
        "the name has no ending": (1, "a/y/raw"),
    }
    assert "a: 2 files are not read: .svs is no format that is read; the first is a/x/slide.svs." in report.warnings
    assert any("README.md" in warning for warning in report.warnings)
    assert report.domains[1].unread, "a link in circles ends"
    assert set(report.warnings) >= set(open_dataset(DataSource(data_dir=root)).warnings)
    told = report.as_json()
    assert json.loads(json.dumps(told))["domains"][0]["unread"][0]["count"] == 2
    assert told["domains"][0]["sizes"] == {"12x12": 10}


def test_frames_that_are_not_used_are_counted(root: Path) -> None:
    write_classes(root / "a", {"x": 5, "y": 5})
    pages = [Image.fromarray(picture(i)) for i in (90, 91)]
    pages[0].save(root / "a" / "x" / "stack.tif", save_all=True, append_images=pages[1:])
    (warning,) = [warning for warning in check(root).warnings if "frames" in warning]
    assert warning.startswith("1 images of a have several frames") and "a/x/stack.tif" in warning


def test_a_class_name_that_is_nearly_another_is_an_error_unless_it_is_meant(root: Path) -> None:
    write_classes(root / "a", {"mouse": 5, "muose": 1, "rat": 5})
    write_classes(root / "b", {"mouse": 5, "rat": 5}, seed=5000)
    (problem,) = check(root).problems
    assert problem.code == "data-classes"
    assert problem.message.startswith("The class 'muose' (1 at a) is nearly 'mouse': did you mean that?")
    (root / "classes.txt").write_text("mouse\nmuose\nrat\n")
    assert check(root).ok


def test_names_that_all_sites_have_are_meant(root: Path) -> None:
    for seed, site in enumerate(("a", "b")):
        write_classes(root / site, {"mouse": 5, "moose": 5}, seed=5000 * seed)
    assert check(root).ok


@pytest.mark.parametrize(
    ("one", "other", "is_slip"),
    [
        ("mouse", "muose", True),
        ("mouse", "mouses", True),
        ("adenocarcinoma", "adenocarcinomma", True),
        ("left lung", "left lnug", True),
        ("benign", "bening", True),
        ("typical", "atypical", False),
        ("stage ii", "stage iii", False),
        ("grade a", "grade b", False),
        ("class1", "class2", False),
        ("cat", "bat", False),
        ("mouse", "horse", False),
        ("type viii", "type xiii", False),
        ("hypothyroid", "hyperthyroid", False),
    ],
)
def test_slips_of_the_pen(one: str, other: str, is_slip: bool) -> None:
    from fedshift.data.index.survey import _is_slip, plain_name

    for pair in ((one, other), (other, one)):
        assert _is_slip(*map(plain_name, pair)) is is_slip


def test_loose_images_beside_classes_are_a_warning(root: Path) -> None:
    write_classes(root / "a", {"x": 5, "y": 5})
    save(root / "a" / "stray.png", picture(77))
    report = check(root)
    assert any("1 images lie in" in warning for warning in report.warnings)
    assert sum(report.domains[0].splits.values()) == 10
