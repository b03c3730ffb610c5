"""Small data that learns in a second, and a cache of the tests' own."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch
from tinydata import TINTS, write_domain


@pytest.fixture(scope="session", autouse=True)
def _own_cache(tmp_path_factory: pytest.TempPathFactory) -> None:
    """Nothing is read from or left in the user's cache; xdist workers share one so that data is made once."""
    root = tmp_path_factory.getbasetemp()
    shared = root.parent if os.environ.get("PYTEST_XDIST_WORKER") else root
    os.environ["FEDSHIFT_CACHE"] = str(shared / "fedshift-cache")
    torch.set_num_threads(1)


@pytest.fixture(scope="session")
def tiny_data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Four domains of three classes: a folder to train on in a second."""
    root = tmp_path_factory.mktemp("tiny")
    for number, name in enumerate(TINTS):
        write_domain(root, name, seed=10 * number)
    return root
