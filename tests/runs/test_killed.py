"""A run that is killed at any moment and resumed ends as if nothing had happened."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from fedshift.runs.config import RunConfig, make_config
from fedshift.runs.directory import read_metrics
from fedshift.runs.execute import run

ROUNDS = 12
KILLS = 2
KEYS = {"method": "fedavg", "target": "dim", "arch": "digits-csac", "rounds": ROUNDS, "batch_size": 4, "workers": 0}


def configured(data: Path) -> RunConfig:
    return make_config({**KEYS, "data_dir": data, "policy": {"min_samples": 2}})


def command(data: Path, out: Path, *more: str) -> list[str]:
    keys = [f"--set={key}={value}" for key, value in KEYS.items()] + ["--set=policy.min_samples=2"]
    return [sys.executable, "-m", "fedshift", "train", "--data-dir", str(data), "--out", str(out), *keys, *more]


@pytest.mark.timeout(240)
@pytest.mark.slow
def test_killed_at_random_moments_and_resumed(tiny_data: Path, tmp_path: Path) -> None:
    expected = run(configured(tiny_data), tmp_path / "whole")

    broken, moments = tmp_path / "broken", random.Random(7)
    killed_in_rounds = set()
    for number in range(KILLS):
        more = ["--resume"] if (broken / "config.yaml").exists() else []
        process = subprocess.Popen(
            command(tiny_data, broken, *more), stderr=subprocess.DEVNULL, stdout=subprocess.DEVNULL
        )
        _wait_for_round(broken, minimum=2 * number + 1)
        time.sleep(moments.uniform(0, 0.15))
        os.kill(process.pid, signal.SIGKILL)
        process.wait()
        killed_in_rounds.add(_last_checkpoint(broken))
        assert not (broken / "done").exists(), "the run was over before it could be killed: make it longer"
    got = run(configured(tiny_data), broken, resume=True)

    assert min(killed_in_rounds) > 0 and len(killed_in_rounds) == KILLS
    assert got["model_sha256"] == expected["model_sha256"]
    assert got["per_target"] == expected["per_target"] and got["bytes"] == expected["bytes"]
    rows, halves = read_metrics(broken / "metrics.jsonl")
    scored = [(row["round"], row["phase"], row["site"], row["name"]) for row in rows]
    assert len(scored) == len(set(scored)) and halves == 0
    assert {row["round"] for row in rows} == set(range(1, ROUNDS + 1))


def _wait_for_round(folder: Path, minimum: int) -> None:
    deadline = time.monotonic() + 60
    while _last_checkpoint(folder) < minimum and time.monotonic() < deadline:
        time.sleep(0.01)


def _last_checkpoint(folder: Path) -> int:
    return max((int(path.stem.split("-")[1]) for path in folder.glob("checkpoints/round-*")), default=0)


@pytest.mark.slow
@pytest.mark.timeout(120)
def test_ctrl_c_stops_with_130_and_leaves_a_resumable_run(tiny_data: Path, tmp_path: Path) -> None:
    out = tmp_path / "run"
    process = subprocess.Popen(
        command(tiny_data, out),
        stderr=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        text=True,
        # What a shell starts in the background ignores Ctrl-C, and so would everything these tests start.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )
    _wait_for_round(out, minimum=1)
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 130
    assert "--resume" in errors and "Traceback" not in errors
    assert not (out / "done").exists()
    again = subprocess.run(command(tiny_data, out, "--resume"), capture_output=True, text=True)
    assert again.returncode == 0 and (out / "done").exists()
