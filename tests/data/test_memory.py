"""Data in memory: arrays, tensors and torch data sets become the same data set that files would."""

from __future__ import annotations

import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from datafiles import picture
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image
from torch.utils.data import Dataset as TorchDataset
from torch.utils.data import TensorDataset

from fedshift.data import VOID, DataSource, Domain, dataset_from, open_dataset
from fedshift.data.memory import digest_of
from fedshift.data.splits import SPLITS, choose_splits
from fedshift.errors import InputError


def images(count: int, side: int = 8, seed: int = 0) -> np.ndarray:
    return np.stack([picture(seed + i, side, side) for i in range(count)])


def labels(count: int, classes: int = 3) -> np.ndarray:
    return np.arange(count) % classes


def all_inputs(domain: Domain) -> np.ndarray:
    return np.concatenate([domain.train.inputs, domain.val.inputs, domain.test.inputs])


def refused(data: Any, **options: Any) -> InputError:
    with pytest.raises(InputError) as error:
        dataset_from(data, **options)
    return error.value


def assert_same(one: Domain, other: Domain) -> None:
    for split in SPLITS:
        a, b = getattr(one, split), getattr(other, split)
        np.testing.assert_array_equal(a.inputs, b.inputs)
        assert a.inputs.dtype == b.inputs.dtype
        assert (a.labels is None) == (b.labels is None)
        if a.labels is not None:
            np.testing.assert_array_equal(a.labels, b.labels)
            assert a.labels.dtype == b.labels.dtype
    assert one.test_given == other.test_given


# What comes out -----------------------------------------------------------------------------------------------------


def test_images_and_class_numbers() -> None:
    dataset = dataset_from({"west": (images(30, seed=50), labels(30)), "north": (images(40), labels(40))})
    assert (dataset.name, dataset.task, dataset.classes) == ("memory", "classification", ("0", "1", "2"))
    assert dataset.domains == ("north", "west") and dataset.input_shape == (3, 8, 8) and dataset.columns == ()
    north = dataset.load("north")
    assert sorted(x.tobytes() for x in all_inputs(north)) == sorted(x.tobytes() for x in images(40))
    assert north.train.inputs.dtype == np.uint8 and north.train.labels is not None
    assert north.train.labels.dtype == np.int64 and not north.test_given
    assert not north.train.inputs.flags.writeable


def test_splits_are_chosen_by_the_hash_of_the_index_within_each_class() -> None:
    x, y = images(60), labels(60)
    domain = dataset_from({"a": (x, y)}).load("a")
    chosen = choose_splits([str(i) for i in range(60)], [str(label) for label in y])
    for number, split in enumerate(SPLITS):
        np.testing.assert_array_equal(getattr(domain, split).inputs, x[chosen == number])
        np.testing.assert_array_equal(getattr(domain, split).labels, y[chosen == number])


def test_labels_stay_with_their_samples_whatever_they_are() -> None:
    x, y = images(50), labels(50)
    names = np.array(["cow", "ant", "bee"])[y]
    dataset = dataset_from({"a": (x, names)})
    assert dataset.classes == ("ant", "bee", "cow")
    of = {image.tobytes(): name for image, name in zip(x, names, strict=True)}
    domain = dataset.load("a")
    for split in (domain.train, domain.val, domain.test):
        assert split.labels is not None
        assert [of[image.tobytes()] for image in split.inputs] == [dataset.classes[i] for i in split.labels]


def test_classes_are_the_union_of_all_sites_and_a_missing_one_is_a_warning() -> None:
    dataset = dataset_from(
        {"a": (images(4), ["cat", "dog", "cat", "dog"]), "b": (images(4, seed=9), ["emu", "dog", "emu", "dog"])}
    )
    assert dataset.classes == ("cat", "dog", "emu")
    assert dataset.warnings == ("a has no sample of 'emu'.", "b has no sample of 'cat'.")
    assert set(dataset.load("b").train.labels.tolist()) <= {1, 2}  # type: ignore[union-attr]


