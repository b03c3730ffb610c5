"""Data sets that need no download: drawn from what the dependencies ship, the same bytes every time."""

from __future__ import annotations

from collections.abc import Callable

from fedshift.data.builtin import digits, rotated, streets
from fedshift.data.domain import Dataset

BUILTIN: dict[str, Callable[[], Dataset]] = {
    recipe.name: recipe.dataset for recipe in (digits.RECIPE, rotated.RECIPE, streets.RECIPE)
}
