from __future__ import annotations

from pathlib import Path

import pytest


@pytest.fixture(autouse=True)
def own_cache(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """A cache of its own for every test of the readers, but not for the built-in data, which take seconds to draw."""
    if request.node.path.name != "test_builtin.py":
        folder: Path = request.getfixturevalue("tmp_path")
        monkeypatch.setenv("FEDSHIFT_CACHE", str(folder / "cache"))


@pytest.fixture
def root(tmp_path: Path) -> Path:
    folder = tmp_path / "data"
    folder.mkdir()
    return folder