def test_one_name_in_two_unicode_spellings_is_one_class() -> None:
    composed, decomposed = "caf\u00e9", "cafe\u0301"
    data = {"a": (images(2), [composed, "tea"]), "b": (images(2, seed=5), [decomposed, "tea"])}
    assert dataset_from(data).classes == (composed, "tea")
    assert dataset_from(data, classes=["tea", decomposed]).classes == ("tea", composed)


def test_masks_of_truth_values_are_two_classes() -> None:
    dataset = dataset_from({"a": (images(6), images(6)[..., 0] > 127)})
    assert dataset.task == "segmentation" and dataset.classes == ("0", "1")


def test_names_that_are_numbers_are_sorted_as_numbers() -> None:
    assert dataset_from({"a": (images(3), ["10", "9", "9"])}).classes == ("9", "10")


def test_given_classes_name_numbers_and_fix_the_order_of_names() -> None:
    numbers = dataset_from({"a": (images(6), labels(6))}, classes=["x", "y", "z", "unused"])
    assert numbers.classes == ("x", "y", "z", "unused")
    names = dataset_from({"a": (images(4), ["b", "a", "b", "a"])}, classes=["b", "a"], name="mine")
    assert names.name == "mine" and names.classes == ("b", "a")
    assert Counter(np.concatenate([names.load("a").train.labels, names.load("a").test.labels]).tolist()) == {0: 2, 1: 2}


def test_a_gap_in_class_numbers_keeps_its_place() -> None:
    dataset = dataset_from({"a": (images(6), np.array([0, 3, 0, 3, 0, 3]))})
    assert dataset.classes == ("0", "1", "2", "3")
    assert set(dataset.load("a").train.labels.tolist()) <= {0, 3}  # type: ignore[union-attr]


def test_samples_without_labels() -> None:
    dataset = dataset_from({"a": (images(9), labels(9)), "b": images(9, seed=20), "c": (images(9, seed=40), None)})
    for name in ("b", "c"):
        domain = dataset.load(name)
        assert domain.train.labels is domain.val.labels is domain.test.labels is None
        assert len(all_inputs(domain)) == 9


@pytest.mark.parametrize("form", ["(n, 3, h, w)", "(n, h, w, 3)", "tensor", "half", "bytes first", "(n, 1, h, w)"])
def test_every_form_of_images_gives_the_same_bytes(form: str) -> None:
    x = images(12)
    expected = x
    given: Any
    if form == "(n, 3, h, w)":
        given = (x / 255.0).transpose(0, 3, 1, 2)
    elif form == "(n, h, w, 3)":
        given = (x / 255.0).astype(np.float32)
    elif form == "tensor":
        given = torch.from_numpy(x).permute(0, 3, 1, 2).float().div(255).requires_grad_()
    elif form == "half":
        expected = (x > 127).astype(np.uint8) * 255
        given = torch.from_numpy(expected).permute(0, 3, 1, 2).bfloat16().div(255)
    elif form == "bytes first":
        given = torch.from_numpy(x.transpose(0, 3, 1, 2).copy())
    else:
        expected = np.repeat(x[..., :1], 3, axis=3)
        given = x[..., :1].transpose(0, 3, 1, 2) / np.float32(255)
    domain = dataset_from({"a": (given, torch.from_numpy(labels(12)))}).load("a")
    assert sorted(i.tobytes() for i in all_inputs(domain)) == sorted(i.tobytes() for i in expected)


def test_floats_are_rounded_to_the_nearest_level() -> None:
    x = np.zeros((2, 1, 4, 4), dtype=np.float64)
    x[0], x[1] = 0.4 / 255, 254.6 / 255
    domain = dataset_from({"a": {"train": (x, [0, 1]), "val": (x, [0, 1]), "test": (x, [0, 1])}}).load("a")
    assert domain.train.inputs.shape == (2, 4, 4, 3)
    assert domain.train.inputs[:, 0, 0, 0].tolist() == [0, 255]


