"""Jobs: skipped when finished, resumed when not, listed when failed; records survive half-written lines."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from fedshift.bench.jobs import Column, Job, Row, grid, merged
from fedshift.bench.records import append, read
from fedshift.bench.runner import run_jobs

ROWS = (Row("FedAvg", "fedavg"), Row("FedAvg, twice the rate", "fedavg", {"lr": 0.04}))
COLUMNS = (Column("dim", {"target": "dim"}),)


def jobs(data: Path, **common: object) -> list[Job]:
    usual = {"data_dir": str(data), "rounds": 1, "batch_size": 8, "lr": 0.02, "workers": 0, "arch": "digits-copa"}
    return list(grid(ROWS, COLUMNS, (0,), usual | common, {}))


def silent(text: str, done: int, total: int, left: float) -> None:
    return None


def test_layers_of_settings_are_laid_over_each_other() -> None:
    assert merged({"lr": 1, "csac": {"lambda": 0.6, "smoothing": 0}}, {"csac": {"lambda": 0}}) == {
        "lr": 1,
        "csac": {"lambda": 0, "smoothing": 0},
    }


def test_equal_configurations_are_one_job(tiny_data: Path) -> None:
    first, second = jobs(tiny_data)
    assert first.digest == jobs(tiny_data)[0].digest != second.digest


def test_finished_jobs_are_skipped_and_failures_do_not_stop_the_rest(tiny_data: Path, tmp_path: Path) -> None:
    wanted = jobs(tiny_data)
    broken = Job("broken", "dim", wanted[0].config.model_copy(update={"target": "nowhere"}))
    outcome = run_jobs([broken, *wanted], tmp_path, 2, silent)
    assert [record.row for record in outcome.records] == ["FedAvg", "FedAvg, twice the rate"]
    assert all(0 <= record.scores["dim"]["last"] <= 1 for record in outcome.records)
    (failure,) = outcome.failures
    assert failure.job is broken and "nowhere" in failure.words and failure.log.exists()

    told: list[str] = []
    again = run_jobs(wanted, tmp_path, 2, lambda text, *rest: told.append(text))
    assert told == ["trainings there already, 0 to do"] and again.records == outcome.records, "nothing was left to do"


def test_a_half_written_line_is_counted_and_swallows_nothing(tiny_data: Path, tmp_path: Path) -> None:
    run_jobs(jobs(tiny_data)[:1], tmp_path, 1, silent)
    path = tmp_path / "records.jsonl"
    (whole,), broken = read([path])
    assert broken == 0
    path.write_text(path.read_text() + json.dumps({"job": "x"})[:5])
    append(path, whole)
    records, broken = read([path])
    assert records == [whole] and broken == 1


@pytest.mark.parametrize("key", ["data_dir", "workers", "engine"])
def test_records_do_not_tell_where_data_lives(tiny_data: Path, tmp_path: Path, key: str) -> None:
    outcome = run_jobs(jobs(tiny_data)[:1], tmp_path, 1, silent)
    assert key not in outcome.records[0].settings and str(tiny_data) not in json.dumps(vars(outcome.records[0]))


def test_a_job_keeps_its_name_whether_a_default_is_said_or_not(tiny_data: Path) -> None:
    plain, said = jobs(tiny_data)[0], jobs(tiny_data, evaluate_every=1, precision="float32")[0]
    other = jobs(tiny_data, evaluate_every=2)[0]
    assert plain.digest == said.digest != other.digest
