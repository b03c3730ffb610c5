from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest
from datafiles import picture, png_of_declared_size, save, write_classes
from PIL import Image

from fedshift.data import DataSource, Domain, open_dataset
from fedshift.data.splits import choose_splits
from fedshift.errors import InputError


def open_folder(root: Path, image_size: int | None = None):
    return open_dataset(DataSource(data_dir=root, image_size=image_size))


def error_of(root: Path) -> InputError:
    with pytest.raises(InputError) as error:
        dataset = open_folder(root)
        for name in dataset.domains:
            dataset.load(name)
    return error.value


def everything(domain: Domain) -> dict[bytes, int]:
    """Every image of a domain and its label."""
    return {
        split.inputs[i].tobytes(): int(split.labels[i])
        for split in (domain.train, domain.val, domain.test)
        for i in range(len(split))
    }


def test_folders_become_domains_classes_and_splits(root: Path) -> None:
    write_classes(root / "north", {"cat": 30, "dog": 20})
    write_classes(root / "south", {"cat": 5, "dog": 6}, seed=500)
    dataset = open_folder(root)
    assert (dataset.name, dataset.task, dataset.classes) == ("data", "classification", ("cat", "dog"))
    assert dataset.domains == ("north", "south")
    assert dataset.input_shape == (3, 12, 12)
    north = dataset.load("north")
    names = [f"{label}/{i:03}.png" for label, count in (("cat", 30), ("dog", 20)) for i in range(count)]
    labels = ["cat"] * 30 + ["dog"] * 20
    split = choose_splits(names, labels)
    for number, part in enumerate((north.train, north.val, north.test)):
        expected = [i for i in range(50) if split[i] == number]
        assert part.labels.tolist() == [int(labels[i] == "dog") for i in expected]
        seeds = [i if i < 30 else 1000 + i - 30 for i in expected]
        np.testing.assert_array_equal(part.inputs, np.stack([picture(seed) for seed in seeds]))


def test_a_class_missing_at_one_site_leaves_label_numbers_aligned(root: Path) -> None:
    write_classes(root / "a", {"ant": 4, "bee": 4, "cow": 4})
    write_classes(root / "b", {"bee": 4, "cow": 4}, seed=9000)
    dataset = open_folder(root)
    assert dataset.classes == ("ant", "bee", "cow")
    assert dataset.warnings == ("b has no sample of 'ant'.",)
    labels = everything(dataset.load("b"))
    assert labels[picture(9000).tobytes()] == 1
    assert labels[picture(10_000).tobytes()] == 2


def test_numbered_classes_are_in_the_order_of_numbers(root: Path) -> None:
    write_classes(root / "a", {str(i): 1 for i in range(12)})
    assert open_folder(root).classes == tuple(str(i) for i in range(12))


def test_suffixes_in_any_case_count_and_everything_else_does_not(root: Path) -> None:
    for name in ("a.JPG", "b.jpeg", "c.Png"):
        save(root / "a" / "x" / name, picture(1))
    save(root / "a" / "y" / "d.png", picture(2))
    (root / "a" / "x" / "notes.txt").write_text("no image")
    (root / "a" / "x" / "._e.png").write_bytes(b"what a Mac leaves behind")
    (root / ".git").mkdir()
    (root / "__MACOSX" / "a").mkdir(parents=True)
    os.mkfifo(root / "a" / "x" / "pipe.png")
    domain = open_folder(root).load("a")
    assert sum(len(split) for split in (domain.train, domain.val, domain.test)) == 4
    assert domain.skipped == ()


def test_flat_folder_is_a_domain_without_labels(root: Path) -> None:
    write_classes(root / "a", {"x": 4, "y": 4})
    for i in range(10):
        save(root / "wild" / f"{i}.png", picture(70 + i))
    wild = open_folder(root).load("wild")
    assert [split.labels for split in (wild.train, wild.val, wild.test)] == [None, None, None]
    assert sum(len(split) for split in (wild.train, wild.val, wild.test)) == 10
    assert min(len(split) for split in (wild.train, wild.val, wild.test)) >= 1