def test_where_both_ends_could_be_channels_floats_have_them_first_and_bytes_last() -> None:
    floats = np.zeros((4, 3, 5, 3))
    floats[:, 0] = 1.0
    assert dataset_from({"a": (floats, [0, 1, 0, 1])}).input_shape == (3, 5, 3)
    assert dataset_from({"a": (np.zeros((4, 3, 5, 3), np.uint8), [0, 1, 0, 1])}).input_shape == (3, 3, 5)


def test_grey_images_get_three_equal_channels() -> None:
    x = images(6)[..., 0]
    domain = dataset_from({"a": (x, labels(6))}).load("a")
    assert all_inputs(domain).shape == (6, 8, 8, 3)
    assert (all_inputs(domain) == all_inputs(domain)[..., :1]).all()


def test_tables_keep_missing_values() -> None:
    x = np.random.default_rng(0).normal(size=(30, 4))
    x[3, 2] = np.nan
    dataset = dataset_from({"a": (x, labels(30, 2)), "b": (torch.from_numpy(x), labels(30, 2))})
    assert dataset.input_shape == (4,) and dataset.columns == ("x0", "x1", "x2", "x3")
    assert dataset.task == "classification"
    rows = all_inputs(dataset.load("a"))
    assert rows.dtype == np.float32 and np.isnan(rows).sum() == 1
    np.testing.assert_array_equal(np.sort(rows, axis=0), np.sort(x.astype(np.float32), axis=0))
    assert dataset_from({"a": (np.arange(8).reshape(4, 2), [0, 1, 0, 1])}).load("a").train.inputs.dtype == np.float32


def test_masks_make_it_segmentation() -> None:
    masks = images(10)[..., 0].astype(np.int64) % 3
    masks[0, 0, 0] = VOID
    dataset = dataset_from({"a": (images(10), masks), "b": images(10, seed=30)})
    assert dataset.task == "segmentation" and dataset.classes == ("0", "1", "2") and dataset.mask_ids == (0, 1, 2)
    a = dataset.load("a")
    assert a.train.labels is not None and a.train.labels.dtype == np.uint8
    assert a.train.labels.shape == a.train.inputs.shape[:3]
    assert dataset.shown_in["a"].keys() == {"0", "1", "2"} and dataset.shown_in["b"] == {}
    assert dataset.shown_in["a"]["1"].startswith("site 'a': mask ")
    assert dataset_from({"a": (images(10), masks)}, classes=["road", "sky", "car"]).shown_in == {}


# Splits that are given ----------------------------------------------------------------------------------------------


def test_given_splits_stay_as_they_are_and_are_not_copied() -> None:
    x = images(30)
    parts = {"train": (x[:20], labels(20)), "val": (x[20:25], labels(5)), "test": (x[25:], labels(5))}
    domain = dataset_from({"a": parts}).load("a")
    np.testing.assert_array_equal(domain.train.inputs, x[:20])
    np.testing.assert_array_equal(domain.val.labels, labels(5))
    np.testing.assert_array_equal(domain.test.inputs, x[25:])
    assert domain.test_given and np.shares_memory(domain.train.inputs, x) and x.flags.writeable


@pytest.mark.parametrize("other", ["val", "test"])
def test_with_one_other_split_a_tenth_of_train_validates(other: str) -> None:
    x = images(70)
    domain = dataset_from({"a": {"train": (x[:60], labels(60)), other: (x[60:], labels(10))}}).load("a")
    np.testing.assert_array_equal(domain.test.inputs, x[60:])
    assert len(domain.train) + len(domain.val) == 60 and 3 <= len(domain.val) <= 12
    assert domain.test_given == (other == "test")


def test_a_target_may_have_labels_for_testing_only() -> None:
    parts = {"train": images(20, seed=70), "test": (images(5, seed=99), labels(5))}
    domain = dataset_from({"a": (images(9), labels(9)), "b": parts}).load("b")
    assert domain.train.labels is None and domain.val.labels is None
    np.testing.assert_array_equal(domain.test.labels, labels(5))


