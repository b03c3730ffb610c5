"""Runs every script beside it in its short form and writes RESULTS.md: `make bench`.

python benchmarks/run_all.py [NAME ...] runs those that are named and prints the page instead. A script is stopped after
its share of the time: all together take less than 20 minutes on two free cores. What a script prints last, if it is a
line of JSON, becomes a table; other output stays as it is.
"""

from __future__ import annotations

import ast
import json
import os
import platform
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import psutil

FOLDER = Path(__file__).parent
SHORT: dict[str, tuple[int, list[str]]] = {
    "compression": (90, ["methods=fedavg", "compress=none,int4", "seeds=0"]),
    "csac_epoch": (60, ["--only", "digits-csac", "--epochs", "4"]),
    "fuzz": (60, ["2000"]),
    "local_training": (120, ["--quick"]),
    "fedavg_overhead": (180, []),
    "many_sites": (330, ["100", "1000", "10000"]),
    "real_machines": (180, []),
    "startup": (90, []),
    "privacy": (45, ["record", "--seeds", "0", "--rounds", "2", "--methods", "fedavg"]),
}
"""Script -> seconds, and arguments."""
SECONDS = 50
"""For any other script, which is run without arguments."""
BUDGET = 19 * 60
"""For all of them. What is left to do then is not run."""
_SHOWN_LINES = 40


def main() -> None:
    names = sys.argv[1:] or sorted(file.stem for file in FOLDER.glob("[a-z]*.py") if file.stem != Path(__file__).stem)
    began = time.perf_counter()
    load = os.getloadavg()[0]
    sections: list[str] = []
    for name in names:
        try:
            sections += one(name, BUDGET - (time.perf_counter() - began))
        except Exception as error:  # One script that cannot be run does not lose what the others have found.
            sections += ["", f"## {name}", "", f"Not run: {type(error).__name__}: {error}"]
    page = "\n".join([*head(time.perf_counter() - began, load), *sections])
    if sys.argv[1:]:
        print(page, flush=True)
    else:
        (FOLDER / "RESULTS.md").write_text(page + "\n")
        print(f"wrote {FOLDER / 'RESULTS.md'} in {time.perf_counter() - began:.0f} s", file=sys.stderr)


def head(seconds: float, load: float) -> list[str]:
    import torch

    import fedshift

    return [
        "# Measured on one machine",
        "",
        f"`make bench` on {datetime.now(UTC):%Y-%m-%d}: {processor()}, {os.cpu_count()} cores, Python"
        f" {platform.python_version()}, torch {torch.__version__}, fedshift {fedshift.__version__}; {seconds / 60:.0f}"
        f" minutes, load {load:.1f} when it began. Ratios are within one run; with a load above the number of cores,"
        " seconds say little. What each figure is stands at the top of its script.",
    ]


def processor() -> str:
    known = Path("/proc/cpuinfo")
    lines = known.read_text().splitlines() if known.exists() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()


def one(name: str, left: float) -> Iterator[str]:
    """The section of a script; `left` is how many seconds there are for it and those after it."""
    limit, arguments = SHORT.get(name, (SECONDS, []))
    if left < 1:
        yield from ["", f"## {name}", "", "Not run: the time was over."]
        return
    limit = min(limit, round(left))
    file = FOLDER / f"{name}.py"
    print(f"{name}: up to {limit} s", file=sys.stderr, flush=True)
    began = time.perf_counter()
    # A session of its own, so that nothing of the terminal reaches it; what it has started ends with it, see `_end`.
    with subprocess.Popen(
        [sys.executable, str(file), *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    ) as process:
        try:
            output, errors = process.communicate(timeout=limit)
            ending = "" if process.returncode == 0 else f"failed with exit code {process.returncode}"
        except subprocess.TimeoutExpired:
            _end(process.pid)
            output, errors = process.communicate()
            ending = f"stopped after {limit} s"
    command = " ".join(["python", f"benchmarks/{name}.py", *arguments])
    summary = (ast.get_docstring(ast.parse(file.read_text())) or "").partition("\n")[0]
    spent = time.perf_counter() - began
    yield from ["", f"## {name}", "", summary, "", f"`{command}`, {spent:.0f} s{f': {ending}' if ending else ''}", ""]
    yield from shown(output.splitlines() or errors.splitlines()[-3:])


def _end(pid: int) -> None:
    """Ends a process and all that it has started: some of these have sessions of their own, and all of them hold the
    pipes that are being read."""
    family = [psutil.Process(pid), *psutil.Process(pid).children(recursive=True)]
    for process in family:
        with suppress(psutil.NoSuchProcess):
            process.kill()
    psutil.wait_procs(family[1:], timeout=5)


def shown(lines: list[str]) -> Iterator[str]:
    try:
        found = json.loads(lines[-1])
    except (ValueError, IndexError):
        found = None
    if not isinstance(found, dict):
        yield from ["```text", *lines[-_SHOWN_LINES:], "```"]
        return
    single = {key: value for key, value in found.items() if not isinstance(value, dict | list) and key != "benchmark"}
    if single:
        yield from table([single])
    for key, value in found.items():
        if isinstance(value, list) and value and all(isinstance(row, dict) for row in value):
            yield from [f"{key}:", "", *table([flat(row) for row in value])]
        elif isinstance(value, dict) and value and all(isinstance(row, dict) for row in value.values()):
            yield from [f"{key}:", "", *table([{"": name, **flat(row)} for name, row in value.items()])]
        elif isinstance(value, dict):
            yield from [f"{key}:", "", *table([flat(value)])]


def flat(row: Mapping[str, Any], before: str = "") -> dict[str, Any]:
    found: dict[str, Any] = {}
    for key, value in row.items():
        found |= flat(value, f"{before}{key}: ") if isinstance(value, dict) else {f"{before}{key}": value}
    return found


def table(rows: list[dict[str, Any]]) -> Iterator[str]:
    columns = list(dict.fromkeys(key for row in rows for key in row))
    yield "| " + " | ".join(columns) + " |"
    yield "|" + "---|" * len(columns)
    for row in rows:
        yield "| " + " | ".join(str(row.get(column, "")) for column in columns) + " |"
    yield ""


if __name__ == "__main__":
    main()
