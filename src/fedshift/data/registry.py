"""Data sets by name or folder: the ones that come with fedshift, the public ones, and the user's own."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from fedshift.data.domain import Dataset, DataSource
from fedshift.data.folders import survey_folder
from fedshift.data.public import PUBLIC, how_to_get, survey_public
from fedshift.data.raw import Progress
from fedshift.data.survey import Agreed, Survey, open_survey
from fedshift.errors import InputError, nearest

if TYPE_CHECKING:
    from fedshift.data.builtin.generated import Recipe

SMALLEST_IMAGE, LARGEST_IMAGE = 8, 1024

BUILTIN_ABOUT = {
    "digits": "Ten digits in five looks: handwritten, over photos, typeset, as street numbers, in chalk.",
    "rotated-digits": "Handwritten digits turned by 0 to 75 degrees, the protocol of Rotated MNIST.",
    "streets": "Street scenes of five invented cities, for segmentation.",
}


@dataclass(frozen=True)
class DatasetInfo:
    """A line of `list datasets`. `classes` is empty where only the data themselves can tell."""

    name: str
    domains: tuple[str, ...]
    classes: tuple[str, ...]
    builtin: bool
    description: str
    licence: str
    how_to_get: str


def open_dataset(source: DataSource, progress: Progress | None = None) -> Dataset:
    """A data set, ready to load its domains. Nothing is decoded before a domain is loaded for the first time."""
    if source.name is not None and source.name in _builtin():
        refused = {"data_dir": source.data_dir, "label_column": source.label_column}
        for key, value in refused.items():
            if value is not None:
                raise InputError("config-value", f"{source.name} comes with fedshift and takes no {key}.")
        _check_size(source.image_size)
        return _builtin()[source.name].dataset(source.image_size)
    return open_survey(survey(source), progress)


def survey(source: DataSource) -> Survey:
    """What is in a public data set or a user's folder, without reading it."""
    size = source.image_size
    _check_size(size)
    if source.name is None:
        if source.data_dir is None:
            raise InputError("config-value", "No data: name a data set with --dataset or a folder with --data-dir.")
        agreed = None if source.task is None else Agreed(source.task, source.classes or ())
        return survey_folder(source.data_dir, size, source.label_column, agreed)
    if source.name in _builtin():
        raise InputError("config-value", f"{source.name} comes with fedshift: there is nothing to check.")
    if source.name not in PUBLIC:
        raise InputError("unknown-name", f"There is no data set {source.name!r}. {nearest(source.name, _all_names())}")
    if source.label_column is not None:
        raise InputError("config-value", f"label_column is for tables, but {source.name} is a set of images.")
    return survey_public(source.name, source.data_dir, size)


def list_datasets() -> list[DatasetInfo]:
    """The data sets that come with fedshift, then the public ones."""
    listed = []
    for name, recipe in _builtin().items():
        dataset = recipe.dataset()
        listed.append(DatasetInfo(name, dataset.domains, dataset.classes, True, BUILTIN_ABOUT[name], "Apache-2.0", ""))
    for name, row in PUBLIC.items():
        listed.append(
            DatasetInfo(
                name, tuple(row.domains), row.classes or (), False, row.description, row.licence, how_to_get(name)
            )
        )
    return listed


def _check_size(size: int | None) -> None:
    if size is not None and not SMALLEST_IMAGE <= size <= LARGEST_IMAGE:
        raise InputError(
            "config-value", f"image_size is {size}; it must be {SMALLEST_IMAGE} to {LARGEST_IMAGE} pixels."
        )


def _builtin() -> dict[str, Recipe]:
    # Imported late: the built-in data sets draw on scikit-learn and matplotlib.
    from fedshift.data.builtin import BUILTIN

    return BUILTIN


def _all_names() -> list[str]:
    return [*_builtin(), *PUBLIC]
