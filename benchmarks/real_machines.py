"""Overhead of real machines: the same requests over mutual TLS, in NVFlare's own tasks, and in workers of one machine.

A server and four sites on 127.0.0.1. One JSON line: seconds for an empty request and for one that carries a 45 MB model
there and back (ResNet-18, one batch of sixteen 32-pixel images of training in between); the same with a server and
sites of plain NVFlare, whose sites send back the bytes that come; bytes through the server's port against payload;
memory of every kind of process; what was told of the transfers meanwhile. Aims: 1.3 times NVFlare's own, and 0.1 s more
for an empty question. With `--kills` also how long a killed worker and a killed site stay away.

With `--slow COMPRESS`: two sites behind lines of 10 Mbit/s and 100 ms each way, and seconds for the model there and
back, twice: the second time it is sent as a change.
"""

from __future__ import annotations

import dataclasses
import itertools
import json
import math
import os
import queue
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import yaml

from fedshift.beats import tell_transfers
from fedshift.deploy.hardening import harden_server, harden_site
from fedshift.deploy.provision import ORGANISATION
from fedshift.federation.engines.nvflare.kits import COORDINATOR_USER, Coordinator
from fedshift.federation.engines.nvflare.session import Server
from fedshift.federation.federation import Federation
from fedshift.federation.handshake import introduce
from fedshift.methods.averaging import train
from fedshift.methods.local import weights_of
from fedshift.runs.config import make_config
from fedshift.runs.engines import connect_nvflare
from fedshift.runs.planning import base_network, open_federation, prepare

SITES = ("east", "north", "south", "west")
REPEATS = 5


class Proxy:
    """A proxy between sites and server that counts bytes and forwards TLS unchanged: at once, or as a line of `rate`
    bytes per second on which each byte is under way for `delay` seconds."""

    def __init__(self, server: int, rate: float = math.inf, delay: float = 0.0) -> None:
        self.server, self.bytes = server, 0
        self.rate, self.delay = rate, delay
        self.listening = socket.create_server(("127.0.0.1", 0))
        self.port = int(self.listening.getsockname()[1])
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        while True:
            site, _ = self.listening.accept()
            try:
                server = socket.create_connection(("127.0.0.1", self.server))
            except OSError:
                site.close()
                continue
            for source, sink in ((site, server), (server, site)):
                threading.Thread(target=self._pump, args=(source, sink), daemon=True).start()

    def _pump(self, source: socket.socket, sink: socket.socket) -> None:
        under_way: queue.Queue[tuple[float, bytes]] = queue.Queue()
        free = time.monotonic()  # When all that was sent so far has gone out.
        if self.delay:
            threading.Thread(target=self._arrive, args=(under_way, sink), daemon=True).start()
        with suppress(OSError):
            while data := source.recv(1 << (20 if math.isinf(self.rate) else 14)):
                self.bytes += len(data)
                # Who wakes up late may catch up a quarter of a second.
                free = max(free, time.monotonic() - 0.25) + len(data) / self.rate
                time.sleep(max(0.0, free - time.monotonic()))
                if self.delay:
                    under_way.put((time.monotonic() + self.delay, data))
                else:
                    sink.sendall(data)
        time.sleep(self.delay)
        for end in (source, sink):
            with suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)

    def _arrive(self, under_way: queue.Queue[tuple[float, bytes]], sink: socket.socket) -> None:
        with suppress(OSError):
            while True:
                due, data = under_way.get()
                time.sleep(max(0.0, due - time.monotonic()))
                sink.sendall(data)


