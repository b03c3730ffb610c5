from __future__ import annotations

import gzip
import struct
from pathlib import Path

import numpy as np
import pytest
from datafiles import picture, save, write_classes
from PIL import Image

from fedshift.data import VOID, Dataset, DataSource, Domain
from fedshift.data.formats.public import PUBLIC, how_to_get, survey_public
from fedshift.data.formats.public_layouts import images_from_mat, labels_from_mat, read_idx
from fedshift.data.index.survey import open_survey
from fedshift.data.registry import list_datasets, open_dataset, survey
from fedshift.errors import InputError


def open_public(name: str, root: Path) -> Dataset:
    return open_survey(survey_public(name, root, None))


def counts(domain: Domain) -> list[int]:
    return [len(domain.train), len(domain.val), len(domain.test)]


def test_pacs_below_kfold_with_its_lists(root: Path) -> None:
    classes = PUBLIC["pacs"].classes
    assert classes is not None
    for number, domain in enumerate(("art_painting", "cartoon", "photo", "sketch")):
        write_classes(root / "kfold" / domain, dict.fromkeys(classes, 5), seed=20_000 * number)
        lines = [f"{domain}/{label}/{i:03}.png {k + 1}" for k, label in enumerate(classes) for i in range(5)]
        lists = root / "Train val splits and h5py files pre-read"
        lists.mkdir(exist_ok=True)
        (lists / f"{domain}_train_kfold.txt").write_text("\n".join(line for i, line in enumerate(lines) if i % 5 < 4))
        (lists / f"{domain}_crossval_kfold.txt").write_text("\n".join(lines[4::5]))
        (lists / f"{domain}_test_kfold.txt").write_text("\n".join(lines))
    dataset = open_public("pacs", root)
    assert dataset.domains == ("art_painting", "cartoon", "photo", "sketch")
    assert dataset.classes == ("dog", "elephant", "giraffe", "guitar", "horse", "house", "person")
    domain = dataset.load("sketch")
    # The published test list repeats train and crossval, so crossval tests and a tenth of train validates.
    assert len(domain.test) == 7
    assert len(domain.train) + len(domain.val) == 28
    np.testing.assert_array_equal(domain.test.inputs[0], picture(60_004))


@pytest.mark.parametrize("spelled", ["CALTECH,LABELME,PASCAL,SUN", "Caltech101,LabelMe,VOC2007,SUN09"])
def test_vlcs_as_split_folders_of_numbered_classes_and_as_named_ones(root: Path, spelled: str) -> None:
    folders = spelled.split(",")
    for number, folder in enumerate(folders):
        seed = 30_000 * number
        if spelled.isupper():
            for part, (split, count) in enumerate({"train": 2, "crossval": 1, "test": 1, "full": 1}.items()):
                write_classes(root / folder / split, {str(i): count for i in range(5)}, seed=seed + 5000 * part)
        else:
            write_classes(root / folder, dict.fromkeys(("bird", "car", "chair", "dog", "person"), 3), seed=seed)
    dataset = open_public("vlcs", root)
    assert dataset.domains == ("caltech", "labelme", "pascal", "sun")
    assert dataset.classes == ("bird", "car", "chair", "dog", "person")
    domain = dataset.load("pascal")
    if spelled.isupper():
        assert counts(domain) == [10, 5, 5]
    else:
        assert sum(counts(domain)) == 15
    assert set(domain.train.labels.tolist()) == {0, 1, 2, 3, 4}


def test_digits_dg_tests_on_what_it_calls_val(root: Path) -> None:
    for number, name in enumerate(("mnist", "mnist_m", "svhn", "syn")):
        write_classes(root / name / "train", {str(i): 3 for i in range(10)}, seed=40_000 * number)
        write_classes(root / name / "val", {str(i): 1 for i in range(10)}, seed=40_000 * number + 20_000)
    dataset = open_public("digits-dg", root)
    assert dataset.domains == ("mnist", "mnist_m", "svhn", "syn")
    domain = dataset.load("svhn")
    assert len(domain.test) == 10
    np.testing.assert_array_equal(domain.test.inputs[0], picture(100_000))
    assert len(domain.train) + len(domain.val) == 30


def test_office_home_by_its_folder_names_with_spaces(root: Path) -> None:
    for number, name in enumerate(("Art", "Clipart", "Product", "Real World")):
        write_classes(root / "OfficeHomeDataset" / name, {"Alarm_Clock": 3, "TV": 3}, seed=5000 * number)
    dataset = open_public("office-home", root)
    assert dataset.domains == ("art", "clipart", "product", "real_world")
    assert dataset.classes == ("Alarm_Clock", "TV")
    assert sum(counts(dataset.load("real_world"))) == 6