def test_split_lists_are_followed(root: Path) -> None:
    write_classes(root / "a", {"x": 6, "y": 6})
    (root / "splits").mkdir()
    (root / "splits" / "a_train.txt").write_text("a/x/000.png\na/x/001.png 0\ny/000.png\n")
    (root / "splits" / "a_val.txt").write_text("x/002.png\n")
    (root / "splits" / "a_test.txt").write_text("a/y/001.png 99\na/y/002.png 99\na/x/000.png\n")
    dataset = open_folder(root)
    domain = dataset.load("a")
    assert domain.train.labels.tolist() == [0, 0, 1]
    np.testing.assert_array_equal(domain.val.inputs, picture(2)[None])
    np.testing.assert_array_equal(domain.test.inputs, np.stack([picture(1001), picture(1002)]))
    assert dataset.domains == ("a",)
    assert any("1 images of a are in several split lists" in warning for warning in dataset.warnings)
    assert any("6 images of a are in no split list" in warning for warning in dataset.warnings)


def test_split_list_that_names_other_files_is_an_error(root: Path) -> None:
    write_classes(root / "a", {"x": 6, "y": 6})
    (root / "splits").mkdir()
    (root / "splits" / "a_train.txt").write_text("x/000.png\n../../../../etc/passwd\n")
    error = error_of(root)
    assert error.code == "data-missing"
    assert "etc/passwd" in error.message


def test_split_folders_are_followed_and_a_class_called_train_is_not_one(root: Path) -> None:
    for split, seed in (("train", 0), ("val", 300), ("test", 600)):
        write_classes(root / "a" / split, {"bus": 3, "train": 3}, seed=seed)
    write_classes(root / "b", {"bus": 3, "train": 3}, seed=20_000)
    dataset = open_folder(root)
    assert dataset.classes == ("bus", "train")
    domain = dataset.load("a")
    assert [len(split) for split in (domain.train, domain.val, domain.test)] == [6, 6, 6]
    np.testing.assert_array_equal(domain.val.inputs[0], picture(300))


def test_no_folder_is_an_error(root: Path) -> None:
    error = error_of(root / "nowhere")
    assert error.code == "data-missing"
    assert "nowhere" in error.message


def test_empty_root_is_an_error_that_shows_the_layouts(root: Path) -> None:
    error = error_of(root)
    assert error.code == "data-layout"
    assert "<domain>/<class>" in error.message


def test_domain_without_images_is_an_error(root: Path) -> None:
    write_classes(root / "a", {"x": 4, "y": 4})
    (root / "b" / "x").mkdir(parents=True)
    error = error_of(root)
    assert error.code == "data-empty"
    assert str(root / "b") in error.message


def test_class_without_an_image_anywhere_is_an_error(root: Path) -> None:
    write_classes(root / "a", {"x": 4, "y": 4, "z": 0})
    error = error_of(root)
    assert error.code == "data-empty"
    assert "'z'" in error.message


def test_class_names_that_differ_only_in_case_are_an_error_that_says_where(root: Path) -> None:
    write_classes(root / "a", {"Dog": 4, "cat": 4})
    write_classes(root / "b", {"dog": 4, "cat": 4})
    error = error_of(root)
    assert error.code == "data-classes"
    assert "'Dog' at a; 'dog' at b" in error.message


def test_one_class_is_not_enough(root: Path) -> None:
    write_classes(root / "a", {"x": 4})
    assert error_of(root).code == "data-classes"


def test_no_labels_at_all_is_an_error(root: Path) -> None:
    save(root / "a" / "1.png", picture(1))
    assert error_of(root).code == "data-layout"


def test_unknown_domain_is_an_error_with_a_suggestion(root: Path) -> None:
    write_classes(root / "north", {"x": 4, "y": 4})
    with pytest.raises(InputError, match="Did you mean 'north'") as error:
        open_folder(root).load("nort")
    assert error.value.code == "unknown-name"


def test_a_few_unreadable_images_are_left_out_and_named(root: Path) -> None:
    write_classes(root / "a", {"x": 100, "y": 100})
    (root / "a" / "x" / "050.png").write_bytes(b"broken")
    (root / "a" / "y" / "050.png").write_bytes(png_of_declared_size(60_000, 60_000))
    domain = open_folder(root).load("a")
    assert sum(len(split) for split in (domain.train, domain.val, domain.test)) == 198
    assert [skipped.file for skipped in domain.skipped] == ["a/x/050.png", "a/y/050.png"]
    assert "not a JPEG, PNG" in domain.skipped[0].reason
    assert "megapixels" in domain.skipped[1].reason
    labels = everything(domain)
    assert labels[picture(51).tobytes()] == 0
    assert labels[picture(1051).tobytes()] == 1


def test_skipped_images_go_by_the_names_of_the_folder_that_was_read(root: Path) -> None:
    write_classes(root / "a", {"x": 100, "y": 100})
    (root / "a" / "x" / "050.png").write_bytes(b"broken")
    open_folder(root).load("a")
    (root / "a").rename(root / "b")
    assert [skipped.file for skipped in open_folder(root).load("b").skipped] == ["b/x/050.png"]