def test_a_site_may_have_nothing_to_train_on() -> None:
    data = {"a": (images(9), labels(9)), "b": {"train": images(1)[:0], "test": (images(4), labels(4))}}
    domain = dataset_from(data).load("b")
    assert (len(domain.train), len(domain.val), len(domain.test)) == (0, 0, 4)
    assert domain.train.inputs.shape == (0, 8, 8, 3)
    masks = np.zeros((4, 8, 8), dtype=np.uint8)
    masks[0] = 1
    parts = {"train": (images(1)[:0], []), "val": (images(2), masks[:2]), "test": (images(4), masks)}
    empty = dataset_from({"a": (images(4), masks), "b": parts}).load("b").train
    assert empty.labels is not None and empty.labels.shape == (0, 8, 8)


def test_given_splits_equal_the_same_data_in_npz_files(root: Path) -> None:
    data: dict[str, Any] = {}
    for number, (name, grey) in enumerate({"north": False, "west": True, "east": False}.items()):
        parts = {}
        for split, count in (("train", 30), ("val", 6), ("test", 9)):
            x = images(count, seed=1000 * number + 100 * len(split))
            parts[split] = (x[..., 0] if grey else x, labels(count))
        data[name] = parts
        arrays = {f"{split}_images": x for split, (x, _) in parts.items()}
        arrays |= {f"{split}_labels": y for split, (_, y) in parts.items()}
        np.savez(root / f"{name}.npz", **arrays)
    data["far"] = images(20, seed=7000)
    np.savez(root / "far.npz", images=data["far"])
    ours, files = dataset_from(data), open_dataset(DataSource(data_dir=root))
    assert (ours.task, ours.classes, ours.domains, ours.input_shape, ours.warnings) == (
        files.task,
        files.classes,
        files.domains,
        files.input_shape,
        files.warnings,
    )
    for name in ("north", "west", "east"):
        assert_same(ours.load(name), files.load(name))
    far, from_file = ours.load("far"), files.load("far")
    assert sorted(x.tobytes() for x in all_inputs(far)) == sorted(x.tobytes() for x in all_inputs(from_file))
    assert far.train.labels is from_file.train.labels is None


# Data sets of torch -------------------------------------------------------------------------------------------------


class Pictures(TorchDataset[Any]):
    """Counts how often each sample is read."""

    def __init__(self, samples: list[Any]) -> None:
        self.samples = samples
        self.read: Counter[int] = Counter()

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, index: int) -> Any:
        self.read[index] += 1
        return self.samples[index]


def as_pil(pixels: np.ndarray) -> Image.Image:
    return Image.fromarray(pixels)


@pytest.mark.parametrize("form", ["tensor", "numpy", "pil", "pil name", "tensors", "one by one"])
def test_a_torch_data_set_is_read_once_and_equals_its_arrays(form: str) -> None:
    x, y = images(24), labels(24)
    names = ["ant", "bee", "cow"]
    samples = {
        "tensor": [(torch.from_numpy(i).permute(2, 0, 1) / 255, torch.tensor(k)) for i, k in zip(x, y, strict=True)],
        "numpy": list(zip(x, y, strict=True)),
        "pil": [(as_pil(i), int(k)) for i, k in zip(x, y, strict=True)],
        "pil name": [(as_pil(i), names[k]) for i, k in zip(x, y, strict=True)],
        "one by one": [[i, np.array([k])] for i, k in zip(x, y, strict=True)],
    }
    data: Any = TensorDataset(torch.from_numpy(x), torch.from_numpy(y))
    if form != "tensors":
        data = Pictures(samples[form])
    ours = dataset_from({"a": data})
    assert_same(ours.load("a"), dataset_from({"a": (x, y)}).load("a"))
    ours.load("a")
    assert form == "tensors" or data.read == dict.fromkeys(range(24), 1)
    assert ours.classes == (("ant", "bee", "cow") if form == "pil name" else ("0", "1", "2"))


