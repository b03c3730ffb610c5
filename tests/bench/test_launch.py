"""Jobs start from a process that has imported everything; each is still a process of its own."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from fedshift.bench.launch import Processes

CONFIG = (
    "method: fedavg\ndata_dir: {data}\ntarget: dim\nrounds: 1\nbatch_size: 8\nlr: 0.02\nworkers: 0\narch: digits-copa\n"
)


@pytest.fixture
def launcher() -> Processes:
    return Processes()


def wait_for_a_round(metrics: Path) -> None:
    for _ in range(600):
        if metrics.exists() and metrics.stat().st_size:
            return
        time.sleep(0.1)
    raise AssertionError("no round in a minute")


def test_one_starter_serves_jobs_in_turn_and_passes_on_their_exit_codes(
    launcher: Processes, tiny_data: Path, tmp_path: Path
) -> None:
    good, bad = tmp_path / "good.yaml", tmp_path / "bad.yaml"
    good.write_text(CONFIG.format(data=tiny_data))
    bad.write_text(CONFIG.format(data=tiny_data).replace("target: dim", "target: nowhere"))
    try:
        assert launcher.train(bad, tmp_path / "bad", tmp_path / "bad.log", 1) == 2
        assert launcher.train(good, tmp_path / "good", tmp_path / "good.log", 1) == 0
        assert "nowhere" in (tmp_path / "bad.log").read_text()
        assert (tmp_path / "good" / "done").exists() and not (tmp_path / "bad" / "done").exists()
        if sys.platform == "linux":
            assert len(launcher._started) == 1
    finally:
        launcher.stop()
    assert launcher._started == []


def test_a_forked_job_trains_the_same_model_as_the_command(
    launcher: Processes, tiny_data: Path, tmp_path: Path
) -> None:
    config = tmp_path / "job.yaml"
    config.write_text(CONFIG.format(data=tiny_data))
    try:
        assert launcher.train(config, tmp_path / "forked", tmp_path / "log", 1) == 0
    finally:
        launcher.stop()
    command = [sys.executable, "-m", "fedshift", "train", str(config), "--out", str(tmp_path / "alone")]
    subprocess.run(command, check=True, capture_output=True, env={**os.environ, "OMP_NUM_THREADS": "1"})
    forked, alone = (tmp_path / name / "model.safetensors" for name in ("forked", "alone"))
    assert forked.read_bytes() == alone.read_bytes()


@pytest.mark.skipif(sys.platform != "linux", reason="only there jobs are forked")
def test_importing_everything_starts_no_thread() -> None:
    """A fork keeps one thread: what others held would stay locked for ever."""
    code = (
        "import os; from fedshift.cli.starter import import_everything; import_everything();"
        "print(len(os.listdir('/proc/self/task')))"
    )
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    told = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True, env=environment)
    assert told.stdout.strip() == "1"


def test_stopping_ends_a_training_that_runs(launcher: Processes, tiny_data: Path, tmp_path: Path) -> None:
    config = tmp_path / "job.yaml"
    config.write_text(CONFIG.format(data=tiny_data).replace("rounds: 1", "rounds: 100000"))
    codes: list[int] = []
    thread = threading.Thread(
        target=lambda: codes.append(launcher.train(config, tmp_path / "run", tmp_path / "log", 1))
    )
    thread.start()
    metrics = tmp_path / "run" / "metrics.jsonl"
    wait_for_a_round(metrics)
    launcher.stop()
    thread.join(timeout=30)
    assert codes and codes[0] != 0
    size = metrics.stat().st_size
    time.sleep(0.5)
    assert metrics.stat().st_size == size > 0, "nobody trains any more"


@pytest.mark.skipif(sys.platform != "linux", reason="only there jobs are forked")
def test_a_killed_suite_leaves_nobody_training(tiny_data: Path, tmp_path: Path) -> None:
    config = tmp_path / "job.yaml"
    config.write_text(CONFIG.format(data=tiny_data).replace("rounds: 1", "rounds: 100000"))
    code = (
        "from pathlib import Path; from fedshift.bench.launch import Processes;"
        f"Processes().train(Path({str(config)!r}), Path({str(tmp_path / 'run')!r}), Path({str(tmp_path / 'log')!r}), 1)"
    )
    suite = subprocess.Popen([sys.executable, "-c", code])
    metrics = tmp_path / "run" / "metrics.jsonl"
    wait_for_a_round(metrics)
    suite.kill()
    suite.wait()
    time.sleep(2)
    size = metrics.stat().st_size
    time.sleep(1)
    assert metrics.stat().st_size == size > 0
