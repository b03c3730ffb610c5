"""Setting a federation up: the project file, the kits, what a site checks, and what sites must agree on."""

from __future__ import annotations

import json
import socket
import stat
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from loopback import free_port
from tinydata import write_domain

from fedshift._version import __version__
from fedshift.cli.app import app
from fedshift.deploy.coordinator import federation_status, start_coordinator, stop_coordinator
from fedshift.deploy.project import Project, read_project
from fedshift.deploy.provision import init_federation
from fedshift.deploy.site import SiteOptions, check_site, read_policy, seconds_to_wait, start_site
from fedshift.errors import FedshiftError, InputError, SiteError
from fedshift.federation import codec
from fedshift.federation.engines import Failure
from fedshift.federation.engines.nvflare.kits import SiteKit
from fedshift.federation.engines.nvflare.settings import SiteSettings, worker_setup
from fedshift.federation.survey import Found, agreed_dataset, survey_sites
from fedshift.runs.config import make_config
from fedshift.runs.execute import run

NOW = 1e9
FOUND = Found("0.1.0", "classification", ("cat", "dog"), (3, 16, 16), (), NOW)


@pytest.fixture(scope="module")
def federation(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("deploy") / "fed"
    project = Project(
        name="lungs", address=f"localhost:{free_port()}", sites=("north", "south"), observers=("a@b.org",)
    )
    init_federation(project, out)
    return out


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("name: lungs\naddress: localhost:8002\n", "sites"),
        ("name: Lungs!\naddress: localhost:8002\nsites: [a]\n", "small letters"),
        ("name: lungs\naddress: localhost\nsites: [a]\n", "HOST:PORT"),
        ("name: lungs\naddress: localhost:99999\nsites: [a]\n", "HOST:PORT"),
        ("name: lungs\naddress: localhost:8002\nsites: [a, a]\n", "twice"),
        ("name: lungs\naddress: localhost:8002\nsites: [../a]\n", "../a"),
        ("name: lungs\naddress: localhost:8002\nsites: [server]\n", "reserved"),
        ("name: lungs\naddress: localhost:8002\nsites: [a]\nobservers: [nobody]\n", "e-mail"),
        ("name: lungs\naddress: localhost:8002\nsites: [a]\nport: 1\n", "port"),
        ("name: [", "not valid YAML"),
        ("lungs", "keys and values"),
    ],
)
def test_a_bad_project_file_is_one_sentence(tmp_path: Path, text: str, says: str) -> None:
    path = tmp_path / "project.yaml"
    path.write_text(text)
    with pytest.raises(InputError) as caught:
        read_project(path)
    assert caught.value.code == "deploy-project" and says in caught.value.message and str(path) in caught.value.message


def test_kits_are_private_hardened_and_hold_nothing_to_run(federation: Path) -> None:
    for kit in (federation / "sites" / "north", federation / "coordinator" / "server"):
        allowed = json.loads((kit / "local" / "authorization.json").read_text())["permissions"]
        for role in ("project_admin", "org_admin", "lead", "member"):
            assert allowed[role]["byoc"] == allowed[role]["shell_commands"] == allowed[role]["operate"] == "none"
        assert [role for role in allowed if allowed[role]["submit_job"] != "none"] == ["lead"]
        resources = json.loads((kit / "local" / "resources.json").read_text())
        assert resources["class_list_enforcement_mode"] == "enforce"
        assert all(name.startswith("fedshift.") for name in resources["class_allow_list"])
        assert not list(kit.rglob("*.default.json")) and not list(kit.rglob("*.sh"))
        assert "/tmp/nvflare" not in json.dumps(resources)
        transfers = json.loads((kit / "local" / "comm_config.json").read_text())
        # At 1 MB/s, a sign of life that waits behind this much is in time, and no site is taken for lost.
        assert transfers["streaming_chunk_size"] < transfers["streaming_window_size"] <= 4 * 2**20
    site = json.loads((federation / "sites" / "north" / "local" / "resources.json").read_text())
    assert site["allow_log_streaming"] is False
    for secret in federation.rglob("*.key"):
        assert stat.S_IMODE(secret.stat().st_mode) == 0o600
    for folder in ("coordinator", "authority", "sites/north"):
        assert stat.S_IMODE((federation / folder).stat().st_mode) == 0o700
    assert "fedshift site start" in (federation / "sites" / "north" / "README.txt").read_text()
    assert not (federation / "sites" / "north" / "startup" / "server.key").exists()


