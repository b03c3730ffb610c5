"""A federation on this machine: a server and sites, each a process of its own, with mutual TLS on 127.0.0.1."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path

import psutil
import yaml

from fedshift.federation.engines.nvflare.kits import COORDINATOR_USER, Coordinator
from fedshift.federation.engines.nvflare.session import Server

LOST_AFTER = 10
PATIENCE = 120.0


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def fedshift(*words: str | Path) -> list[str]:
    return [sys.executable, "-m", "fedshift", *map(str, words)]


def wait_for(what: str, is_so: Callable[[], object], patience: float = PATIENCE) -> None:
    until = time.monotonic() + patience
    while not is_so():
        assert time.monotonic() < until, f"not within {patience} s: {what}"
        time.sleep(0.1)


class Loopback:
    """Started and stopped with the commands a user has."""

    def __init__(
        self,
        root: Path,
        data: Callable[[str], Path],
        sites: Sequence[str],
        absent: Sequence[str],
        observers: Sequence[str],
    ) -> None:
        self.root, self.data, self.sites = root, data, tuple(sites)
        self.port = free_port()
        self.running: dict[str, subprocess.Popen[bytes]] = {}
        project = {
            "name": "loopback",
            "address": f"localhost:{self.port}",
            "sites": [*sites, *absent],
            "observers": list(observers),
            "lost_after": LOST_AFTER,
        }
        self.project = root / "project.yaml"
        self.project.write_text(yaml.safe_dump(project))
        done = subprocess.run(
            fedshift("deploy", "init", self.project, "--out", root / "fed"), capture_output=True, text=True
        )
        assert done.returncode == 0, done.stderr
        self.coordinator = root / "fed" / "coordinator"
        self.policy = root / "policy.yaml"
        self.policy.write_text("min_samples: 2\n")

    def kit(self, site: str) -> Path:
        return self.root / "fed" / "sites" / site

    def start_coordinator(self) -> None:
        self._start("coordinator", fedshift("coordinator", "start", self.coordinator))

    def start_site(self, site: str, policy: Path | None = None) -> None:
        words = ("--data", self.data(site), "--policy", policy or self.policy)
        self._start(site, fedshift("site", "start", self.kit(site), *words))

    def start(self) -> None:
        self.start_coordinator()
        for site in self.sites:
            self.start_site(site)
        self.wait_until_online(*self.sites)

    def wait_until_online(self, *sites: str, since: float = 0.0) -> None:
        wait_for("the server listens", self._listens)
        wait_for(
            f"{sites} are connected", lambda: set(sites) <= {site.name for site in self.online() if site.seen > since}
        )

    def online(self) -> list[object]:
        server = Server(Coordinator.read(self.coordinator).admin_kit, COORDINATOR_USER)
        try:
            return list(server.online())
        finally:
            server.close()

    def tree(self, name: str) -> list[psutil.Process]:
        """A started command and all below it."""
        root = psutil.Process(self.running[name].pid)
        return [root, *root.children(recursive=True)]

    def kill(self, name: str) -> None:
        """kill -9 of everything that belongs to a site or to the coordinator."""
        for process in self.tree(name):
            with suppress(psutil.NoSuchProcess):
                process.kill()
        self.running.pop(name).wait()

    def stop(self, name: str) -> int:
        process = self.running.pop(name)
        process.terminate()
        return process.wait(PATIENCE)

    def close(self) -> None:
        below = [child for name in self.running for child in self.tree(name)]
        for process in self.running.values():
            process.terminate()
        for process in self.running.values():
            with suppress(subprocess.TimeoutExpired):
                process.wait(PATIENCE)
        alive = psutil.wait_procs(below, timeout=5)[1]
        for process in alive:
            process.kill()
        assert not alive, f"left behind: {alive}"

    def _start(self, name: str, command: list[str]) -> None:
        with (self.root / f"{name}.out").open("ab") as output:
            self.running[name] = subprocess.Popen(
                command, stdout=output, stderr=output, env={**os.environ, "OMP_NUM_THREADS": "1"}
            )

    def _listens(self) -> bool:
        with suppress(OSError), socket.create_connection(("127.0.0.1", self.port), timeout=1):
            return True
        return False
