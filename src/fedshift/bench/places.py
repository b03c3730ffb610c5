"""Where a suite is measured: a public data set, a built-in one, or folders that the user gave."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from fedshift.bench.layouts import Scene
from fedshift.bench.recipes import Recipe
from fedshift.data import DataSource, open_dataset
from fedshift.data.public import PUBLIC, how_to_get
from fedshift.data.registry import survey
from fedshift.data.survey import Survey
from fedshift.errors import InputError

SMALL_IMAGE = 40
"""Images up to this side, in pixels, are for the digit networks."""
STREET = 64
"""The side that given street scenes are scaled to."""


@dataclass(frozen=True)
class Place:
    """`data` are the configuration keys that name the data; `notes` what a reader has to know about them."""

    title: str
    recipe: Recipe
    data: Mapping[str, Any]
    scene: Scene
    notes: tuple[str, ...] = ()


def named_place(recipe: Recipe, data_dir: Path | None) -> Place:
    """The recipe's own data set: from the folder where it is public, else built in."""
    name = recipe.dataset
    if name not in PUBLIC:
        note = f"Measured on the built-in {name}: compare rows with each other, not with the paper."
        return Place(name, recipe, {"dataset": name}, recipe.scene(), (note,))
    if data_dir is None:
        raise InputError("data-missing", f"it is measured on {name}. {how_to_get(name)}")
    inner = data_dir / name
    folder = (inner if inner.is_dir() else data_dir).resolve()
    found = _usable(survey(DataSource(name, folder, recipe.settings.get("image_size"))))
    missing = [domain for domain in recipe.domains if domain not in _names(found)]
    if missing:
        raise InputError("data-missing", f"{folder} lacks {', '.join(missing)} of {name}. {how_to_get(name)}")
    return Place(name, recipe, {"dataset": name, "data_dir": str(folder)}, recipe.scene())


def given_place(mini: Recipe, data_dir: Path, names: Sequence[str]) -> Place:
    """The user's folder, read as one of the public sets `names` if it is that, else as a folder of domains; with the
    short recipe that fits its pictures."""
    name, found = _survey(data_dir, names)
    task = open_dataset(DataSource(mini.dataset)).task
    if found.task != task:
        raise InputError("method-needs", f"it is about {task}, and {data_dir} holds data for {found.task}")
    is_photo = task == "classification" and len(found.input_shape) == 3 and max(found.input_shape[1:]) > SMALL_IMAGE
    recipe = mini.on_photos() if is_photo else mini
    data: dict[str, Any] = {"dataset": name, "data_dir": str(data_dir.resolve())}
    if task == "segmentation":
        data["image_size"] = STREET
    domains = _names(found)
    # Built-in data may be scaled down; what somebody gave keeps its size, unless it is for another network.
    size = recipe.settings.get("image_size") if is_photo else None
    recipe = replace(recipe.but(image_size=size), domains=domains)
    title = name or data_dir.resolve().name
    note = f"Measured on {title} with a schedule cut to minutes: compare rows with each other, not with the paper."
    return Place(title, recipe, {k: v for k, v in data.items() if v is not None}, recipe.scene(), (note,))


def _survey(data_dir: Path, names: Sequence[str]) -> tuple[str | None, Survey]:
    if not data_dir.is_dir():
        raise InputError("data-missing", f"there is no folder {data_dir}")
    for name in names:
        try:
            found = survey(DataSource(name, data_dir))
        except InputError:
            continue
        if not found.problems and len(found.domains) > 1:
            return name, found
    return None, _usable(survey(DataSource(None, data_dir)))


def _usable(found: Survey) -> Survey:
    if found.problems:
        raise InputError(found.problems[0].code, found.problems[0].message)
    return found


def _names(found: Survey) -> tuple[str, ...]:
    return tuple(domain.name for domain in found.domains)
