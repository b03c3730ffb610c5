"""Collects finished runs as records, and writes records as tables into the documentation.

python results/tables.py collect results/real-digits.jsonl COPA runs/copa-*
python results/tables.py keep runs/bench/records.jsonl
python results/tables.py leakage runs/leakage
python results/tables.py write docs/results.md

`collect` appends runs as records of one row, without their paths. Runs that the file already has are left out.
`keep` copies trainings of small suites into results/suites.jsonl, for every suite whose trainings are all there.
`leakage` copies the studies of `fedshift audit leakage` into results/leakage.jsonl, without their pictures.
`write` fills in the tables of a page: it replaces what stands between `<!-- table FILE minus ROW -->` or
`<!-- suite NAME -->` and `<!-- end -->`. `<!-- suite NAME FILE -->` shows all trainings of a suite in FILE, of as many
seeds as it has. `<!-- rules NAME -->` compares rules that choose a round on a suite's runs. `<!-- sources FILE -->`
shows accuracy on validation images of the sources and nothing of the target: what settings are chosen by.
"""

from __future__ import annotations

import hashlib
import json
import re
import statistics
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from fedshift.bench.grid import Experiment, make_tables, mini_jobs
from fedshift.bench.papers import EXPERIMENTS
from fedshift.bench.papers.selection import EXPERIMENT as SELECTION
from fedshift.bench.papers.selection import split
from fedshift.bench.recipes import named_workload
from fedshift.bench.records import Record, append, read, read_run
from fedshift.bench.run import records_for_jobs
from fedshift.bench.selection import rules_compared
from fedshift.bench.suite import SuiteRequest
from fedshift.bench.tables import Sheet, Table, make_table, markdown
from fedshift.bench.trees import AUC, POOLED
from fedshift.report.leakage import read_leakage, study_key
from fedshift.report.leakage import table as leakage_rows

HERE = Path(__file__).parent
SUITES = HERE / "suites.jsonl"
EXPERIMENTS_BY_NAME = {experiment.name: experiment for experiment in (*EXPERIMENTS, SELECTION)}
RULES = {"last": "Last round", "source_val": "Round chosen on source validation"}
BOUNDS = ("Oracle", "DeepAll", "Fed-oracle", "Cent-MCD", POOLED)
TABLE = re.compile(r"(<!-- table (\S+?)(?: minus (.+?))? -->\n).*?(<!-- end -->)", re.DOTALL)
SOURCES_TABLE = re.compile(r"(<!-- sources (\S+) -->\n).*?(<!-- end -->)", re.DOTALL)
LEAKAGE, LEAKAGE_TABLE = HERE / "leakage.jsonl", re.compile(r"(<!-- leakage -->\n).*?(<!-- end -->)", re.DOTALL)
SUITE_TABLE = re.compile(r"(<!-- (suite|rules) (\S+)(?: (\S+))? -->\n).*?(<!-- end -->)", re.DOTALL)


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
    """Splits a multi-adapt run into one record per client, each in its own column; other runs stay as they are."""
    if record.setting != "multi-adapt":
        return [record]
    return [
        Record(**{**vars(record), "column": client, "scores": {client: scores}})
        for client, scores in record.scores.items()
    ]


def keep(path: Path) -> None:
    """Keeps equal trainings once, even if several suites share them."""
    found, known = read([path])[0], {record.job for record in read([SUITES])[0]}
    for name, experiment in EXPERIMENTS_BY_NAME.items():
        jobs = mini_jobs(experiment)
        records = {record.job: record for record in records_for_jobs(found, jobs)}
        missing = len({job.digest for job in jobs}) - len(records)
        print(name, "kept" if not missing else f"lacks {missing} trainings")
        for job, record in records.items() if not missing else ():
            if job not in known:
                append(SUITES, record)
                known.add(job)


def tables(path: Path, baseline: str | None) -> str:
    """Markdown tables of a record file, one per rule."""
    records, broken = read([path])
    assert not broken, f"{path} has {broken} broken lines"
    if not records:
        return ""
    records = sorted((part for record in records for part in by_client(record)), key=lambda record: record.column)
    found = [
        make_table(
            records,
            lambda record, rule=rule: {target: scores[rule] for target, scores in record.scores.items()},
            rule,
            baseline=baseline,
            not_ranked=BOUNDS,
        )
        for rule in RULES
    ]
    if all(AUC in scores for record in records for scores in record.scores.values()):
        areas = make_table(
            records,
            lambda record: {target: scores[AUC] for target, scores in record.scores.items()},
            "last",
            baseline=baseline,
            not_ranked=BOUNDS,
        )
        return f"{by_rule(found)}Last round, area under the ROC curve in %:\n\n{markdown(areas)}\n"
    return by_rule(found)


