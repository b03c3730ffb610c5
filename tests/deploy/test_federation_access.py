"""Who is refused, and what never leaves a site. Named by what must fail."""

from __future__ import annotations

import json
import shutil
import socket
import ssl
import subprocess
import time
from pathlib import Path

import pytest
from conftest import ABSENT, OBSERVER
from loopback import Loopback, fedshift, wait_for

from fedshift.deploy.project import Project
from fedshift.deploy.provision import init_federation
from fedshift.errors import FedshiftError, InputError
from fedshift.federation.engines.nvflare.job import write_job
from fedshift.federation.engines.nvflare.kits import COORDINATOR_USER, Coordinator
from fedshift.federation.engines.nvflare.session import Server
from fedshift.runs.config import make_config
from fedshift.runs.execute import run

pytestmark = [pytest.mark.xdist_group("federation"), pytest.mark.timeout(900)]


def refused(loopback: Loopback, context: ssl.SSLContext) -> bool:
    """Whether the server ends a connection that is opened like this. One that it accepts stays open and silent."""
    try:
        with (
            socket.create_connection(("127.0.0.1", loopback.port), timeout=10) as plain,
            context.wrap_socket(plain, server_hostname="localhost") as line,
        ):
            line.settimeout(2)
            return line.recv(1) == b""
    except TimeoutError:
        return False
    except (ssl.SSLError, ConnectionError):
        return True


def client_context(authority: Path, kit: Path | None) -> ssl.SSLContext:
    context = ssl.create_default_context(cafile=str(authority / "startup" / "rootCA.pem"))
    if kit is not None:
        context.load_cert_chain(kit / "startup" / "client.crt", kit / "startup" / "client.key")
    return context


