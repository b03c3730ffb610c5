"""Every method gives the same model, to the byte, on separate processes with mutual TLS as in one process."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from loopback import Loopback

from fedshift.federation.engines.nvflare import link as links
from fedshift.federation.engines.nvflare.kits import Coordinator
from fedshift.methods import METHODS
from fedshift.runs.config import make_config
from fedshift.runs.execute import run

pytestmark = [pytest.mark.xdist_group("federation"), pytest.mark.timeout(900)]

TINY: dict[str, dict[str, Any]] = {
    "csac": {"csac": {"acquisition_epochs": 1, "calibration_epochs": 1}},
    "dualadapt": {"dualadapt": {"pretrain_epochs": 1}},
    "fed-oracle": {"fed-oracle": {"pretrain_epochs": 1}},
    "fed-mcd": {"fed-mcd": {"repeats": 1}},
    "cent-mcd": {"cent-mcd": {"repeats": 1}},
}
"""Keys that cut a method's published schedule down to seconds."""

ROLES: dict[str, dict[str, Any]] = {
    "generalize": {"sources": ["amber", "blue"], "target": "coral"},
    "adapt": {"sources": ["amber", "blue", "coral"], "target": "dim"},
    "multi-adapt": {"home": "dim", "targets": ["amber", "blue", "coral"]},
}


@pytest.fixture(scope="module")
def shared_link(loopback: Loopback) -> Iterator[links.Link]:
    """One job for all methods: starting one takes as long as several of these runs."""
    link = links.Link(Coordinator.read(loopback.coordinator), loopback.sites)
    yield link
    link.close()


@pytest.mark.parametrize("method", METHODS)
def test_the_same_bytes_as_in_one_process(
    method: str,
    loopback: Loopback,
    shared_link: links.Link,
    tiny_data: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    setting = METHODS[method].about.settings[0]
    common: dict[str, Any] = {
        "method": method,
        "setting": setting,
        "arch": "digits-csac",
        "rounds": 2,
        "batch_size": 16,
        "data_dir": tiny_data,
        **ROLES[setting],
        **TINY.get(method, {}),
    }
    here = run(make_config(common | {"workers": 0, "policy": {"min_samples": 2}}), tmp_path / "here")

    monkeypatch.setattr(links, "Link", lambda coordinator, wanted: shared_link)
    monkeypatch.setattr(shared_link, "close", lambda: None)
    federated: dict[str, Any] = {"engine": "nvflare", "federation": loopback.coordinator}
    if METHODS[method].about.data != "target-labels" and setting != "generalize":
        federated["policy"] = {"min_samples": 2}  # Of the home, the coordinator's own data.
    there = run(make_config(common | federated), tmp_path / "there")

    assert there["model_sha256"] == here["model_sha256"]
    assert there["per_target"] == here["per_target"] and there["bytes"] == here["bytes"]
    assert there["counters"] == here["counters"]