def test_a_torch_data_set_without_labels_with_splits_and_with_masks() -> None:
    x = images(12)
    masks = x[..., 0] % 2
    pairs = Pictures([(as_pil(i), as_pil(m)) for i, m in zip(x, masks, strict=True)])
    alone = Pictures([as_pil(i) for i in x])
    single = TensorDataset(torch.from_numpy(x))
    dataset = dataset_from({"a": {"train": pairs, "test": (x, masks)}, "b": alone, "c": single})
    assert dataset.task == "segmentation"
    np.testing.assert_array_equal(dataset.load("a").test.labels, masks)
    assert_same(dataset.load("b"), dataset.load("c"))


def test_rows_of_a_torch_data_set() -> None:
    x = np.random.default_rng(1).normal(size=(15, 3)).astype(np.float32)
    data = TensorDataset(torch.from_numpy(x), torch.from_numpy(labels(15)))
    assert_same(dataset_from({"a": data}).load("a"), dataset_from({"a": (x, labels(15))}).load("a"))


# What is refused ----------------------------------------------------------------------------------------------------

X, Y = images(6), labels(6)
NAN = (X / 255.0).transpose(0, 3, 1, 2)
NAN = np.where(np.arange(8) == 3, np.nan, NAN)


class Broken(Pictures):
    def __getitem__(self, index: int) -> Any:
        raise RuntimeError("no disk")


@pytest.mark.parametrize(
    ("bad", "code", "says"),
    [
        ((X[0, 0, 0], Y[:3]), "data-unreadable", "x has shape (3,)"),
        ((X[:, None], Y), "data-unreadable", "x has shape (6, 1, 8, 8, 3)"),
        ((X.astype(np.int64), Y), "data-unreadable", "x is int64 of shape (6, 8, 8, 3)"),
        ((X[..., 0] / 255, Y), "data-unreadable", "x is float64 of shape (6, 8, 8)"),
        ((X[..., :2], Y), "data-unreadable", "images have 1 or 3 channels"),
        ((X.astype(np.float32), Y), "data-unreadable", "from 0 to 255; images of floats go from 0 to 1"),
        (((X / 255.0 - 0.5), Y), "data-unreadable", "from -0.5 to 0.5"),
        ((NAN, Y), "data-unreadable", "NaN or infinite"),
        ((np.array([{}, {}]), [0, 1]), "data-unreadable", "array of Python objects"),
        (np.array(["a", "b"]), "data-unreadable", "array of <U1"),
        (([[1.0, 2.0], [3.0]], [0, 1]), "data-unreadable", "cannot be made one array"),
        ([X, Y], "data-unreadable", "cannot be made one array"),
        ((np.array([[1.0, np.inf]]), [0]), "data-unreadable", "column 1 of x"),
        ((np.array([[1e300, 1.0]]), [0]), "data-unreadable", "column 0 of x"),
        ((np.empty((4, 0)), Y[:4]), "data-empty", "no columns"),
        ((np.empty((4, 0, 8, 3), np.uint8), Y[:4]), "data-empty", "no pixels"),
        ((X, Y[:5]), "data-labels", "x has 6 samples, but y has 5"),
        ((X, 3), "data-labels", "x has 6 samples, but y has 1"),
        ((X, np.array([0, 1, 2, 0, 1, -1])), "data-labels", "the label -1"),
        ((X, np.array([0, 1, 2, 0, 1, 10**9])), "data-labels", "the label 1000000000; class numbers go up to 65535"),
        ((X, np.array([0, 1, 2, 0, 1, 2**63 + 5], dtype=np.uint64)), "data-labels", "class numbers go up to 65535"),
        ((X, [*"abcab", ""]), "data-labels", "y of sample 5 is ''; a class name is printable text"),
        ((X, [*"abcab", "a\nb"]), "data-labels", "y of sample 5 is 'a\\nb'"),
        ((X, Y.astype(float)), "data-labels", "y is float64; classes are whole numbers or names"),
        ((X, np.array([None, 1, 2, 0, 1, 1])), "data-labels", "array of Python objects"),
        ((X, np.zeros((6, 2), int)), "data-labels", "y has shape (6, 2)"),
        ((X, np.zeros((6, 4, 4), int)), "data-labels", "masks have shape (4, 4), images (8, 8)"),
        ((X, np.zeros((6, 8, 8))), "data-labels", "y is float64; masks hold whole numbers"),
        ((X, np.full((6, 8, 8), 256)), "data-labels", "a mask holds 256"),
        ((X, np.full((6, 8, 8), -1)), "data-labels", "a mask holds -1"),
        ((X, Y, Y), "data-unreadable", "has 3 values"),
        (7, "data-unreadable", "data of type int cannot be read"),
        ((X[:0], Y[:0]), "data-empty", "has no samples"),
        ({}, "data-empty", "has no split 'train'"),
        ({"test": (X, Y)}, "data-empty", "has no split 'train'"),
        ({"train": (X, Y), "dev": (X, Y)}, "config-value", "has no split 'dev'"),
        ({"train": (X, Y), "test": X}, "data-labels", "test has no labels, but train has"),
        ({"train": (X, Y), "test": (images(4, 6), Y[:4])}, "site-mismatch", "images of 6 x 6 pixels"),
        (Pictures([]), "data-empty", "the data set is empty"),
        (Broken([1]), "data-unreadable", "sample 0 cannot be read: RuntimeError('no disk')"),
        (
            Pictures([(X[0], 0), (X[1][:4], 1)]),
            "data-unreadable",
            "x of sample 1 is uint8 of shape (4, 8, 3), but that",
        ),
        (Pictures([(X[0], 0), (X[1] / 255, 1)]), "data-unreadable", "x of sample 1 is float64 of shape (8, 8, 3)"),
        (Pictures([(X[0], 0), X[1]]), "data-labels", "1 of 2 samples have a label"),
        (Pictures([{"image": X[0]}]), "data-unreadable", "sample 0 is a dict"),
        (Pictures([(X[0], 0, "more")]), "data-unreadable", "sample 0 is a tuple of 3"),
    ],
)
def test_bad_data_name_the_site_and_what_is_wrong(bad: Any, code: str, says: str) -> None:
    error = refused({"north": (X, Y), "west": bad})
    assert error.code == code
    assert "'west'" in error.message and says in error.message, error.message


