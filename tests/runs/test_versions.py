"""What an older version wrote still opens, predicts the same numbers and resumes; damaged files say what is wrong."""

from __future__ import annotations

import csv
import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import safetensors
import torch
from safetensors.torch import load_file, save_file

from fedshift import Run, __version__
from fedshift.errors import FedshiftError, InputError
from fedshift.federation import codec
from fedshift.runs.config import make_config, read_config
from fedshift.runs.execute import run
from fedshift.runs.files.checkpoint import read_checkpoint, write_checkpoint
from fedshift.runs.files.model import load_model
from fedshift.runs.predict import predict_files

KEPT = Path(__file__).parent.parent / "fixtures" / "v0.1.0"
METHODS = ("fedavg", "csac", "kd3a")


@pytest.fixture
def old(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy of what 0.1.0 wrote, where its configurations look for data."""
    monkeypatch.chdir(tmp_path)
    shutil.copytree(KEPT, "v0.1.0")
    return Path("v0.1.0")


def predictions(file: Path) -> list[dict[str, Any]]:
    with file.open(newline="") as lines:
        return list(csv.DictReader(lines))


@pytest.mark.parametrize("method", METHODS)
def test_a_model_of_0_1_0_predicts_the_same_numbers(old: Path, method: str) -> None:
    predict_files(old / f"{method}-finished", old / "new.csv", Path("now.csv"))
    now, then = predictions(Path("now.csv")), predictions(old / f"{method}-predictions.csv")
    assert len(now) == 12 and [row["prediction"] for row in now] == [row["prediction"] for row in then]
    for row, before in zip(now, then, strict=True):
        for name in ("p_dead", "p_ill", "p_well"):
            assert float(row[name]) == pytest.approx(float(before[name]), abs=2e-4)


@pytest.mark.parametrize("method", METHODS)
def test_a_run_of_0_1_0_resumes_to_the_model_that_0_1_0_would_have_made(old: Path, method: str) -> None:
    """Also where sites keep state (CSAC) and where the target is at the coordinator (KD3A)."""
    folder = old / f"{method}-stopped"
    values = read_config(folder / "config.yaml")
    results = run(make_config(values), folder, resume=True)
    assert results["rounds"] == 3
    then, now = load_file(old / f"{method}-finished" / "model.safetensors"), load_file(folder / "model.safetensors")
    assert set(then) == set(now)
    for key, value in then.items():
        torch.testing.assert_close(now[key], value, rtol=1e-3, atol=1e-4)
    environment = json.loads((folder / "env.json").read_text())
    assert environment["fedshift"] == "0.1.0" and environment["continued_by"] == [__version__]


def test_a_changed_setting_is_still_another_run(old: Path) -> None:
    values = read_config(old / "csac-stopped" / "config.yaml")
    for changed, named in (({"lr": 0.5}, "lr"), ({"csac": {**values["csac"], "lambda": 0.3}}, "csac.lambda_")):
        with pytest.raises(InputError, match=rf"another configuration \({named}\)"):
            run(make_config({**values, **changed}), old / "csac-stopped", resume=True)


def rewrite_header(file: Path, change: Any) -> None:
    """Writes a model file of 0.1.0 again with another header; it has no checksum."""
    with safetensors.safe_open(file, "pt") as opened:
        metadata = opened.metadata()
    header = json.loads(metadata["fedshift"])
    change(header)
    save_file(load_file(file), file, {**metadata, "fedshift": json.dumps(header)})


def test_headers_are_tolerant_of_unknown_and_of_missing_keys(old: Path) -> None:
    """As those of a model of 0.1.0 are: it has no checksum to keep up."""
    file = old / "fedavg-finished" / "model.safetensors"
    rewrite_header(file, lambda header: header["plan"].update(colour="blue", hyper={"invented": 1}))
    rewrite_header(file, lambda header: header["plan"]["model"].pop("freeze_norm"))
    rewrite_header(file, lambda header: header["plan"].pop("training"))
    header = load_model(file).header
    assert header.written_by == "0.1.0" and header.columns == ("age", "pulse", "pressure", "sugar")
    with pytest.raises(InputError, match="its SHA-256 is another"):
        Run(old / "fedavg-finished").predict([[1.0, 2.0, 3.0, 4.0]])
    results = old / "fedavg-finished" / "results.json"
    results.write_text(json.dumps(json.loads(results.read_text()) | {"model_sha256": codec.sha256(file.read_bytes())}))
    assert Run(old / "fedavg-finished").predict([[1.0, 2.0, 3.0, 4.0]]).shape == (1,)


def test_a_model_of_a_later_format_says_who_wrote_it(old: Path) -> None:
    file = old / "fedavg-finished" / "model.safetensors"
    rewrite_header(file, lambda header: header.update(format=9, written_by="7.0.0"))
    with pytest.raises(InputError, match=r"written by fedshift 7\.0\.0 .*format 9"):
        load_model(file)


@pytest.fixture
def finished(tmp_path: Path) -> Path:
    keys = {"data_dir": KEPT / "tables", "label_column": "outcome", "target": "west", "rounds": 2, "workers": 0}
    run(make_config({"method": "fedavg", **keys}), tmp_path / "run")
    return tmp_path / "run"


def test_models_and_checkpoints_are_safetensors_with_a_small_header(finished: Path) -> None:
    with safetensors.safe_open(finished / "model.safetensors", "pt") as opened:
        metadata = opened.metadata()
        assert "head.weight" in opened.keys()  # noqa: SIM118
    header = json.loads(metadata["fedshift"])
    assert header["format"] == 2 and header["classes"] == ["dead", "ill", "well"] and "lr" not in json.dumps(header)
    assert len(header["sha256"]) == 64
    for file in (finished / "checkpoints").iterdir():
        with safetensors.safe_open(file, "pt") as opened:
            assert json.loads(opened.metadata()["fedshift"])["written_by"] == __version__ and len(opened.keys()) > 0


@pytest.mark.parametrize("what", ["model.safetensors", "checkpoints/round-00002.safetensors"])
def test_one_flipped_bit_is_noticed(finished: Path, what: str) -> None:
    file = finished / what
    data = bytearray(file.read_bytes())
    data[-5] ^= 1
    file.write_bytes(data)
    with pytest.raises(FedshiftError, match=r"does not match its checksum") as caught:
        load_model(file) if what.startswith("model") else read_checkpoint(file)
    assert caught.value.code == "run-corrupt"


def test_a_checkpoint_of_a_later_format_says_who_wrote_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from fedshift.runs.files import checkpoint

    monkeypatch.setattr(checkpoint, "FORMAT", 9)
    monkeypatch.setattr(checkpoint, "__version__", "7.0.0")
    write_checkpoint(tmp_path / "c.safetensors", {"round": 1})
    monkeypatch.undo()
    with pytest.raises(FedshiftError, match=r"written by fedshift 7\.0\.0 in format 9"):
        read_checkpoint(tmp_path / "c.safetensors")


@pytest.mark.parametrize("data", [b"", b"\0" * 40, b"\xff" * 200, b"{}" * 50])
def test_bytes_that_are_no_file_of_ours_are_one_clear_error(tmp_path: Path, data: bytes) -> None:
    file = tmp_path / "file.safetensors"
    file.write_bytes(data)
    with pytest.raises(InputError, match="not a fedshift model file"):
        load_model(file)
    with pytest.raises(FedshiftError, match="is damaged"):
        read_checkpoint(file)


@pytest.mark.parametrize("mean", [[0.5, 0.5], [float("nan")], ["a"], 3])
def test_a_header_with_impossible_numbers_is_one_clear_error(finished: Path, mean: object) -> None:
    file = finished / "model.safetensors"
    tensors, metadata = codec.read_safetensors(file.read_bytes())
    header = {**codec.read_header(metadata), "mean": mean}
    header.pop("sha256")
    file.write_bytes(codec.seal(tensors, header))
    with pytest.raises(InputError, match=f"written by fedshift {__version__} and cannot be read"):
        load_model(file)


def test_a_damaged_configuration_or_environment_does_not_resume_by_a_traceback(old: Path) -> None:
    folder = old / "fedavg-stopped"
    values = read_config(folder / "config.yaml")
    (folder / "env.json").write_text(json.dumps({"fedshift": "0.1.0", "continued_by": 5}))
    assert run(make_config(values), folder, resume=True)["rounds"] == 3
    stopped = old / "csac-stopped"
    values = read_config(stopped / "config.yaml")
    text = (stopped / "config.yaml").read_text()
    (stopped / "config.yaml").write_text(text[: text.index("\ncsac:")] + "\ncsac: [1, 2]\n")
    with pytest.raises(InputError, match=r"another configuration \(csac\)"):
        run(make_config(values), stopped, resume=True)
