"""Data sets that need no download: drawn from what the dependencies ship, the same bytes every time."""

from __future__ import annotations

from fedshift.data.builtin import digits, rotated, streets
from fedshift.data.builtin.generated import Recipe

BUILTIN: dict[str, Recipe] = {recipe.name: recipe for recipe in (digits.RECIPE, rotated.RECIPE, streets.RECIPE)}
