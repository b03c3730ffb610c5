"""One federation for all tests that need one; they share a worker, in the group `federation`."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from loopback import Loopback

SITES = ("amber", "blue", "coral", "pooled")
"""`pooled` is there for the bounds that bring data together: somebody has to hold it."""
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
                shutil.copy(tiny_data / f"{'coral' if name == 'pooled' else name}.npz", folder / f"{name}.npz")
        return folder

    federation = Loopback(root, data, SITES, (OBSERVER,))
    try:
        federation.start()
        yield federation
    finally:
        federation.close()
