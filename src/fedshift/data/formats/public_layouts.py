"""Public data sets that are commonly kept in special forms, not in folders of domains and classes.

Each function looks for one such form and returns the domains it finds.
"""

from __future__ import annotations

import gzip
import struct
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from fedshift.data.cache import cached_arrays
from fedshift.data.formats.arrays import ArraysError, ImageArrays, read_npz
from fedshift.data.formats.base import RawDomain, printable
from fedshift.data.formats.images import ImageFiles
from fedshift.data.index.files import FileIndex, digest_of
from fedshift.data.index.layouts import Listing, add_pairs, settle_splits
from fedshift.data.splits import SPLITS, choose_splits
from fedshift.errors import InputError

DIGITS = tuple(str(digit) for digit in range(10))

# Digit-Five ------------------------------------------------------------------------------------------------------

_X_Y = ("X", "y")
DIGIT_FIVE_FILES: dict[str, tuple[dict[str, tuple[str, str, str]], ...]] = {
    "mnist": (
        {
            "train": ("mnist_data.mat", "train_32", "label_train"),
            "test": ("mnist_data.mat", "test_32", "label_test"),
        },
    ),
    "mnist_m": (
        {
            "train": ("mnistm_with_label.mat", "train", "label_train"),
            "test": ("mnistm_with_label.mat", "test", "label_test"),
        },
    ),
    "svhn": ({"train": ("svhn_train_32x32.mat", *_X_Y), "test": ("svhn_test_32x32.mat", *_X_Y)},),
    "syn": (
        {"train": ("synth_train_32x32.mat", *_X_Y), "test": ("synth_test_32x32.mat", *_X_Y)},
        {
            "train": ("syn_number.mat", "train_data", "train_label"),
            "test": ("syn_number.mat", "test_data", "test_label"),
        },
    ),
    "usps": ({"train": ("usps_28x28.mat", "dataset", "0"), "test": ("usps_28x28.mat", "dataset", "1")},),
}
"""The location of each split's images and labels: file, name of the images, name of the labels. USPS is one table of
cells with a row for each split."""


def digit_five_mat(root: Path, index: FileIndex) -> list[RawDomain]:
    """Digit-Five as the `.mat` files of its first release, in the data folder or one below."""
    domains: list[RawDomain] = []
    for folder in (root, *index.folders(root)):
        for name, versions in DIGIT_FIVE_FILES.items():
            for parts in versions:
                files = sorted({folder / file for file, _, _ in parts.values()})
                if all(map(index.has_file, files)) and name not in {domain.name for domain in domains}:
                    digest = digest_of("".join(index.digest(path) for path in files).encode())
                    arrays = cached_arrays(f"digit-five 1 {name} {digest}", partial(_read_mat, folder, parts))
                    domains.append(ImageArrays(name, arrays, digest, DIGITS))
    return domains


def _read_mat(folder: Path, parts: dict[str, tuple[str, str, str]]) -> dict[str, NDArray[Any]]:
    from scipy.io import loadmat

    arrays: dict[str, NDArray[Any]] = {}
    for split, (file, images, labels) in parts.items():
        try:
            content = loadmat(folder / file, variable_names=[images, labels])
            pair = content[images][int(labels)] if labels.isdigit() else (content[images], content[labels])
            arrays[f"{split}_images"] = images_from_mat(pair[0])
            arrays[f"{split}_labels"] = labels_from_mat(pair[1])
        except (ValueError, TypeError, KeyError, IndexError, OSError, NotImplementedError) as problem:
            raise InputError(
                "data-unreadable", f"{printable(folder / file)} is not the Digit-Five file of that name: {problem}."
            ) from problem
    return arrays


def images_from_mat(values: NDArray[Any]) -> NDArray[np.uint8]:
    """Images with samples and channels on any axis, 0..255 or 0..1, as `(n, h, w)` or `(n, h, w, c)`."""
    if values.ndim == 4 and values.shape[0] == values.shape[1] and values.shape[2] in (1, 3):
        values = values.transpose(3, 0, 1, 2)
    elif values.ndim == 4 and values.shape[1] in (1, 3):
        values = values.transpose(0, 2, 3, 1)
    if values.dtype.kind == "f" and values.max() <= 1:
        values = values * 255
    return np.ascontiguousarray(values.astype(np.uint8))


def labels_from_mat(values: NDArray[Any]) -> NDArray[np.int64]:
    """Digits from one-hot rows or numbers. MATLAB counts from 1, so 10 stands for zero."""
    if values.ndim == 2 and values.shape[1] == 10:
        return np.asarray(values.argmax(axis=1), dtype=np.int64)
    digits = values.ravel().astype(np.int64)
    return np.where(digits == 10, 0, digits)


# Rotated MNIST ---------------------------------------------------------------------------------------------------

ANGLES = (0, 15, 30, 45, 60, 75)
PER_CLASS = 100


