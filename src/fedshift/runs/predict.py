"""Predictions for new files: a CSV with one line per file or row; for segmentation also a mask a picture."""

from __future__ import annotations

import csv
import io
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image
from torch import Tensor, nn
from torch.nn import functional as F

from fedshift.data.decoding import (
    SUFFIXES,
    Size,
    UnreadableError,
    decode_image,
    decode_whole,
    fit_of,
    image_size,
)
from fedshift.data.formats.tables import read_features
from fedshift.errors import InputError
from fedshift.files import write_atomically
from fedshift.functional.tiles import stitched, stitched_classes
from fedshift.methods.base import SHARED
from fedshift.runs.api import Run, Select
from fedshift.runs.files.model import ModelHeader, SavedModel, with_distances

_BATCH = 64
UNLIKE = "unlike the sources' data"
"""The note of an input that is farther from what was seen than 99 of 100 of the sources' own."""
_UNSURE = 5
_FEWEST_TOGETHER = 20


@dataclass(frozen=True)
class PredictionCounts:
    """`model` says in words whose model predicted, `note` what else is to be known of it. `unlike`: how many inputs are
    unlike what the sources have; `together` says so of all of them as a whole, if they are. `unsure`: those with the
    lowest confidence, which is `calibrated` or not."""

    predicted: int
    skipped: int
    model: str
    note: str = ""
    unlike: int = 0
    together: str = ""
    unsure: tuple[tuple[str, float], ...] = ()
    calibrated: bool = False


def predict_files(
    run: Path, inputs: Path, out: Path, *, site: str | None = None, select: Select = "last"
) -> PredictionCounts:
    """Predicts every image below a folder, or every row of a table, and writes `out`.

    Unreadable files get a line with the reason. Segmentation masks go to `<out without suffix>_masks/`, with the ids of
    the masks that were learned from and at the size of each picture.
    """
    finished = Run(run, unfinished=True)
    saved = finished.model(select)
    chosen = finished.choose(saved, site)
    net = saved.network(chosen)
    if not inputs.exists():
        raise InputError("data-missing", f"there is nothing at {inputs}")
    seen = _Seen(saved.header)
    if len(saved.header.input_shape) == 1:
        rows = _predict_table(saved, net, inputs, seen)
    elif saved.header.task == "segmentation":
        rows = _predict_masks(saved, net, inputs, out.with_name(f"{out.stem}_masks"))
    else:
        rows = _predict_images(saved, net, inputs, seen)
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    for row, whose in zip(rows, ["model", *[chosen or "shared"] * (len(rows) - 1)], strict=True):
        writer.writerow([*row, whose])
    unreadable = [row for row in rows[1:] if str(row[-1]).startswith("unreadable")]
    if len(unreadable) == len(rows) - 1:
        raise InputError(
            "data-unreadable", f"nothing in {inputs} could be read: {unreadable[0][0]} is {unreadable[0][-1]}"
        )
    # Names of files are bytes to the system, and in any encoding.
    write_atomically(out, text.getvalue().encode(errors="surrogateescape"))
    note = "" if saved.is_checked else "this model has no checksum, so damage to its file would not be noticed"
    note = "; ".join(filter(None, (finished.so_far, note)))
    whose = whose_model(finished, saved, site, chosen)
    unlike = sum(row[-1] == UNLIKE for row in rows[1:])
    unsure: list[tuple[str, float]] = []
    if saved.header.task == "classification":
        unsure = sorted(((str(row[0]), float(str(row[2]))) for row in rows[1:] if row[1] != ""), key=lambda one: one[1])
    read = len(rows) - 1 - len(unreadable)
    is_calibrated = saved.header.temperature != 1.0
    told = seen.together()
    return PredictionCounts(read, len(unreadable), whose, note, unlike, told, tuple(unsure[:_UNSURE]), is_calibrated)


