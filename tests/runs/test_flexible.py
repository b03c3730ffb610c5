"""Runs that get more or fewer rounds, are used before they end, fail at the start, or are deleted."""

from __future__ import annotations

import csv
import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from PIL import Image
from typer.testing import CliRunner

from fedshift.cli.app import app
from fedshift.errors import InputError
from fedshift.runs.config import make_config
from fedshift.runs.directory import RunDirectory, read_metrics
from fedshift.runs.execute import run
from fedshift.runs.predict import predict_files
from fedshift.runs.progress import Silent


def config(data: Path, **changes: Any) -> Any:
    keys = {"data_dir": data, "target": "dim", "arch": "digits-csac", "rounds": 2, "batch_size": 16, "workers": 0}
    return make_config({"method": "fedavg", "policy": {"min_samples": 2}, **keys, **changes})


class Heard(Silent):
    def __init__(self, stop_after: int = 0) -> None:
        self.messages: list[str] = []
        self.stop_after = stop_after

    def message(self, text: str) -> None:
        self.messages.append(text)

    def round(self, round: int, val: Any, test: Any) -> None:
        if round == self.stop_after:
            raise KeyboardInterrupt


@pytest.fixture(scope="module")
def finished(tiny_data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished run of two rounds with a constant rate."""
    folder = tmp_path_factory.mktemp("flexible") / "run"
    run(config(tiny_data, schedule="constant"), folder)
    return folder


@pytest.fixture
def copied(finished: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(finished, tmp_path / "run"))


def test_a_finished_run_gets_more_rounds_and_ends_as_one_that_had_them(
    tiny_data: Path, copied: Path, tmp_path: Path
) -> None:
    heard = Heard()
    longer = config(tiny_data, schedule="constant", rounds=3)
    results = run(longer, copied, resume=True, progress=heard)
    assert results["rounds"] == 3 and results["replans"] == [{"after": 2, "before": 2, "now": 3}]
    assert any("3 rounds in all, 2 were planned" in text for text in heard.messages)
    # A constant rate does not depend on how many rounds there are.
    assert results["model_sha256"] == run(longer, tmp_path / "whole")["model_sha256"]
    rows = read_metrics(copied / "metrics.jsonl")[0]
    assert sorted({row["round"] for row in rows}) == [1, 2, 3]
    RunDirectory(copied).require_whole()
    again = run(config(tiny_data, schedule="constant").model_copy(update={"rounds": None}), copied, resume=True)
    assert again == results, "without --rounds, the number is that of the run"


def test_a_run_under_way_gets_fewer_rounds_and_says_what_becomes_of_a_cosine(tiny_data: Path, tmp_path: Path) -> None:
    folder, heard = tmp_path / "run", Heard()
    with pytest.raises(KeyboardInterrupt):
        run(config(tiny_data, rounds=8, lr=0.01), folder, progress=Heard(stop_after=3))
    results = run(config(tiny_data, rounds=3, lr=0.01), folder, resume=True, progress=heard)
    told = next(text for text in heard.messages if "were planned" in text)
    # Rounds 1 and 2 of 8 had cos(0) and cos(pi / 8); round 3 of 3 has (1 + cos(2 pi / 3)) / 2 = 0.25.
    assert "cosine: the learning rate was 0.00962 in round 2 and is 0.0025 in round 3" in told
    assert "where it would have been 0.00854" in told and results["rounds"] == 3 and (folder / "done").exists()


def test_rounds_that_were_done_cannot_be_undone(tiny_data: Path, copied: Path) -> None:
    before = (copied / "done").read_bytes()
    with pytest.raises(InputError, match="has done 2 rounds, which cannot be undone: choose --rounds 2 or more"):
        run(config(tiny_data, schedule="constant", rounds=1), copied, resume=True)
    assert (copied / "done").read_bytes() == before
    with pytest.raises(InputError, match=r"another configuration \(rounds\)"):
        run(config(tiny_data, schedule="constant", rounds=3), copied)


def test_the_last_round_is_scored_though_it_was_not_to_be(tiny_data: Path, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    # Killed in round 4: round 3 is done, and round 2 was the last that was scored.
    with pytest.raises(KeyboardInterrupt):
        run(config(tiny_data, rounds=6, evaluate_every=2), folder, progress=Heard(stop_after=4))
    results = run(config(tiny_data, rounds=3, evaluate_every=2), folder, resume=True)
    rows = read_metrics(folder / "metrics.jsonl")[0]
    scored = {row["round"]: row["value"] for row in rows if row["phase"] == "test"}
    assert sorted(scored) == [2, 3] and results["accuracy"]["last"] == pytest.approx(scored[3], abs=1e-6)


def test_predict_uses_an_unfinished_run_and_says_so(tiny_data: Path, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    with pytest.raises(KeyboardInterrupt):
        run(config(tiny_data, rounds=5), folder, progress=Heard(stop_after=2))
    Image.new("RGB", (32, 32), "red").save(tmp_path / "new.png")
    counts = predict_files(folder, tmp_path / "new.png", tmp_path / "predictions.csv")
    assert counts.note.startswith("this run is not finished: the model is of round 2 of 5")
    rows = list(csv.DictReader((tmp_path / "predictions.csv").open()))
    assert len(rows) == counts.predicted == 1
    fresh = tmp_path / "fresh"
    with pytest.raises(KeyboardInterrupt):
        run(config(tiny_data, rounds=5, evaluate_every=5), fresh, progress=Heard(stop_after=1))
    with pytest.raises(InputError, match="no round of it was scored yet"):
        predict_files(fresh, tmp_path / "new.png", tmp_path / "other.csv")


class Refusing(Silent):
    """Stands for whatever is found to be wrong with the input after the folder was made."""

    def begin(self, rounds: int, done: int, title: str) -> None:
        raise InputError("config-value", "wrong")


def test_a_failed_start_leaves_no_folder(tiny_data: Path, tmp_path: Path) -> None:
    with pytest.raises(InputError, match="wrong"):
        run(config(tiny_data), tmp_path / "runs" / "deep" / "first", progress=Refusing())
    assert not (tmp_path / "runs").exists()
    (tmp_path / "mine").mkdir()
    with pytest.raises(InputError, match="wrong"):
        run(config(tiny_data), tmp_path / "mine", progress=Refusing())
    assert (tmp_path / "mine").is_dir(), "it was there before"


def test_runs_are_listed_compared_and_deleted(tiny_data: Path, copied: Path) -> None:
    call = CliRunner().invoke
    with pytest.raises(KeyboardInterrupt):
        run(config(tiny_data, lr=0.2), copied.parent / "other", progress=Heard(stop_after=1))
    listed = call(app, ["runs", "list", str(copied.parent)]).stdout
    assert "2/2" in listed and "finished" in listed and "1/2" in listed and "stopped" in listed
    compared = call(app, ["runs", "compare", str(copied), str(copied.parent / "other")]).stdout
    assert "schedule" in compared and "0.2" in compared and "batch_size" not in compared
    assert call(app, ["runs", "delete", str(copied)], input="n\n").exit_code == 1 and copied.exists()
    refused = call(app, ["runs", "delete", "--yes", str(copied), str(tiny_data)])
    assert isinstance(refused.exception, InputError) and copied.exists() and tiny_data.exists()
    with RunDirectory(copied).locked():
        assert isinstance(call(app, ["runs", "delete", "--yes", str(copied)]).exception, InputError)
    assert call(app, ["runs", "delete", "--yes", str(copied)]).exit_code == 0 and not copied.exists()


def test_a_run_continues_by_its_folder_alone(copied: Path) -> None:
    done = CliRunner().invoke(app, ["train", "--out", str(copied), "--resume", "--rounds", "3"])
    assert done.exit_code == 0, done.output
    assert json.loads((copied / "results.json").read_text())["rounds"] == 3
