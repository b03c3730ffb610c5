from __future__ import annotations

import io
import zipfile
from pathlib import Path

import numpy as np
import pytest
from datafiles import picture, write_classes

from fedshift.data import DataSource, open_dataset
from fedshift.data.formats import arrays as arrays_format
from fedshift.data.index.files import FileIndex
from fedshift.errors import InputError


def images(count: int, side: int = 8, seed: int = 0) -> np.ndarray:
    return np.stack([picture(seed + i, side, side) for i in range(count)])


def labels(count: int, classes: int = 3) -> np.ndarray:
    return np.arange(count) % classes


def open_folder(root: Path):
    return open_dataset(DataSource(data_dir=root))


def problem_of(root: Path) -> InputError:
    with pytest.raises(InputError) as error:
        open_folder(root)
    return error.value


def test_given_test_images_stay_and_a_tenth_of_train_validates(root: Path) -> None:
    np.savez(
        root / "a.npz",
        train_images=images(200),
        train_labels=labels(200),
        test_images=images(30, seed=900),
        test_labels=labels(30),
    )
    dataset = open_folder(root)
    assert dataset.classes == ("0", "1", "2")
    domain = dataset.load("a")
    np.testing.assert_array_equal(domain.test.inputs, images(30, seed=900))
    np.testing.assert_array_equal(domain.test.labels, labels(30))
    assert len(domain.train) + len(domain.val) == 200
    assert 8 <= len(domain.val) <= 35
    of = {image.tobytes(): label for image, label in zip(images(200), labels(200), strict=True)}
    for split in (domain.train, domain.val):
        assert [of[image.tobytes()] for image in split.inputs] == split.labels.tolist()


def test_splits_hang_on_content_not_on_order(root: Path) -> None:
    order = np.random.default_rng(0).permutation(90)
    np.savez(root / "a.npz", images=images(90), labels=labels(90))
    np.savez(root / "b.npz", images=images(90)[order], labels=labels(90)[order])
    dataset = open_folder(root)
    a, b = dataset.load("a"), dataset.load("b")
    for one, other in ((a.train, b.train), (a.val, b.val), (a.test, b.test)):
        assert {x.tobytes() for x in one.inputs} == {x.tobytes() for x in other.inputs}


def test_grey_gets_three_channels_and_small_domains_grow_to_the_largest(root: Path) -> None:
    np.savez(root / "grey.npz", images=images(9, 4)[..., 0], labels=labels(9))
    np.savez_compressed(root / "colour.npz", images=images(9, 8), labels=labels(9)[:, None])
    dataset = open_folder(root)
    assert dataset.input_shape == (3, 8, 8)
    grey = dataset.load("grey").train.inputs
    assert grey.shape[1:] == (8, 8, 3)
    assert (grey == grey[..., :1]).all()


def test_arrays_and_folders_agree_on_classes(root: Path) -> None:
    np.savez(root / "a.npz", images=images(6, 12), labels=np.array([1, 2] * 3))
    write_classes(root / "b", {"0": 3, "1": 3, "2": 3})
    dataset = open_folder(root)
    assert dataset.classes == ("0", "1", "2")
    assert set(dataset.load("a").train.labels.tolist()) == {1, 2}


def test_without_labels_it_is_an_unlabelled_domain(root: Path) -> None:
    np.savez(root / "a.npz", images=images(9), labels=labels(9))
    np.savez(root / "b.npz", images=images(9, seed=100))
    assert open_folder(root).load("b").train.labels is None


def test_label_out_of_range_of_the_class_file(root: Path) -> None:
    np.savez(root / "a.npz", images=images(4), labels=np.array([0, 1, 2, 7]))
    (root / "classes.txt").write_text("ant\nbee\ncow\n")
    error = problem_of(root)
    assert error.code == "data-labels"
    assert "label 7" in error.message
    assert "3 classes" in error.message


