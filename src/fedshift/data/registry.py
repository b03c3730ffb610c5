"""Data sets by name or folder: built-in ones, public ones, those of installed packages, and the user's own.

A package offers a data set through the entry point group `fedshift.datasets`, a script through `register_dataset`. Both
give a function that takes `image_size` (pixels, or None for the data set's own size) and returns a `Dataset`.
"""

from __future__ import annotations

import inspect
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np

from fedshift.data.domain import LARGEST_IMAGE, SMALLEST_IMAGE, Dataset, DataSource, Domain
from fedshift.data.formats.base import Progress
from fedshift.data.formats.public import PUBLIC, how_to_get, survey_public
from fedshift.data.index.survey import Agreed, Survey, open_survey, survey_folder
from fedshift.data.tiling import check_tile, in_tiles, surveyed_in_tiles, told_shrunk
from fedshift.errors import InputError, nearest
from fedshift.files import open_files_left
from fedshift.registry import Registry

DatasetFunction = Callable[[int | None], Dataset]
"""`image_size` -> data set."""

BUILTIN = {
    "digits": "Ten digits in five looks: handwritten, over photos, typeset, as street numbers, in chalk.",
    "rotated-digits": "Handwritten digits turned by 0 to 75 degrees, the protocol of Rotated MNIST.",
    "streets": "Street scenes of five invented cities, for segmentation.",
}

DATASETS: Registry[DatasetFunction] = Registry(
    "data set",
    "datasets",
    {
        "digits": "fedshift.data.builtin.digits:RECIPE",
        "rotated-digits": "fedshift.data.builtin.handwriting:RECIPE",
        "streets": "fedshift.data.builtin.streets.streets:RECIPE",
    },
)
"""Data sets that are made by a function. Public ones are read from a folder and are in `PUBLIC`."""


@dataclass(frozen=True)
class DatasetInfo:
    """One line of `list datasets`. `classes` is empty if only the data can tell; so is `domains` for a data set of a
    package or script, whose function is not called for a list."""

    name: str
    domains: tuple[str, ...]
    classes: tuple[str, ...]
    builtin: bool
    description: str
    licence: str
    how_to_get: str


def register_dataset(name: str, function: DatasetFunction) -> None:
    """Makes `function` the data set `name` in this process. Its docstring describes it in lists."""
    if name in PUBLIC:
        raise InputError("config-value", f"there already is a public data set {name!r}: choose another name")
    if not name or not name.isprintable():
        raise InputError("config-value", f"{name!r} cannot name a data set")
    if not callable(function):
        raise InputError("config-value", f"data set {name!r}: {function!r} is not a function of image_size")
    DATASETS.register(name, function)


def open_dataset(source: DataSource, progress: Progress | None = None) -> Dataset:
    """A data set, ready to load its domains. Nothing is decoded before a domain is first loaded."""
    if source.name is not None and source.name not in PUBLIC and source.name in DATASETS:
        made = _made(source.name, source)
        return made if source.tile is None else in_tiles(made, source.tile, source.image_size)
    return open_survey(survey(source), progress)


def opened_once(dataset: Dataset) -> Dataset:
    """The data set, whose domains are read once by whoever asks first. Those that are mapped from files keep these
    open: where there are many, the domains that were not asked for longest are let go, and mapped again when needed."""
    return replace(dataset, load=_OpenDomains(dataset.load, _most_open_files()))


class _OpenDomains:
    def __init__(self, load: Callable[[str], Domain], most_files: int) -> None:
        self._load = load
        self._most_files = most_files
        self._in_memory: dict[str, Domain] = {}
        self._mapped: OrderedDict[str, Domain] = OrderedDict()
        self._files = 0

    def __call__(self, name: str) -> Domain:
        if name in self._in_memory:
            return self._in_memory[name]
        if name in self._mapped:
            self._mapped.move_to_end(name)
            return self._mapped[name]
        domain = self._load(name)
        files = _mapped_files(domain)
        if not files:
            self._in_memory[name] = domain
            return domain
        self._mapped[name] = domain
        self._files += files
        while self._files > self._most_files and len(self._mapped) > 1:
            self._files -= _mapped_files(self._mapped.popitem(last=False)[1])
        return domain