@pytest.fixture(scope="module")
def other_project(loopback: Loopback, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Another federation's kits, for the same address and site names."""
    out = tmp_path_factory.mktemp("other") / "fed"
    init_federation(Project(name="other", address=f"localhost:{loopback.port}", sites=("amber",)), out)
    return out / "sites" / "amber"


def test_a_site_of_the_federation_is_accepted(loopback: Loopback) -> None:
    """Or the refusals below would prove nothing."""
    kit = loopback.kit("amber")
    assert not refused(loopback, client_context(kit, kit))


def test_no_certificate_is_refused(loopback: Loopback) -> None:
    assert refused(loopback, client_context(loopback.kit("amber"), None))


def test_a_certificate_of_another_authority_is_refused(loopback: Loopback, other_project: Path) -> None:
    assert refused(loopback, client_context(loopback.kit("amber"), other_project))
    words = ("site", "check", other_project, "--data", loopback.data("amber"))
    done = subprocess.run(fedshift(*words), capture_output=True, text=True, timeout=60)
    assert done.returncode == 2
    assert "ok    kit" in done.stdout and "FAIL  connection" in done.stdout and "of this project?" in done.stdout


def test_plain_text_is_refused(loopback: Loopback) -> None:
    with socket.create_connection(("127.0.0.1", loopback.port), timeout=10) as line:
        line.sendall(b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n" * 4)
        line.settimeout(10)
        try:
            answer = line.recv(100)
        except ConnectionError:
            answer = b""
    # Nothing, or a TLS alert (type 21): not a word of the protocol.
    assert answer == b"" or answer[0] == 21


def test_a_site_with_the_name_of_another_is_refused(loopback: Loopback, tmp_path: Path) -> None:
    """blue's certificate, in a kit that says it is a site that is away."""
    kit = tmp_path / "impostor"
    shutil.copytree(loopback.kit("blue"), kit, ignore=shutil.ignore_patterns("runs", "*.log", "*.txt", "*.out"))
    startup = kit / "startup" / "fed_client.json"
    startup.write_text(startup.read_text().replace('"blue"', f'"{ABSENT}"'))
    server_log = loopback.coordinator / "server" / "server.out"
    refusal = f"authenticated as 'blue' but claimed endpoint '{ABSENT}'"
    words = ("site", "start", kit, "--data", loopback.data(ABSENT))
    impostor = subprocess.Popen(fedshift(*words), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        wait_for("the server refuses it", lambda: refusal in server_log.read_text())
        assert "Successfully registered" not in (kit / "site.out").read_text()
    finally:
        impostor.terminate()
        impostor.wait(30)


def test_an_observer_may_look_but_not_submit(loopback: Loopback, tmp_path: Path) -> None:
    observer = Server(loopback.root / "fed" / "observers" / OBSERVER, OBSERVER)
    try:
        assert {site.name for site in observer.online()} >= set(loopback.sites)
        with pytest.raises(InputError) as caught:
            observer.submit(write_job(tmp_path, ["amber"], "/nowhere"))
        assert caught.value.code == "not-allowed"
    finally:
        observer.close()


def ends_badly(loopback: Loopback, job: Path) -> str:
    """How a job that must not run ends: refused when submitted, or failed before it starts."""
    server = Server(Coordinator.read(loopback.coordinator).admin_kit, COORDINATOR_USER)
    try:
        try:
            name = server.submit(job)
        except FedshiftError as error:
            return error.code
        wait_for("the job ends", lambda: server.has_ended(name), 90)
        return str(server.has_ended(name))
    finally:
        server.close()


def test_a_job_with_code_is_refused(loopback: Loopback, tmp_path: Path) -> None:
    job, trace = write_job(tmp_path, ["amber"], "/nowhere"), tmp_path / "trace"
    code = job / "app" / "custom"
    code.mkdir()
    (code / "evil.py").write_text(f"open({str(trace)!r}, 'w')\n")
    config = job / "app" / "config" / "config_fed_client.json"
    config.write_text(config.read_text().replace("fedshift.federation.engines.nvflare.executor.SiteDoor", "evil.Evil"))
    ended = ends_badly(loopback, job)
    assert ended != "FINISHED:COMPLETED" and not trace.exists(), ended


@pytest.mark.parametrize("half", ["server", "client"])
def test_a_class_outside_the_allow_list_is_refused(loopback: Loopback, tmp_path: Path, half: str) -> None:
    """Even one that NVFlare ships and allows by itself."""
    allowed = {"server": "controller.Bridge", "client": "executor.SiteDoor"}[half]
    other = {
        "server": "nvflare.app_common.workflows.cross_site_model_eval.CrossSiteModelEval",
        "client": "nvflare.app_common.np.np_trainer.NPTrainer",
    }[half]
    with socket.socket(socket.AF_UNIX) as bridge:
        bridge.bind(str(tmp_path / "b"))
        bridge.listen()
        job = write_job(tmp_path, ["amber"], str(tmp_path / "b"))
        config = job / "app" / "config" / f"config_fed_{half}.json"
        config.write_text(
            config.read_text()
            .replace(f"fedshift.federation.engines.nvflare.{allowed}", other)
            .replace(f'"address": "{tmp_path / "b"}"', "")
        )
        ended = ends_badly(loopback, job)
    assert ended != "FINISHED:COMPLETED"
    logs = loopback.coordinator / "server" if half == "server" else loopback.kit("amber")
    assert "is not in allow_list" in "".join(path.read_text() for path in logs.glob("*.out"))


def test_the_policy_of_a_site_has_the_last_word_and_its_ledger_tells(loopback: Loopback, tmp_path: Path) -> None:
    strict = tmp_path / "strict.yaml"
    strict.write_text("min_samples: 2\nallow: [facts, counts]\n")
    assert loopback.stop("coral") == 0
    loopback.start_site("coral", strict)
    try:
        loopback.wait_until_online("coral", since=time.time())
        keys = {"method": "fedavg", "arch": "digits-csac", "rounds": 1, "sources": ["amber", "coral"]}
        config = make_config(keys | {"target": "blue", "engine": "nvflare", "federation": loopback.coordinator})
        results = run(config, tmp_path / "run")
    finally:
        loopback.stop("coral")
        loopback.start_site("coral")
        loopback.wait_until_online("coral", since=time.time())
    assert results["counters"] == {"failed.site-policy": 1}
    folder = loopback.kit("coral") / "runs" / (tmp_path / "run" / ".identity").read_text()
    left = [json.loads(line) for line in (folder / "ledger.jsonl").read_text().splitlines()]
    assert {row["kind"] for row in left} == {"facts", "counts"}
    assert "policy does not allow 'weights'" in (folder / "site.log").read_text()
    # The text of the refusal stayed there.
    assert "does not allow" not in (loopback.coordinator / "server" / "server.out").read_text()
