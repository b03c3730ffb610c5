"""`python -m fedshift.bench.suites docs/benchmarks.md` writes the table of suites anew into that page."""

from __future__ import annotations

import re
import sys
from pathlib import Path

from fedshift.bench.suites import SUITES

PLACE = re.compile(r"(<!-- suites -->\n).*?(<!-- end -->)", re.DOTALL)


def written(page: str) -> str:
    """`page` with its table made from the suites there are."""
    lines = ["| suite | what it answers | mini | paper: needs | paper: costs |", "| --- | --- | --- | --- | --- |"]
    lines += [
        f"| `{suite.name}` | {suite.question} | {suite.cost['mini']} | {suite.needs['paper']} | {suite.cost['paper']} |"
        for suite in SUITES.values()
    ]
    table = "\n".join(lines)
    return PLACE.sub(lambda match: f"{match[1]}\n{table}\n\n{match[2]}", page)


if __name__ == "__main__":
    path = Path(sys.argv[1])
    path.write_text(written(path.read_text()))
