"""Overhead of the federation: a FedAvg round through the whole protocol, relative to a plain PyTorch loop.

python benchmarks/fedavg_overhead.py [NETWORK ...] prints one JSON line. Both train the same network on the same batches
in one process with one thread; they take turns, and ratios are those of medians. A federated round ends in a
checkpoint, as in a run. Scoring all sites, which a run does in every `evaluate_every`-th round and a loop need not,
stands beside. Aims: at most 1.02, with ResNet-18 1.03.
"""

from __future__ import annotations

import json
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch.nn import functional as F

from fedshift.federation.federation import Federation
from fedshift.federation.handshake import agree
from fedshift.federation.site import Labelled
from fedshift.functional.averaging import weighted_mean
from fedshift.methods.averaging import Averaging, Hyper, State, train
from fedshift.methods.base import SHARED
from fedshift.methods.evaluation import score_models
from fedshift.methods.local import plain_network, weights_of, with_weights
from fedshift.rng import Rng
from fedshift.runs.config import make_config
from fedshift.runs.directory import RunDirectory
from fedshift.runs.planning import base_network, open_federation, prepare
from fedshift.runs.results import Memory

REPEATS = 5
NETWORKS = ("digits-copa", "digits-csac", "resnet18")
IMAGES = 400
"""Training images per site."""


def plain_round(state: State, fed: Federation, sites: dict[str, Labelled]) -> State:
    """The same computation without steps, messages, checks or policies."""
    training = fed.plan.training
    trained = []
    for name, site in sites.items():
        net = with_weights(plain_network(fed.plan), state.model, torch.device("cpu")).train()
        optimizer = torch.optim.SGD(
            net.parameters(), site.lr, training.momentum, weight_decay=training.weight_decay, fused=True
        )
        for batch in site.train.batches(training.batch_size, Rng.of(0, fed.round, name, train.name)):
            optimizer.zero_grad()
            F.cross_entropy(net(batch.x), batch.y).backward()
            optimizer.step()
        trained.append((weights_of(net), len(site.train)))
    return State(weighted_mean(trained))


def federated_round(method: Averaging, state: State, fed: Federation, directory: RunDirectory) -> State:
    fed.begin(1)  # Sites answer a question once per round.
    new = method.round(state, fed)
    directory.save_checkpoint(1, Memory(1, new))
    return new


def score(state: State, fed: Federation) -> None:
    fed.begin(1)
    score_models(fed, {SHARED: state.model}, fed.sources, "val")
    score_models(fed, {SHARED: state.model}, ("photo",), "test")


def compare(arch: str, folder: Path) -> dict[str, Any]:
    keys = {"dataset": "digits", "target": "photo", "arch": arch, "train_per_site": IMAGES, "workers": 0}
    prepared = prepare(make_config({"method": "fedavg", **keys}))
    fed = open_federation(prepared, folder)
    hosts = fed.engine._hosts  # type: ignore[attr-defined]
    sites = {name: hosts[name].view(Labelled, 1) for name in fed.sources}
    method, state = Averaging(Hyper()), State(weights_of(base_network(prepared)[0]))
    rounds: dict[str, Callable[[], State]] = {
        "plain": lambda: plain_round(state, fed, sites),
        "federated": lambda: federated_round(method, state, fed, RunDirectory(folder)),
    }
    agree(fed, [*fed.sources, "photo"], rewind_to=0)
    fed.begin(1)  # Both draw the same batches.
    results = {name: work() for name, work in rounds.items()}  # Also warms up caches.
    same = all(torch.equal(results["plain"].model[key], value) for key, value in results["federated"].model.items())
    seconds: dict[str, list[float]] = {name: [] for name in rounds}
    for turn in range(REPEATS):
        for name in sorted(rounds, reverse=turn % 2 == 0):
            started = time.process_time()
            rounds[name]()
            seconds[name].append(time.process_time() - started)
    plain, federated = (statistics.median(seconds[name]) for name in ("plain", "federated"))
    ratio = federated / plain
    started = time.process_time()
    score(state, fed)
    return {
        "plain s": round(plain, 2),
        "federated s": round(federated, 2),
        "ratio": round(ratio, 3),
        "scoring s": round(time.process_time() - started, 2),
        "same bytes": same,
    }


def main() -> None:
    torch.set_num_threads(1)
    networks = {}
    for arch in sys.argv[1:] or NETWORKS:
        with tempfile.TemporaryDirectory() as folder:
            networks[arch] = compare(arch, Path(folder))
    print(json.dumps({"benchmark": "fedavg_overhead", "networks": networks}))


if __name__ == "__main__":
    main()
