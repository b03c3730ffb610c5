"""`precision: auto`: whether a network trains faster in bfloat16 than in float32 on this machine.

Processors differ: some have no instructions for it, some have slow ones, and some announce instructions that end a
process which uses them. So steps are timed in a process of their own, and if that ends, nothing else does.
"""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from fedshift.data.domain import Dataset
from fedshift.federation.engines.workers import how_it_ended
from fedshift.nn.archs import ARCHS, find_arch
from fedshift.runs.config import RunConfig

FASTER = 0.9
"""bfloat16 must take at most this part of the time that float32 takes."""
_STEPS = 5
_BUDGET = 20.0
"""Seconds of timing after which no further pair of steps is begun."""
_DEADLINE = 180.0


@dataclass(frozen=True)
class Choice:
    """What `auto` stands for, and why, as a sentence."""

    precision: str
    reason: str


def with_precision(config: RunConfig, dataset: Dataset, is_local: bool) -> tuple[RunConfig, str]:
    """A configuration in which `auto` is decided, and a sentence that tells how."""
    if config.precision != "auto":
        return config, ""
    arch = find_arch(config.arch)
    if not is_local:
        found = Choice("float32", "other machines may be slow at bfloat16")
    elif arch.whole is not None or config.arch not in ARCHS.builtin:
        found = Choice("float32", "bfloat16 is tried with networks that come with fedshift; yours may name it")
    else:
        classes, is_map = len(dataset.classes), dataset.task == "segmentation"
        found = choose_precision(
            config.arch, dataset.input_shape, classes, config.batch_size or 0, config.threads, config.device, is_map
        )
    told = f"chosen: precision={found.precision} ({found.reason})"
    return config.model_copy(update={"precision": found.precision}), told


def choose_precision(
    arch: str, input_shape: tuple[int, ...], classes: int, batch_size: int, threads: int, device: str, is_map: bool
) -> Choice:
    """Tries both in a new process that builds the network by its name."""
    told = {
        "arch": arch,
        "input_shape": input_shape,
        "classes": classes,
        "batch_size": batch_size,
        "threads": threads,
        "device": device,
        "is_map": is_map,
    }
    try:
        done = subprocess.run(
            [sys.executable, "-m", "fedshift.runs.precision", json.dumps(told)],
            capture_output=True,
            timeout=_DEADLINE,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired):
        return Choice("float32", "bfloat16 could not be tried in time")
    if done.returncode < 0:
        return Choice("float32", f"the process that tried bfloat16 is gone: {how_it_ended(done.returncode)}")
    try:
        times = json.loads(done.stdout.splitlines()[-1])
        ratio = float(times["bfloat16"]) / float(times["float32"])
    except (ValueError, KeyError, IndexError, TypeError, ZeroDivisionError):
        return Choice("float32", f"bfloat16 could not be tried with {arch}")
    percent = f"a step in bfloat16 takes {100 * ratio:.0f} % of the time of float32 here"
    return Choice("bfloat16" if ratio <= FASTER else "float32", percent)


def step_times(told: Mapping[str, Any]) -> dict[str, float]:
    """The median seconds of a training step in both precisions, which take turns."""
    import torch

    from fedshift.functional.losses import cross_entropy
    from fedshift.machine import keep_freed_memory
    from fedshift.methods.local import autocast
    from fedshift.nn.archs import build_network

    keep_freed_memory()
    torch.set_num_threads(told["threads"])
    device, shape, count = torch.device(told["device"]), tuple(told["input_shape"]), max(2, told["batch_size"])
    net = build_network(told["arch"], shape, told["classes"], 0).to(device, memory_format=torch.channels_last)  # type: ignore[call-overload]
    optimizer = torch.optim.SGD(net.train().parameters(), 1e-4, 0.9)
    generator = torch.Generator().manual_seed(0)
    x = torch.rand(count, *shape, generator=generator).to(device)
    if x.ndim == 4:
        x = x.contiguous(memory_format=torch.channels_last)
    size = (count, *shape[1:]) if told["is_map"] else (count,)
    y = torch.randint(told["classes"], size, generator=generator).to(device)
    seconds: dict[str, list[float]] = {"float32": [], "bfloat16": []}
    began = time.perf_counter()
    for number in range(_STEPS + 1):
        for precision, found in seconds.items():
            # Work of other processes is not counted, where torch says how much there was of ours.
            clock = time.process_time if device.type == "cpu" else time.perf_counter
            started = clock()
            with autocast(device, precision):
                loss = cross_entropy(net(x), y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            float(loss.detach())  # Waits for the device.
            found.append(clock() - started)
        if number and time.perf_counter() - began > _BUDGET:
            break
    # The first steps set up the kernels.
    return {precision: statistics.median(found[1:]) for precision, found in seconds.items()}


if __name__ == "__main__":
    print(json.dumps(step_times(json.loads(sys.argv[1]))))