@pytest.mark.parametrize(
    ("arrays", "code", "says"),
    [
        ({"images": images(4), "labels": np.array([0, 1, -1, 2])}, "data-labels", "label -1"),
        ({"images": images(4), "labels": np.array([0.0, 0.5, 1.0, 1.0])}, "data-labels", "whole numbers"),
        ({"images": images(4), "labels": np.array([0, 1])}, "data-labels", "4 images"),
        ({"images": images(4).astype(np.float32), "labels": labels(4)}, "data-unreadable", "must be uint8"),
        ({"images": images(4)[..., :2], "labels": labels(4)}, "data-unreadable", "(4, 8, 8, 2)"),
        ({"test_images": images(4), "test_labels": labels(4)}, "data-unreadable", "no images to train on"),
        ({"pictures": images(4)}, "data-unreadable", "pictures"),
        (
            {"train_images": images(4), "train_labels": labels(4), "test_images": images(2)},
            "data-labels",
            "none for test_images",
        ),
    ],
)
def test_unusable_arrays_say_why(root: Path, arrays: dict[str, np.ndarray], code: str, says: str) -> None:
    np.savez(root / "a.npz", **arrays)
    error = problem_of(root)
    assert error.code == code
    assert says in error.message


def test_pickled_objects_are_never_loaded(root: Path, tmp_path: Path) -> None:
    class Trap:
        def __reduce__(self) -> tuple[object, tuple[str]]:
            return Path.touch, (tmp_path / "sprung",)  # type: ignore[return-value]

    np.savez(root / "a.npz", images=np.array([Trap()], dtype=object), labels=np.array([0]))
    assert problem_of(root).code == "data-unreadable"
    assert not (tmp_path / "sprung").exists()


def archive_with(root: Path, header: dict[str, object], data: bytes) -> None:
    stream = io.BytesIO()
    np.lib.format.write_array_header_1_0(stream, header)
    with zipfile.ZipFile(root / "a.npz", "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("images.npy", stream.getvalue() + data)


def test_an_array_that_declares_more_than_it_has_takes_no_memory(root: Path) -> None:
    archive_with(root, {"descr": "|u1", "fortran_order": False, "shape": (10**9, 8, 8)}, b"\0" * 640)
    error = problem_of(root)
    assert error.code == "data-unreadable" and "declares 64,000,000,000 bytes and has 640" in error.message


def test_an_archive_of_nothing_is_not_unpacked(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A small file that would fill memory and disk."""
    monkeypatch.setattr(arrays_format, "UNSUSPICIOUS", 2**20)
    archive_with(root, {"descr": "|u1", "fortran_order": False, "shape": (2**15, 8, 8)}, bytes(2**21))
    assert (root / "a.npz").stat().st_size < 5000
    assert "more than 200 times its size" in problem_of(root).message


@pytest.mark.parametrize("order", ["C", "F"])
def test_arrays_of_several_blocks_come_back_equal(root: Path, order: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(arrays_format, "BLOCK", 1000)
    given = np.random.default_rng(3).integers(0, 256, (40, 8, 8), dtype=np.uint8)
    np.savez(root / "a.npz", images=np.asarray(given, order=order), labels=labels(40))
    found, _ = arrays_format.read_npz(root / "a.npz", FileIndex())
    assert np.array_equal(found["images"], given) and np.array_equal(found["labels"], labels(40))


@pytest.mark.parametrize("content", [b"", b"PK\x03\x04 but no archive", b"\x80\x04."])
def test_file_that_is_no_archive(root: Path, content: bytes) -> None:
    (root / "a.npz").write_bytes(content)
    error = problem_of(root)
    assert error.code == "data-unreadable"
    assert "a.npz" in error.message


def test_keras_names_are_understood(root: Path) -> None:
    np.savez(root / "a.npz", x_train=images(30), y_train=labels(30), x_test=images(5, seed=50), y_test=labels(5))
    np.testing.assert_array_equal(open_folder(root).load("a").test.inputs, images(5, seed=50))


def test_two_domains_of_one_name(root: Path) -> None:
    np.savez(root / "a.npz", images=images(6, 12), labels=labels(6))
    write_classes(root / "a", {"0": 3, "1": 3})
    error = problem_of(root)
    assert error.code == "data-layout"
    assert "several domains called 'a'" in error.message
