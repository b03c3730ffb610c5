"""`python -m fedshift.bench.papers docs/benchmarks.md` updates the table of suites in that page."""

from __future__ import annotations

import re
import sys
from pathlib import Path

from fedshift.bench.papers import SUITES

TABLE = re.compile(r"(<!-- suites -->\n).*?(<!-- end -->)", re.DOTALL)


def updated(page: str) -> str:
    """`page` with the table of all suites."""
    lines = ["| suite | what it answers | mini | paper: needs | paper: costs |", "| --- | --- | --- | --- | --- |"]
    lines += [
        f"| `{suite.name}` | {suite.question} | {suite.cost['mini']} | {suite.needs['paper']} | {suite.cost['paper']} |"
        for suite in SUITES.values()
    ]
    table = "\n".join(lines)
    return TABLE.sub(lambda match: f"{match[1]}\n{table}\n\n{match[2]}", page)


if __name__ == "__main__":
    path = Path(sys.argv[1])
    path.write_text(updated(path.read_text()))
