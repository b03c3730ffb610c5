"""Trackers: the very rows of metrics.jsonl, each once, also when a run is interrupted and goes on."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

import fedshift
from fedshift import cli
from fedshift.errors import InputError
from fedshift.runs import execute
from fedshift.runs.config import make_config
from fedshift.runs.directory import RunDirectory, read_metrics
from fedshift.runs.execute import run
from fedshift.runs.tracking import Tracking, _mlflow_key

Places = dict[tuple[str, int], float]


def settings(data: Path) -> dict[str, Any]:
    keys = {"method": "fedavg", "data_dir": data, "target": "dim", "sources": ("amber", "blue"), "rounds": 3}
    return keys | {"batch_size": 16, "arch": "digits-copa", "workers": 0, "policy": {"min_samples": 2}}


def written(folder: Path) -> Places:
    """What metrics.jsonl has, without times, which differ when a round is repeated."""
    rows = read_metrics(folder / "metrics.jsonl")[0]
    tags = {(_mlflow_key(row), row["round"]): row["value"] for row in rows if row["name"] != "seconds"}
    return {place: value for place, value in tags.items() if value is not None}


def interrupted(data: Path, out: Path, monkeypatch: pytest.MonkeyPatch, track: tuple[str, ...]) -> None:
    """A run that ends after round 2 was logged and before its checkpoint was written: round 2 will be repeated."""
    save = RunDirectory.save_checkpoint

    def fail(self: RunDirectory, round: int, tree: Any) -> None:
        if round == 2:
            raise KeyboardInterrupt
        save(self, round, tree)

    with monkeypatch.context() as patch:
        patch.setattr(RunDirectory, "save_checkpoint", fail)
        with pytest.raises(KeyboardInterrupt):
            run(make_config(settings(data)), out, track=track)
    assert {row["round"] for row in read_metrics(out / "metrics.jsonl")[0]} == {1, 2}


def board(folder: Path) -> list[tuple[str, int, float]]:
    """Every scalar in the event files, as often as it is there."""
    pytest.importorskip("tensorboard", reason="the extra `tensorboard` is not installed")
    from tensorboard.backend.event_processing.event_file_loader import EventFileLoader

    found = []
    for path in sorted((folder / "tensorboard").glob("events.*")):
        for event in EventFileLoader(str(path)).Load():
            for value in event.summary.value:
                if value.metadata.plugin_data.plugin_name == "scalars":
                    found.append((value.tag, event.step, value.tensor.float_val[0]))
    return found


def test_tensorboard_has_every_row_once(tiny_data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("tensorboard", reason="the extra `tensorboard` is not installed")
    out = tmp_path / "run"
    interrupted(tiny_data, out, monkeypatch, ("tensorboard",))
    assert {step for _, step, _ in board(out)} == {1, 2}
    run(make_config(settings(tiny_data)), out, resume=True, track=("tensorboard",))
    scalars = [(tag, step, value) for tag, step, value in board(out) if tag != "round/seconds"]
    assert {(tag, step): pytest.approx(value, rel=1e-6) for tag, step, value in scalars} == written(out)
    assert len(scalars) == len({(tag, step) for tag, step, _ in scalars})


def test_tracking_that_begins_in_the_middle_has_the_rounds_before(
    tiny_data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("tensorboard", reason="the extra `tensorboard` is not installed")
    out = tmp_path / "run"
    interrupted(tiny_data, out, monkeypatch, ())
    assert not (out / "tensorboard").exists()
    run(make_config(settings(tiny_data)), out, resume=True, track=("tensorboard",))
    assert {(tag, step) for tag, step, _ in board(out) if tag != "round/seconds"} == set(written(out))


@pytest.mark.slow
def test_mlflow_has_every_row_once(tiny_data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("mlflow", reason="the extra `mlflow` is not installed")
    pytest.importorskip("alembic", reason="the extra `mlflow` is not installed")
    from mlflow.tracking import MlflowClient

    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    out = tmp_path / "run"
    interrupted(tiny_data, out, monkeypatch, ("mlflow",))
    kept = json.loads((out / "mlflow.json").read_text())
    assert kept["uri"] == f"sqlite:///{tmp_path / 'mlflow.db'}"
    client = MlflowClient(tracking_uri=kept["uri"])
    assert client.get_run(kept["run"]).info.status == "KILLED"
    run(make_config(settings(tiny_data)), out, resume=True, track=("mlflow",))
    found = client.get_run(kept["run"])
    assert found.info.status == "FINISHED" and found.info.run_name == "run"
    assert found.data.params["target"] == "dim" and found.data.params["rounds"] == "3"
    points = [p for key in found.data.metrics for p in client.get_metric_history(kept["run"], key)]
    places = [(p.key, p.step) for p in points if p.key != "round/seconds"]
    assert len(places) == len(set(places))
    assert {(p.key, p.step): p.value for p in points if p.key != "round/seconds"} == pytest.approx(written(out))
    [experiment] = [e for e in client.search_experiments() if e.name == "fedshift"]
    assert len(client.search_runs([experiment.experiment_id])) == 1


def test_names_become_keys_that_mlflow_takes_and_stay_apart() -> None:
    def key(site: str) -> str:
        return _mlflow_key({"phase": "test", "name": "accuracy", "site": site})

    assert key("photo") == "test/accuracy/photo" and key("") == "test/accuracy"
    odd = ["a<b", "a>b", "..", ".", "a/b", "東京", "x" * 70, "x" * 71, " a"]
    keys = [key(site) for site in odd]
    assert len(set(keys)) == len(odd)
    for text in keys:
        assert text.count("/") == 2 and all(c.isascii() and (c.isalnum() or c in "_-. /") for c in text)
        assert text.split("/")[2].strip(". ") == text.split("/")[2]


@pytest.mark.parametrize("name", ["tensorboard", "mlflow"])
def test_a_missing_package_is_one_clear_error(
    name: str, tiny_data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, name, None)
    words = ["train", "--data-dir", str(tiny_data), "--target", "dim", "--track", name, "--out", str(tmp_path / "run")]
    monkeypatch.setattr(sys, "argv", ["fedshift", *words])
    with pytest.raises(SystemExit) as stop:
        cli.main()
    assert stop.value.code == 2
    [line] = capsys.readouterr().err.strip().splitlines()
    assert line.startswith("error [tracker]") and f'pip install "fedshift[{name}]"' in line
    assert not (tmp_path / "run").exists(), "nothing was begun"


def test_an_unknown_tracker_names_the_nearest() -> None:
    with pytest.raises(InputError, match="Did you mean 'tensorboard'"):
        Tracking(["tensorbord"], make_config({}), Path("run"))


class Broken:
    """A tracker that breaks in round 2."""

    def __init__(self, *_: Any) -> None:
        self.rounds: list[int] = []

    def begin(self, rows: Any) -> None:
        pass

    def log(self, rows: Any) -> None:
        if rows[0]["round"] == 2:
            raise ConnectionError("the server is gone\nand more")
        self.rounds.append(rows[0]["round"])

    def end(self, finished: bool) -> None:
        raise AssertionError("it was dropped before")


def test_a_tracker_that_breaks_does_not_take_the_run_with_it(
    tiny_data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from fedshift.runs import tracking
    from fedshift.runs.progress import Silent

    told: list[str] = []

    class Told(Silent):
        def message(self, text: str) -> None:
            told.append(text)

    broken = Broken()
    monkeypatch.setitem(tracking.TRACKERS, "broken", lambda config, folder: broken)
    keys = settings(tiny_data)
    fedshift.fit(keys.pop("method"), out=tmp_path / "run", track=["broken"], progress=Told(), **keys)
    assert broken.rounds == [1] and (tmp_path / "run" / "done").exists()
    assert [t for t in told if "broken failed" in t] == [
        "broken failed (ConnectionError: the server is gone): the run goes on, metrics.jsonl has everything"
    ]


def test_a_place_that_cannot_be_written_is_an_error_at_the_start(
    tiny_data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("tensorboard", reason="the extra `tensorboard` is not installed")
    monkeypatch.setattr(execute, "read_metrics", lambda path: ([{"value": 1.0}], 0))  # A row without its keys.
    with pytest.raises(InputError, match="tensorboard cannot be written to") as error:
        run(make_config(settings(tiny_data)), tmp_path / "run", track=("tensorboard",))
    assert error.value.code == "tracker"