@pytest.mark.parametrize(
    ("west", "says"),
    [
        ((images(6, 12), Y), "site 'west' has images of 12 x 12 pixels, but site 'north' has images of 8 x 8 pixels"),
        ((np.zeros((6, 5)), Y), "site 'west' has tables of 5 columns, but site 'north' has images"),
        ((X, [*"abcabc"]), "site 'north' has class numbers, but site 'west' has class names"),
        ((X, np.zeros((6, 8, 8), int)), "site 'north' has class numbers, but site 'west' has masks"),
    ],
)
def test_sites_that_do_not_fit_each_other(west: Any, says: str) -> None:
    error = refused({"north": (X, Y), "west": west})
    assert error.code == "site-mismatch" and says in error.message


@pytest.mark.parametrize(
    ("data", "options", "code", "says"),
    [
        ({}, {}, "data-empty", "one site at least"),
        ([X], {}, "data-empty", "must be a mapping from the name of each site"),
        ({"a": X, "b": X}, {}, "data-labels", "no site has labels"),
        ({"": (X, Y)}, {}, "config-value", "cannot name a site"),
        ({3: (X, Y)}, {}, "config-value", "cannot name a site"),
        ({"a/b": (X, Y)}, {}, "config-value", "folder"),
        ({"..": (X, Y)}, {}, "config-value", "folder"),
        (
            {"a": (X, Y)},
            {"classes": ["x", "y"]},
            "data-labels",
            "site 'a': y has the label 2, but there are 2 classes, numbered from 0",
        ),
        (
            {"a": (X, [*"xyzxyz"])},
            {"classes": ["x", "y"]},
            "data-labels",
            "site 'a': y has 'z', which is not in classes",
        ),
        ({"a": (X, Y)}, {"classes": "xyz"}, "config-value", "list of names"),
        ({"a": (X, Y)}, {"classes": ["x", "y", "x"]}, "data-classes", "'x' more than once"),
        ({"a": (X, Y * 0)}, {}, "data-classes", "there must be two or more"),
        ({"a": (X, np.zeros((6, 8, 8), int))}, {}, "data-labels", "hold 1 classes"),
        ({"a": (X, np.full((6, 8, 8), VOID))}, {}, "data-labels", "hold 0 classes"),
        ({"a": (X, ["Cat", "cat", "dog"] * 2)}, {}, "data-classes", "differ only in spelling"),
        ({"a": (X, np.full((6, 8, 8), 5))}, {"classes": ["x", "y"]}, "data-labels", "site 'a': y has the label 5"),
    ],
)
def test_data_sets_that_cannot_be(data: Any, options: Any, code: str, says: str) -> None:
    error = refused(data, **options)
    assert error.code == code and says in error.message, error.message