class Machines:
    """The processes, started with the same commands as a user's; if they are `plain`, with NVFlare's own."""

    def __init__(
        self,
        root: Path,
        sites: Sequence[str] = SITES,
        rate: float = math.inf,
        delay: float = 0.0,
        *,
        plain: bool = False,
    ) -> None:
        root.mkdir(exist_ok=True)
        self.root, self.plain = root, plain
        self.running: dict[str, subprocess.Popen[bytes]] = {}
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        project = {"name": "bench", "address": f"localhost:{port}", "sites": list(sites), "lost_after": 15}
        (root / "project.yaml").write_text(yaml.safe_dump(project))
        self._fedshift("deploy", "init", root / "project.yaml", "--out", root / "fed").wait()
        self.coordinator = root / "fed" / "coordinator"
        self.proxy = Proxy(port, rate, delay)
        for site in sites:
            config = root / "fed" / "sites" / site / "startup" / "fed_client.json"
            config.write_text(config.read_text().replace(f"localhost:{port}", f"localhost:{self.proxy.port}"))
        if plain:
            kit = Coordinator.read(self.coordinator).server_kit
            harden_server(kit, 15)
            _allow_echo(kit)
            self.running["server"] = self._nvflare("server.server_train", kit, "fed_server.json")
        else:
            self.running["server"] = self._fedshift("coordinator", "start", self.coordinator)
        for site in sites:
            self.start(site)

    def start(self, site: str) -> None:
        kit = self.root / "fed" / "sites" / site
        if self.plain:
            harden_site(kit)
            _allow_echo(kit)
            self.running[site] = self._nvflare("client.client_train", kit, "fed_client.json", f"uid={site}")
        else:
            self.running[site] = self._fedshift("site", "start", kit, "--data", self.root.parent / "data" / site)

    def tree(self, name: str) -> list[psutil.Process]:
        process = psutil.Process(self.running[name].pid)
        return [process, *process.children(recursive=True)]

    def megabytes(self, name: str, word: str) -> float:
        """Memory in MB of the process of `name` whose command contains `word`."""
        found = [p for p in self.tree(name) if any(word in part for part in p.cmdline())]
        return max((p.memory_info().rss for p in found), default=0) / 1e6

    def close(self) -> None:
        everything = [process for name in self.running for process in self.tree(name)]
        for process in self.running.values():
            process.terminate()
        for process in self.running.values():
            with suppress(subprocess.TimeoutExpired):
                process.wait(20)
        for left in everything:
            with suppress(psutil.NoSuchProcess):
                left.kill()

    def _fedshift(self, *words: object) -> subprocess.Popen[bytes]:
        return self._start("fedshift", *words)

    def _nvflare(self, module: str, kit: Path, config: str, *more: str) -> subprocess.Popen[bytes]:
        keys = ("secure_train=true", f"org={ORGANISATION}", "config_folder=config", *more)
        return self._start(f"nvflare.private.fed.app.{module}", "-m", kit, "-s", config, "--set", *keys)

    def _start(self, module: str, *words: object) -> subprocess.Popen[bytes]:
        path = os.pathsep.join([str(Path(__file__).parent), *filter(None, [os.environ.get("PYTHONPATH")])])
        return subprocess.Popen(
            [sys.executable, "-m", module, *map(str, words)],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL if self.plain else None,
            env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": path},
        )


def _allow_echo(kit: Path) -> None:
    """The benchmark's own classes may run, and models cross as NVFlare would have them cross."""
    resources = kit / "local" / "resources.json"
    allowed = {"class_allow_list": ["_nvflare_echo.Asking", "_nvflare_echo.Echo"]}
    resources.write_text(json.dumps(json.loads(resources.read_text()) | allowed))
    (kit / "local" / "comm_config.json").unlink()


def median_seconds(work: Callable[[], object]) -> float:
    seconds = []
    for _ in range(REPEATS):
        started = time.perf_counter()
        work()
        seconds.append(time.perf_counter() - started)
    return statistics.median(seconds)


