"""Processor time per training step, with and without keeping freed memory, in fresh processes.

Run: python benchmarks/allocator.py [--arch digits-copa] [--batch 64] [--steps 20] [--repeats 5]
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys
import time

import torch

from fedshift.functional.losses import cross_entropy
from fedshift.machine import keep_freed_memory
from fedshift.nn.archs import build_network


def step_seconds(arch: str, batch: int, steps: int) -> float:
    torch.set_num_threads(1)
    side = 32 if arch.startswith("digits") else 96
    net = build_network(arch, (3, side, side), 10, generator_seed=0).to(memory_format=torch.channels_last)
    x = torch.rand(batch, 3, side, side).contiguous(memory_format=torch.channels_last)
    y = torch.arange(batch) % 10
    for number in range(steps + 3):
        if number == 3:  # the first steps set up the kernels
            started = time.process_time()
        net.zero_grad(set_to_none=True)
        cross_entropy(net(x), y).backward()
    return (time.process_time() - started) / steps


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--arch", default="digits-copa")
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--child", choices=("plain", "kept"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        if options.child == "kept" and not keep_freed_memory():
            sys.exit("this system's allocator has no such settings")
        print(step_seconds(options.arch, options.batch, options.steps))
        return

    def measured(kind: str) -> float:
        command = [sys.executable, __file__, "--child", kind, "--arch", options.arch]
        command += ["--batch", str(options.batch), "--steps", str(options.steps)]
        return float(subprocess.run(command, check=True, capture_output=True, text=True).stdout)

    pairs = [(measured("plain"), measured("kept")) for _ in range(options.repeats)]
    plain, kept = (statistics.median(times) for times in zip(*pairs, strict=True))
    ratio = statistics.median(kept / plain for plain, kept in pairs)
    print(f"{options.arch}, batch {options.batch}: {plain * 1e3:.0f} ms per step, {kept * 1e3:.0f} ms when kept")
    print(f"ratio {ratio:.2f}")


if __name__ == "__main__":
    main()