def at_sources(record: Record) -> float:
    """Mean over the sources of their validation accuracy in the last scored round."""
    return statistics.fmean(score for curve in record.val.values() if (score := curve[-1]) is not None)


def sources_table(path: Path) -> str:
    records, broken = read([path])
    assert not broken, f"{path} has {broken} broken lines"
    rows = [record.row for record in records]
    table = make_table(records, lambda record: {record.column: at_sources(record)}, "", not_ranked=rows)
    return f"\n{markdown(table)}\n"


def suite_tables(what: str, name: str, file: str | None) -> str:
    """Markdown tables of a small suite, from the trainings of its current recipe only; of `file`, from those of any
    seed."""
    experiment = EXPERIMENTS_BY_NAME[name]
    if file is not None:
        known = {row.label: number for number, row in enumerate(experiment.rows)}
        records = [record for record in read([HERE / file])[0] if record.row in known]
        records.sort(key=lambda record: known[record.row])
        return "".join(
            f"\n{sheet.title[0].upper()}{sheet.title[1:]}:\n\n{markdown(sheet)}\n"
            for sheet in sheets(experiment, records)
        )
    jobs = mini_jobs(experiment)
    records = records_for_jobs(read([SUITES])[0], jobs)
    assert len(records) == len(jobs), f"{SUITES.name} lacks {len(jobs) - len(records)} trainings of {name}"
    if what == "rules" or experiment is SELECTION:
        return f"\n{markdown(rules_compared(*split(records)))}\n"
    if not experiment.tables:
        return "".join(f"\n{markdown(sheet)}\n" for sheet in sheets(experiment, records))
    return by_rule(list(make_tables(experiment, named_workload(experiment.mini, None), records, "mini")))


def sheets(experiment: Experiment, records: Sequence[Record]) -> Sequence[Sheet]:
    assert experiment.draw is not None
    with tempfile.TemporaryDirectory() as folder:  # for its pictures
        return experiment.draw(records, SuiteRequest("mini", Path(folder), Path(folder)))[0]


def by_rule(found: Sequence[Table]) -> str:
    """One table per rule, or one for both rules if they chose the same rounds."""
    headings: dict[str, list[str]] = {}
    for table, heading in zip(found, RULES.values(), strict=True):
        headings.setdefault(markdown(table), []).append(heading)
    parts = []
    for text, (first, *others) in headings.items():
        heading = first + "".join(f", and {other[0].lower()}{other[1:]}" for other in others)
        parts.append(f"{heading}:\n\n{text}\n")
    return "\n" + "".join(parts)


def keep_leakage(folder: Path) -> None:
    """Replaces studies of the same kind."""
    lines = LEAKAGE.read_text().splitlines() if LEAKAGE.exists() else []
    studies = {study_key(study): study for study in [*map(json.loads, lines), *read_leakage(folder)]}
    for study in studies.values():
        for case in study["cases"]:
            case.pop("picture", None)
    LEAKAGE.write_text("".join(f"{json.dumps(study)}\n" for _, study in sorted(studies.items())))


def leakage_table() -> str:
    lines = LEAKAGE.read_text().splitlines() if LEAKAGE.exists() else []
    return f"\n{leakage_rows([json.loads(line) for line in lines])}\n" if lines else ""


def written(page: str) -> str:
    """`page` with all tables up to date."""
    page = TABLE.sub(lambda m: m[1] + tables(HERE / m[2], m[3]) + m[4], page)
    page = SOURCES_TABLE.sub(lambda m: m[1] + sources_table(HERE / m[2]) + m[3], page)
    page = LEAKAGE_TABLE.sub(lambda m: m[1] + leakage_table() + m[2], page)
    return SUITE_TABLE.sub(lambda m: m[1] + suite_tables(m[2], m[3], m[4]) + m[5], page)


if __name__ == "__main__":
    command, file, *rest = sys.argv[1:]
    if command == "collect":
        collect(Path(file), rest[0], [Path(name) for name in rest[1:]])
    elif command == "leakage":
        keep_leakage(Path(file))
    elif command == "keep":
        keep(Path(file))
    else:
        Path(file).write_text(written(Path(file).read_text()))
