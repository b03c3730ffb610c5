"""The reader of run directories: what it says of finished, unfinished, failed and damaged runs."""

from __future__ import annotations

import json
import re
import shutil
from dataclasses import asdict
from pathlib import Path

import pytest

from fedshift.bench.records import read_run
from fedshift.errors import InputError
from fedshift.runs.directory import read_metrics
from fedshift.runs.record import read_record, read_results

KEPT = Path(__file__).parents[1] / "fixtures" / "v0.1.0"


@pytest.fixture
def finished(tmp_path: Path) -> Path:
    return shutil.copytree(KEPT / "fedavg-finished", tmp_path / "run")


@pytest.mark.parametrize("name", ["fedavg", "csac", "kd3a"])
def test_a_finished_run_is_told_from_its_results(name: str) -> None:
    folder = KEPT / f"{name}-finished"
    written = json.loads((folder / "results.json").read_text())
    record = read_record(folder)
    assert (record.method, record.seed, record.rounds) == (name, written["seed"], written["rounds"])
    assert {target: scores.model_dump() for target, scores in record.scores.items()} == written["per_target"]
    assert record.chosen == written["chosen_round"] and record.broken == 0 and record.failure == ""
    assert [row.model_dump() for row in record.rows] == read_metrics(folder / "metrics.jsonl")[0]
    assert read_results(folder) == written, "a program gets every key, as it was written"


@pytest.mark.parametrize("name", ["fedavg", "csac", "kd3a"])
def test_a_stopped_run_is_told_from_its_configuration_and_metrics(name: str) -> None:
    folder = KEPT / f"{name}-stopped"
    record = read_record(folder)
    assert record.results is None and record.method == name
    assert 0 < record.round < record.rounds and record.round == max(row.round for row in record.rows)
    tested = {row.site: row.value for row in record.rows if row.phase == "test" and row.round == record.round}
    assert {target: scores.last for target, scores in record.scores.items()} == tested and tested
    with pytest.raises(InputError, match="not a finished run"):
        read_results(folder)
    with pytest.raises(InputError, match="not a finished run"):
        read_run(folder, "job", "row", "column")


def test_a_benchmark_keeps_the_numbers_of_the_run(finished: Path) -> None:
    written = read_results(finished)
    kept = asdict(read_run(finished, "job", "row", "column"))
    for key in ("method", "setting", "sources", "target", "home", "seed", "bytes", "counters", "model_sha256"):
        assert kept[key] == written[key]
    assert kept["scores"] == written["per_target"] and kept["seconds"] == written["seconds"]["total"]
    last = {site: values[-1] for site, values in kept["test"].items()}
    assert last == pytest.approx({target: scores["last"] for target, scores in kept["scores"].items()}, abs=1e-6)


def test_lines_that_were_cut_off_are_counted(finished: Path) -> None:
    whole = read_record(finished)
    with (finished / "metrics.jsonl").open("a") as file:
        file.write('{"round": 9, "phase": "te')
    with next((finished / "sites").glob("*/ledger.jsonl")).open("a") as file:
        file.write('{"round": 9\n{"round": "nine"}\n')
    record = read_record(finished)
    assert record.broken == 3 and record.rows == whole.rows and record.ledger == whole.ledger


def test_an_error_that_ended_a_run_is_a_sentence(finished: Path) -> None:
    (finished / "results.json").unlink()
    (finished / "done").unlink()
    (finished / "failed").write_text("disk\n")
    assert "disk is full or not writable (disk)." in read_record(finished).failure
    (finished / "failed").write_text("unexpected\n")
    assert "unexpected error" in read_record(finished).failure


@pytest.mark.parametrize("content", ['{"method": ', '{"method": 3}', "[]", "a matrix of another shape"])
def test_damaged_results_are_one_error_for_every_reader(finished: Path, content: str) -> None:
    if content.startswith("a matrix"):
        results = json.loads((finished / "results.json").read_text())
        next(iter(results["confusion"].values()))[0].append(1)
        content = json.dumps(results)
    (finished / "results.json").write_text(content)
    for read in (read_record, read_results, lambda path: read_run(path, "job", "row", "column")):
        with pytest.raises(InputError, match=r"results\.json") as error:
            read(finished)
        assert error.value.code == "run-corrupt"


def test_a_folder_that_is_no_run_is_named(tmp_path: Path) -> None:
    for read in (read_record, read_results):
        with pytest.raises(InputError, match=re.escape(str(tmp_path))) as error:
            read(tmp_path)
        assert error.value.code == "run-missing"