def test_a_site_more_keeps_certificates_and_renewing_changes_them(tmp_path: Path) -> None:
    def certificate(site: str) -> bytes:
        return (tmp_path / "fed" / "sites" / site / "startup" / "client.crt").read_bytes()

    def authority(site: str) -> bytes:
        return (tmp_path / "fed" / "sites" / site / "startup" / "rootCA.pem").read_bytes()

    project = Project(name="lungs", address="localhost:8002", sites=("north",))
    init_federation(project, tmp_path / "fed")
    first, root = certificate("north"), authority("north")
    (tmp_path / "fed" / "sites" / "north" / "runs").mkdir()
    init_federation(project.model_copy(update={"sites": ("north", "south")}), tmp_path / "fed")
    assert certificate("north") == first and authority("south") == root
    assert (tmp_path / "fed" / "sites" / "north" / "runs").exists()
    init_federation(project, tmp_path / "fed", renew=True)
    assert certificate("north") != first and authority("north") == root
    with pytest.raises(InputError, match="another project"):
        init_federation(project.model_copy(update={"name": "hearts"}), tmp_path / "fed")


def test_check_has_one_line_each_and_says_what_is_wrong(federation: Path, tmp_path: Path) -> None:
    write_domain(tmp_path, "north")
    kit = federation / "sites" / "north"
    policy = tmp_path / "policy.yaml"
    policy.write_text("min_samples: 20\n")
    checks = {check.what: check for check in check_site(kit, SiteOptions(tmp_path, policy))}
    assert list(checks) == ["kit", "data", "policy", "connection"]
    assert checks["kit"].ok and "north of lungs" in checks["kit"].says
    assert checks["data"].ok and "3 classes" in checks["data"].says
    assert checks["policy"].ok and "min_samples 20" in checks["policy"].says
    assert not checks["connection"].ok and "cannot be reached" in checks["connection"].says

    (tmp_path / "north.npz").rename(tmp_path / "south.npz")
    policy.write_text("minimum: 20\n")
    checks = {check.what: check for check in check_site(kit, SiteOptions(tmp_path, policy))}
    assert not checks["data"].ok and "no part called 'north'" in checks["data"].says
    assert not checks["policy"].ok and "min_samples" in checks["policy"].says
    assert [check.ok for check in check_site(tmp_path, SiteOptions(None))] == [False, True]


@pytest.mark.parametrize("text", ["min_samples: many\n", "- 1\n", "allow: weights\n", "x: ["])
def test_a_bad_policy_file_never_becomes_a_weaker_policy(tmp_path: Path, text: str) -> None:
    path = tmp_path / "policy.yaml"
    path.write_text(text)
    with pytest.raises(InputError, match=r"policy\.yaml"):
        read_policy(path)


def test_a_site_does_not_start_without_its_data(federation: Path, tmp_path: Path) -> None:
    with pytest.raises(InputError) as caught:
        start_site(federation / "sites" / "north", SiteOptions(tmp_path / "gone"))
    assert caught.value.code == "data-missing"
    with pytest.raises(InputError) as caught:
        start_site(tmp_path, SiteOptions(tmp_path))
    assert caught.value.code == "deploy-kit"


def test_a_port_in_use_and_a_server_that_is_away_are_told(federation: Path) -> None:
    port = json.loads((federation / "coordinator" / "federation.json").read_text())["port"]
    with socket.socket() as busy:
        busy.bind(("127.0.0.1", port))
        busy.listen()
        with pytest.raises(InputError) as caught:
            start_coordinator(federation / "coordinator")
    assert caught.value.code == "deploy-port" and str(port) in caught.value.message
    assert stop_coordinator(federation / "coordinator") is False
    with pytest.raises(InputError) as caught:
        federation_status(federation / "sites" / "north")
    assert caught.value.code == "deploy-kit"


