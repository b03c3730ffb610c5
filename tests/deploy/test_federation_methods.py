"""Every method gives the same model, to the byte, on separate processes with mutual TLS as in one process."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from loopback import ROOT, SITES, STRICT, Loopback, wait_for

from fedshift import registry
from fedshift.data import DataSource
from fedshift.errors import SiteError
from fedshift.federation import codec
from fedshift.federation.engines import Failure
from fedshift.federation.engines.nvflare import link as links
from fedshift.federation.engines.nvflare.engine import Nvflare
from fedshift.federation.engines.nvflare.kits import Coordinator
from fedshift.federation.site import SiteSpec
from fedshift.federation.step import Request
from fedshift.federation.survey import survey_sites
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
    link = links.Link(Coordinator.read(loopback.coordinator), SITES)
    yield link
    link.close()


def test_two_sites_give_the_same_bytes_as_one_process(two_sites: Loopback, tiny_data: Path, tmp_path: Path) -> None:
    """From the survey of the sites to the model, as `fedshift train` does it. The target is the coordinator's own. With
    models as changes, both ends have to remember the same."""
    roles = {"sources": ["amber", "blue"], "target": "dim", "data_dir": tiny_data, "policy": {"min_samples": 2}}
    common: dict[str, Any] = {"method": "kd3a", "arch": "digits-csac", "rounds": 2, "batch_size": 16, **roles}
    common["compress"] = "int4"
    here = run(make_config(common | {"workers": 0}), tmp_path / "here")
    there = run(make_config(common | {"engine": "nvflare", "federation": two_sites.coordinator}), tmp_path / "there")
    assert_same(there, here)


def assert_same(there: dict[str, Any], here: dict[str, Any]) -> None:
    for key in ("model_sha256", "per_target", "bytes", "counters"):
        assert there[key] == here[key], key


@pytest.mark.slow
def test_secure_sums_under_the_sites_own_certificates_are_the_same(
    loopback: Loopback,
    shared_link: links.Link,
    tiny_data: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    keys: dict[str, Any] = {
        "method": "fedavg",
        "setting": "adapt",
        "arch": "digits-csac",
        "rounds": 1,
        "batch_size": 16,
    }
    common = {**keys, **ROLES["adapt"], "data_dir": tiny_data, "policy": {"min_samples": 2}, "secure_aggregation": True}
    here = run(make_config(common | {"workers": 0}), tmp_path / "here")
    monkeypatch.setattr(links, "Link", lambda coordinator, wanted: shared_link)
    monkeypatch.setattr(shared_link, "close", lambda: None)
    there = run(make_config(common | {"engine": "nvflare", "federation": loopback.coordinator}), tmp_path / "there")
    assert not there["counters"]
    assert there["model_sha256"] == here["model_sha256"]
    lists = [path.read_text() for path in loopback.kit("amber").glob("runs/*/ledger.jsonl")]
    assert any('"kind": "masked"' in text and '"step": "secure.reveal"' in text for text in lists)


@pytest.mark.slow
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
        "evaluate_every": 2,
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

    assert_same(there, here)


@pytest.mark.slow
def test_a_users_own_method_runs_where_sites_allow_its_module(
    loopback: Loopback,
    shared_link: links.Link,
    tiny_data: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.syspath_prepend(str(ROOT))
    monkeypatch.setattr(registry, "_allowed", {"examples.fedprox"})
    monkeypatch.setattr(METHODS, "_values", dict(METHODS._values))
    keys: dict[str, Any] = {"method": "examples.fedprox:FedProx", "arch": "digits-csac", "rounds": 2, "batch_size": 16}
    common = {**keys, "data_dir": tiny_data, **ROLES["generalize"]}
    here = run(make_config(common | {"workers": 0, "policy": {"min_samples": 2}}), tmp_path / "here")
    monkeypatch.setattr(links, "Link", lambda coordinator, wanted: shared_link)
    monkeypatch.setattr(shared_link, "close", lambda: None)
    federated = {"engine": "nvflare", "federation": loopback.coordinator}
    assert_same(run(make_config(common | federated), tmp_path / "there"), here)


@pytest.mark.slow
def test_a_site_that_does_not_allow_a_module_refuses_by_code(
    loopback: Loopback, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The site has the module; its policy does not list it."""
    monkeypatch.syspath_prepend(str(ROOT))
    monkeypatch.setattr(registry, "_allowed", {"examples.fedprox"})
    monkeypatch.setattr(METHODS, "_values", dict(METHODS._values))
    keys: dict[str, Any] = {"method": "examples.fedprox:FedProx", "arch": "digits-csac", "rounds": 1}
    federated = {"engine": "nvflare", "federation": loopback.coordinator}
    with pytest.raises(SiteError, match=r"strict: unknown-name"):
        run(make_config({**keys, **federated, "sources": ["amber", STRICT]}), tmp_path / "run")


def surveying(link: links.Link) -> Nvflare:
    return Nvflare(link, "0" * 16, [SiteSpec("amber", "held-out", DataSource(), ("amber",), Path())], None)


@pytest.mark.slow
def test_a_site_past_the_deadline_is_late_and_its_worker_replaced(loopback: Loopback, shared_link: links.Link) -> None:
    engine = surveying(shared_link)
    assert survey_sites(engine, ["amber"])["amber"].classes == ("0", "1", "2")

    def workers() -> list[psutil.Process]:
        return [process for process in loopback.tree("amber") if "fedshift.runs.worker" in process.cmdline()]

    wait_for("jobs of other tests have ended", lambda: len(workers()) == 1)
    (worker,) = workers()
    worker.suspend()  # It neither answers nor goes away.
    question = Request("amber", "survey.look", 0, "n", codec.pack({}))
    assert dict(engine.call([question], 2.0)) == {"amber": Failure("late")}
    assert not worker.is_running()
    assert set(survey_sites(engine, ["amber"])) == {"amber"}


@pytest.mark.slow
def test_a_data_folder_that_vanished_is_told_by_code_and_no_path_crosses(
    loopback: Loopback, shared_link: links.Link
) -> None:
    folder = loopback.data("amber")
    away = folder.rename(folder.with_name("away"))
    try:
        with pytest.raises(SiteError) as caught:
            survey_sites(surveying(shared_link), ["amber"])
    finally:
        away.rename(folder)
    assert "amber: data-missing" in caught.value.message and str(folder) not in caught.value.message
    assert str(folder) in (loopback.kit("amber") / "runs" / ("0" * 16) / "site.log").read_text()
