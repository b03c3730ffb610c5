"""Finished jobs are skipped, failed ones are listed, and records survive half-written lines."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from inprocess import InProcess

from fedshift.bench.jobs import Column, Job, Row, grid_jobs, merged
from fedshift.bench.records import Record, append, read
from fedshift.bench.run import run_jobs, silent
from fedshift.methods import METHODS
from fedshift.runs.config import make_config

ROWS = (Row("FedAvg", "fedavg"), Row("FedAvg, twice the rate", "fedavg", {"lr": 0.04}))
COLUMNS = (Column("dim", {"target": "dim"}),)


def jobs(data: Path, **common: object) -> list[Job]:
    usual = {"data_dir": str(data), "rounds": 1, "batch_size": 8, "lr": 0.02, "workers": 0, "arch": "digits-copa"}
    return list(grid_jobs(ROWS, COLUMNS, (0,), usual | common, {}))


@pytest.fixture(scope="module")
def record(tiny_data: Path, tmp_path_factory: pytest.TempPathFactory) -> Record:
    """Of one training."""
    (found,) = run_jobs(jobs(tiny_data)[:1], tmp_path_factory.mktemp("one"), 1, silent, InProcess()).records
    return found


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
    outcome = run_jobs([broken, *wanted], tmp_path, 1, silent, InProcess())
    assert [record.row for record in outcome.records] == ["FedAvg", "FedAvg, twice the rate"]
    assert all(0 <= record.scores["dim"]["last"] <= 1 for record in outcome.records)
    (failure,) = outcome.failures
    assert failure.job is broken and "nowhere" in failure.message and failure.log.exists()

    told: list[str] = []
    again = run_jobs(wanted, tmp_path, 2, lambda text, *rest: told.append(text))
    assert told == ["trainings finished earlier, 0 to do"] and again.records == outcome.records


def test_a_half_written_line_is_counted_and_swallows_nothing(record: Record, tmp_path: Path) -> None:
    path = tmp_path / "records.jsonl"
    append(path, record)
    assert read([path]) == ([record], 0)
    path.write_text(path.read_text() + json.dumps({"job": "x"})[:5])
    append(path, record)
    assert read([path]) == ([record], 1)


@pytest.mark.parametrize("key", ["data_dir", "workers", "engine"])
def test_records_do_not_tell_where_data_lives(record: Record, tiny_data: Path, key: str) -> None:
    assert key not in record.settings and str(tiny_data) not in json.dumps(vars(record))


def test_a_job_keeps_its_name_whether_a_default_is_said_or_not(tiny_data: Path) -> None:
    plain, said = jobs(tiny_data)[0], jobs(tiny_data, evaluate_every=1, precision="float32")[0]
    other = jobs(tiny_data, evaluate_every=2)[0]
    assert plain.digest == said.digest != other.digest


def test_a_job_gets_another_name_when_its_method_computes_something_else(
    tiny_data: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = jobs(tiny_data)[0].digest
    entry = METHODS["fedavg"]
    monkeypatch.setitem(METHODS._values, "fedavg", replace(entry, about=replace(entry.about, revision=1)))
    assert jobs(tiny_data)[0].digest != before


def test_with_given_weights_a_job_is_another_one_when_its_defaults_change(monkeypatch: pytest.MonkeyPatch) -> None:
    def digests() -> list[str]:
        return [Job("", "", make_config({"method": "fedavg", "weights": weights})).digest for weights in (None, "x")]

    before, entry = digests(), METHODS["fedavg"]
    monkeypatch.setitem(METHODS._values, "fedavg", replace(entry, about=replace(entry.about, pretrained={"lr": 0.5})))
    assert digests()[0] == before[0] and digests()[1] != before[1]