def test_many_unreadable_images_are_an_error_with_the_first_and_the_count(root: Path) -> None:
    write_classes(root / "a", {"x": 50, "y": 47})
    for i in (10, 20, 30):
        (root / "a" / "x" / f"0{i}.png").write_bytes(b"broken")
    error = error_of(root)
    assert error.code == "data-unreadable"
    assert "3 of 97" in error.message
    assert "a/x/010.png" in error.message


def test_changed_pixels_under_the_same_size_and_time_are_read_again(root: Path) -> None:
    write_classes(root / "a", {"x": 1, "y": 3})
    path = root / "a" / "x" / "000.png"
    # Stored without compression, so that any two images take the same number of bytes.
    for seed in (1, 2):
        status = path.stat()
        Image.fromarray(picture(seed)).save(path, compress_level=0)
        if seed == 2:
            assert path.stat().st_size == status.st_size
            os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))
        assert picture(seed).tobytes() in everything(open_folder(root).load("a"))


def test_hostile_names_stay_data_and_never_reach_the_terminal(root: Path) -> None:
    strange = ["new\nline.png", "\x1b[31mred.png", "-rf.png", "$(touch x).png", "%s {0} [bold].png", "\u202egnp.png"]
    for i, name in enumerate(strange):
        save(root / "a" / "x" / name, picture(i))
    save(root / "a" / "y" / "1.png", picture(50))
    not_unicode = os.fsencode(root / "a" / "y") + b"/\xff\xfe.png"
    Path(os.fsdecode(not_unicode)).write_bytes((root / "a" / "y" / "1.png").read_bytes())
    domain = open_folder(root).load("a")
    assert sum(len(split) for split in (domain.train, domain.val, domain.test)) == 8
    for name in strange:
        (root / "a" / "x" / name).write_bytes(b"broken")
    message = error_of(root).message
    assert message.isprintable()
    assert "6 of 8" in message


@pytest.mark.parametrize("folder", ["a/x\x1b[31m", "b\x07/x"])
def test_unprintable_domains_and_classes_are_refused(root: Path, folder: str) -> None:
    write_classes(root / "a", {"x": 4, "y": 4})
    write_classes((root / folder).parent, {Path(folder).name: 2, "y": 2})
    error = error_of(root)
    assert error.code in ("data-classes", "data-layout")
    assert error.message.isprintable()


def test_image_size_cuts_out_the_centre_square(root: Path) -> None:
    wide = np.zeros((20, 60, 3), dtype=np.uint8)
    wide[:, 20:40] = 200
    for label in ("x", "y"):
        save(root / "a" / label / "1.png", wide)
    dataset = open_folder(root, image_size=10)
    assert dataset.input_shape == (3, 10, 10)
    inputs = dataset.load("a").train.inputs
    assert inputs.shape[1:] == (10, 10, 3)
    assert inputs[:, :, 1:-1].min() == 200
    assert inputs.min() > 150  # Smoothing mixes in the pixel next to the cut.


@pytest.mark.parametrize("size", [0, 7, 5000])
def test_absurd_image_size_is_refused(root: Path, size: int) -> None:
    with pytest.raises(InputError, match="image_size") as error:
        open_folder(root, size)
    assert error.value.code == "config-value"


def test_class_file_fixes_the_list_for_a_site_that_has_not_all_of_it(root: Path) -> None:
    write_classes(root / "a", {"bee": 4, "cow": 4})
    (root / "classes.txt").write_text("ant\nbee\ncow\n")
    dataset = open_folder(root)
    assert dataset.classes == ("ant", "bee", "cow")
    assert set(everything(dataset.load("a")).values()) == {1, 2}
    (root / "classes.txt").write_text("ant\nbee\n")
    error = error_of(root)
    assert error.code == "data-classes"
    assert "'cow'" in error.message


def test_progress_is_told_once_and_not_when_cached(root: Path) -> None:
    write_classes(root / "a", {"x": 20, "y": 20})
    told: list[tuple[str, int, int]] = []
    source = DataSource(data_dir=root)
    open_dataset(source, lambda *args: told.append(args)).load("a")
    assert told[-1] == ("a", 40, 40)
    assert [done for _, done, _ in told] == sorted(done for _, done, _ in told)
    told.clear()
    open_dataset(source, lambda *args: told.append(args)).load("a")
    assert told == []
