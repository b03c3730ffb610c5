"""Exported models predict what `fedshift predict` does, in runtimes that know nothing of fedshift."""

from __future__ import annotations

import csv
import json
import re
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors import safe_open
from safetensors.torch import load_file
from tinydata import shapes
from typer.testing import CliRunner

import fedshift
from fedshift.cli.app import app
from fedshift.errors import InputError
from fedshift.handover import export
from fedshift.handover.export import Format, export_model
from fedshift.runs.predict import predict_files

PAGE = Path(__file__).parents[2] / "docs" / "after-training.md"
TINY: dict[str, Any] = {"rounds": 1, "batch_size": 16, "workers": 0, "arch": "digits-copa"}


@pytest.fixture(scope="module")
def run(tiny_data: Path, tmp_path_factory: pytest.TempPathFactory) -> fedshift.Run:
    """COPA: hybrid norms, which no library knows."""
    out = tmp_path_factory.mktemp("export") / "run"
    return fedshift.fit("copa", data=tiny_data, target="dim", out=out, **TINY)


@pytest.fixture(scope="module")
def pictures(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("pages") / "new-pictures"
    folder.mkdir()
    for number, image in enumerate(shapes(6, (0.6, 0.8, 0.7), 0.1, 77)[0]):
        Image.fromarray(image).resize((40, 52)).save(folder / f"{number}.png")
    return folder


def snippet(word: str) -> str:
    found = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)
    return next(text for text in found if word in text)


