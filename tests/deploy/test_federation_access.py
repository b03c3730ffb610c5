"""Who is refused, and what never leaves a site. The names of the tests say what must fail."""

from __future__ import annotations

import json
import shutil
import socket
import ssl
import subprocess
from pathlib import Path

import pytest
from loopback import ABSENT, OBSERVER, SITES, STRICT, Loopback, fedshift, wait_for

from fedshift.deploy.project import Project
from fedshift.deploy.provision import init_federation
from fedshift.errors import FedshiftError, InputError
from fedshift.federation.engines.nvflare.job import write_job
from fedshift.federation.engines.nvflare.kits import COORDINATOR_USER, Coordinator
from fedshift.federation.engines.nvflare.session import Server
from fedshift.runs.config import make_config
from fedshift.runs.execute import run

pytestmark = [pytest.mark.xdist_group("federation"), pytest.mark.timeout(900), pytest.mark.slow]


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
    shutil.copytree(
        loopback.kit("blue"), kit, ignore=shutil.ignore_patterns("runs", "last-end", "*.log", "*.txt", "*.out")
    )
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
        assert {site.name for site in observer.online()} >= {*SITES, STRICT}
        with pytest.raises(InputError) as caught:
            observer.submit(write_job(tmp_path, ["amber"], "/nowhere"))
        assert caught.value.code == "not-allowed"
    finally:
        observer.close()


def with_code(folder: Path, trace: Path) -> Path:
    """A job that brings code, which would write the file `trace`."""
    job = write_job(folder, ["amber"], "/nowhere")
    code = job / "app" / "custom"
    code.mkdir()
    (code / "evil.py").write_text(f"open({str(trace)!r}, 'w')\n")
    config = job / "app" / "config" / "config_fed_client.json"
    config.write_text(config.read_text().replace("fedshift.federation.engines.nvflare.executor.SiteDoor", "evil.Evil"))
    return job


def with_other_class(folder: Path, half: str, bridge: Path) -> Path:
    """A job in which the server or the site runs a class that NVFlare ships and allows by default."""
    allowed = {"server": "controller.Bridge", "client": "executor.SiteDoor"}[half]
    other = {
        "server": "nvflare.app_common.workflows.cross_site_model_eval.CrossSiteModelEval",
        "client": "nvflare.app_common.np.np_trainer.NPTrainer",
    }[half]
    job = write_job(folder, ["amber"], str(bridge))
    config = job / "app" / "config" / f"config_fed_{half}.json"
    config.write_text(
        config.read_text()
        .replace(f"fedshift.federation.engines.nvflare.{allowed}", other)
        .replace(f'"address": "{bridge}"', "")
    )
    return job


@pytest.fixture(scope="module")
def endings(loopback: Loopback, tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """How jobs end that must not run: refused when submitted, or failed before they start. All are submitted before the
    first is waited for."""
    folder = tmp_path_factory.mktemp("jobs")
    server = Server(Coordinator.read(loopback.coordinator).admin_kit, COORDINATOR_USER)
    submitted, ended = {}, {}
    with socket.socket(socket.AF_UNIX) as bridge:
        bridge.bind(str(folder / "b"))
        bridge.listen()
        jobs = {half: with_other_class(folder / half, half, folder / "b") for half in ("server", "client")}
        jobs["code"] = with_code(folder / "code", folder / "trace")
        try:
            for name, job in jobs.items():
                try:
                    submitted[name] = server.submit(job)
                except FedshiftError as error:
                    ended[name] = error.code
            for name, job_id in submitted.items():
                wait_for(f"the job {name} ends", lambda job_id=job_id: server.has_ended(job_id), 90)
                ended[name] = str(server.has_ended(job_id))
        finally:
            server.close()
    return ended | {"trace": "exists" if (folder / "trace").exists() else "none"}


def test_a_job_with_code_is_refused(endings: dict[str, str]) -> None:
    assert endings["code"] != "FINISHED:COMPLETED" and endings["trace"] == "none", endings


@pytest.mark.parametrize("half", ["server", "client"])
def test_a_class_outside_the_allow_list_is_refused(loopback: Loopback, endings: dict[str, str], half: str) -> None:
    """Even one that NVFlare ships and allows by default."""
    assert endings[half] != "FINISHED:COMPLETED"
    logs = loopback.coordinator / "server" if half == "server" else loopback.kit("amber")
    assert "is not in allow_list" in "".join(path.read_text() for path in logs.glob("*.out"))


def test_the_policy_of_a_site_has_the_last_word_and_its_ledger_tells(loopback: Loopback, tmp_path: Path) -> None:
    keys = {"method": "fedavg", "arch": "digits-csac", "rounds": 1, "sources": ["amber", STRICT]}
    config = make_config(keys | {"target": "blue", "engine": "nvflare", "federation": loopback.coordinator})
    results = run(config, tmp_path / "run")
    assert results["counters"] == {"failed.site-policy": 1}
    folder = loopback.kit(STRICT) / "runs" / (tmp_path / "run" / ".identity").read_text()
    left = [json.loads(line) for line in (folder / "ledger.jsonl").read_text().splitlines()]
    assert {row["kind"] for row in left if row["event"] == "left"} == {"facts", "counts"}
    assert "policy does not allow 'weights'" in (folder / "site.log").read_text()
    # The text of the refusal stayed there.
    assert "does not allow" not in (loopback.coordinator / "server" / "server.out").read_text()
