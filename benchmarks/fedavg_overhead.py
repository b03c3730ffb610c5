"""What the federation costs: a FedAvg round through the whole protocol over a plain PyTorch loop doing the same steps.

Both train the same network on the same batches in one process with one thread; they take turns, and the ratio of medians
is printed. Aim: at most 1.05.
"""

from __future__ import annotations

import statistics
import tempfile
import time
from pathlib import Path

import torch
from torch.nn import functional as F

from fedshift.federation.federation import Federation
from fedshift.federation.site import Labelled
from fedshift.functional.averaging import weighted_mean
from fedshift.methods.averaging import Averaging, Hyper, State, train
from fedshift.methods.local import plain_network, weights_of
from fedshift.rng import Rng
from fedshift.runs.config import make_config
from fedshift.runs.planning import base_network, open_federation, prepare

REPEATS = 7


def plain_round(state: State, fed: Federation, sites: dict[str, Labelled]) -> State:
    """The same computation without steps, messages, checks or policies."""
    training = fed.plan.training
    trained = []
    for name, site in sites.items():
        net = plain_network(fed.plan)
        net.load_state_dict(dict(state.model))
        net.train()
        optimizer = torch.optim.SGD(
            net.parameters(), site.lr, training.momentum, weight_decay=training.weight_decay, fused=True
        )
        for batch in site.train.batches(training.batch_size, Rng.of(0, fed.round, name, train.name)):
            optimizer.zero_grad()
            F.cross_entropy(net(batch.x), batch.y).backward()
            optimizer.step()
        trained.append((weights_of(net), len(site.train)))
    return State(weighted_mean(trained))


def main() -> None:
    torch.set_num_threads(1)
    for arch, rounds_of in (("digits-copa", 400), ("digits-csac", 400)):
        keys = {"dataset": "digits", "target": "photo", "arch": arch, "train_per_site": rounds_of, "workers": 0}
        prepared = prepare(make_config({"method": "fedavg", **keys}))
        with tempfile.TemporaryDirectory() as folder:
            fed = open_federation(prepared, Path(folder))
            hosts = fed.engine._hosts  # type: ignore[attr-defined]
            sites = {name: hosts[name].view(Labelled, 1) for name in fed.sources}
            method, state = Averaging(Hyper()), State(weights_of(base_network(prepared)[0]))
            seconds: dict[str, list[float]] = {"plain": [], "federated": []}
            results: dict[str, State] = {}
            for repeat in range(REPEATS + 1):
                fed.begin(1)
                for name, work in (
                    ("plain", lambda: plain_round(state, fed, sites)),
                    ("federated", lambda: method.round(state, fed)),
                ):
                    started = time.process_time()
                    results[name] = work()
                    if repeat:  # The first turn warms up caches.
                        seconds[name].append(time.process_time() - started)
            same = all(torch.equal(results["plain"].model[k], v) for k, v in results["federated"].model.items())
            plain, federated = (statistics.median(seconds[name]) for name in ("plain", "federated"))
            print(
                f"fedavg_overhead {arch}: plain {plain:.2f} s, federated {federated:.2f} s a round,"
                f" ratio {federated / plain:.3f}, same weights: {same}"
            )


if __name__ == "__main__":
    main()