def questions(fed: Federation, model: object, wire: Callable[[], int]) -> dict[str, float]:
    rounds = itertools.count(1)

    def ask_nothing() -> None:
        fed.begin(next(rounds))
        fed.ask(SITES, introduce, rewind_to=fed.round - 1)

    def ask_for_training() -> None:
        fed.begin(next(rounds))
        fed.ask(SITES, train, model=model)

    ask_nothing()  # Workers are up and have read their data.
    ask_for_training()
    empty = median_seconds(ask_nothing)
    before, payload = wire(), fed.learning.up + fed.learning.down
    full = median_seconds(ask_for_training)
    carried = fed.learning.up + fed.learning.down - payload
    return {"empty": empty, "full": full, "wire": (wire() - before) / carried, "payload": carried / REPEATS / 1e6}


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        generator = np.random.default_rng(0)
        for site in (*SITES, "all"):
            (root / "data" / site).mkdir(parents=True)
        for site in SITES:
            images = generator.integers(0, 256, (32, 32, 32, 3), dtype=np.uint8)
            parts = {"train_images": images, "train_labels": np.arange(32) % 2}
            parts |= {"test_images": images[:4], "test_labels": np.arange(4) % 2}
            for place in (site, "all"):
                np.savez(root / "data" / place / f"{site}.npz", **parts)
        keys = {"method": "fedavg", "arch": "resnet18", "batch_size": 16, "rounds": 100, "sources": list(SITES)}
        keys |= {"local_epochs": 0.5, "lr": 1e-6}

        prepared = prepare(make_config(keys | {"data_dir": root / "data" / "all", "workers": 2}))
        model = weights_of(base_network(prepared)[0])
        if sys.argv[1:2] == ["--slow"]:
            machines = Machines(root / "ours", SITES[:2], rate=10e6 / 8, delay=0.1)
            try:
                with Listening() as heard:
                    line = slow_run(machines, keys | {"sources": list(SITES[:2])}, model, sys.argv[2])
                print(json.dumps(line | {"told": heard.lines}))
            finally:
                machines.close()
            return
        fed = open_federation(prepared, root / "here")
        here = questions(fed, model, lambda: 0)
        fed.engine.close()
        size = sum(tensor.nbytes for tensor in model.values())
        line: dict[str, Any] = {"benchmark": "real_machines", "sites": len(SITES), "megabytes": round(size / 1e6, 1)}
        for plain in (True, False):
            machines = Machines(root / ("plain" if plain else "ours"), plain=plain)
            try:
                if plain:
                    own = nvflare_alone(machines, size)
                else:
                    line |= remote_run(machines, keys, model, here, own)
            finally:
                machines.close()
        print(json.dumps(line))


def nvflare_alone(machines: Machines, size: int) -> dict[str, float]:
    """Seconds for nothing and for `size` bytes to all sites and back, in NVFlare's own tasks."""
    coordinator = Coordinator.read(machines.coordinator)
    while not _answers(coordinator.port):
        time.sleep(0.2)
    job = machines.root / "job"
    config = job / "app" / "config"
    config.mkdir(parents=True)
    result = machines.root / "seconds.json"
    common = {"format_version": 2, "components": [], "task_data_filters": [], "task_result_filters": []}
    arguments = {"size": size, "repeats": REPEATS, "result": str(result)}
    flow = [{"id": "echo", "path": "_nvflare_echo.Asking", "args": arguments}]
    door = [{"tasks": ["echo"], "executor": {"path": "_nvflare_echo.Echo", "args": {}}}]
    server = {"heart_beat_timeout": 600, "task_request_interval": 0.05}
    (config / "config_fed_server.json").write_text(json.dumps(common | {"server": server, "workflows": flow}))
    (config / "config_fed_client.json").write_text(json.dumps(common | {"executors": door}))
    everyone = {"app": ["server", *SITES]}
    meta = {"name": "echo", "resource_spec": {}, "min_clients": len(SITES), "deploy_map": everyone}
    (job / "meta.json").write_text(json.dumps(meta))
    session = Server(coordinator.admin_kit, COORDINATOR_USER)
    try:
        while len(session.online()) < len(SITES):
            time.sleep(0.5)
        number = session.submit(job)
        while not result.exists():
            if ended := session.has_ended(number):
                raise RuntimeError(f"NVFlare's job ended: {ended}")
            time.sleep(0.5)
    finally:
        session.close()
    found: dict[str, float] = json.loads(result.read_text())
    return found


