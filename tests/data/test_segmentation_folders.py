from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from datafiles import picture, save
from PIL import Image

from fedshift.data import VOID, DataSource, Domain, check_data, open_dataset
from fedshift.errors import InputError

IDS = np.array([[0, 1, 2], [2, 11, 255]], dtype=np.uint8)


@pytest.fixture
def root(tmp_path: Path) -> Path:
    folder = tmp_path / "streets"
    folder.mkdir()
    return folder


def mask(ids: np.ndarray, scale: int = 4) -> np.ndarray:
    return np.kron(ids, np.ones((scale, scale), dtype=np.uint8))


def write_city(root: Path, name: str, count: int, ids: np.ndarray = IDS, seed: int = 0) -> None:
    for i in range(count):
        save(root / name / "images" / f"f{i}.png", picture(seed + i, 8, 12))
        save(root / name / "masks" / f"f{i}.png", mask(np.roll(ids, i)))


def pairs(domain: Domain) -> dict[bytes, np.ndarray]:
    return {
        split.inputs[i].tobytes(): split.labels[i]
        for split in (domain.train, domain.val, domain.test)
        for i in range(len(split))
    }


def problem_of(root: Path) -> InputError:
    with pytest.raises(InputError) as error:
        dataset = open_dataset(DataSource(data_dir=root))
        dataset.load(dataset.domains[0])
    return error.value


def test_classes_are_the_ids_found_in_any_domain(root: Path) -> None:
    write_city(root, "a", 4)
    write_city(root, "b", 4, np.array([[0, 1, 5], [5, 1, 0]], dtype=np.uint8), seed=50)
    dataset = open_dataset(DataSource(data_dir=root))
    assert dataset.task == "segmentation"
    assert dataset.classes == ("0", "1", "2", "5", "11")
    assert dataset.mask_ids == (0, 1, 2, 5, 11)
    assert dataset.input_shape == (3, 8, 12)
    a, b = dataset.load("a"), dataset.load("b")
    assert a.train.labels.dtype == np.uint8
    np.testing.assert_array_equal(pairs(a)[picture(0, 8, 12).tobytes()], mask(np.array([[0, 1, 2], [2, 4, VOID]])))
    np.testing.assert_array_equal(pairs(b)[picture(50, 8, 12).tobytes()], mask(np.array([[0, 1, 3], [3, 1, 0]])))


@pytest.mark.parametrize(
    ("lines", "classes", "numbers"),
    [
        (["sky", "road", "car", "void"], ("sky", "road", "car"), [0, 1, 2, VOID]),
        (["Void", "sky", "road", "car"], ("sky", "road", "car"), [VOID, 0, 1, 2]),
    ],
)
def test_class_file_names_ids_and_void(
    root: Path, lines: list[str], classes: tuple[str, ...], numbers: list[int]
) -> None:
    write_city(root, "a", 4, np.array([[0, 1], [2, 3]], dtype=np.uint8)[:, [0, 1, 1]])
    (root / "classes.txt").write_text("\n".join(lines))
    dataset = open_dataset(DataSource(data_dir=root))
    assert dataset.classes == classes
    found = pairs(dataset.load("a"))[picture(0, 8, 12).tobytes()]
    np.testing.assert_array_equal(found, mask(np.array(numbers, dtype=np.uint8).reshape(2, 2)[:, [0, 1, 1]]))


def test_id_beyond_the_class_file_is_an_error(root: Path) -> None:
    write_city(root, "a", 4)
    (root / "classes.txt").write_text("sky\nroad\ncar\n")
    error = problem_of(root)
    assert error.code == "data-labels"
    assert "Masks of a hold the id 11 (first in a/masks/f0.png), beyond the 3 lines of classes.txt" in error.message


def test_one_id_beyond_the_class_file_is_told_among_hundreds_of_masks(root: Path) -> None:
    """Fewer than the 1 % that may be unreadable: but a class that is missing from the list is no broken file."""
    write_city(root, "a", 120, np.array([[0, 1, 1], [1, 0, 0]], dtype=np.uint8))
    save(root / "a" / "masks" / "f77.png", mask(np.array([[0, 1, 2], [4, 0, 0]], dtype=np.uint8)))
    (root / "classes.txt").write_text("sky\nroad\n")
    report = check_data(DataSource(data_dir=root))
    assert [problem.code for problem in report.problems] == ["data-labels"]
    assert "hold ids 2, 4 (first in a/masks/f77.png)" in report.problems[0].message
    (root / "classes.txt").write_text("sky\nroad\nvoid\n\ncar\nVOID\n")
    dataset = open_dataset(DataSource(data_dir=root))
    assert dataset.classes == ("sky", "road", "car")
    assert dataset.load("a").skipped == ()


def test_camvid_ids_in_a_folder_of_ones_own(root: Path) -> None:
    """Eleven classes and id 11, which is none."""
    for number, drive in enumerate(("0001TP", "Seq05VD")):
        write_city(root, drive, 4, np.array([[0, 3, 10], [11, 11, 255]], dtype=np.uint8), seed=50 * number)
    (root / "classes.txt").write_text("\n".join([*(f"class{i}" for i in range(11)), "void"]))
    dataset = open_dataset(DataSource(data_dir=root))
    assert len(dataset.classes) == 11 and dataset.shown_in == {}
    found = pairs(dataset.load("Seq05VD"))[picture(50, 8, 12).tobytes()]
    np.testing.assert_array_equal(found, mask(np.array([[0, 3, 10], [VOID, VOID, VOID]])))


