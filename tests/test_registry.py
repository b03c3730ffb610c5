"""Names that come with fedshift, that a script adds, that a package offers."""

from __future__ import annotations

from importlib.metadata import EntryPoint

import pytest

from fedshift import registry
from fedshift.errors import InputError
from fedshift.registry import Registry, load_object


@pytest.fixture
def letters(monkeypatch: pytest.MonkeyPatch) -> Registry[str]:
    offered = [
        EntryPoint("gamma", "string:ascii_lowercase", "fedshift.letters"),
        EntryPoint("alpha", "string:digits", "fedshift.letters"),
    ]
    monkeypatch.setattr(registry, "entry_points", lambda group: [p for p in offered if p.group == group])
    return Registry("letter", "letters", {"alpha": "string:ascii_letters", "beta": "string:digits"})


def test_built_in_registered_and_offered_values_stand_side_by_side(letters: Registry[str]) -> None:
    letters.register("delta", "mine")
    assert sorted(letters) == ["alpha", "beta", "delta", "gamma"] and len(letters) == 4
    assert letters["beta"] == "0123456789" and letters["gamma"].startswith("abc")


def test_a_package_cannot_take_a_built_in_name(letters: Registry[str]) -> None:
    assert letters["alpha"].startswith("abc") and len(letters["alpha"]) == 52
    with pytest.raises(InputError, match="already has a letter 'alpha'"):
        letters.register("alpha", "mine")


def test_a_notebook_may_register_the_same_name_again(letters: Registry[str]) -> None:
    letters.register("delta", "first")
    letters.register("delta", "second")
    assert letters["delta"] == "second"


def test_an_unknown_name_suggests_the_nearest(letters: Registry[str]) -> None:
    with pytest.raises(InputError, match=r"no letter 'gama'.*gamma"):
        letters.find("gama")


def test_what_cannot_be_imported_says_which_part_is_wrong() -> None:
    with pytest.raises(InputError, match="no module 'nowhere_at_all'"):
        load_object("nowhere_at_all:Thing")
    with pytest.raises(InputError, match=r"'string' has no 'digit'.*digits"):
        load_object("string:digit")