class _Seen:
    """Answers for all inputs, and what they say together: a site that looks different shows in many inputs, not in
    one."""

    def __init__(self, header: ModelHeader) -> None:
        self._header = header
        self._sure: list[Tensor] = []
        self._distances: list[Tensor] = []

    def answered(self, net: nn.Module, inputs: Tensor) -> tuple[Tensor, Tensor]:
        """Class probabilities, and which inputs are unlike the sources' data."""
        found, distances = with_distances(net, self._header, inputs)
        self._sure.append(found.amax(1))
        self._distances.append(distances)
        far = self._header.far
        return found, torch.zeros(len(inputs), dtype=torch.bool) if far is None else distances > far

    def together(self) -> str:
        """A sentence if the inputs as a whole are unlike every source's; empty if not, or if they are too few."""
        usual = self._header.usual
        if usual is None or sum(map(len, self._sure)) < _FEWEST_TOGETHER:
            return ""
        confidence, distances = torch.cat(self._sure), torch.cat(self._distances)
        if not usual.is_unlike(confidence, None if self._header.far is None else distances):
            return ""
        low, high = (f"{100 * mean:.0f}" for mean in usual.confidence)
        return (
            f"as a whole, these {len(confidence):,} look unlike each source's data: mean confidence"
            f" {100 * float(confidence.mean()):.0f} %, at the sources {low}-{high} %. Expect a lower accuracy than in"
            " validation (fedshift adapt, fedshift estimate), or label thirty of them and check"
        )


def whose_model(run: Run, saved: SavedModel, site: str | None, chosen: str) -> str:
    if chosen != SHARED:
        return f"the model of {chosen}" + ("" if site in (None, chosen) else f" (this run has none of {site}'s own)")
    if site is None:
        return "the shared model"
    if left_out := run.left_out(saved, site):
        return f"the shared model, because {left_out}"
    others = f", only of {', '.join(saved.own)}" if saved.own else ""
    return f"the shared model (this run has none of {site}'s own{others})"


def _predict_images(saved: SavedModel, net: nn.Module, folder: Path, seen: _Seen) -> list[Sequence[object]]:
    classes = saved.header.classes
    rows: list[Sequence[object]] = [["file", "prediction", "confidence", *(f"p_{name}" for name in classes), "note"]]
    for batch in _batches(folder, saved.header):
        rows += [[name, "", "", *("" for _ in classes), f"unreadable: {why}"] for name, why in batch.problems]
        if batch.names:
            rows += _class_rows(batch.names, *seen.answered(net, batch.images), classes)
    return rows


def _predict_table(saved: SavedModel, net: nn.Module, path: Path, seen: _Seen) -> list[Sequence[object]]:
    classes = saved.header.classes
    if not saved.header.columns:
        raise InputError(
            "config-value", "this model learned from arrays and knows no names of columns: use run.predict in Python"
        )
    features = read_features(path, saved.header.columns)
    header = ["row", "prediction", "confidence", *(f"p_{name}" for name in classes), "note"]
    names = [str(number) for number in range(1, len(features) + 1)]
    return [header, *_class_rows(names, *seen.answered(net, torch.from_numpy(features)), classes)]


def _class_rows(
    names: Sequence[str], probabilities: Tensor, is_far: Tensor, classes: Sequence[str]
) -> list[Sequence[object]]:
    best = probabilities.argmax(1).tolist()
    shares = [[f"{share:.4f}" for share in row] for row in probabilities.tolist()]
    notes = [UNLIKE if far else "" for far in is_far.tolist()]
    return [
        [name, classes[k], row[k], *row, note] for name, k, row, note in zip(names, best, shares, notes, strict=True)
    ]


def _predict_masks(saved: SavedModel, net: nn.Module, folder: Path, masks: Path) -> list[Sequence[object]]:
    """A mask a picture; the table says which share of it each class covers."""
    classes = saved.header.classes
    rows: list[Sequence[object]] = [["file", "mask", *(f"share_{name}" for name in classes), "note"]]
    written: set[Path] = set()
    for batch in _batches(folder, saved.header):
        rows += [[name, "", *("" for _ in classes), f"unreadable: {why}"] for name, why in batch.problems]
        if not batch.names:
            continue
        for name, numbers in zip(batch.names, _masks_of(net, saved.header, batch), strict=True):
            target = (masks / name).with_suffix(".png")
            if target in written:  # a.jpg and a.png
                target = masks / f"{name}.png"
            written.add(target)
            buffer = io.BytesIO()
            Image.fromarray(saved.to_ids(numbers)).save(buffer, format="PNG")
            write_atomically(target, buffer.getvalue())
            covered = np.bincount(numbers.ravel(), minlength=len(classes)) / numbers.size
            rows.append([name, target.relative_to(masks.parent), *(f"{share:.4f}" for share in covered), ""])
    return rows


