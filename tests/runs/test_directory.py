from __future__ import annotations

import errno
import json
import os
from pathlib import Path
from typing import Any

import pytest

from fedshift.errors import InputError, SiteError
from fedshift.runs.config import make_config
from fedshift.runs.directory import RunDirectory, read_metrics
from fedshift.runs.execute import run
from fedshift.runs.health import CODES, PREDICT_RULE
from fedshift.runs.progress import Silent


def config(data: Path, **changes: Any) -> Any:
    keys = {"data_dir": data, "target": "dim", "arch": "digits-csac", "rounds": 3, "batch_size": 16, "workers": 0}
    return make_config({"method": "fedavg", "policy": {"min_samples": 2}, **keys, **changes})


class Listener(Silent):
    def __init__(self, stop_after: int = 0) -> None:
        self.messages: list[str] = []
        self.stop_after = stop_after

    def message(self, text: str) -> None:
        self.messages.append(text)

    def round(self, round: int, val: Any, test: Any) -> None:
        if round == self.stop_after:
            raise KeyboardInterrupt


@pytest.fixture
def stopped(tiny_data: Path, tmp_path: Path) -> Path:
    """A run of three rounds that was stopped while the third was being finished: two checkpoints are there."""
    with pytest.raises(KeyboardInterrupt):
        run(config(tiny_data), tmp_path / "run", progress=Listener(stop_after=3))
    assert len(list((tmp_path / "run" / "checkpoints").iterdir())) == 2
    return tmp_path / "run"


def test_everything_a_finished_run_promises_is_there(tiny_data: Path, tmp_path: Path) -> None:
    results = run(config(tiny_data), tmp_path / "run")
    names = {path.name for path in (tmp_path / "run").iterdir()}
    promised = {"config.yaml", "env.json", "metrics.jsonl", "results.json", "checkpoints", "model.safetensors"}
    assert promised | {"MODEL_CARD.md", "done"} <= names
    assert set(results["accuracy"]) == {"last", "source_val", "oracle"}
    assert 0 <= results["accuracy"]["last"] <= results["accuracy"]["oracle"] <= 1
    up, down = results["bytes"]["up"], results["bytes"]["down"]
    weights = (tmp_path / "run" / "model.safetensors").stat().st_size
    # Three rounds, three sites: each sends and gets the model, and the headers are small beside it.
    assert 9 * weights * 0.9 < down < 9 * weights * 1.1 and abs(up - down) < 0.1 * down
    assert results["flops_client"] is None, "counted on request: fedshift cost, fedshift bench"
    rows, broken = read_metrics(tmp_path / "run" / "metrics.jsonl")
    assert broken == 0 and {row["phase"] for row in rows} == {"train", "val", "test", "round"}
    assert json.loads((tmp_path / "run" / "results.json").read_text()) == results
    low, high = results["intervals"]["dim"]["last"]
    assert 0 < low < results["accuracy"]["last"] < high < 1 and {one["code"] for one in results["warnings"]} <= set(
        CODES
    )
    card = (tmp_path / "run" / "MODEL_CARD.md").read_text()
    assert f"({100 * low:.1f}-{100 * high:.1f})" in card and PREDICT_RULE in card and "## Warnings" in card
    assert sum(map(sum, results["val_confusion"]["blue"])) == results["samples"]["blue"]["val"]


def test_a_finished_run_of_ten_thousand_sites_can_be_read(tmp_path: Path) -> None:
    """`done` has a line for each site's ledger: more than a megabyte."""
    digests = {f"sites/site-{site:05}/ledger.jsonl": "0" * 64 for site in range(10_000)}
    (tmp_path / "done").write_text(json.dumps({"sha256": digests}, indent=2))
    assert (tmp_path / "done").stat().st_size > 2**20
    assert RunDirectory(tmp_path).digests == digests


def test_the_written_configuration_runs_again_to_the_same_model(tiny_data: Path, tmp_path: Path) -> None:
    from fedshift.runs.config import read_config

    first = run(config(tiny_data), tmp_path / "first")
    again = run(make_config(read_config(tmp_path / "first" / "config.yaml")), tmp_path / "second")
    assert again["model_sha256"] == first["model_sha256"]
    assert (tmp_path / "first" / "config.yaml").read_text() == (tmp_path / "second" / "config.yaml").read_text()