def test_ids_of_one_domain_alone_are_told_with_a_mask(root: Path) -> None:
    write_city(root, "a", 4, np.array([[0, 1, 1], [1, 0, 0]], dtype=np.uint8))
    write_city(root, "b", 4, np.array([[0, 1, 1], [1, 0, 0]], dtype=np.uint8), seed=50)
    save(root / "b" / "masks" / "f2.png", mask(np.array([[0, 1, 7], [0, 255, 0]], dtype=np.uint8)))
    dataset = open_dataset(DataSource(data_dir=root))
    assert dataset.shown_in == {
        "a": {"0": "a/masks/f0.png", "1": "a/masks/f0.png"},
        "b": {"0": "b/masks/f0.png", "1": "b/masks/f0.png", "7": "b/masks/f2.png"},
    }
    report = check_data(DataSource(data_dir=root))
    assert report.ok
    assert any("Only masks of b hold the id 7 (first in b/masks/f2.png)" in warning for warning in report.warnings)


def test_palette_masks_mean_indices(root: Path) -> None:
    write_city(root, "a", 4, np.array([[0, 1, 1], [1, 0, 0]], dtype=np.uint8))
    image = Image.fromarray(mask(np.array([[1, 0, 1], [0, 1, 0]], dtype=np.uint8)), "P")
    image.putpalette([0, 0, 0, 250, 0, 0])
    image.save(root / "a" / "masks" / "f0.png")
    found = pairs(open_dataset(DataSource(data_dir=root)).load("a"))[picture(0, 8, 12).tobytes()]
    np.testing.assert_array_equal(found, mask(np.array([[1, 0, 1], [0, 1, 0]], dtype=np.uint8)))


def test_images_and_masks_are_resized_alike_without_new_ids(root: Path) -> None:
    write_city(root, "a", 4)
    dataset = open_dataset(DataSource(data_dir=root, image_size=16))
    assert dataset.input_shape == (3, 16, 24)
    found = pairs(dataset.load("a"))
    assert {label.shape for label in found.values()} == {(16, 24)}
    assert set(np.unique(np.stack(list(found.values())))) == {0, 1, 2, 3, VOID}


def test_images_without_a_mask_are_an_error(root: Path) -> None:
    write_city(root, "a", 4)
    (root / "a" / "masks" / "f2.png").unlink()
    error = problem_of(root)
    assert error.code == "data-labels"
    assert "1 of 4" in error.message
    assert "the first is f2.png. Name masks like their images (f2.png for this one), add" in error.message


def test_mask_of_another_size_than_its_image_is_named(root: Path) -> None:
    write_city(root, "a", 4)
    save(root / "a" / "masks" / "f1.png", mask(IDS, 2))
    error = problem_of(root)
    assert error.code == "data-labels"
    assert "a/masks/f1.png: the mask is 6 x 4, its image 12 x 8" in error.message


def test_a_broken_mask_is_named_and_not_its_image(root: Path) -> None:
    write_city(root, "a", 4)
    (root / "a" / "masks" / "f1.png").write_bytes(b"not a mask")
    error = problem_of(root)
    assert error.code == "data-unreadable"
    assert "a/masks/f1.png: it is not a JPEG, PNG, TIFF, GIF, WebP, BMP or DICOM image" in error.message


def test_a_split_without_masks_has_no_labels(root: Path) -> None:
    write_city(root, "a", 4)
    for i in range(10):
        save(root / "b" / "Images" / "Train" / f"{i}.png", picture(70 + i, 8, 12))
    for i in range(3):
        save(root / "b" / "Images" / "Test" / f"t{i}.png", picture(90 + i, 8, 12))
        save(root / "b" / "Labels" / "Test" / f"t{i}.png", mask(IDS))
    b = open_dataset(DataSource(data_dir=root)).load("b")
    assert b.train.labels is None
    assert len(b.train) + len(b.val) == 10
    assert b.test.labels.shape == (3, 8, 12)


def test_domain_of_images_alone_has_no_labels(root: Path) -> None:
    write_city(root, "a", 4)
    for i in range(5):
        save(root / "b" / "images" / f"{i}.png", picture(70 + i, 8, 12))
    assert open_dataset(DataSource(data_dir=root)).load("b").train.labels is None


def test_masks_beside_class_folders_do_not_mix(root: Path) -> None:
    write_city(root, "a", 4)
    save(root / "b" / "dog" / "1.png", picture(1))
    error = problem_of(root)
    assert error.code == "data-layout"
    assert "mixes" in error.message


def test_check_counts_the_images_that_show_a_class(root: Path) -> None:
    write_city(root, "a", 5, np.array([[0, 0, 0], [0, 0, 1]], dtype=np.uint8))
    write_city(root, "b", 3, np.array([[0, 0, 0], [0, 0, 0]], dtype=np.uint8), seed=40)
    report = check_data(DataSource(data_dir=root))
    a, b = report.domains
    assert {label: sum(counts.values()) for label, counts in a.classes.items()} == {"0": 5, "1": 5}
    assert {label: sum(counts.values()) for label, counts in b.classes.items()} == {"0": 3, "1": 0}
    assert "No mask of b shows '1'." in report.warnings
