"""The coordinator's side: start its server, say how everybody is, stop."""

from __future__ import annotations

import json
import os
import signal
import socket
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from fedshift.deploy.hardening import harden_server
from fedshift.deploy.processes import python_module, supervise
from fedshift.deploy.provision import ORGANISATION
from fedshift.errors import InputError, SiteError
from fedshift.federation.engines.nvflare.kits import COORDINATOR_USER, Coordinator
from fedshift.federation.engines.nvflare.status import Status

_START_SECONDS = 60.0


@dataclass(frozen=True)
class SiteStatus:
    """`seen`: seconds since its server last heard from the site, None when it is not connected. `version` and `last`
    (what came of the last question) are what the last run learnt."""

    name: str
    seen: float | None
    version: str | None
    last: str | None


@dataclass(frozen=True)
class FederationStatus:
    project: str
    address: str
    jobs: int
    run: str | None
    round: int
    sites: tuple[SiteStatus, ...]


def start_coordinator(folder: Path, ready: Callable[[str], None] = lambda text: None) -> int:
    """Runs the server until it is told to stop. `ready` is told once sites can connect."""
    coordinator = Coordinator.read(folder)
    _require_free_port(coordinator)
    kit = coordinator.server_kit
    lost_after = json.loads((coordinator.folder / "federation.json").read_text()).get("lost_after", 30)
    harden_server(kit, lost_after)
    arguments = ["secure_train=true", f"org={ORGANISATION}", "config_folder=config"]
    command = python_module(
        "nvflare.private.fed.app.server.server_train",
        *("-m", str(kit), "-s", "fed_server.json", "--set", *arguments),
    )

    def started(pid: int) -> None:
        coordinator.pid_file.write_text(str(os.getpid()))
        if _answers(coordinator, _START_SECONDS):
            ready(f"{coordinator.project}: sites can connect to {coordinator.host}:{coordinator.port}")

    try:
        return supervise(command, kit / "server.out", started)
    finally:
        coordinator.pid_file.unlink(missing_ok=True)


def federation_status(folder: Path) -> FederationStatus:
    """Who is connected now, and what the last run knew."""
    from fedshift.federation.engines.nvflare.session import Server

    coordinator = Coordinator.read(folder)
    server = Server(coordinator.admin_kit, COORDINATOR_USER)
    try:
        online, jobs = {site.name: site.seen for site in server.online()}, server.jobs()
    finally:
        server.close()
    known = Status(coordinator.status_file).known
    now = time.time()
    sites = tuple(
        SiteStatus(
            name,
            max(0.0, now - online[name]) if name in online else None,
            known["sites"].get(name, {}).get("version"),
            known["sites"].get(name, {}).get("last"),
        )
        for name in sorted({*coordinator.sites, *online})
    )
    address = f"{coordinator.host}:{coordinator.port}"
    return FederationStatus(coordinator.project, address, len(jobs), known["run"], known["round"], sites)


def stop_coordinator(folder: Path, patience: float = 30.0) -> bool:
    """Ends the server, and with it the run that uses it, which can be resumed. False where none is running."""
    coordinator = Coordinator.read(folder)
    try:
        pid = int(coordinator.pid_file.read_text())
        os.kill(pid, signal.SIGTERM)
    except (OSError, ValueError):
        coordinator.pid_file.unlink(missing_ok=True)
        return False
    until = time.monotonic() + patience
    while coordinator.pid_file.exists():
        if time.monotonic() > until:
            raise SiteError("server-offline", f"the server (process {pid}) does not end: look at it, or kill it")
        time.sleep(0.1)
    return True


def _require_free_port(coordinator: Coordinator) -> None:
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1" if coordinator.host == "localhost" else "0.0.0.0", coordinator.port))
        except OSError as error:
            raise InputError(
                "deploy-port",
                f"port {coordinator.port} cannot be used ({error.strerror}): is the server running already, or another"
                " program? Its number is in the project file",
            ) from error


def _answers(coordinator: Coordinator, patience: float) -> bool:
    until = time.monotonic() + patience
    while time.monotonic() < until:
        with suppress(OSError), socket.create_connection(("127.0.0.1", coordinator.port), timeout=1):
            return True
        time.sleep(0.1)
    return False
