"""Real machines, played on this one: a server and two sites, each its own process, with mutual TLS on 127.0.0.1.

Every step is a command that an administrator types; docs/real-machines.md explains them. Needs `fedshift[nvflare]`.

    python examples/real_machines.py
"""

from __future__ import annotations

import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np

import fedshift

SITES = {"north": 0.0, "south": 0.3}


def write_site(path: Path, shift: float, rng: np.random.Generator) -> None:
    """SITE.csv: two measurements and an outcome."""
    values = rng.normal(0, 1, (200, 2))
    ill = values.sum(1) > 0
    lines = [f"{a + shift:.3f},{b + shift:.3f},{int(y)}" for (a, b), y in zip(values, ill, strict=True)]
    path.parent.mkdir(parents=True)
    path.write_text("\n".join(["first,second,label", *lines]) + "\n")


def fedshift_command(*words: object) -> list[str]:
    return [sys.executable, "-m", "fedshift", *map(str, words)]


def wait_for_sites(coordinator: Path) -> None:
    """`fedshift status` lists a site as seen once it is connected."""
    for _ in range(60):
        shown = subprocess.run(fedshift_command("status", coordinator), capture_output=True, text=True).stdout
        if shown.count("seen ") == len(SITES):
            return
        time.sleep(1)
    raise SystemExit("the sites did not connect within a minute")


def main() -> None:
    root = Path(tempfile.mkdtemp(prefix="fedshift-example-"))
    rng = np.random.default_rng(0)
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    project = root / "lungs.yaml"
    project.write_text(f"name: lungs\naddress: localhost:{port}\nsites: [{', '.join(SITES)}]\n")
    subprocess.run(fedshift_command("deploy", "init", project, "--out", root / "lungs"), check=True)

    coordinator = root / "lungs" / "coordinator"
    commands = [fedshift_command("coordinator", "start", coordinator)]
    for site, shift in SITES.items():
        data = root / "data" / site  # on a machine that only this site can read
        write_site(data / f"{site}.csv", shift, rng)
        commands.append(fedshift_command("site", "start", root / "lungs" / "sites" / site, "--data", data))
    log = (root / "log.txt").open("w")
    started = [subprocess.Popen(command, stdout=log, stderr=log) for command in commands]
    try:
        wait_for_sites(coordinator)
        run = fedshift.fit(
            "fedavg",
            engine="nvflare",
            federation=coordinator,
            sources=tuple(SITES),
            rounds=3,
            batch_size=16,
            lr=0.05,
            out=root / "run",
        )
    finally:
        subprocess.run(fedshift_command("stop", coordinator), stdout=log, stderr=log)
        for process in started:
            process.terminate()
        for process in started:
            process.wait(60)
    print(f"{'round':<8}{'site':<8}{'validation accuracy':>20}")
    for row in run.metrics:
        if row["phase"] == "val" and row["name"] == "accuracy":
            print(f"{row['round']:<8}{row['site']:<8}{row['value']:>20.1%}")


if __name__ == "__main__":
    main()