def _masks_of(net: nn.Module, header: ModelHeader, batch: _Batch) -> Iterator[NDArray[np.uint8]]:
    """The class numbers of each picture of a batch, at its own size."""
    if header.tiled:
        for picture, size in zip(batch.pictures, batch.sizes, strict=True):
            yield tiled_classes(net, header, picture, size)
    else:
        for size, shares in zip(batch.sizes, _probabilities(net, batch.images), strict=True):
            yield likeliest(shares, size)


@torch.inference_mode()
def tiled_classes(net: nn.Module, header: ModelHeader, picture: NDArray[np.uint8], size: Size) -> NDArray[np.uint8]:
    """The class numbers `size` of a picture `(h, w, 3)` as `decode_whole` gives it, by a model that sees squares."""
    pixels, side = torch.from_numpy(np.array(picture)), header.input_shape[1]
    if pixels.shape[:2] == size:
        return stitched_classes(net, pixels, side).numpy()
    return likeliest(stitched(net, pixels, side), size)


def likeliest(probabilities: Tensor, size: Size) -> NDArray[np.uint8]:
    """The class number of every pixel at another size, from `(classes, h, w)`. One class after the other: all at once
    would take gigabytes for a large photo."""
    best = torch.full(size, -1.0)
    numbers = torch.zeros(size, dtype=torch.uint8)
    for number, plane in enumerate(probabilities):
        if plane.shape != best.shape:
            plane = F.interpolate(plane[None, None], size, mode="bilinear", align_corners=False)[0, 0]
        numbers[plane > best] = number
        best = torch.maximum(best, plane)
    return numbers.numpy()


@dataclass(frozen=True)
class _Batch:
    """Names, images `(b, 3, h, w)` and own sizes of files that could be read; names with the reason of those that
    could not. A model that sees squares gets `pictures` of any shape instead."""

    names: list[str]
    images: Tensor
    pictures: list[NDArray[np.uint8]]
    sizes: list[Size]
    problems: list[tuple[str, str]]


def _batches(folder: Path, model: ModelHeader) -> Iterator[_Batch]:
    """The files of a folder, brought to size as for training."""
    files = (
        sorted(path for path in folder.rglob("*") if path.suffix.lower() in SUFFIXES) if folder.is_dir() else [folder]
    )
    if not files:
        raise InputError("data-empty", f"there are no pictures ({', '.join(SUFFIXES)}) in {folder}")
    base = folder if folder.is_dir() else folder.parent
    _, height, width = model.input_shape
    at_once = 1 if model.tiled else _BATCH
    for start in range(0, len(files), at_once):
        names: list[str] = []
        images: list[NDArray[np.uint8]] = []
        sizes: list[Size] = []
        problems: list[tuple[str, str]] = []
        for path in files[start : start + at_once]:
            name = path.relative_to(base).as_posix()
            try:
                data = path.read_bytes()
                image, size = decoded_for(model, data), image_size(data)
            except (UnreadableError, OSError) as error:
                problems.append((name, str(error)))
                continue
            images.append(image)
            names.append(name)
            sizes.append(size)
        is_whole = images and not model.tiled
        stacked = torch.from_numpy(np.stack(images)) if is_whole else torch.zeros(0, height, width, 3)
        yield _Batch(names, stacked.permute(0, 3, 1, 2).float() / 255, images, sizes, problems)


def decoded_for(model: ModelHeader, data: bytes) -> NDArray[np.uint8]:
    """An encoded image as the model takes it; for one that sees squares, in its own shape."""
    if model.tiled:
        return decode_whole(data, model.scaled_to)
    return decode_image(data, (model.input_shape[1], model.input_shape[2]), fit_of(model.task))


@torch.inference_mode()
def _probabilities(net: nn.Module, inputs: Tensor) -> Tensor:
    scores: Tensor = net(inputs)
    return scores.softmax(1)
