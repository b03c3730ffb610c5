"""A finished model is fitted to a new site without labels; the result is a run like any other."""

from __future__ import annotations

import csv
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from tinydata import shapes
from typer.testing import CliRunner

import fedshift
from fedshift.cli.app import app
from fedshift.errors import InputError
from fedshift.handover.adapt import _kept, adapt_run
from fedshift.handover.export import export_model
from fedshift.handover.serve import ServedModel
from fedshift.handover.transfer import ADAPTED, AS_IT_WAS, STATISTICS, State
from fedshift.report import write_report
from fedshift.runs.predict import predict_files

TINY: dict[str, Any] = {"rounds": 3, "batch_size": 16, "workers": 0, "arch": "digits-copa", "lr": 0.05}


def write_site(folder: Path, count: int = 90, labelled: bool = False) -> Path:
    """A site whose pictures are negatives of what the others have."""
    images, labels = shapes(count, (0.7, 0.7, 0.9), 0.1, 4)
    for number, (image, label) in enumerate(zip(images, labels, strict=True)):
        place = folder / str(label) if labelled else folder
        place.mkdir(parents=True, exist_ok=True)
        Image.fromarray(255 - image).save(place / f"{number}.png")
    return folder


@pytest.fixture(scope="module")
def run(tiny_data: Path, tmp_path_factory: pytest.TempPathFactory) -> fedshift.Run:
    return fedshift.fit("fedavg", data=tiny_data, out=tmp_path_factory.mktemp("adapt") / "run", **TINY)


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_site(tmp_path_factory.mktemp("sites") / "harbour")


def test_the_result_is_a_run(run: fedshift.Run, site: Path, tmp_path: Path) -> None:
    out = tmp_path / "new"
    words = ["adapt", str(run.path), str(site), "--out", str(out), "--epochs", "2", "--keep", "adapted"]
    shown = CliRunner().invoke(app, words)
    assert shown.exit_code == 0, shown.output
    assert "Estimated accuracy, without any label" in shown.output and "kept: adapted" in shown.output
    adapted = fedshift.Run(out)
    assert adapted.results["target"] == "harbour" and adapted.results["setting"] == "adapt"
    assert [state["name"] for state in adapted.results["adapted"]["states"]] == [AS_IT_WAS, STATISTICS, ADAPTED]
    head = {key: value for key, value in run.model().models[""].items() if key.startswith("head.")}
    assert head and all(torch.equal(adapted.model().models[""][key], value) for key, value in head.items())
    assert not torch.equal(
        adapted.model().models[""]["backbone.block1.conv.weight"], run.model().models[""]["backbone.block1.conv.weight"]
    )
    assert predict_files(out, site, tmp_path / "p.csv").predicted == 90
    assert export_model(out, tmp_path / "m.safetensors", "safetensors")[0].largest_difference == 0
    assert ServedModel(out).header.classes == run.model().header.classes
    write_report([out], tmp_path / "report.html", features=False)
    assert "harbour" in (tmp_path / "report.html").read_text()
    card = (out / "MODEL_CARD.md").read_text()
    assert "adapted to harbour" in card and "## Limits" in card.replace("### Limits", "## Limits")


def test_the_same_seed_gives_the_same_bytes(run: fedshift.Run, site: Path, tmp_path: Path) -> None:
    digests = []
    for number, seed in enumerate((1, 1, 2)):
        adapt_run(run.path, site, tmp_path / str(number), epochs=1, keep="adapted", seed=seed)
        digests.append(fedshift.Run(tmp_path / str(number)).results["model_sha256"])
    assert digests[0] == digests[1] != digests[2]


def test_own_statistics_are_the_mean_over_the_site(run: fedshift.Run, site: Path, tmp_path: Path) -> None:
    adapt_run(run.path, site, tmp_path / "new", epochs=1, keep="statistics")
    weights, before = fedshift.Run(tmp_path / "new").model().models[""], run.model().models[""]
    changed = {key for key in weights if not torch.equal(weights[key], before[key])}
    assert changed and all("running_" in key or "num_batches" in key for key in changed)
    pixels = np.stack([np.asarray(Image.open(path)) for path in sorted(site.glob("*.png"))])
    first = run.model().network().backbone.block1
    with torch.no_grad():
        x = (torch.from_numpy(pixels).permute(0, 3, 1, 2).float() / 255 - 0.5) / 0.5
        wanted = first.conv(x).mean((0, 2, 3))
    assert weights["backbone.block1.norm.running_mean"].tolist() == pytest.approx(wanted.tolist(), abs=2e-3)


