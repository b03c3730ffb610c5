"""Small data to train on in a second, and a cache that only the tests use."""

from __future__ import annotations

import gc
import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from tinydata import TINTS, write_domain

# Importing torch and a hundred test modules allocates objects that all stay. Looking for garbage among them, again and
# again, would be a third of the time that collecting the tests takes.
gc.disable()


def pytest_collection_finish(session: pytest.Session) -> None:
    gc.freeze()
    gc.enable()
    require_groups(session)


def require_groups(session: pytest.Session) -> None:
    """Tests that share what takes long to make have to be on one worker. Where xdist cannot group them, it says nothing
    and every worker makes its own."""
    grouped = [item for item in session.items if item.get_closest_marker("xdist_group")]
    if getattr(session.config.option, "loadgroup", False) and grouped and "@" not in grouped[0].nodeid:
        raise pytest.UsageError("pytest-xdist did not group the tests: use the versions in constraints.txt")


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_auto_num_workers(config: pytest.Config) -> int:
    """One worker per core that may be used. Tests of real federations mostly wait: with them, there is one more."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return min(8, cores + (config.getoption("markexpr") != "not slow"))


@pytest.fixture(scope="session", autouse=True)
def _own_cache(tmp_path_factory: pytest.TempPathFactory) -> None:
    """Tests neither read nor write the user's cache. Workers of xdist share one, so that data is made once."""
    import torch  # Here, because the process that only hands out tests to workers needs none of it.

    root = tmp_path_factory.getbasetemp()
    shared = root.parent if os.environ.get("PYTEST_XDIST_WORKER") else root
    os.environ["FEDSHIFT_CACHE"] = str(shared / "fedshift-cache")
    torch.set_num_threads(1)


@pytest.fixture(scope="session")
def tiny_data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of four domains with three classes each, to train on in a second."""
    root = tmp_path_factory.mktemp("tiny")
    for number, name in enumerate(TINTS):
        write_domain(root, name, seed=10 * number)
    return root


REGISTRIES = {
    "fedshift.methods": "METHODS",
    "fedshift.nn.archs": "ARCHS",
    "fedshift.data.registry": "DATASETS",
    "fedshift.runs.engines": "ENGINES",
    "fedshift.federation.aggregation": "RULES",
}


@pytest.fixture(autouse=True)
def _nothing_stays_registered() -> Iterator[None]:
    """What a test registers, or allows to be imported, is gone after it."""
    found = [getattr(sys.modules[module], name) for module, name in REGISTRIES.items() if module in sys.modules]
    before = [(table, dict(table._values)) for table in found]
    allowed = sys.modules["fedshift.registry"]._allowed if "fedshift.registry" in sys.modules else set()
    kept = set(allowed)
    is_strict = getattr(sys.modules.get("fedshift.registry"), "_only_allowed", False)
    yield
    for table, values in before:
        table._values = values
    allowed.clear()
    allowed.update(kept)
    if "fedshift.registry" in sys.modules:
        sys.modules["fedshift.registry"]._only_allowed = is_strict  # type: ignore[attr-defined]
