"""How long a user waits: seconds until help, lists and the first training batch, medians of five starts each.

python benchmarks/startup.py prints one JSON line. Ratios are to the time that Python itself takes to start.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
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
        if not Path(os.environ["FIRST_BATCH"]).exists():
            Path(os.environ["FIRST_BATCH"]).write_text(str(time.time()))
        yield batch
batches.LabelledData.batches = timed
sys.argv = ["fedshift", "train", "--dataset", "digits", "--target", "photo", "--rounds", "1"]
sys.argv += ["--out", os.environ["OUT"]]
from fedshift.cli import main
main()
"""


def median(measure: object) -> float:
    return statistics.median(measure() for _ in range(REPEATS))  # type: ignore[operator]


def seconds_of(command: list[str]) -> float:
    started = time.perf_counter()
    subprocess.run(command, capture_output=True, check=False)
    return time.perf_counter() - started


def seconds_to_first_batch() -> float:
    """From the start of `fedshift train` until a site has its first batch, with data that was drawn before."""
    with tempfile.TemporaryDirectory() as folder:
        note = Path(folder) / "first"
        environment = {**os.environ, "FIRST_BATCH": str(note), "OUT": str(Path(folder) / "run")}
        started = time.time()
        subprocess.run([sys.executable, "-c", FIRST_BATCH], env=environment, capture_output=True, check=True)
        return float(note.read_text()) - started


def main() -> None:
    python = median(lambda: seconds_of([sys.executable, "-c", ""]))
    seconds = {
        name: median(lambda words=words: seconds_of([sys.executable, "-m", "fedshift", *words]))
        for name, words in COMMANDS.items()
    }
    seconds["import torch"] = median(lambda: seconds_of([sys.executable, "-c", "import torch"]))
    seconds_to_first_batch()  # draws the data
    seconds["first batch"] = median(seconds_to_first_batch)
    print(
        json.dumps(
            {
                "benchmark": "startup",
                "seconds": {name: round(value, 3) for name, value in seconds.items()},
                "times python": {name: round(value / python, 1) for name, value in seconds.items()},
            }
        )
    )


if __name__ == "__main__":
    main()