def test_a_damaged_checkpoint_falls_back_to_the_one_before_and_says_so(
    tiny_data: Path, stopped: Path, tmp_path: Path
) -> None:
    newest = max((stopped / "checkpoints").iterdir())
    content = bytearray(newest.read_bytes())
    content[len(content) // 2] ^= 0xFF
    newest.write_bytes(content)
    listener = Listener()
    resumed = run(config(tiny_data), stopped, resume=True, progress=listener)
    assert any("damaged" in message and newest.name in message for message in listener.messages)
    assert resumed["model_sha256"] == run(config(tiny_data), tmp_path / "undisturbed")["model_sha256"]


def test_when_every_checkpoint_is_damaged_nothing_is_overwritten(tiny_data: Path, stopped: Path) -> None:
    for path in (stopped / "checkpoints").iterdir():
        path.write_bytes(path.read_bytes()[:100])
    with pytest.raises(InputError, match="no checkpoint") as caught:
        run(config(tiny_data), stopped, resume=True)
    assert caught.value.code == "run-corrupt"
    assert len(list((stopped / "checkpoints").iterdir())) == 2


def test_a_run_of_another_configuration_is_not_touched(tiny_data: Path, stopped: Path) -> None:
    before = (stopped / "metrics.jsonl").read_bytes()
    with pytest.raises(InputError, match=r"another configuration.*lr") as caught:
        run(config(tiny_data, lr=0.3), stopped, resume=True)
    assert caught.value.code == "run-exists" and (stopped / "metrics.jsonl").read_bytes() == before


class Failing(Silent):
    def __init__(self, error: Exception) -> None:
        self.error = error

    def round(self, round: int, val: Any, test: Any) -> None:
        raise self.error


@pytest.mark.parametrize(
    ("error", "left"),
    [(SiteError("site-failed", "at /private/place"), "site-failed\n"), (OSError("/private/place"), "unexpected\n")],
)
def test_an_error_leaves_its_code_until_the_run_goes_on(
    tiny_data: Path, tmp_path: Path, error: Exception, left: str
) -> None:
    folder = tmp_path / "run"
    with pytest.raises(type(error)):
        run(config(tiny_data), folder, progress=Failing(error))
    assert (folder / "failed").read_text() == left
    run(config(tiny_data), folder, resume=True)
    assert (folder / "done").exists() and not (folder / "failed").exists()


def test_what_a_user_stops_or_is_refused_is_no_failure(tiny_data: Path, stopped: Path) -> None:
    with pytest.raises(InputError, match="--resume"):
        run(config(tiny_data), stopped)
    assert not (stopped / "failed").exists()


def test_an_unfinished_run_asks_for_resume_and_a_finished_one_refuses(tiny_data: Path, stopped: Path) -> None:
    with pytest.raises(InputError, match="add --resume"):
        run(config(tiny_data), stopped)
    done = run(config(tiny_data), stopped, resume=True)
    with pytest.raises(InputError, match="finished run"):
        run(config(tiny_data), stopped)
    assert run(config(tiny_data), stopped, resume=True) == done


def test_a_folder_with_other_things_in_it_is_refused(tiny_data: Path, tmp_path: Path) -> None:
    (tmp_path / "holiday.jpg").write_bytes(b"x")
    with pytest.raises(InputError, match="is not a run"):
        run(config(tiny_data), tmp_path)


def test_a_full_disk_is_one_clear_error_and_loses_no_round(
    tiny_data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    original, written = os.fsync, []

    def fsync(handle: int) -> None:
        name = str(Path(f"/proc/self/fd/{handle}").readlink())
        if "round-00003" in name:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        written.append(name)
        original(handle)

    monkeypatch.setattr(os, "fsync", fsync)
    with pytest.raises(InputError, match="No space left") as caught:
        run(config(tiny_data), tmp_path / "run")
    assert caught.value.code == "disk" and written
    assert sorted(p.name for p in (tmp_path / "run" / "checkpoints").iterdir()) == [
        "round-00001.safetensors",
        "round-00002.safetensors",
    ]
    monkeypatch.undo()
    resumed = run(config(tiny_data), tmp_path / "run", resume=True)
    assert resumed["model_sha256"] == run(config(tiny_data), tmp_path / "whole")["model_sha256"]


def test_two_processes_cannot_write_one_run(tmp_path: Path) -> None:
    with (
        RunDirectory(tmp_path / "run").locked(),
        pytest.raises(InputError, match="in use"),
        RunDirectory(tmp_path / "run").locked(),
    ):
        pytest.fail("the second lock was granted")


def test_half_a_line_of_metrics_is_ignored_and_counted(tmp_path: Path) -> None:
    row = {"round": 1, "phase": "val", "site": "a", "name": "accuracy", "value": 0.5}
    (tmp_path / "metrics.jsonl").write_text(json.dumps(row) + "\n" + json.dumps(row)[:20])
    assert read_metrics(tmp_path / "metrics.jsonl") == ([row], 1)
