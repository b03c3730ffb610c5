"""CSAC's fusion and averages of models that are read one at a time: seconds per model and memory by their number.

python benchmarks/many_models.py [MODELS ...] prints one JSON line. Models have half a million numbers and are made when
they are read; each number of models is a process of its own. Aim: 1,000 models take no more memory than 10, and no
longer each.
"""

from __future__ import annotations

import json
import resource
import subprocess
import sys
import time
from collections.abc import Iterator

MODELS = (10, 100, 1000)
SHAPES = {"conv": (64, 32, 5, 5), "norm": (64,), "fc": (3136, 128), "head": (128, 10)}


def main() -> None:
    rows = []
    for count in map(int, sys.argv[1:] or MODELS):
        command = [sys.executable, __file__, "--measure", str(count)]
        done = subprocess.run(command, stdout=subprocess.PIPE, check=True, text=True)
        rows.append(json.loads(done.stdout.splitlines()[-1]))
    print(json.dumps({"benchmark": "many_models", "rows": rows}))


def measure(count: int) -> dict[str, float]:
    import torch
    from torch import Tensor

    from fedshift.functional.averaging import weighted_mean
    from fedshift.functional.fusion import fuse

    torch.set_num_threads(1)
    generator = torch.Generator().manual_seed(0)
    base = {name: torch.randn(shape, generator=generator) for name, shape in SHAPES.items()}

    def models() -> Iterator[tuple[str, dict[str, Tensor]]]:
        for number in range(count):
            yield str(number), {name: value.roll(number) for name, value in base.items()}

    seconds = {}
    for name, work in {
        "reading": lambda: sum(len(model) for _, model in models()),
        "mean": lambda: weighted_mean((model, 1.0) for _, model in models()),
        "fusion": lambda: fuse(models),
    }.items():
        started = time.process_time()
        work()
        seconds[name] = 1000 * (time.process_time() - started) / count
    # Fusion reads everything twice.
    passes = {"mean": 1, "fusion": 2}
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    took = {f"{name} ms": round(seconds[name] - times * seconds["reading"], 2) for name, times in passes.items()}
    return {"models": count, **took, "megabytes": round(peak)}


if __name__ == "__main__":
    if "--measure" in sys.argv:
        print(json.dumps(measure(int(sys.argv[-1]))))
    else:
        main()