def slow_run(machines: Machines, keys: dict[str, object], model: Any, compress: str) -> dict[str, Any]:
    sites = SITES[:2]
    config = make_config(keys | {"engine": "nvflare", "federation": machines.coordinator, "compress": compress})
    while not _answers(Coordinator.read(machines.coordinator).port):
        time.sleep(0.2)
    with connect_nvflare(config, "0" * 16, print) as connection:
        fed = open_federation(prepare(config, connection.dataset, is_local=False), Path(), sites=connection)
        fed.begin(1)
        fed.ask(sites, introduce, rewind_to=0)
        rows = []
        for number in (1, 2):
            fed.begin(number)
            started, before = time.perf_counter(), dataclasses.replace(fed.learning)
            replies = fed.ask(sites, train, everyone=True, model=model)
            sent, seconds = fed.learning, time.perf_counter() - started
            rows.append(
                {
                    "seconds": round(seconds, 1),
                    "down": round((sent.down - before.down) / 2e6, 2),
                    "up": round((sent.up - before.up) / 2e6, 2),
                }
            )
            model = fed.average([(trained.model, 1.0) for _, trained in replies], since=model)
    return {"benchmark": "slow line", "compress": compress, "rounds, MB per site": rows}


def remote_run(
    machines: Machines, keys: dict[str, object], model: object, here: dict[str, float], own: dict[str, float]
) -> dict[str, Any]:
    config = make_config(keys | {"engine": "nvflare", "federation": machines.coordinator})
    while not _answers(Coordinator.read(machines.coordinator).port):
        time.sleep(0.2)
    started = time.perf_counter()
    with connect_nvflare(config, "0" * 16, lambda text: None) as sites:
        connected = time.perf_counter() - started
        fed = open_federation(prepare(config, sites.dataset, is_local=False), Path(), sites=sites)
        with Listening() as heard:
            there = questions(fed, model, lambda: machines.proxy.bytes)
        kinds = {
            "server": ("server", "server_train"),
            "server's job": ("server", "runner_process"),
            "site": ("north", "client_train"),
            "site's job": ("north", "client.worker_process"),
            "site's worker": ("north", "runs.worker"),
        }
        seconds = {
            name: {"fedshift": there[name], "NVFlare": own[name], "one machine": here[name]}
            for name in ("empty", "full")
        }
        line: dict[str, Any] = {
            "connected s": round(connected, 1),
            "times NVFlare's own": round(there["full"] / own["full"], 2),
            "empty question more s": round(there["empty"] - own["empty"], 3),
            "bytes on the wire of payload": round(there["wire"], 3),
            "seconds": {name: {who: round(took, 2) for who, took in row.items()} for name, row in seconds.items()},
            "memory MB": {kind: round(machines.megabytes(*where)) for kind, where in kinds.items()},
            "told": {"times": len(heard.lines), "last": heard.lines[-1] if heard.lines else ""},
        }
        if "--kills" in sys.argv:
            line["back after s"] = kills(machines, fed)
    return line


class Listening:
    """Notes what a run would tell of transfers, every second."""

    def __enter__(self) -> Listening:
        self.lines: list[str] = []
        self._stop = threading.Event()
        threading.Thread(target=self._work, daemon=True).start()
        return self

    def __exit__(self, *details: object) -> None:
        self._stop.set()

    def _work(self) -> None:
        while not self._stop.wait(1):
            if told := tell_transfers():
                self.lines.append(told)


def kills(machines: Machines, fed: Federation) -> dict[str, float]:
    worker = next(p for p in machines.tree("north") if any("runs.worker" in part for part in p.cmdline()))
    worker.kill()
    fed.begin(fed.round + 1)
    fed.ask(SITES, introduce, rewind_to=0)
    started = time.perf_counter()
    fed.begin(fed.round + 1)
    fed.ask(SITES, introduce, everyone=True, rewind_to=0)
    found = {"worker": round(time.perf_counter() - started, 1)}
    for process in machines.tree("north"):
        with suppress(psutil.NoSuchProcess):
            process.kill()
    machines.start("north")
    started = time.perf_counter()
    missing = {"north": ""}
    while "north" in missing:
        fed.begin(fed.round + 1)
        missing = fed.ask(SITES, introduce, rewind_to=0).missing
        found.setdefault("site, noticed", round(time.perf_counter() - started, 1))
    return found | {"site": round(time.perf_counter() - started, 1)}


def _answers(port: int) -> bool:
    with suppress(OSError), socket.create_connection(("127.0.0.1", port), timeout=1):
        return True
    return False


if __name__ == "__main__":
    main()
