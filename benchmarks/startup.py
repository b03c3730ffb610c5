"""How long a user waits: seconds until help, lists and the first training batch, medians of five starts each.

python benchmarks/startup.py prints one JSON line: seconds by the clock, and of processor time, which other work on the
machine changes less. Ratios are to the processor time that Python itself takes to start. Aims: help 0.3 s, a list 1 s,
an error in what is asked for 2 s, the first batch 4 s.
"""

from __future__ import annotations

import json
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

REPEATS = 5
COMMANDS = {
    "help": ["--help"],
    "list methods": ["list", "methods"],
    "list datasets": ["list", "datasets"],
    "list archs": ["list", "archs"],
    "list suites": ["list", "suites"],
    "unknown method": ["train", "--method", "fedavgg", "--dataset", "digits"],
}

FIRST_BATCH = """
import os, sys, time
from pathlib import Path
from fedshift.data import batches
made = batches.LabelledData.batches
def timed(self, *arguments, **keys):
    for batch in made(self, *arguments, **keys):
        Path(os.environ["FIRST_BATCH"]).write_text(f"{time.time()} {time.process_time()}")
        os._exit(0)
        yield batch
batches.LabelledData.batches = timed
sys.argv = ["fedshift", "train", "--dataset", "digits", "--target", "photo", "--rounds", "1"]
sys.argv += ["--set", "workers=0", "--out", os.environ["OUT"]]
from fedshift.cli import main
main()
"""
LONGEST = 60.0
"""Seconds that any start may take before the script gives up."""


Waited = tuple[float, float]
"""Seconds by the clock and of the processor."""


def median(measure: Callable[[], Waited]) -> Waited:
    found = [measure() for _ in range(REPEATS)]
    return statistics.median(clock for clock, _ in found), statistics.median(used for _, used in found)


def processor_time() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def seconds_of(command: list[str]) -> Waited:
    began, used = time.perf_counter(), processor_time()
    subprocess.run(command, capture_output=True, check=False, timeout=LONGEST)
    return time.perf_counter() - began, processor_time() - used


def seconds_to_first_batch() -> Waited:
    """From the start of `fedshift train` until a site has its first batch, with data that was drawn before."""
    with tempfile.TemporaryDirectory() as folder:
        note = Path(folder) / "first"
        environment = {**os.environ, "FIRST_BATCH": str(note), "OUT": str(Path(folder) / "run")}
        began = time.time()
        command = [sys.executable, "-c", FIRST_BATCH]
        subprocess.run(command, env=environment, capture_output=True, check=True, timeout=LONGEST)
        at, used = note.read_text().split()
        return float(at) - began, float(used)


def main() -> None:
    found = {
        name: median(lambda words=words: seconds_of([sys.executable, "-m", "fedshift", *words]))
        for name, words in COMMANDS.items()
    }
    found["import torch"] = median(lambda: seconds_of([sys.executable, "-c", "import torch"]))
    seconds_to_first_batch()  # draws the data
    found["first batch"] = median(seconds_to_first_batch)
    _, python = median(lambda: seconds_of([sys.executable, "-c", ""]))
    rows = {
        name: {"s": round(clock, 3), "processor s": round(used, 3), "times python": round(used / python, 1)}
        for name, (clock, used) in found.items()
    }
    print(json.dumps({"benchmark": "startup", "starts": rows}))


if __name__ == "__main__":
    main()