def test_office_caltech_classes_have_many_spellings(root: Path) -> None:
    write_classes(root / "amazon" / "images", {"back_pack": 3, "laptop_computer": 3, "stapler": 3})
    write_classes(root / "caltech", {"backpack": 3, "laptop-101": 3}, seed=5000)
    dataset = open_public("office-caltech10", root)
    assert len(dataset.classes) == 10
    labels = {name: set(dataset.load(name).train.labels.tolist()) for name in ("amazon", "caltech")}
    assert labels["amazon"] == labels["caltech"] == {dataset.classes.index("backpack"), dataset.classes.index("laptop")}
    assert any("stapler" in warning for warning in dataset.warnings)
    assert any("dslr, webcam not found" in warning for warning in dataset.warnings)


def test_office_caltech_home_joins_two_sets_on_their_common_classes(root: Path) -> None:
    write_classes(root / "office_caltech_10" / "amazon", {"mouse": 3, "headphones": 3, "mug": 3})
    write_classes(root / "OfficeHome" / "Real World", {"Mouse": 3, "Mug": 3, "Sink": 3}, seed=5000)
    dataset = open_public("office-caltech-home", root)
    assert dataset.domains == ("amazon", "real_world")
    assert dataset.classes == ("backpack", "bike", "calculator", "keyboard", "laptop", "monitor", "mouse", "mug")
    for name in dataset.domains:
        assert set(dataset.load(name).train.labels.tolist()) == {6, 7}


def test_domainnet_lists_beside_the_domains(root: Path) -> None:
    write_classes(root / "clipart", {"aircraft_carrier": 6, "zigzag": 6})
    lines = [
        f"clipart/{label}/{i:03}.png {k}" for k, label in enumerate(("aircraft_carrier", "zigzag")) for i in range(5)
    ]
    (root / "clipart_train.txt").write_text("\n".join(lines[:4] + lines[5:9]))
    (root / "clipart_test.txt").write_text("\n".join([lines[4], lines[9]]))
    write_classes(root / "real", {"aircraft_carrier": 4, "zigzag": 4}, seed=5000)
    dataset = open_public("domainnet", root)
    assert dataset.classes == ("aircraft_carrier", "zigzag")
    domain = dataset.load("clipart")
    np.testing.assert_array_equal(domain.test.inputs, np.stack([picture(4), picture(1004)]))
    assert len(domain.train) + len(domain.val) == 8


def test_digit_five_as_npz_under_its_own_names_and_some_missing(root: Path) -> None:
    images = np.stack([picture(i, 8, 8) for i in range(40)])
    for name in ("mnist", "mnistm"):
        np.savez(root / f"{name}.npz", images=images, labels=np.arange(40) % 10)
    dataset = open_public("digit-five", root)
    assert dataset.domains == ("mnist", "mnist_m")
    assert dataset.classes == tuple("0123456789")
    assert any("svhn, syn, usps not found" in warning for warning in dataset.warnings)


def test_digit_five_label_that_is_no_digit(root: Path) -> None:
    images = np.stack([picture(i, 8, 8) for i in range(4)])
    np.savez(root / "svhn.npz", images=images, labels=np.array([1, 2, 3, 10]))
    with pytest.raises(InputError, match="label 10") as error:
        open_public("digit-five", root)
    assert error.value.code == "data-labels"


def test_digit_five_with_labels_in_file_names(root: Path) -> None:
    for split, count, seed in (("train_images", 30, 0), ("test_images", 10, 500)):
        for i in range(count):
            save(root / "mnist" / split / f"{i:06}_{i % 10}.png", picture(seed + i))
    domain = open_public("digit-five", root).load("mnist")
    assert len(domain.test) == 10
    assert sorted(domain.test.labels.tolist()) == list(range(10))
    np.testing.assert_array_equal(domain.test.inputs[3], picture(503))