def _mapped_files(domain: Domain) -> int:
    """How many files a domain keeps open, at most: views of one file count each."""
    parts = (domain.train, domain.val, domain.test, *domain.rest)
    arrays = [array for part in parts for array in (part.inputs, part.labels)]
    return sum(isinstance(array, np.memmap) for array in arrays)


def _most_open_files() -> int:
    """A quarter of what this process may open: sites, engines and libraries need some too."""
    limit = open_files_left()
    return 2048 if limit is None else max(16, min(limit // 4, 2048))


def survey(source: DataSource) -> Survey:
    """What a public data set or a user's folder holds, without reading it."""
    check_tile(source.tile)
    found = _found(source)
    return told_shrunk(found) if source.tile is None else surveyed_in_tiles(found, source.tile, source.image_size)


def _found(source: DataSource) -> Survey:
    size = source.image_size
    _check_size(size)
    if source.name is None:
        if source.data_dir is None:
            raise InputError("config-value", "No data: name a data set with --dataset or a folder with --data-dir.")
        agreed = None if source.task is None else Agreed(source.task, source.classes or ())
        return survey_folder(source.data_dir, size, source.label_column, agreed)
    if source.name in PUBLIC:
        if source.label_column is not None:
            raise InputError("config-value", f"label_column is for tables, but {source.name} is a set of images.")
        return survey_public(source.name, source.data_dir, size)
    if source.name in DATASETS:
        raise InputError("config-value", f"{_origin(source.name)}: there is nothing to check.")
    known = [*DATASETS, *PUBLIC]
    raise InputError("unknown-name", f"There is no data set {source.name!r}. {nearest(source.name, known)}")


def list_datasets() -> list[DatasetInfo]:
    """Built-in data sets, then public ones, then those of packages and scripts."""
    listed = []
    for name, description in BUILTIN.items():
        dataset = DATASETS[name](None)
        listed.append(DatasetInfo(name, dataset.domains, dataset.classes, True, description, "Apache-2.0", ""))
    for name, row in PUBLIC.items():
        listed.append(
            DatasetInfo(
                name, tuple(row.domains), row.classes or (), False, row.description, row.licence, how_to_get(name)
            )
        )
    added = sorted(set(DATASETS) - BUILTIN.keys() - PUBLIC.keys())
    listed += [DatasetInfo(name, (), (), False, _description(name), "", "") for name in added]
    return listed


def _made(name: str, source: DataSource) -> Dataset:
    """The data set that a function makes."""
    for key in ("data_dir", "label_column"):
        if getattr(source, key) is not None:
            raise InputError("config-value", f"{_origin(name)} and takes no {key}.")
    size = source.image_size
    _check_size(size)
    check_tile(source.tile)
    dataset = _function(name)(size)
    if not isinstance(dataset, Dataset):
        kind = type(dataset).__name__
        raise InputError("config-value", f"The function of the data set {name!r} returned a {kind}, not a Dataset.")
    if size is not None and len(dataset.input_shape) == 3 and min(dataset.input_shape[1:]) != size:
        height, width = dataset.input_shape[1:]
        raise InputError(
            "config-value",
            f"image_size is {size}, but the function of the data set {name!r} gives images of {width} x {height}: leave"
            " image_size out, or let the function resize them.",
        )
    return dataset


def _function(name: str) -> DatasetFunction:
    try:
        return DATASETS[name]
    except (ImportError, AttributeError) as error:
        raise InputError(
            "unknown-name", f"The package that offers the data set {name!r} cannot be imported: {error}."
        ) from error


def _description(name: str) -> str:
    """The first paragraph of the function's docstring. One broken package must not hide the other data sets."""
    try:
        text = inspect.getdoc(_function(name)) or ""
    except InputError as error:
        return error.message
    return " ".join(text.split("\n\n")[0].split())


def _origin(name: str) -> str:
    return f"{name} comes with fedshift" if name in BUILTIN else f"{name} is made by a function"


def _check_size(size: int | None) -> None:
    if size is not None and not SMALLEST_IMAGE <= size <= LARGEST_IMAGE:
        raise InputError(
            "config-value", f"image_size is {size}; it must be {SMALLEST_IMAGE} to {LARGEST_IMAGE} pixels."
        )
