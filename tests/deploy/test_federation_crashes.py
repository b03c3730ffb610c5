"""After kill -9 of any process, the run continues with the quorum, or it stops with exit code 3 and can be resumed."""

from __future__ import annotations

import json
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from loopback import Loopback, federation, fedshift, wait_for

from fedshift._version import __version__
from fedshift.runs.config import make_config
from fedshift.runs.execute import run

pytestmark = [pytest.mark.xdist_group("crashes"), pytest.mark.timeout(900), pytest.mark.slow]

LONG = 240.0
"""Seconds that nothing here takes, even on a machine with other work to do."""
WORKER = "fedshift.runs.worker"
SITE_JOB = "nvflare.private.fed.app.client.worker_process"
SETTINGS: dict[str, Any] = {
    "method": "fedavg",
    "arch": "digits-csac",
    "batch_size": 8,
    "sources": ["amber", "blue"],
    "target": "coral",
}


@pytest.fixture(scope="module")
def loopback(tmp_path_factory: pytest.TempPathFactory, tiny_data: Path) -> Iterator[Loopback]:
    """A federation that no other module uses, so that both can be tested at the same time."""
    with federation(tmp_path_factory.mktemp("crashes"), tiny_data, ("amber", "blue", "coral")) as started:
        yield started


def train(loopback: Loopback, out: Path, rounds: int, *more: str) -> subprocess.Popen[str]:
    config = out.with_suffix(".yaml")
    config.write_text(json.dumps(SETTINGS | {"rounds": rounds}))
    words = ("train", config, "--engine", "nvflare", "--federation", loopback.coordinator, "--out", out, *more)
    return subprocess.Popen(
        fedshift(*words),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        # What a shell starts in the background ignores Ctrl-C, and so would everything these tests start.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )


def finished_rounds(out: Path) -> int:
    return max((int(path.stem.split("-")[1]) for path in out.glob("checkpoints/round-*")), default=0)


def wait_for_round(process: subprocess.Popen[str], out: Path, round: int) -> None:
    wait_for(f"round {round}", lambda: finished_rounds(out) >= round or process.poll() is not None, LONG)
    assert process.poll() is None, process.communicate()


def of_site(loopback: Loopback, site: str, module: str) -> psutil.Process:
    (found,) = [process for process in loopback.tree(site) if module in process.cmdline()]
    return found


def end(process: subprocess.Popen[str]) -> tuple[int, str]:
    _, errors = process.communicate(timeout=LONG)
    assert "Traceback" not in errors
    return process.returncode, errors


def rounds_in_ledger(loopback: Loopback, site: str, out: Path) -> set[int]:
    ledger = loopback.kit(site) / "runs" / (out / ".identity").read_text() / "ledger.jsonl"
    return {row["round"] for row in map(json.loads, ledger.read_text().splitlines()) if row.get("kind") == "weights"}


def test_a_killed_child_costs_its_reply_and_a_killed_site_comes_back(loopback: Loopback, tmp_path: Path) -> None:
    out = tmp_path / "run"
    process = train(loopback, out, 1000)
    wait_for_round(process, out, 1)
    of_site(loopback, "blue", WORKER).kill()
    wait_for_round(process, out, finished_rounds(out) + 2)
    loopback.kill("blue")
    lost = time.time()
    before = rounds_in_ledger(loopback, "blue", out)
    loopback.start_site("blue")
    wait_for("blue takes part again", lambda: rounds_in_ledger(loopback, "blue", out) > before, LONG)
    process.send_signal(signal.SIGINT)
    code, errors = end(process)
    assert code == 130, errors
    assert "missing.crashed x1" in errors and "missing.unreachable x" in errors
    trained = rounds_in_ledger(loopback, "blue", out)
    assert set(range(1, max(trained))) - trained, "blue missed at least the round in which it was killed"
    assert set(range(1, max(trained))) <= rounds_in_ledger(loopback, "amber", out), "the others continued"
    loopback.wait_until_online(*loopback.sites, since=lost)


def test_after_a_killed_site_job_and_a_killed_coordinator_a_run_is_resumed_to_the_same_model(
    loopback: Loopback, tiny_data: Path, tmp_path: Path
) -> None:
    here = {"workers": 0, "policy": {"min_samples": 2}, "data_dir": tiny_data, "rounds": 6}
    expected = run(make_config(SETTINGS | here), tmp_path / "here")
    out = tmp_path / "run"

    process = train(loopback, out, 6)
    wait_for_round(process, out, 2)
    of_site(loopback, "amber", SITE_JOB).kill()
    code, errors = end(process)
    assert code == 3 and "server-offline" in errors and "--resume" in errors

    process = train(loopback, out, 6, "--resume")
    wait_for_round(process, out, 4)
    loopback.kill("coordinator")
    code, errors = end(process)
    assert code == 3 and "server-offline" in errors and "--resume" in errors
    assert subprocess.run(fedshift("status", loopback.coordinator), capture_output=True).returncode == 3

    lost = time.time()
    loopback.start_coordinator()
    loopback.wait_until_online(*loopback.sites, since=lost)
    code, errors = end(train(loopback, out, 6, "--resume"))
    assert code == 0, errors
    shown = subprocess.run(fedshift("status", loopback.coordinator), capture_output=True, text=True).stdout
    assert f"run {(out / '.identity').read_text()}, round 6" in shown and f"fedshift {__version__}" in shown
    assert shown.count("seen ") == len(loopback.sites) and "not connected" in shown
    results = json.loads((out / "results.json").read_text())
    assert results["model_sha256"] == expected["model_sha256"]
    assert results["per_target"] == expected["per_target"] and results["bytes"] == expected["bytes"]


def test_stop_ends_the_server_and_sites_wait_for_its_return(loopback: Loopback) -> None:
    done = subprocess.run(fedshift("stop", loopback.coordinator), capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout) == (0, "stopped\n")
    assert loopback.running.pop("coordinator").wait(30) == 0
    lost = time.time()
    loopback.start_coordinator()
    loopback.wait_until_online(*loopback.sites, since=lost)
