"""A run that is killed at any moment and resumed ends as if nothing had happened."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from fedshift.runs.directory import read_metrics

KILLS = 4


def command(data: Path, out: Path, *more: str) -> list[str]:
    flags = ["--data-dir", str(data), "--target", "dim", "--arch", "digits-csac", "--rounds", "16", "--out", str(out)]
    keys = ["--set", "batch_size=4", "--set", "policy.min_samples=2", "--set", "workers=0"]
    return [sys.executable, "-m", "fedshift", "train", "--method", "fedavg", *flags, *keys, *more]


@pytest.mark.timeout(240)
def test_killed_at_random_moments_and_resumed(tiny_data: Path, tmp_path: Path) -> None:
    whole = tmp_path / "whole"
    subprocess.run(command(tiny_data, whole), check=True, capture_output=True)
    expected = json.loads((whole / "results.json").read_text())

    broken, moments = tmp_path / "broken", random.Random(7)
    killed_in_rounds = set()
    for number in range(KILLS):
        more = ["--resume"] if (broken / "config.yaml").exists() else []
        process = subprocess.Popen(
            command(tiny_data, broken, *more), stderr=subprocess.DEVNULL, stdout=subprocess.DEVNULL
        )
        _wait_for_round(broken, minimum=2 * number)
        time.sleep(moments.uniform(0, 0.15))
        os.kill(process.pid, signal.SIGKILL)
        process.wait()
        killed_in_rounds.add(_last_checkpoint(broken))
        assert not (broken / "done").exists(), "the run was over before it could be killed: make it longer"
    subprocess.run(command(tiny_data, broken, "--resume"), check=True, capture_output=True)

    got = json.loads((broken / "results.json").read_text())
    assert len(killed_in_rounds) > 1
    assert got["model_sha256"] == expected["model_sha256"]
    assert got["per_target"] == expected["per_target"] and got["bytes"] == expected["bytes"]
    rows, halves = read_metrics(broken / "metrics.jsonl")
    scored = [(row["round"], row["phase"], row["site"], row["name"]) for row in rows]
    assert len(scored) == len(set(scored)) and halves == 0
    assert {row["round"] for row in rows} == set(range(1, 17))


def _wait_for_round(folder: Path, minimum: int) -> None:
    deadline = time.monotonic() + 60
    while _last_checkpoint(folder) < minimum and time.monotonic() < deadline:
        time.sleep(0.01)


def _last_checkpoint(folder: Path) -> int:
    return max((int(path.stem.split("-")[1]) for path in folder.glob("checkpoints/round-*")), default=0)


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