def test_digit_five_as_mat_files(root: Path) -> None:
    from scipy.io import savemat

    digits = np.arange(20) % 10
    one_hot = np.eye(10)[digits]
    grey = np.stack([picture(i, 32, 32)[..., 0] for i in range(20)])
    colour = np.stack([picture(100 + i, 32, 32) for i in range(20)])
    folder = root / "Digit-Five"
    folder.mkdir()
    savemat(
        folder / "mnist_data.mat",
        {"train_32": grey, "label_train": one_hot, "test_32": grey[:5], "label_test": one_hot[:5]},
    )
    counted_from_one = np.where(digits == 0, 10, digits)[:, None]
    for split in ("train", "test"):
        savemat(
            folder / f"svhn_{split}_32x32.mat",
            {"X": colour.transpose(1, 2, 3, 0), "y": counted_from_one.astype(np.uint8)},
        )
    cells = np.empty((2, 2), dtype=object)
    for row in range(2):
        cells[row, 0] = grey[:, None, :28, :28] / 255.0
        cells[row, 1] = digits[:, None]
    savemat(folder / "usps_28x28.mat", {"dataset": cells})
    dataset = open_public("digit-five", root)
    assert dataset.domains == ("mnist", "svhn", "usps")
    assert dataset.input_shape == (3, 32, 32)
    mnist, svhn = dataset.load("mnist"), dataset.load("svhn")
    np.testing.assert_array_equal(mnist.test.inputs[..., 0], grey[:5])
    assert mnist.test.labels.tolist() == digits[:5].tolist()
    np.testing.assert_array_equal(svhn.test.inputs, colour)
    assert svhn.test.labels.tolist() == digits.tolist()
    assert dataset.load("usps").test.labels.tolist() == digits.tolist()


def test_mat_arrays_whatever_their_axes() -> None:
    images = np.stack([picture(i, 6, 6) for i in range(4)])
    np.testing.assert_array_equal(images_from_mat(images), images)
    np.testing.assert_array_equal(images_from_mat(images.transpose(1, 2, 3, 0)), images)
    np.testing.assert_array_equal(images_from_mat(images.transpose(0, 3, 1, 2)), images)
    assert labels_from_mat(np.array([[10], [1]])).tolist() == [0, 1]
    assert labels_from_mat(np.eye(10)[[3, 0]]).tolist() == [3, 0]


def write_idx(path: Path, values: np.ndarray) -> None:
    header = struct.pack(f">HBB{values.ndim}I", 0, 8, values.ndim, *values.shape)
    data = header + values.tobytes()
    path.write_bytes(gzip.compress(data) if path.suffix == ".gz" else data)


def test_rotated_mnist_is_made_from_the_original_files(root: Path) -> None:
    raw = root / "MNIST" / "raw"
    raw.mkdir(parents=True)
    images = np.zeros((1200, 28, 28), dtype=np.uint8)
    images[:, 12:16, 4:24] = np.random.default_rng(0).integers(100, 256, (1200, 4, 20))
    write_idx(raw / "train-images-idx3-ubyte.gz", images)
    write_idx(raw / "train-labels-idx1-ubyte", (np.arange(1200) % 10).astype(np.uint8))
    dataset = open_public("rotated-mnist", root)
    assert dataset.domains == ("M0", "M15", "M30", "M45", "M60", "M75")
    upright, turned = dataset.load("M0"), dataset.load("M45")
    assert sum(counts(upright)) == 1000
    assert counts(upright) == counts(turned)
    assert (
        np.bincount(np.concatenate([s.labels for s in (upright.train, upright.val, upright.test)])).tolist()
        == [100] * 10
    )
    known = {image.tobytes() for image in images}
    assert all(image[..., 0].tobytes() in known for image in upright.test.inputs)
    # The same digits in the same order, turned clockwise.
    expected = Image.fromarray(upright.test.inputs[5][..., 0]).rotate(-45, Image.Resampling.BILINEAR)
    np.testing.assert_array_equal(turned.test.inputs[5][..., 0], np.asarray(expected))
    # The stroke goes from left to right; its right end is now at the bottom, its left end at the top.
    shown = turned.test.inputs[5][..., 0]
    assert shown[18:24, 18:24].any() and shown[4:10, 4:10].any()
    assert not shown[4:10, 18:24].any() and not shown[18:24, 4:10].any()
    assert upright.test.labels.tolist() == turned.test.labels.tolist()


def test_idx_file_of_another_kind_is_refused(tmp_path: Path) -> None:
    write_idx(tmp_path / "x", np.zeros((2, 2), dtype=np.uint8))
    with pytest.raises(InputError, match="not an MNIST file"):
        read_idx(tmp_path / "x", 3)


def camvid_name(i: int) -> str:
    return f"{('0001TP', 'Seq05VD')[i % 2]}_{i:05}"