def test_labels_are_only_measured_on(run: fedshift.Run, site: Path, tmp_path: Path) -> None:
    """The same pictures in class folders: what is adapted to has no labels, a part is held back."""
    labelled = write_site(tmp_path / "quay", labelled=True)
    found = adapt_run(run.path, labelled, tmp_path / "a", epochs=1, keep="statistics")
    assert found.measured is not None and found.measured.samples + found.inputs == 90
    right = predict_right(tmp_path / "a", labelled)
    held_back = round(found.measured.after * found.measured.samples)
    assert held_back <= right  # it is a part of all pictures
    wrong = tmp_path / "wrong"  # every label another one: nothing that is learned may change
    for label in range(3):
        (wrong / "quay" / str((label + 1) % 3)).parent.mkdir(parents=True, exist_ok=True)
        (labelled / str(label)).rename(wrong / "quay" / str((label + 1) % 3))
    again = adapt_run(run.path, wrong / "quay", tmp_path / "b", epochs=1, keep="statistics")
    assert (again.measured is not None and again.measured.after != found.measured.after) or found.measured.after == 0
    for key in ("confidence", "changed"):
        one, other = ([round(getattr(state, key), 2) for state in made.states] for made in (found, again))
        assert one == pytest.approx(other, abs=0.06)


def predict_right(run: Path, folder: Path) -> int:
    predict_files(run, folder, folder.parent / "out.csv")
    rows = list(csv.DictReader((folder.parent / "out.csv").open()))
    return sum(row["prediction"] == row["file"].split("/")[0] for row in rows)


def test_the_estimate_chooses() -> None:
    def state(name: str, confidence: float, agreement: float = 1.0) -> State:
        return State(name, torch.nn.Identity(), confidence, 0.0, agreement)

    before, measured = state(AS_IT_WAS, 0.6), state(STATISTICS, 0.7, 0.9)
    assert _kept([before, measured], "auto").name == STATISTICS
    assert _kept([before, measured, state(ADAPTED, 0.99, 0.99)], "auto").name == STATISTICS
    assert _kept([before, measured, state(ADAPTED, 0.99, 0.1)], "adapted").name == ADAPTED
    assert _kept([before, state(STATISTICS, 0.605)], "auto").name == AS_IT_WAS  # nearly equal: the simpler one
    with pytest.raises(InputError, match="not possible"):
        _kept([before], "statistics")


def test_what_cannot_be_is_refused(run: fedshift.Run, site: Path, tmp_path: Path, tiny_data: Path) -> None:
    few = write_site(tmp_path / "few", 9)
    with pytest.raises(InputError, match="9 samples to adapt to; it takes 20"):
        adapt_run(run.path, few, tmp_path / "out")
    with pytest.raises(InputError, match="nothing at"):
        adapt_run(run.path, tmp_path / "nowhere", tmp_path / "out")
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "mine.txt").write_text("keep")
    with pytest.raises(InputError, match="not empty"):
        adapt_run(run.path, site, tmp_path / "full")
    other = tmp_path / "other"
    write_site(other / "cat", 30)
    with pytest.raises(InputError, match="not in its list of classes"):
        adapt_run(run.path, other, tmp_path / "out")
    sr = fedshift.fit("fedsr", data=tiny_data, out=tmp_path / "sr", **{**TINY, "rounds": 1})
    found = adapt_run(sr.path, site, tmp_path / "sr-new", epochs=1)
    assert any("no classifier on top" in note for note in found.notes) and len(found.states) == 2
    assert not (tmp_path / "out").exists()


def test_rows_of_a_table(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    sites = {}
    for number, name in enumerate(("north", "south")):
        x = rng.normal(number, 1, (60, 3)).astype(np.float32)
        sites[name] = (x, (x[:, 0] > number).astype(np.int64))
    run = fedshift.fit("fedavg", data=sites, out=tmp_path / "run", rounds=2, workers=0)
    table = tmp_path / "east.csv"
    names = run.model().header.columns
    rows = [",".join(names), *(",".join(map(str, row)) for row in rng.normal(5, 1, (40, 3)).round(3))]
    table.write_text("\n".join(rows) + "\n")
    found = adapt_run(run.path, table, tmp_path / "new", epochs=1)
    assert found.site == "east" and found.inputs == 40 and len(found.states) == 2
    assert json.loads((tmp_path / "new" / "results.json").read_text())["adapted"]["kept"] == found.kept.name