def test_an_unknown_domain_is_named_with_its_nearest() -> None:
    with pytest.raises(InputError, match=r"no domain 'nort'. Did you mean 'north'"):
        dataset_from({"north": (X, Y)}).load("nort")


# The digest ---------------------------------------------------------------------------------------------------------


def test_the_digest_is_that_of_the_data_and_nothing_else() -> None:
    one = digest_of(dataset_from({"a": (X, Y), "b": images(4, seed=9)}))
    assert len(one) == 64
    assert one == digest_of(dataset_from({"b": images(4, seed=9), "a": (torch.from_numpy(X), list(Y))}, name="other"))
    brighter = X.copy()
    brighter[0, 0, 0, 0] ^= 1
    others = [
        {"a": (brighter, Y), "b": images(4, seed=9)},
        {"a": (X, Y[::-1].copy()), "b": images(4, seed=9)},
        {"a": (X, Y), "c": images(4, seed=9)},
        {"a": (X, Y), "b": images(5, seed=9)},
        {"a": {"train": (X, Y)}, "b": {"train": images(4, seed=9), "test": images(4, seed=9)}},
        {"a": (X, Y), "b": (images(4, seed=9), Y[:4])},
    ]
    found = {digest_of(dataset_from(data)) for data in others}
    assert len(found) == len(others) and one not in found
    assert digest_of(dataset_from({"a": (X, Y)}, classes=[*"xyz"])) != digest_of(dataset_from({"a": (X, Y)}))


def test_the_digest_is_the_same_in_another_process() -> None:
    code = (
        "import numpy as np; from fedshift.data.memory import dataset_from, digest_of;"
        "x = np.arange(40 * 64, dtype=np.uint8).reshape(40, 8, 8);"
        "print(digest_of(dataset_from({'a': (x, np.arange(40) % 3)})));"
        "import sys; print('torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    x = np.arange(40 * 64, dtype=np.uint8).reshape(40, 8, 8)
    assert done.stdout.split() == [digest_of(dataset_from({"a": (x, np.arange(40) % 3)})), "False"]


@settings(max_examples=40, deadline=None)
@given(st.lists(st.integers(0, 4), min_size=2, max_size=60).filter(lambda y: max(y) > 0))
def test_no_sample_is_lost_or_doubled(y: list[int]) -> None:
    x = np.arange(len(y), dtype=np.float32)[:, None]
    domain = dataset_from({"a": (x, y)}).load("a")
    assert sorted(all_inputs(domain)[:, 0].tolist()) == list(range(len(y)))
    for split in (domain.train, domain.val, domain.test):
        assert split.labels is not None
        assert [y[int(row)] for row in split.inputs[:, 0]] == split.labels.tolist()
