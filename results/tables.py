"""Finished runs to records, records to tables.

python results/tables.py collect results/real-digits.jsonl COPA runs/copa-*
python results/tables.py show results/real-digits.jsonl FedAvg

`collect` appends runs under a row's name, without the paths they lay in; a run that the file already has is left out.
`show` prints Markdown, with differences to the named row.
"""

from __future__ import annotations

import hashlib
import sys
from pathlib import Path

from fedshift.bench.records import Record, append, read, read_run
from fedshift.bench.tables import make_table, markdown

RULES = {"last": "Last round", "source_val": "Round chosen on source validation"}
BOUNDS = ("Oracle", "DeepAll")


def collect(path: Path, row: str, runs: list[Path]) -> None:
    known = {record.model_sha256 for record in read([path])[0] if record.row == row}
    for run in sorted(runs):
        if not (run / "done").exists():
            continue
        job = hashlib.sha256((run / "config.yaml").read_bytes()).hexdigest()[:16]
        record = read_run(run, job, row, "")
        if record.model_sha256 not in known:
            append(path, Record(**{**vars(record), "column": record.target or record.home or ""}))


def show(path: Path, baseline: str | None, rule: str) -> str:
    records, broken = read([path])
    assert not broken, f"{path} has {broken} lines that are not whole"
    records.sort(key=lambda record: record.column)
    table = make_table(
        records,
        lambda record: {target: scores[rule] for target, scores in record.scores.items()},
        rule,
        baseline=baseline,
        not_ranked=BOUNDS,
    )
    return f"{RULES[rule]}:\n\n{markdown(table)}"


if __name__ == "__main__":
    command, record, *rest = sys.argv[1:]
    if command == "collect":
        collect(Path(record), rest[0], [Path(name) for name in rest[1:]])
    else:
        for rule in RULES:
            print(show(Path(record), rest[0] if rest else None, rule))