@pytest.mark.parametrize(
    ("keys", "code", "says"),
    [
        ({}, "config-value", "federation"),
        ({"federation": "here", "attack": ["noise:north"]}, "config-value", "attack"),
        ({"federation": "here", "policy": {"min_samples": 1}}, "config-value", "policy"),
        ({"federation": "here", "sources": ["nord"]}, "unknown-name", "Did you mean 'north'"),
        ({"federation": "elsewhere"}, "deploy-kit", "elsewhere"),
    ],
)
def test_a_run_that_cannot_reach_sites_says_so_before_anything_starts(
    federation: Path, tmp_path: Path, keys: dict[str, Any], code: str, says: str
) -> None:
    folders = {"here": federation / "coordinator", "elsewhere": tmp_path / "elsewhere"}
    given = keys | ({"federation": folders[keys["federation"]]} if keys else {})
    with pytest.raises(FedshiftError) as caught:
        run(make_config({"method": "fedavg", "engine": "nvflare", **given}), tmp_path / "run")
    assert caught.value.code == code and says in caught.value.message


def test_what_sites_have_in_common_becomes_the_data_set() -> None:
    unlabelled = replace(FOUND, task=None, classes=(), input_shape=())
    agreed = agreed_dataset("lungs", {"south": FOUND, "north": FOUND, "west": unlabelled}, NOW)
    assert agreed.classes == ("cat", "dog") and agreed.domains == ("north", "south", "west")
    assert agreed.input_shape == (3, 16, 16)


def test_ids_of_masks_are_known_where_all_sites_number_alike() -> None:
    north = replace(FOUND, task="segmentation", mask_ids=(0, 5))
    unlabelled = replace(FOUND, task=None, classes=(), input_shape=())
    assert agreed_dataset("lungs", {"north": north, "south": north, "west": unlabelled}, NOW).mask_ids == (0, 5)
    south = replace(north, mask_ids=(1, 5))
    assert agreed_dataset("lungs", {"north": north, "south": south}, NOW).mask_ids == ()


@pytest.mark.parametrize(
    ("change", "code", "says"),
    [
        ({"classes": ("cat", "cow")}, "data-classes", "'cow', 'dog'"),
        ({"classes": ("dog", "cat")}, "data-classes", "order"),
        ({"input_shape": (3, 32, 32)}, "site-mismatch", "image_size"),
        ({"columns": ("age",)}, "site-mismatch", "columns"),
        ({"clock": NOW + 3600}, "site-mismatch", "60 minutes"),
    ],
)
def test_a_site_that_differs_is_named(change: dict[str, Any], code: str, says: str) -> None:
    with pytest.raises(SiteError) as caught:
        agreed_dataset("lungs", {"north": FOUND, "south": replace(FOUND, **change)}, NOW)
    assert caught.value.code == code and says in caught.value.message and "south" in caught.value.message


READING: dict[str, Any] = {"image_size": None, "tile": None, "task": None, "classes": None}
PART: dict[str, Any] = {
    "role": "labelled",
    "domains": ["north"],
    "reading": READING,
    "train_cap": None,
    "train_share": 1.0,
    "copies": [],
}


def test_the_coordinator_cannot_say_where_a_site_reads_or_writes(tmp_path: Path) -> None:
    rules = {"min_samples": 50, "label_column": "stage"}
    settings = SiteSettings("north", "/data", "fedshift.runs.worker", policy=rules)
    (spec,) = worker_setup(settings, tmp_path, "0123abcd", PART, None)["specs"]
    assert spec["source"]["data_dir"] == "/data" and spec["policy"] == rules
    assert spec["source"]["label_column"] == "stage" and spec["is_remote"] is True
    assert Path(spec["folder"]).parent == tmp_path / "runs"
    for run_id in ("../../etc", "", "0123ABCD", "0123abcd/..", "0123abcd\n", 12345678, None):
        with pytest.raises(ValueError, match="not the name of a run"):
            worker_setup(settings, tmp_path, run_id, PART, None)
    for key in ("data_dir", "label_column", "name"):
        with pytest.raises(ValueError, match="not where data is"):
            worker_setup(settings, tmp_path, "0123abcd", PART | {"reading": READING | {key: "x"}}, None)