def rotated_mnist(root: Path, index: FileIndex) -> list[RawDomain]:
    """Six domains made from MNIST: 100 images per class, the same at every angle (Ghifary et al., "Domain
    Generalization for Object Recognition with Multi-task Autoencoders", ICCV 2015), turned clockwise as in CSAC (Yuan
    et al., TKDE 2023). An image is in the same split at every angle, so that no digit is trained on at one angle and
    tested at another."""
    found = _find_mnist(root, index)
    if found is None:
        return []
    images, labels, digest = found
    domains: list[RawDomain] = []
    for angle in ANGLES:
        key = f"rotated-mnist 2 {digest} {angle}"  # 1 was counter-clockwise
        arrays = cached_arrays(key, partial(_rotated, images, labels, angle))
        domains.append(ImageArrays(f"M{angle}", arrays, digest_of(key.encode()), DIGITS))
    return domains


def _rotated(images: NDArray[Any], labels: NDArray[Any], angle: int) -> dict[str, NDArray[Any]]:
    names = np.array([digest_of(image.tobytes()) for image in images])
    order = np.lexsort((names, labels))
    rank = np.arange(len(order)) - np.searchsorted(labels[order], labels[order])
    chosen = order[rank < PER_CLASS]
    turned = np.stack(
        [
            np.asarray(Image.fromarray(np.asarray(image)).rotate(-angle, Image.Resampling.BILINEAR))
            for image in images[chosen]
        ]
    )
    split = choose_splits(list(names[chosen]), [str(label) for label in labels[chosen]])
    arrays: dict[str, NDArray[Any]] = {}
    for number, name in enumerate(SPLITS):
        arrays[f"{name}_images"] = turned[split == number]
        arrays[f"{name}_labels"] = labels[chosen][split == number]
    return arrays


def _find_mnist(root: Path, index: FileIndex) -> tuple[NDArray[Any], NDArray[Any], str] | None:
    """MNIST's training images, labels and their hash, from `mnist.npz` or from its original four files."""
    below = index.folders(root)
    folders = [root, *below, *(inner for folder in below for inner in index.folders(folder))]
    for folder in folders:
        archive = folder / "mnist.npz"
        if index.has_file(archive):
            try:
                arrays, digest = read_npz(archive, index)
                return arrays["train_images"], arrays["train_labels"], digest
            except (ArraysError, KeyError) as problem:
                raise InputError("data-unreadable", f"{printable(archive)} is not MNIST: {problem}.") from problem
        images = _either(index, folder, "train-images-idx3-ubyte", "train-images.idx3-ubyte")
        labels = _either(index, folder, "train-labels-idx1-ubyte", "train-labels.idx1-ubyte")
        if images is not None and labels is not None:
            digest = digest_of((index.digest(images) + index.digest(labels)).encode())
            return read_idx(images, 3), read_idx(labels, 1), digest
    return None


def _either(index: FileIndex, folder: Path, *names: str) -> Path | None:
    candidates = (folder / f"{name}{end}" for name in names for end in ("", ".gz"))
    return next((path for path in candidates if index.has_file(path)), None)


MAX_IDX = 2**30
"""Bytes: ten times what the largest data set in this format has."""


def read_idx(path: Path, dimensions: int) -> NDArray[np.uint8]:
    """An array of bytes in the format of MNIST's original files, gzipped or not."""
    try:
        with gzip.open(path) if path.suffix == ".gz" else path.open("rb") as file:
            data = file.read(MAX_IDX + 1)
        if len(data) > MAX_IDX:
            raise ValueError(f"it holds more than {MAX_IDX // 2**20} MB")
        header = struct.unpack_from(f">HBB{dimensions}I", data)
        if header[:3] != (0, 8, dimensions):
            raise ValueError(f"its header is {header[:3]}")
        return np.frombuffer(data, dtype=np.uint8, offset=4 + 4 * dimensions).reshape(header[3:])
    except (OSError, EOFError, ValueError, struct.error) as problem:
        raise InputError("data-unreadable", f"{printable(path)} is not an MNIST file: {problem}.") from problem


# CamVid ----------------------------------------------------------------------------------------------------------

CAMVID_FOLDERS: tuple[tuple[str, str, Any], ...] = (
    ("train", "trainannot", "train"),
    ("val", "valannot", "val"),
    ("test", "testannot", "test"),
    ("701_stillsraw_full", "labeledapproved_full", None),
)
"""Images, masks and split: SegNet's distribution, and the original one (masks in colour, named with `_L`)."""


def camvid_pooled(root: Path, index: FileIndex, sequences: Sequence[str]) -> list[RawDomain]:
    """CamVid with all drives in one folder: the name of an image begins with its drive."""
    for base in (root, *index.folders(root)):
        folders = {path.name.lower(): path for path in index.folders(base)}
        listings = {name: Listing(base, "segmentation") for name in sequences}
        for images, masks, split in CAMVID_FOLDERS:
            if images in folders and masks in folders:
                files = index.images(folders[images])
                for name, listing in listings.items():
                    own = [path for path in files if path.name.startswith(name)]
                    add_pairs(listing, own, index.images(folders[masks]), split, ("", "_L"))
        found = {name: listing for name, listing in listings.items() if listing.items}
        for listing in found.values():
            settle_splits(listing)
        if found:
            return [ImageFiles(name, listing, index) for name, listing in found.items()]
    return []
