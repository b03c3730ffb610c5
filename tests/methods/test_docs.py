"""The pages on methods name code that exists, and keys that can be set."""

from __future__ import annotations

import ast
import dataclasses
import re
from pathlib import Path

import pytest

import fedshift
from fedshift.methods import METHODS

PACKAGE = Path(fedshift.__file__).parent
PAGES = sorted((PACKAGE.parent.parent / "docs" / "methods").glob("*.md"))
CODE = re.compile(r"`((?:methods|functional|nn)/[\w/]+\.py)(?:: ([\w., ]+))?`")


def defined(path: Path) -> set[str]:
    """Names of functions and classes, and methods as `Class.method`."""
    names = set()
    for node in ast.parse(path.read_text()).body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            names.add(node.name)
        if isinstance(node, ast.ClassDef):
            names |= {f"{node.name}.{inner.name}" for inner in node.body if isinstance(inner, ast.FunctionDef)}
    return names


@pytest.mark.parametrize("page", PAGES, ids=[page.stem for page in PAGES])
def test_code_that_a_page_names_exists(page: Path) -> None:
    mentioned = CODE.findall(page.read_text())
    assert mentioned or page.stem in ("averaging", "ensembles")
    for file, names in mentioned:
        assert (PACKAGE / file).is_file(), file
        for name in filter(None, names.split(", ")):
            assert name in defined(PACKAGE / file), f"{file}: {name}"


@pytest.mark.parametrize("page", PAGES, ids=[page.stem for page in PAGES])
def test_keys_that_a_page_names_exist(page: Path) -> None:
    for method, key in re.findall(r"`([\w-]+)\.(\w+)(?:=[^`]*)?`", page.read_text()):
        if method in METHODS:
            fields = {field.name.rstrip("_") for field in dataclasses.fields(METHODS[method].implementation.hyper_type)}
            assert key in fields, f"{method}.{key}"
