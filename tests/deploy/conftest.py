"""One federation for all tests that need one and kill nothing. They share a worker of xdist, the group `federation`."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from loopback import SITES, STRICT, Loopback, federation


@pytest.fixture(scope="session")
def two_sites(tmp_path_factory: pytest.TempPathFactory, tiny_data: Path) -> Iterator[Loopback]:
    """The coordinator, and the sites amber and blue."""
    with federation(tmp_path_factory.mktemp("federation"), tiny_data, SITES[:2]) as started:
        yield started


@pytest.fixture(scope="session")
def loopback(two_sites: Loopback) -> Loopback:
    """The same federation with all its sites."""
    strict = two_sites.root / "strict.yaml"
    strict.write_text("min_samples: 2\nallow: [facts, counts]\n")
    two_sites.start_site(STRICT, strict)
    two_sites.start_sites(*SITES[2:])
    two_sites.wait_until_online(STRICT)
    return two_sites
