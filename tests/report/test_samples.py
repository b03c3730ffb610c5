"""Maps of features and samples: real runs on tiny data, and the parts on numbers worked out by hand."""

from __future__ import annotations

import base64
import io
import json
import re
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from runfiles import write_run

import fedshift
from fedshift.data.domain import VOID, Split
from fedshift.report import write_report
from fedshift.report.feature_map import feature_maps
from fedshift.report.samples import (
    FILE,
    FeaturePoints,
    class_colour,
    data_view,
    overlay,
    predicted_images,
    predicted_masks,
)
from fedshift.runs.features import NetworkOutputs, network_outputs
from fedshift.runs.record import read_record

TRAINING = {"rounds": 1, "batch_size": 8, "arch": "digits-copa", "workers": 0, "policy": {"min_samples": 2}}


@pytest.fixture(scope="module")
def trained(tiny_data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("gallery") / "run"
    return fedshift.fit("fedavg", out=out, data_dir=tiny_data, target="dim", **TRAINING).path


def test_samples_are_right_or_wrong_and_the_surest_mistakes_come_first() -> None:
    split = Split(np.zeros((4, 8, 8, 3), np.uint8), np.array([0, 1, 1, 0]))
    probabilities = torch.tensor([[0.9, 0.1], [0.6, 0.4], [0.8, 0.2], [0.7, 0.3]])
    random, mistakes, unsure = predicted_images(split, probabilities, ("cat", "dog"), 2)
    assert [round(s.confidence, 1) for s in unsure] == [0.6]
    assert [(s.prediction, s.truth, s.is_right) for s in random] == [("cat", "cat", True), ("cat", "dog", False)]
    assert [round(s.confidence, 1) for s in mistakes] == [0.8, 0.6]
    unlabelled, none, _ = predicted_images(split.without_labels(), probabilities, ("cat", "dog"), 2)
    assert [s.is_right for s in unlabelled] == [None, None] and none == []


def test_masks_are_coloured_and_unlabelled_pixels_stay_grey() -> None:
    image = np.full((2, 2, 3), (30, 60, 90), np.uint8)
    mixed = overlay(image, np.array([[0, 1], [VOID, 1]], np.uint8), 2)
    assert mixed[1, 0].tolist() == [60, 60, 60]
    expected = [round(0.68 * part + 0.32 * 60) for part in class_colour(1, 2)]
    assert mixed[0, 1].tolist() == mixed[1, 1].tolist() == expected
    split = Split(image[None], np.array([[[0, 1], [VOID, 1]]], np.uint8))
    [scene] = predicted_masks(split, torch.tensor([[[[1.0, 1.0], [1.0, 0.0]], [[0.0, 0.0], [0.0, 1.0]]]]), 2, 3)
    assert scene.score == pytest.approx(2 / 3), "one of three labelled pixels is wrong"


def test_a_run_has_maps_and_samples_of_every_domain(trained: Path) -> None:
    made = data_view(read_record(trained), make=True, points=40)
    features = made.features
    assert (
        features is not None and features.domains == ["amber", "blue", "coral", "dim"] and features.targets == ["dim"]
    )
    assert len(features.before) == len(features.after) == len(features.label) == 40
    assert set(features.label) == {0, 1, 2} and features.before != features.after
    assert [(s.domain, s.is_target) for s in made.samples] == [
        ("dim", True),
        *((n, False) for n in ("amber", "blue", "coral")),
    ]
    image = Image.open(io.BytesIO(base64.b64decode(made.samples[0].random[0].image)))
    assert image.format == "JPEG" and image.size == (16, 16)


def test_what_is_predicted_for_samples_is_what_the_run_predicts(trained: Path) -> None:
    made = data_view(read_record(trained), make=True, points=40)
    from fedshift.report.samples import _random_samples
    from fedshift.runs.config import make_config, read_config
    from fedshift.runs.planning import prepare

    dataset = prepare(make_config(read_config(trained / "config.yaml"))).dataset
    split = _random_samples(dataset, "dim", 12)
    expected = fedshift.Run(trained).predict(split.inputs)
    assert [shot.prediction for shot in made.samples[0].random] == [dataset.classes[k] for k in expected]


def test_it_is_kept_and_made_anew_for_another_model(trained: Path) -> None:
    record = read_record(trained)
    first = data_view(record, make=True, points=40)
    kept = json.loads((trained / FILE).read_text())
    kept["notes"] = ["as kept"]
    (trained / FILE).write_text(json.dumps(kept))
    assert data_view(record, make=True, points=40).notes == ["as kept"]
    assert data_view(record, make=False).notes == ["as kept"], "fewer points than usual are better than none"
    kept["key"] = "of another model"
    (trained / FILE).write_text(json.dumps(kept))
    assert data_view(record, make=True, points=40) == first
    (trained / FILE).write_text('{"strips": 3')
    assert data_view(record, make=True, points=40) == first


def test_what_version_0_1_kept_is_still_shown(trained: Path, tmp_path: Path) -> None:
    first = data_view(read_record(trained), make=True, points=40)
    kept = json.loads((trained / FILE).read_text())
    kept["cloud"], kept["strips"] = kept.pop("features"), kept.pop("samples")
    old = shutil.copytree(trained, tmp_path / "old")
    (old / FILE).write_text(json.dumps(kept))
    assert data_view(read_record(old), make=False) == first and first.features is not None and first.samples


def test_a_kept_picture_that_is_none_is_not_believed(trained: Path) -> None:
    record = read_record(trained)
    first = data_view(record, make=True, points=40)
    kept = json.loads((trained / FILE).read_text())
    kept["samples"][0]["random"][0]["image"] = 'x" onerror="alert(1)'
    (trained / FILE).write_text(json.dumps(kept))
    assert data_view(record, make=True, points=40) == first


def test_without_the_data_a_note_says_why(trained: Path, tmp_path: Path) -> None:
    without_model = write_run(tmp_path / "a")
    [note] = data_view(read_record(without_model), make=True).notes
    assert "cannot be opened on this machine" in note and "model.safetensors" in note
    moved = tmp_path / "moved"
    shutil.copytree(trained, moved)
    (moved / FILE).unlink(missing_ok=True)
    (moved / "done").write_text("")  # Changed by hand, and with a right to it.
    config = (moved / "config.yaml").read_text()
    (moved / "config.yaml").write_text(re.sub("data_dir: .*", f"data_dir: {tmp_path / 'gone'}", config))
    [note] = data_view(read_record(moved), make=True).notes
    assert "cannot be opened on this machine" in note and "gone" in note
    assert not (moved / FILE).exists(), "it may be there next time"
    unfinished = write_run(tmp_path / "b", finished=False)
    assert data_view(read_record(unfinished), make=True).notes == [
        "Maps of features and samples appear when the run is finished."
    ]


def test_a_model_that_diverged_has_no_map(trained: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import fedshift.report.samples as module

    def broken(net: torch.nn.Module, inputs: torch.Tensor) -> NetworkOutputs:
        seen = network_outputs(net, inputs)
        return NetworkOutputs(seen.features * torch.nan, seen.probabilities)

    monkeypatch.setattr(module, "network_outputs", broken)
    (trained / FILE).unlink(missing_ok=True)
    made = data_view(read_record(trained), make=True, points=40)
    (trained / FILE).unlink()
    assert made.features is None and made.notes == ["The model's features are not finite: there is no map of them."]


def test_no_features_leaves_out_even_what_is_kept(trained: Path, tmp_path: Path) -> None:
    write_report([trained], tmp_path / "with.html", points=40)
    write_report([trained], tmp_path / "without.html", features=False)
    assert (tmp_path / "with.html").read_text().count("data:image/jpeg") > 20
    assert "data:image" not in (tmp_path / "without.html").read_text()


def test_of_many_runs_galleries_are_made_only_if_asked_for(tmp_path: Path) -> None:
    runs = [write_run(tmp_path / str(seed), seed=seed) for seed in range(8)]
    told: list[str] = []
    write_report(runs, tmp_path / "report.html", say=told.append)
    assert told == [] and (tmp_path / "report.html").read_text().count("are not made yet") == 8
    write_report(runs[:7], tmp_path / "report.html", say=told.append)
    assert told == [f"looking at samples and features of {run}" for run in runs[:7]]
    told.clear()
    write_report(runs, tmp_path / "report.html", features=True, say=told.append)
    assert len(told) == 8


@pytest.mark.parametrize("method", ["copa", "fedsr", "ind-ensemble", "single-site"])
def test_networks_of_every_form_have_features(method: str, tiny_data: Path, tmp_path: Path) -> None:
    run = fedshift.fit(method, out=tmp_path / "run", data_dir=tiny_data, target="dim", **TRAINING)
    made = data_view(read_record(run.path), make=True, points=40)
    assert made.features is not None and len(made.features.after) == (36 if method == "single-site" else 40)
    assert ("dim is left out: the run has no model for it." in made.notes) == (method == "single-site")


def test_segmentation_has_scenes_beside_their_truth(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    for name in ("home", "away"):
        for folder in ("images", "masks"):
            (tmp_path / "data" / name / folder).mkdir(parents=True)
        for number in range(12):
            mask = np.zeros((32, 32), np.uint8)
            mask[:, rng.integers(8, 24) :] = 1
            picture = np.repeat(mask[..., None] * 200, 3, 2).astype(np.uint8)
            Image.fromarray(picture).save(tmp_path / "data" / name / "images" / f"{number}.png")
            Image.fromarray(mask).save(tmp_path / "data" / name / "masks" / f"{number}.png")
    keys = {**TRAINING, "arch": "segnet-small"}
    run = fedshift.fit(
        "source-only", setting="multi-adapt", out=tmp_path / "run", data_dir=tmp_path / "data", home="home", **keys
    )
    made = data_view(read_record(run.path), make=True)
    assert [(s.domain, s.is_target) for s in made.samples] == [("away", True), ("home", False)]
    scene = made.samples[0].scenes[0]
    assert scene.truth is not None and scene.score is not None and 0 <= scene.score <= 1
    assert made.features is not None and set(made.features.label) == {0, 1}
    write_report([run.path], tmp_path / "report.html")
    assert ">truth</figcaption>" in (tmp_path / "report.html").read_text()


def test_dots_are_grouped_by_class_and_by_domain() -> None:
    features = FeaturePoints(
        domains=["a", "t"],
        targets=["t"],
        classes=["cat", "dog"],
        domain=[0, 0, 1],
        label=[0, 1, -1],
        before=[(0, 0), (1, 1), (0.5, 0.5)],
        after=[(0, 1), (0, 1), (0, 1)],
    )
    maps = feature_maps(features, {"a": "c1", "t": "c2"})
    assert [(m.title, m.note) for m in maps.maps] == [
        (when, how) for when in ("Before", "After") for how in ("by class", "by domain")
    ]
    by_class, by_domain = maps.maps[:2]
    assert [(d.name, d.hue, d.is_target, d.path) for d in by_class.dots] == [
        ("cat", 0, False, "M30 970h0"),
        ("dog", 180, False, "M970 30h0"),
        ("no label", None, True, "M500 500h0"),
    ]
    assert [(d.name, d.style, d.path) for d in by_domain.dots] == [
        ("a", "c1", "M30 970h0M970 30h0"),
        ("t", "c2", "M500 500h0"),
    ]
    unlabelled = features.model_copy(update={"label": [-1, -1, -1]})
    assert [m.note for m in feature_maps(unlabelled, {}).maps] == ["by domain", "by domain"]
