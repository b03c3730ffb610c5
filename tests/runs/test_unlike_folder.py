"""Many inputs show that they are from a place that looks different, where single ones do not."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from tinydata import TINTS, shapes
from typer.testing import CliRunner

import fedshift
from fedshift.cli.app import app
from fedshift.errors import InputError
from fedshift.handover.adapt import adapt_run
from fedshift.handover.estimate import FILE, left_out_gaps, overconfidence
from fedshift.runs.files.model import load_model, save_model
from fedshift.runs.predict import predict_files


def put(folder: Path, images: np.ndarray) -> Path:
    folder.mkdir()
    for number, image in enumerate(images):
        Image.fromarray(image).save(folder / f"{number:03}.png")
    return folder


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> fedshift.Run:
    data = {name: shapes(300, TINTS[name], 0.25, seed) for seed, name in enumerate(("amber", "blue", "coral", "dim"))}
    out = tmp_path_factory.mktemp("unlike") / "run"
    return fedshift.fit("fedavg", data=data, target="dim", rounds=3, batch_size=16, workers=0, out=out)


def test_a_folder_that_looks_different_is_told_and_one_of_a_source_is_not(run: fedshift.Run, tmp_path: Path) -> None:
    usual = run.model().header.usual
    assert usual is not None and len(usual.sure) == 3 and all(site.samples >= 20 for site in usual.sure)
    known = put(tmp_path / "known", shapes(100, TINTS["blue"], 0.25, 99)[0])
    assert predict_files(run.path, known, tmp_path / "known.csv").together == ""
    other = put(tmp_path / "other", 255 - shapes(100, (0.9, 0.9, 0.2), 0.4, 99)[0])
    told = predict_files(run.path, other, tmp_path / "other.csv").together
    assert "these 100 look unlike each source's data" in told
    shown = CliRunner().invoke(app, ["predict", str(run.path), str(other), "--out", str(tmp_path / "again.csv")])
    assert "look unlike each source's data" in shown.output.replace("\n", " ")
    for path in sorted(other.iterdir())[10:]:
        path.unlink()
    assert predict_files(run.path, other, tmp_path / "few.csv").together == ""


def test_what_is_usual_is_in_the_models_file_and_a_lie_is_refused(run: fedshift.Run, tmp_path: Path) -> None:
    saved = run.model()
    usual = saved.header.usual
    assert usual is not None
    save_model(tmp_path / "model.safetensors", saved)
    assert load_model(tmp_path / "model.safetensors").header.usual == usual
    wrong = dataclasses.replace(usual, edges=(*usual.edges, 1.0))
    save_model(
        tmp_path / "bad.safetensors", dataclasses.replace(saved, header=dataclasses.replace(saved.header, usual=wrong))
    )
    with pytest.raises(InputError, match="usual at its sources"):
        load_model(tmp_path / "bad.safetensors")


def test_confidence_minus_accuracy_of_counts() -> None:
    parts = [[0, 0]] * 20
    parts[18] = [6, 4]  # confidence 0.925, right in 4 of 10
    results = {"calibration": {"targets": {"east": {"before": {}, "after": {"parts": parts}}}}}
    assert overconfidence(results, "east") == pytest.approx(0.525)
    assert overconfidence(results, "west") is None


def test_estimates_at_a_new_site_are_corrected_by_what_was_off_at_left_out_sites(
    run: fedshift.Run, tmp_path: Path
) -> None:
    folder = put(tmp_path / "new", shapes(40, TINTS["dim"], 0.3, 7)[0])
    plain = adapt_run(run.path, folder, tmp_path / "plain")
    assert plain.gaps == () and any("fedshift estimate RUN" in line for line in plain.lines())
    beside = run.path.with_name(f"{run.path.name}-left-out")
    beside.mkdir()
    told = {"overconfidence": {"amber": 0.1, "blue": 0.2}, "run_model_sha256": run.results["model_sha256"]}
    (beside / FILE).write_text(json.dumps(told))
    corrected = adapt_run(run.path, folder, tmp_path / "corrected")
    assert corrected.expected[0] == pytest.approx(plain.expected[0] - 0.15)
    assert any("2 sites that were left out: by +10.0 to +20.0 points" in line for line in corrected.lines())
    assert torch.equal(corrected.kept.net.state_dict()["head.bias"], plain.kept.net.state_dict()["head.bias"])
    for broken in ("[]", '{"run_model_sha256": "of another model", "overconfidence": {"a": 0.1}}', "{"):
        (beside / FILE).write_text(broken)
        assert left_out_gaps(run) == []