@pytest.mark.parametrize(
    "change",
    [
        {"role": "coordinator"},
        {"domains": []},
        {"domains": "north"},
        {"domains": ["north", "north"]},  # A domain pooled with itself seems to have twice as many samples.
        {"domains": [1]},
        {"train_cap": True},
        {"train_cap": -1},
        {"train_cap": 1.5},
        {"train_share": 0},
        {"train_share": float("nan")},
        {"train_share": 2},
        {"copies": [{"domain": "a", "train_share": 1.0}, {"domain": "a", "train_share": 1.0}]},
        {"copies": [{"domain": "a", "train_share": 1.0, "folder": "/"}]},
        {"copies": [[]]},
        {"reading": {**READING, "image_size": True}},
        {"reading": {**READING, "image_size": 4096}},
        {"reading": {**READING, "tile": 4096}},
        {"reading": {**READING, "tile": "auto"}},
        {"reading": {**READING, "classes": "ab"}},
        {"policy": {"min_samples": 1}},
        {"attacks": []},
    ],
    ids=str,
)
def test_a_part_of_the_wrong_form_is_refused(change: dict[str, Any], tmp_path: Path) -> None:
    settings = SiteSettings("north", "/data", "fedshift.runs.worker", policy={"max_image_size": 512})
    with pytest.raises(ValueError, match=r"part|coordinator|pixels"):
        worker_setup(settings, tmp_path, "0123abcd", PART | change, None)


def test_every_command_of_the_walk_exists() -> None:
    names = {command.name or command.callback.__name__ for command in app.registered_commands if command.callback}
    groups = {group.name: group.typer_instance for group in app.registered_groups}
    assert {"status", "stop", "train"} <= names and groups.keys() >= {"deploy", "site", "coordinator"}


def test_an_unfinished_write_of_the_status_is_no_error(tmp_path: Path) -> None:
    from fedshift.federation.engines.nvflare.status import Status

    file = tmp_path / "status.json"
    file.write_text('{"run": ')
    status = Status(file)
    status.note("north", "answered", version="1")
    status.save("0123", 4)
    again = Status(file).known
    assert again["round"] == 4 and again["sites"]["north"]["version"] == "1"
    assert list(tmp_path.iterdir()) == [file]


class OneAnswer:
    """An engine whose only site says what it is told to."""

    where_to_look = "Nowhere."

    def __init__(self, facts: dict[str, Any] | None) -> None:
        self.facts = facts

    def call(self, requests: Any, deadline: float | None) -> Any:
        for request in requests:
            if self.facts is None:
                yield request.site, Failure("unreachable")
            else:
                release = {"code": None, "release": {"facts": self.facts}, "clipped": 0, "seconds": "1.0"}
                yield request.site, codec.pack(request.head | release)

    def close(self) -> None:
        return None


@pytest.mark.parametrize(
    ("facts", "code", "says"),
    [
        ({"version": "0.0.1", "what": "an older site says"}, "site-mismatch", "runs fedshift 0.0.1"),
        ({"version": __version__, "task": "cooking"}, "site-failed", "north"),
        (None, "site-failed", "north: unreachable"),
    ],
)
def test_a_survey_that_fails_names_the_site(facts: dict[str, Any] | None, code: str, says: str) -> None:
    with pytest.raises(SiteError) as caught:
        survey_sites(OneAnswer(facts), ["north"])
    assert caught.value.code == code and says in caught.value.message


def test_a_site_that_is_back_before_it_was_missed_waits(tmp_path: Path) -> None:
    mark = tmp_path / "last-end"
    assert seconds_to_wait(mark, lost_after=30, now=1000.0) == 0, "it was never here"
    mark.write_text("")
    assert seconds_to_wait(mark, lost_after=30, now=1000.0) == 40, "it was killed, nobody knows when"
    mark.write_text("985.0")
    assert seconds_to_wait(mark, lost_after=30, now=1000.0) == 25
    mark.write_text("100.0")
    assert seconds_to_wait(mark, lost_after=30, now=1000.0) == 0


def test_a_kit_says_when_its_site_is_missed(federation: Path) -> None:
    assert SiteKit.read(federation / "sites" / "north").lost_after == 30
