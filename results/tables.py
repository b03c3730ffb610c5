"""Finished runs to records, records to the tables of the documentation.

python results/tables.py collect results/real-digits.jsonl COPA runs/copa-*
python results/tables.py write docs/results.md

`collect` appends runs under a row's name, without the paths they lay in; a run that the file already has is left out.
`write` puts tables where a page says `<!-- table FILE minus ROW -->`, up to `<!-- end -->`.
"""

from __future__ import annotations

import hashlib
import re
import sys
from pathlib import Path

from fedshift.bench.records import Record, append, read, read_run
from fedshift.bench.tables import make_table, markdown

HERE = Path(__file__).parent
RULES = {"last": "Last round", "source_val": "Round chosen on source validation"}
BOUNDS = ("Oracle", "DeepAll", "Fed-oracle", "Cent-MCD")
PLACE = re.compile(r"(<!-- table (\S+?)(?: minus (.+?))? -->\n).*?(<!-- end -->)", re.DOTALL)


def collect(path: Path, row: str, runs: list[Path]) -> None:
    known = {record.model_sha256 for record in read([path])[0] if record.row == row}
    for run in sorted(runs):
        if not (run / "done").exists():
            continue
        job = hashlib.sha256((run / "config.yaml").read_bytes()).hexdigest()[:16]
        record = read_run(run, job, row, "")
        if record.model_sha256 not in known:
            append(path, Record(**{**vars(record), "column": record.target or record.home or ""}))


def by_client(record: Record) -> list[Record]:
    """A multi-adapt run has a column for each client; any other run is in the one that it was collected for."""
    if record.setting != "multi-adapt":
        return [record]
    return [
        Record(**{**vars(record), "column": client, "scores": {client: scores}})
        for client, scores in record.scores.items()
    ]


def tables(path: Path, baseline: str | None) -> str:
    """Markdown tables of a record file, one a rule; one for both rules where they chose the same rounds."""
    records, broken = read([path])
    assert not broken, f"{path} has {broken} lines that are not whole"
    if not records:
        return ""
    records = sorted((part for record in records for part in by_client(record)), key=lambda record: record.column)
    found: dict[str, list[str]] = {}
    for rule, words in RULES.items():
        table = make_table(
            records,
            lambda record, rule=rule: {target: scores[rule] for target, scores in record.scores.items()},
            rule,
            baseline=baseline,
            not_ranked=BOUNDS,
        )
        found.setdefault(markdown(table), []).append(words)
    parts = []
    for text, words in found.items():
        heading = words[0] if len(words) == 1 else f"{words[0]}, and {words[1][0].lower()}{words[1][1:]}"
        parts.append(f"{heading}:\n\n{text}\n")
    return "\n" + "".join(parts)


def written(page: str) -> str:
    """`page` with its tables made anew."""
    return PLACE.sub(lambda m: m[1] + tables(HERE / m[2], m[3]) + m[4], page)


if __name__ == "__main__":
    command, file, *rest = sys.argv[1:]
    if command == "collect":
        collect(Path(file), rest[0], [Path(name) for name in rest[1:]])
    else:
        Path(file).write_text(written(Path(file).read_text()))
