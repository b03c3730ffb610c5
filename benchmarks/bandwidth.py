"""How fast models are averaged, fused, admitted and packed, relative to copying them.

python benchmarks/bandwidth.py [SITES] prints one JSON line: GB of models (ResNet-18) per second, and the ratio to a
plain copy of the same tensors onto others. Medians of processor time, of rounds in which all take turns on one thread.
Aims: averaging at least 0.5, CSAC's fusion 0.25.
"""

from __future__ import annotations

import json
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from fedshift.federation import codec
from fedshift.federation.admission import admit
from fedshift.federation.aggregation import CLIPPED, Gathered
from fedshift.federation.releases import Count, Release, Weights
from fedshift.federation.site import Labelled
from fedshift.federation.step import Request, Step
from fedshift.functional.averaging import weighted_mean
from fedshift.functional.fusion import fuse
from fedshift.machine import keep_freed_memory
from fedshift.methods.local import weights_of
from fedshift.nn.archs import build_network

REPEATS = 7


@dataclass(frozen=True)
class _Learned(Release):
    model: Weights
    samples: Count


_STEP: Step[_Learned] = Step("bandwidth.learn", lambda: None, Labelled, _Learned, {})
_QUESTION = Request("a", _STEP.name, 1, "n", b"")


def models(count: int) -> list[dict[str, Tensor]]:
    base = weights_of(build_network("resnet18", (3, 64, 64), 1000, generator_seed=0))
    generator = torch.Generator().manual_seed(0)
    return [
        {
            name: value + 0.01 * torch.randn(value.shape, generator=generator).abs()
            if value.is_floating_point()
            else value.clone()
            for name, value in base.items()
        }
        for _ in range(count)
    ]


def main() -> None:
    torch.set_num_threads(1)
    keep_freed_memory()  # As runs do.
    sites = int(sys.argv[1]) if len(sys.argv) > 1 else 4
    since, *found = models(sites + 1)
    size = sum(value.nbytes for value in since.values())
    envelope = {**_QUESTION.head, "code": None, "clipped": 0, "seconds": "00000001.000"}
    reply = codec.pack(envelope | {"release": {"model": found[0], "samples": 5}})
    gathered = Gathered(lambda: found, [1.0] * sites, since, 1, lambda what, place: None)
    target = {name: torch.empty_like(value) for name, value in since.items()}

    def copy() -> None:
        for model in found:
            for name, value in model.items():
                target[name].copy_(value)

    work: dict[str, tuple[int, Callable[[], object]]] = {
        "copy": (sites, copy),
        "mean": (sites, lambda: weighted_mean([(model, 1.0) for model in found])),
        "clipped mean": (sites, lambda: CLIPPED.combine(gathered)),
        "fusion": (sites, lambda: fuse(lambda: [(str(n), model) for n, model in enumerate(found)])),
        "pack": (1, lambda: codec.pack({"model": since})),
        "unpack": (1, lambda: codec.unpack(reply)),
        "admit": (1, lambda: admit(reply, _QUESTION, _STEP, {"model": since}, 1e6, {"train": 5}, 1.0)),
    }
    seconds: dict[str, list[float]] = {name: [] for name in work}
    for turn in range(REPEATS + 1):
        for name, (_, run) in work.items():
            started = time.process_time()
            run()
            if turn:  # The first is for caches.
                seconds[name].append(time.process_time() - started)
    speed = {name: count * size / statistics.median(seconds[name]) / 1e9 for name, (count, _) in work.items()}
    rows = {
        name: {"GB/s": round(found, 2), "of copy": round(found / speed["copy"], 2)} for name, found in speed.items()
    }
    print(json.dumps({"benchmark": "bandwidth", "sites": sites, "megabytes": round(size / 1e6, 1), "rows": rows}))


if __name__ == "__main__":
    main()