def as_in_the_docs(word: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """The variables after the documentation's lines were run in a folder."""
    text = snippet(word)
    assert "fedshift" not in re.findall(r"^(?:import|from) (\w+)", text, re.MULTILINE)
    monkeypatch.chdir(folder)
    names: dict[str, Any] = {}
    exec(compile(text, word, "exec", dont_inherit=True), names)
    return names


def first_prediction(run: fedshift.Run, pictures: Path, out: Path, **keys: Any) -> list[float]:
    predict_files(run.path, pictures, out, **keys)
    row = next(csv.DictReader(out.open()))
    return [float(row[key]) for key in row if key.startswith("p_")]


@pytest.mark.slow
def test_onnx_gives_what_predict_gives(
    run: fedshift.Run, pictures: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shown = CliRunner().invoke(app, ["export", str(run.path), "--out", str(tmp_path / "model.onnx")])
    assert shown.exit_code == 0 and "on 100 samples from the run's own data" in shown.output
    assert "e-0" in shown.output or "0.0e+00" in shown.output
    shutil.copytree(pictures, tmp_path / "new-pictures")
    found = as_in_the_docs("onnxruntime", tmp_path, monkeypatch)
    assert found["probabilities"] == pytest.approx(first_prediction(run, pictures, tmp_path / "p.csv"), abs=1e-4)
    assert found["about"]["output"]["classes"] == run.results["classes"]
    data = (tmp_path / "model.onnx").read_bytes()
    for secret in (str(Path(fedshift.__file__).parent), "amber", "coral"):  # neither paths nor names of sites
        assert secret.encode() not in data


@pytest.mark.slow
def test_plain_pytorch_gives_what_predict_gives(
    run: fedshift.Run, pictures: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (made,) = export_model(run.path, tmp_path / "model.pt2", "torch", check=pictures)
    assert made.largest_difference <= 1e-6 and made.samples == 6
    shutil.copytree(pictures, tmp_path / "new-pictures")
    found = as_in_the_docs("torch.export", tmp_path, monkeypatch)
    wanted = first_prediction(run, pictures, tmp_path / "p.csv")
    assert found["probabilities"].tolist() == pytest.approx(wanted, abs=1e-4)
    data = (tmp_path / "model.pt2").read_bytes()
    assert str(Path(fedshift.__file__).parent).encode() not in data
    assert b'use_pickle": true' not in data


def test_safetensors_are_the_weights_of_the_network(run: fedshift.Run, tmp_path: Path) -> None:
    (made,) = export_model(run.path, tmp_path / "w.safetensors", "safetensors")
    assert made.largest_difference == 0
    with safe_open(made.path, "pt") as file:
        assert {key: file.get_tensor(key).sum().item() for key in file.keys()} == {  # noqa: SIM118
            key: value.sum().item() for key, value in run.model().models[""].items()
        }
        about = json.loads(file.metadata()["fedshift"])
    assert about["input"]["shape"] == ["n", 16, 16, 3] and about["method"] == "copa"


def test_a_model_that_differs_is_not_written(
    run: fedshift.Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(export, "expected", lambda net, header, inputs: np.zeros((len(inputs), 3)))
    with pytest.raises(InputError, match="differs from the run's by up to") as raised:
        export_model(run.path, tmp_path / "w.safetensors", "safetensors")
    assert raised.value.code == "export-failed" and not list(tmp_path.iterdir())


def test_without_the_data_the_check_uses_drawn_inputs(run: fedshift.Run, tmp_path: Path) -> None:
    moved = tmp_path / "moved"
    shutil.copytree(run.path, moved)
    text = (moved / "config.yaml").read_text()
    (moved / "config.yaml").write_text(re.sub(r"data_dir: .*", "data_dir: /nowhere", text))
    (moved / "done").write_text("")
    (made,) = export_model(moved, tmp_path / "w.safetensors", "safetensors")
    assert "at random" in made.checked_on and made.samples == 100


def test_a_missing_package_is_named(run: fedshift.Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(export.importlib.util, "find_spec", lambda name: None if name == "onnxscript" else name)
    with pytest.raises(InputError, match=r"needs onnxscript: pip install 'fedshift\[export\]'"):
        export_model(run.path, tmp_path / "m.onnx")


def test_every_client_gets_a_file(tiny_data: Path, tmp_path: Path) -> None:
    """With statistics of its own in each."""
    keys = {**TINY, "setting": "multi-adapt", "norm": "own"}
    run = fedshift.fit("fedavg", data=tiny_data, home="amber", out=tmp_path / "run", **keys)
    made = export_model(run.path, tmp_path / "m.safetensors", "safetensors")
    assert {one.path.name for one in made} == {f"m{end}.safetensors" for end in ("", "-blue", "-coral", "-dim")}
    saved, means = run.model(), set()
    for one in made:
        weights = load_file(one.path)
        own = saved.models[saved.choose(None if one.path.stem == "m" else one.whose)]
        assert weights.keys() == own.keys() and all(torch.equal(weights[key], own[key]) for key in own)
        means.add(next(value.sum().item() for key, value in weights.items() if key.endswith("running_mean")))
    assert len(means) == 4
    (only,) = export_model(run.path, tmp_path / "one.safetensors", "safetensors", site="blue")
    assert only.whose == "blue" and only.path.exists()


@pytest.fixture(scope="module")
def other_runs(tiny_data: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, fedshift.Run]:
    out = tmp_path_factory.mktemp("others")
    streets = {"dataset": "streets", "target": "dunes", "rounds": 1, "train_per_site": 16, "local_epochs": 1}
    return {
        "masks": fedshift.fit("fedavg", out=out / "s", **streets),
        "ensemble": fedshift.fit("shot", data=tiny_data, target="dim", out=out / "e", **{**TINY, "rounds": 2}),
        "rows": fedshift.fit("fedavg", data=_tables(), target="west", rounds=1, out=out / "t"),
    }


@pytest.mark.slow
@pytest.mark.xdist_group("exports")
@pytest.mark.parametrize("format", ["onnx", "torch"])
@pytest.mark.parametrize("kind", ["masks", "ensemble", "rows"])
def test_other_kinds_of_models(format: Format, kind: str, other_runs: dict[str, fedshift.Run], tmp_path: Path) -> None:
    (made,) = export_model(other_runs[kind].path, tmp_path / "file", format)
    assert made.largest_difference <= 1e-5


def _tables() -> dict[str, Any]:
    rng = np.random.default_rng(0)
    found = {}
    for number, site in enumerate(("north", "south", "west")):
        x = rng.normal(number, 1 + number, (80, 5)).astype(np.float32)
        x[rng.random(x.shape) < 0.1] = np.nan
        found[site] = (x, (np.nan_to_num(x[:, 0]) > number).astype(np.int64))
    return found