@pytest.mark.parametrize("form", ["folders", "segnet", "original"])
def test_camvid_in_its_three_forms(root: Path, form: str) -> None:
    ids = np.array([[0, 3], [10, 11]], dtype=np.uint8).repeat(4, axis=0).repeat(6, axis=1)
    colours = np.array([[[128, 128, 128], [128, 0, 192]], [[192, 0, 192], [0, 0, 0]]], dtype=np.uint8)
    colours = colours.repeat(4, axis=0).repeat(6, axis=1)
    for i in range(12):
        name, image = camvid_name(i), picture(i, 8, 12)
        split = ("train", "train", "train", "val", "test", "test")[i // 2]
        if form == "folders":
            save(root / name.split("_")[0] / "images" / f"{name}.png", image)
            save(root / name.split("_")[0] / "masks" / f"{name}.png", ids)
        elif form == "segnet":
            save(root / split / f"{name}.png", image)
            save(root / f"{split}annot" / f"{name}.png", ids)
        else:
            save(root / "701_StillsRaw_full" / f"{name}.png", image)
            save(root / "LabeledApproved_full" / f"{name}_L.png", colours)
    dataset = open_public("camvid", root)
    assert dataset.task == "segmentation"
    assert dataset.domains == ("0001TP", "Seq05VD")
    assert len(dataset.classes) == 11
    assert dataset.classes[3] == "road"
    domain = dataset.load("Seq05VD")
    assert sum(counts(domain)) == 6
    if form == "segnet":
        assert counts(domain) == [3, 1, 2]
    expected = np.array([[0, 3], [10, VOID]], dtype=np.uint8).repeat(4, axis=0).repeat(6, axis=1)
    np.testing.assert_array_equal(domain.test.labels[0], expected)


def test_gta5_and_crosscity_share_thirteen_classes(root: Path) -> None:
    palette = Image.fromarray(np.array([[7, 26], [4, 33]], dtype=np.uint8).repeat(4, axis=0).repeat(4, axis=1), "P")
    palette.putpalette(list(range(256)) * 3)
    for i in range(5):
        save(root / "GTA5" / "images" / f"{i:05}.png", picture(i, 8, 8))
        (root / "GTA5" / "labels").mkdir(exist_ok=True)
        palette.save(root / "GTA5" / "labels" / f"{i:05}.png")
        save(root / "NTHU" / "Rio" / "Images" / "Train" / f"pano_{i}.png", picture(50 + i, 8, 8))
    save(root / "NTHU" / "Rio" / "Images" / "Test" / "pano_t.png", picture(90, 8, 8))
    save(root / "NTHU" / "Rio" / "Labels" / "Test" / "pano_t_eval.png", np.full((8, 8), 8, dtype=np.uint8))
    dataset = open_public("gta5-crosscity", root)
    assert dataset.domains == ("gta5", "rio")
    assert len(dataset.classes) == 13
    np.testing.assert_array_equal(dataset.load("gta5").train.labels[0][::4, ::4], [[0, 9], [VOID, 12]])
    rio = dataset.load("rio")
    assert rio.train.labels is None
    assert (rio.test.labels == 1).all()


@pytest.mark.parametrize("name", sorted(PUBLIC))
def test_without_data_the_error_says_what_to_fetch_and_how_to_lay_it_out(root: Path, name: str) -> None:
    for folder in (None, root / "nowhere", root):
        with pytest.raises(InputError) as error:
            survey_public(name, folder, None)
        assert error.value.code == "data-missing"
        assert PUBLIC[name].layout in error.value.message
        assert PUBLIC[name].source in error.value.message
        assert how_to_get(name) in error.value.message


def test_every_data_set_is_listed_with_what_a_user_needs() -> None:
    listed = {info.name: info for info in list_datasets()}
    assert {"digits", "rotated-digits", "streets", *PUBLIC} == listed.keys()
    for name, info in listed.items():
        assert info.builtin == (name not in PUBLIC)
        assert len(info.domains) >= 4
        assert info.description
        assert bool(info.how_to_get) != info.builtin


@pytest.mark.parametrize("unfit", [{"data_dir": Path("x")}, {"label_column": "y"}])
def test_built_in_data_take_no_settings_of_folders(unfit: dict[str, object]) -> None:
    with pytest.raises(InputError, match="comes with fedshift") as error:
        open_dataset(DataSource(name="digits", **unfit))
    assert error.value.code == "config-value"


def test_no_data_and_unknown_names(root: Path) -> None:
    with pytest.raises(InputError, match="--data-dir"):
        survey(DataSource())
    with pytest.raises(InputError, match="Did you mean 'pacs'") as error:
        survey(DataSource(name="pac", data_dir=root))
    assert error.value.code == "unknown-name"
    with pytest.raises(InputError, match="label_column is for tables"):
        survey(DataSource(name="pacs", data_dir=root, label_column="x"))
