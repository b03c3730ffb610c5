"""Data sets by name: of packages through entry points, of scripts through `register_dataset`."""

from __future__ import annotations

import sys
import types
from importlib.metadata import EntryPoint
from pathlib import Path

import numpy as np
import pytest

from fedshift import registry as names
from fedshift.data import (
    Dataset,
    DataSource,
    Domain,
    Split,
    check_data,
    list_datasets,
    open_dataset,
    register_dataset,
    registry,
)
from fedshift.errors import InputError


def wards(image_size: int | None = None) -> Dataset:
    """Two wards of one hospital,
    as a test.

    More about it.
    """
    side = image_size or 8

    def load(name: str) -> Domain:
        split = Split(np.full((4, side, side, 3), len(name), dtype=np.uint8), np.arange(4) % 2)
        return Domain(name, split, split, split)

    return Dataset("wards", "classification", ("ill", "well"), ("east", "north"), (3, side, side), load)


@pytest.fixture(autouse=True)
def own_registry(monkeypatch: pytest.MonkeyPatch) -> None:
    """A registry as in a new process, with a package that offers four data sets."""
    module = types.ModuleType("wards_of_a_package")
    module.wards = wards  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "wards_of_a_package", module)
    offered = [
        EntryPoint("wards", "wards_of_a_package:wards", "fedshift.datasets"),
        EntryPoint("digits", "wards_of_a_package:wards", "fedshift.datasets"),
        EntryPoint("pacs", "wards_of_a_package:wards", "fedshift.datasets"),
        EntryPoint("broken", "no_such_package:wards", "fedshift.datasets"),
        EntryPoint("other", "wards_of_a_package:wards", "fedshift.methods"),
    ]
    monkeypatch.setattr(names, "entry_points", lambda group: [point for point in offered if point.group == group])
    monkeypatch.setattr(registry.DATASETS, "_offered", None)
    monkeypatch.setattr(registry.DATASETS, "_values", {})


def test_the_registry_holds_every_built_in_data_set() -> None:
    assert registry.DATASETS._builtin.keys() == registry.BUILTIN.keys()


def test_a_package_offers_a_data_set() -> None:
    dataset = open_dataset(DataSource(name="wards"))
    assert dataset.domains == ("east", "north") and dataset.input_shape == (3, 8, 8)
    assert dataset.load("north").train.inputs[0, 0, 0].tolist() == [5, 5, 5]
    assert open_dataset(DataSource(name="wards", image_size=16)).input_shape == (3, 16, 16)


def test_a_package_cannot_take_the_name_of_a_built_in_or_public_data_set(root: Path) -> None:
    assert open_dataset(DataSource(name="digits")).domains[0] == "handwritten"
    with pytest.raises(InputError, match="No domain of pacs"):
        open_dataset(DataSource(name="pacs", data_dir=root))
    for name in ("digits", "pacs"):
        with pytest.raises(InputError, match="choose another name"):
            register_dataset(name, wards)


def test_a_script_registers_a_data_set_and_may_replace_it() -> None:
    register_dataset("mine", lambda image_size: pytest.fail("replaced"))
    register_dataset("mine", wards)
    assert open_dataset(DataSource(name="mine")).classes == ("ill", "well")


def test_lists_describe_added_data_sets_by_their_docstring() -> None:
    register_dataset("mine", lambda image_size: pytest.fail("a list must not make the data"))
    listed = {info.name: info for info in list_datasets()}
    assert list(listed)[-3:] == ["broken", "mine", "wards"]
    assert listed["wards"].description == "Two wards of one hospital, as a test."
    assert not listed["wards"].builtin and listed["wards"].domains == () and listed["mine"].description == ""
    assert listed["digits"].builtin and not listed["pacs"].builtin and listed["pacs"].how_to_get
    assert "no_such_package" in listed["broken"].description


@pytest.mark.parametrize(
    ("source", "message"),
    [
        (DataSource(name="ward"), "Did you mean 'wards'"),
        (DataSource(name="broken"), "offers the data set 'broken' cannot be imported: No module named 'no_such"),
        (DataSource(name="wards", data_dir=Path("x")), "made by a function and takes no data_dir"),
        (DataSource(name="wards", label_column="y"), "made by a function and takes no label_column"),
        (DataSource(name="wards", image_size=4), "must be 8 to 2048 pixels"),
        (DataSource(name="wards", image_size=2049), "must be 8 to 2048 pixels"),
    ],
)
def test_what_cannot_be_opened_says_why(source: DataSource, message: str) -> None:
    with pytest.raises(InputError, match=message):
        open_dataset(source)


def test_a_function_that_returns_something_else_is_refused() -> None:
    register_dataset("pairs", lambda image_size: [(1, 2)])  # type: ignore[arg-type,return-value]
    with pytest.raises(InputError, match="'pairs' returned a list, not a Dataset"):
        open_dataset(DataSource(name="pairs"))
    register_dataset("fixed", lambda image_size: wards(8))
    with pytest.raises(InputError, match=r"image_size is 16, but the function of the data set 'fixed' gives .* 8 x 8"):
        open_dataset(DataSource(name="fixed", image_size=16))
    for name, function in (("", wards), ("a\nb", wards), ("text", "wards")):
        with pytest.raises(InputError) as error:
            register_dataset(name, function)  # type: ignore[arg-type]
        assert error.value.code == "config-value"


def test_there_is_nothing_to_check_in_a_data_set_of_a_function() -> None:
    for name, message in (("wards", "made by a function"), ("digits", "comes with fedshift")):
        (problem,) = check_data(DataSource(name=name)).problems
        assert f"{message}: there is nothing to check" in problem.message
