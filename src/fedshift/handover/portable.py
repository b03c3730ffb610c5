"""A model as one module that needs nothing else: what a picture file decodes to in, class probabilities out."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from fedshift.data.decoding import SUFFIXES, UnreadableError, fit_of
from fedshift.data.formats.tables import read_features
from fedshift.data.tiling import middles
from fedshift.errors import FedshiftError, InputError
from fedshift.functional.tiles import OVERLAP, mirrored
from fedshift.runs.api import Run, as_inputs
from fedshift.runs.config import make_config, read_config
from fedshift.runs.files.model import ModelHeader, probabilities
from fedshift.runs.planning import prepare
from fedshift.runs.predict import decoded_for

CHECKED = 100
"""Samples on which an exported model is compared with the one it was made from."""


class Portable(nn.Module):
    """Images `(n, h, w, 3)` uint8, as Pillow and NumPy hold them, or table rows `(n, columns)` float32 with NaN for
    missing, to class probabilities `(n, classes)`, for segmentation `(n, classes, h, w)`."""

    def __init__(self, net: nn.Module, header: ModelHeader) -> None:
        super().__init__()
        self.net = net
        self.is_image = len(header.input_shape) == 3

    def forward(self, inputs: Tensor) -> Tensor:
        if self.is_image:
            inputs = inputs.permute(0, 3, 1, 2).to(torch.float32) / 255
        scores: Tensor = self.net(inputs)
        return scores.softmax(1)


def input_name(header: ModelHeader) -> str:
    return "images" if len(header.input_shape) == 3 else "rows"


def describe(header: ModelHeader, model_sha256: str) -> dict[str, Any]:
    """What a program must know to use an exported model: its inputs, its classes, where it comes from. Names of sites
    are not in it."""
    shape = header.input_shape
    if len(shape) == 3:
        fits = {
            "crop": "scale the shorter side, cut out the centre (PIL.ImageOps.fit, BILINEAR)",
            "stretch": "resize, bilinear (PIL.Image.resize)",
        }
        taken: dict[str, Any] = {"name": "images", "dtype": "uint8", "shape": ["n", shape[1], shape[2], 3]}
        taken |= {"colours": "RGB", "fit": fits[fit_of(header.task)]}
        if header.tiled:
            # What `stitched_rows` does: docs/after-training.md has it in NumPy.
            taken |= {"fit": "overlapping squares of the picture at its own size", "side": shape[1]}
            taken |= {"overlap": shape[1] // OVERLAP, "shorter_side": header.scaled_to}
    else:
        taken = {"name": "rows", "dtype": "float32", "shape": ["n", shape[0]], "columns": list(header.columns)}
        taken["missing"] = "NaN"
    given: dict[str, Any] = {"name": "probabilities", "dtype": "float32", "classes": list(header.classes)}
    if header.task == "segmentation":
        given["mask_ids"] = list(header.mask_ids or range(len(header.classes)))
    return {
        "task": header.task,
        "input": taken,
        "output": given,
        "temperature": header.temperature,
        "method": header.method,
        "arch": header.arch,
        "written_by": f"fedshift {header.written_by}",
        "run_model_sha256": model_sha256,
    }


def check_samples(run: Run, header: ModelHeader, folder: Path | None) -> tuple[NDArray[Any], str]:
    """Up to `CHECKED` inputs of `Portable` to compare models on, and where they are from: a folder or table that was
    named, the run's own data if they are on this machine, or numbers drawn at random."""
    if folder is not None:
        return _from_files(header, folder)[:CHECKED], str(folder)
    try:
        inputs = _of_the_run(run, header)
    except FedshiftError:
        inputs = None
    if inputs is not None and len(inputs):
        return inputs, "the run's own data"
    return _drawn(header), "inputs drawn at random, because the run's data are not here"


def _from_files(header: ModelHeader, folder: Path) -> NDArray[Any]:
    if not folder.exists():
        raise InputError("data-missing", f"there is nothing at {folder}")
    if len(header.input_shape) == 1:
        return read_features(folder, header.columns)
    files = sorted(path for path in folder.rglob("*") if path.suffix.lower() in SUFFIXES)[:CHECKED]
    height = header.input_shape[1]
    images, problem = [], f"there are no pictures in {folder}"
    for path in files:
        try:
            image = decoded_for(header, path.read_bytes())
            images.append(_middle(image, height) if header.tiled else image)
        except (UnreadableError, OSError) as error:
            problem = f"no picture in {folder} can be read: {path.name}: {error}"
    if not images:
        raise InputError("data-empty", problem)
    return np.stack(images)


def _of_the_run(run: Run, header: ModelHeader) -> NDArray[Any] | None:
    """An equal share of each site's samples."""
    dataset = prepare(make_config(read_config(run.directory.config, "run-corrupt"))).dataset
    if (dataset.input_shape, dataset.task) != (header.input_shape, header.task):
        return None
    share = -(-CHECKED // len(dataset.domains))
    found = []
    for name in dataset.domains:
        domain = dataset.load(name)
        split = max((domain.test, domain.val, domain.train), key=lambda part: (len(part) >= share, len(part) > 0))
        found.append(np.array(split.inputs[:share]) if split.tiles is None else middles(split, share).inputs)
    return np.concatenate(found)[:CHECKED]


def _middle(picture: NDArray[np.uint8], side: int) -> NDArray[np.uint8]:
    """The square in the middle of a picture."""
    whole = mirrored(torch.from_numpy(np.array(picture)), side).numpy()
    top, left = ((length - side) // 2 for length in whole.shape[:2])
    return np.array(whole[top : top + side, left : left + side])


def _drawn(header: ModelHeader) -> NDArray[Any]:
    """Images from dark to bright and from flat to rough; rows far from and near to zero, some values missing."""
    rng = np.random.default_rng(0)
    if len(header.input_shape) == 1:
        rows = rng.normal(size=(CHECKED, header.input_shape[0])) * np.geomspace(0.1, 100, CHECKED)[:, None]
        rows[rng.random(rows.shape) < 0.1] = np.nan
        return rows.astype(np.float32)
    _, height, width = header.input_shape
    base, spread = rng.uniform(0, 255, (CHECKED, 1, 1, 3)), rng.uniform(0, 120, (CHECKED, 1, 1, 1))
    pixels = base + spread * rng.normal(size=(CHECKED, height, width, 3))
    return pixels.clip(0, 255).astype(np.uint8)


def expected(net: nn.Module, header: ModelHeader, inputs: NDArray[Any]) -> NDArray[Any]:
    """What `fedshift predict` computes for inputs of `Portable`."""
    return probabilities(net, as_inputs(inputs, header.input_shape)).numpy()
