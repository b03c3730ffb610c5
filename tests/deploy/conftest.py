"""One federation for all tests that need one; they share a worker, in the group `federation`."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from loopback import Loopback

SITES = ("amber", "blue", "coral", "pooled")
"""`pooled` is there for the bounds that bring data together: somebody has to hold it."""
ABSENT = "spare"
"""A site of the federation that nobody has started."""
OBSERVER = "nurse@example.org"


@pytest.fixture(scope="session")
def loopback(tmp_path_factory: pytest.TempPathFactory, tiny_data: Path) -> Iterator[Loopback]:
    root = tmp_path_factory.mktemp("federation")

    def data(site: str) -> Path:
        """Every site has a folder of its own; clients of some baselines are given a copy of the home's data."""
        folder = root / "data" / site
        if not folder.exists():
            folder.mkdir(parents=True)
            for name in ("amber", "blue", "pooled") if site == "pooled" else (site, "dim"):
                known = tiny_data / f"{name}.npz"
                shutil.copy(known if known.exists() else tiny_data / "coral.npz", folder / f"{name}.npz")
        return folder

    federation = Loopback(root, data, SITES, (ABSENT,), (OBSERVER,))
    try:
        federation.start()
        yield federation
    finally:
        federation.close()
