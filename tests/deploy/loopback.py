"""A federation on this machine: a server and sites, each in its own process, with mutual TLS on 127.0.0.1."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

import psutil
import yaml

from fedshift.federation.engines.nvflare.kits import COORDINATOR_USER, Coordinator
from fedshift.federation.engines.nvflare.session import Server
from fedshift.federation.releases import KINDS

SITES = ("amber", "blue", "coral", "pooled")
"""`pooled` holds the data of several sites, for the bounds that train on all of it in one place."""
STRICT = "strict"
"""A site whose policy lets no weights out."""
ABSENT = "spare"
"""A site of the federation that is never started."""
OBSERVER = "nurse@example.org"

ROOT = Path(__file__).parent.parent.parent

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
    """Starts and stops everything with the commands that users have."""

    def __init__(self, root: Path, data: Callable[[str], Path], sites: Sequence[str], observers: Sequence[str]) -> None:
        self.root, self.data = root, data
        self.port = free_port()
        self.running: dict[str, subprocess.Popen[bytes]] = {}
        project = {
            "name": "loopback",
            "address": f"localhost:{self.port}",
            "sites": list(sites),
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
        # Some methods send what a policy lets out only by name.
        policy = {"allow": list(KINDS), "min_samples": 2, "imports": ["examples.fedprox"]}
        self.policy.write_text(yaml.safe_dump(policy))

    def kit(self, site: str) -> Path:
        return self.root / "fed" / "sites" / site

    def start_coordinator(self) -> None:
        self._start("coordinator", fedshift("coordinator", "start", self.coordinator))

    def start_site(self, site: str, policy: Path | None = None) -> None:
        words = ("--data", self.data(site), "--policy", policy or self.policy)
        self._start(site, fedshift("site", "start", self.kit(site), *words))

    def start_sites(self, *sites: str) -> None:
        for site in sites:
            self.start_site(site)
        self.wait_until_online(*sites)

    @property
    def sites(self) -> tuple[str, ...]:
        """The sites that are running."""
        return tuple(name for name in self.running if name != "coordinator")

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
        """The process of a started command and all its descendants."""
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
                command,
                stdout=output,
                stderr=output,
                # The examples stand for a package that is installed at the sites.
                env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join([str(ROOT), *sys.path])},
            )

    def _listens(self) -> bool:
        with suppress(OSError), socket.create_connection(("127.0.0.1", self.port), timeout=1):
            return True
        return False


@contextmanager
def federation(root: Path, tiny_data: Path, sites: Sequence[str]) -> Iterator[Loopback]:
    """A coordinator and `sites`, running. Kits exist for all."""

    def data(site: str) -> Path:
        """Each site's own folder. It also holds a copy of the home's data, which some baselines give to clients."""
        folder = root / "data" / site
        if not folder.exists():
            folder.mkdir(parents=True)
            for name in ("amber", "blue", "pooled") if site == "pooled" else (site, "dim"):
                known = tiny_data / f"{name}.npz"
                shutil.copy(known if known.exists() else tiny_data / "coral.npz", folder / f"{name}.npz")
        return folder

    loopback = Loopback(root, data, (*SITES, STRICT, ABSENT), (OBSERVER,))
    try:
        loopback.start_coordinator()
        loopback.start_sites(*sites)
        yield loopback
    finally:
        loopback.close()
