"""Each job is a process, forked from one that has already imported everything."""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from typer.testing import CliRunner

from fedshift.bench.jobs import Column, Job, Row, grid_jobs
from fedshift.bench.run import Processes, run_jobs, silent
from fedshift.cli.app import app

CONFIG = (
    "method: fedavg\ndata_dir: {data}\ntarget: dim\nrounds: 1\nbatch_size: 8\nlr: 0.02\nworkers: 0\narch: digits-copa\n"
)
FOREVER = CONFIG.replace("rounds: 1\n", "rounds: 100000\n")

on_linux = pytest.mark.skipif(sys.platform != "linux", reason="jobs are forked on Linux only")


@pytest.fixture(scope="module")
def launcher() -> Iterator[Processes]:
    """One for all tests: a starter takes seconds to import everything."""
    shared = Processes()
    yield shared
    shared.stop()


@pytest.fixture(scope="module")
def trained(launcher: Processes, tiny_data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the run `good`, forked after a job that failed."""
    root = tmp_path_factory.mktemp("launch")
    good, bad = root / "good.yaml", root / "bad.yaml"
    good.write_text(CONFIG.format(data=tiny_data))
    bad.write_text(CONFIG.format(data=tiny_data).replace("target: dim", "target: nowhere"))
    assert launcher.train(bad, root / "bad", root / "bad.log", 1) == 2
    assert launcher.train(good, root / "good", root / "good.log", 1) == 0
    return root


def test_one_starter_serves_jobs_in_turn_and_passes_on_their_exit_codes(launcher: Processes, trained: Path) -> None:
    assert "nowhere" in (trained / "bad.log").read_text()
    assert (trained / "good" / "done").exists() and not (trained / "bad" / "done").exists()
    if sys.platform == "linux":
        assert len(launcher._started) == 1


def test_a_forked_job_trains_the_same_model_as_the_command(trained: Path, tmp_path: Path) -> None:
    done = CliRunner().invoke(app, ["train", str(trained / "good.yaml"), "--out", str(tmp_path / "alone")])
    assert done.exit_code == 0, done.output
    forked, alone = (folder / "model.safetensors" for folder in (trained / "good", tmp_path / "alone"))
    assert forked.read_bytes() == alone.read_bytes()


@pytest.mark.slow
def test_jobs_run_in_processes_and_a_failure_is_the_last_line_of_its_log(
    launcher: Processes, tiny_data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stopped: list[bool] = []
    monkeypatch.setattr(launcher, "stop", lambda: stopped.append(True))  # it is needed again
    common = {"data_dir": str(tiny_data), "rounds": 1, "batch_size": 8, "workers": 0, "arch": "digits-copa"}
    (good,) = grid_jobs([Row("FedAvg", "fedavg")], [Column("dim", {"target": "dim"})], [0], common, {})
    broken = Job("broken", "dim", good.config.model_copy(update={"target": "nowhere"}))
    outcome = run_jobs([broken, good], tmp_path, 1, silent, launcher)
    assert [record.row for record in outcome.records] == ["FedAvg"] and stopped == [True]
    (failure,) = outcome.failures
    assert failure.message.startswith("error [") and "nowhere" in failure.message
    assert failure.log.read_text().strip().endswith(failure.message)


@on_linux
def test_importing_everything_starts_no_thread(launcher: Processes, trained: Path) -> None:
    """A fork keeps one thread: locks that other threads held would stay locked for ever."""
    (starter,) = launcher._started
    assert len(list(Path(f"/proc/{starter.pid}/task").iterdir())) == 1


@pytest.mark.slow
def test_stopping_ends_a_training_that_runs(launcher: Processes, tiny_data: Path, tmp_path: Path) -> None:
    config = tmp_path / "job.yaml"
    config.write_text(FOREVER.format(data=tiny_data))
    codes: list[int] = []
    thread = threading.Thread(
        target=lambda: codes.append(launcher.train(config, tmp_path / "run", tmp_path / "log", 1))
    )
    thread.start()
    metrics = tmp_path / "run" / "metrics.jsonl"
    wait_for_a_round(metrics)
    launcher.stop()
    thread.join(timeout=30)
    assert codes and codes[0] != 0 and launcher._started == []
    assert is_left_alone(metrics)


@pytest.mark.slow
@on_linux
def test_a_killed_suite_leaves_no_training_behind(tiny_data: Path, tmp_path: Path) -> None:
    config = tmp_path / "job.yaml"
    config.write_text(FOREVER.format(data=tiny_data))
    suite = os.fork()
    if suite == 0:  # stands for a suite: it computes nothing itself
        try:
            Processes().train(config, tmp_path / "run", tmp_path / "log", 1)
        finally:
            os._exit(1)
    metrics = tmp_path / "run" / "metrics.jsonl"
    try:
        wait_for_a_round(metrics)
    finally:
        os.kill(suite, signal.SIGKILL)
        os.waitpid(suite, 0)
    deadline = time.monotonic() + 20
    while not is_left_alone(metrics):
        assert time.monotonic() < deadline, "the training continues"


def wait_for_a_round(metrics: Path) -> None:
    for _ in range(1200):
        if metrics.exists() and metrics.stat().st_size:
            return
        time.sleep(0.05)
    raise AssertionError("no round in a minute")


def is_left_alone(metrics: Path) -> bool:
    """Whether no round is added in half a second, in which a training adds several."""
    size = metrics.stat().st_size
    time.sleep(0.5)
    return metrics.stat().st_size == size > 0
