"""Many simulated sites of a tiny network in one process: seconds and memory by the number of sites.

python benchmarks/many_sites.py [SITES ...] prints one JSON line. Each number of sites is a process of its own, in which
no more than 1,024 files may be open. A site has 40 rows of a table. Times are of the processor, in milliseconds per
site; `train` is the same local training without a federation around it. Aims: from 100 to 10,000 sites a `round` takes
at most 1.2 times as long per site and memory grows to at most 1.3 times; `round - train` is at most 2 ms.
"""

from __future__ import annotations

import json
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from numpy.typing import NDArray

SITES = (10, 100, 1000, 10000)
ROUNDS = 3
ROWS, COLUMNS, BATCH = 40, 8, 16
OPEN_FILES = 1024
TRAININGS = 100
"""Local trainings without a federation, of which the median counts."""


def main() -> None:
    rows = [_in_its_own_process(sites) for sites in (map(int, sys.argv[1:]) if sys.argv[1:] else SITES)]
    found = {row["sites"]: row for row in rows if "failed" not in row}
    line: dict[str, Any] = {"benchmark": "many_sites", "rows": rows}
    if {100, 10000} <= found.keys():
        line["from 100 to 10000"] = {
            key: round(found[10000][key] / found[100][key], 2) for key in ("round_ms", "score_ms", "megabytes")
        }
    print(json.dumps(line))


def _in_its_own_process(sites: int) -> dict[str, Any]:
    """What was measured, also on standard error at once: a run of many sites takes minutes. One that fails costs its
    own row only."""
    done = subprocess.run([sys.executable, __file__, "--measure", str(sites)], stdout=subprocess.PIPE, text=True)
    failed = {"sites": sites, "failed": done.returncode}
    row: dict[str, Any] = json.loads(done.stdout.splitlines()[-1]) if done.returncode == 0 else failed
    print(json.dumps(row), file=sys.stderr, flush=True)
    return row


def measure(sites: int) -> dict[str, float]:
    """One run of FedAvg: milliseconds of processor time per site and round, seconds of the start, megabytes at most."""
    import numpy as np
    import torch

    from fedshift.runs.api import fit

    limit = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(OPEN_FILES, limit[1]), limit[1]))
    torch.set_num_threads(1)
    generator = np.random.default_rng(0)
    x = generator.normal(size=(sites, ROWS, COLUMNS)).astype(np.float32)
    y = (x.sum(axis=2) > 0).astype(np.int64)
    data = {f"site-{site:05}": (x[site], y[site]) for site in range(sites)}
    keys: dict[str, Any] = {
        "arch": "mlp",
        "batch_size": BATCH,
        "workers": 0,
        "policy": {"min_samples": 2},
        "rounds": ROUNDS,
        "evaluate_every": ROUNDS,
    }
    with tempfile.TemporaryDirectory() as folder:
        # What is only slow the first time is no site's.
        fit("fedavg", data=dict(list(data.items())[:2]), out=Path(folder) / "warm", **keys)
        watch = _watch()
        started = time.process_time()
        fit("fedavg", data=data, out=Path(folder) / "run", progress=watch, **keys)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    start, learning = watch.began - started, (watch.rounds[1] - watch.began) / 2
    train = _bare_training(x[0], y[0])
    return {
        "sites": sites,
        "start_s": round(start, 2),
        "start_ms": round(1000 * start / sites, 2),
        "round_ms": round(1000 * learning / sites, 2),
        "score_ms": round(1000 * (watch.rounds[2] - watch.rounds[1] - learning) / sites, 2),
        "train_ms": round(1000 * train, 2),
        "megabytes": round(peak),
    }


def _watch() -> Any:
    from fedshift.runs.progress import Silent

    class Watch(Silent):
        """Notes when training begins and when each round ends, of which only the last one is scored."""

        def begin(self, rounds: int, done: int, title: str) -> None:
            self.began = time.process_time()
            self.rounds: list[float] = []

        def round(self, round: int, val: Mapping[str, float], test: Mapping[str, float]) -> None:
            self.rounds.append(time.process_time())

    return Watch()


def _bare_training(x: NDArray[Any], y: NDArray[Any]) -> float:
    """The same local training in plain torch, the network made anew as well: the median in seconds."""
    import torch
    from torch.nn import functional as F

    from fedshift.nn.archs import build_network

    rows = int(0.8 * ROWS)
    inputs, labels = torch.from_numpy(x[:rows]), torch.from_numpy(y[:rows])
    seconds = []
    for turn in range(TRAININGS):
        started = time.process_time()
        net = build_network("mlp", (COLUMNS,), 2, 0).train()
        optimizer = torch.optim.SGD(net.parameters(), 0.01, 0.9, weight_decay=5e-4, fused=True)
        order = torch.randperm(rows, generator=torch.Generator().manual_seed(turn))
        for batch in torch.split(order, BATCH):
            optimizer.zero_grad()
            F.cross_entropy(net(inputs[batch]), labels[batch]).backward()
            optimizer.step()
        seconds.append(time.process_time() - started)
    return statistics.median(seconds)


if __name__ == "__main__":
    if "--measure" in sys.argv:
        print(json.dumps(measure(int(sys.argv[-1]))))
    else:
        main()
