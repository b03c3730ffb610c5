"""A finished run knows how sure it may be, from counts of the sources' validation: in model, card and predictions."""

from __future__ import annotations

import csv
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from tinydata import TINTS, shapes

import fedshift
from fedshift.federation.checks import CountsOf, Refused
from fedshift.runs.calibrated import calibration_of, told
from fedshift.runs.predict import UNLIKE, predict_files


def two_classes(shift: float, count: int = 200) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(int(10 * shift))
    y = rng.integers(0, 2, count)
    x = rng.normal(shift, 1, (count, 3)).astype(np.float32)
    x[:, 0] += 2 * y
    return x, y


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> fedshift.Run:
    sites = {name: two_classes(shift, 400) for name, shift in (("north", 0.0), ("south", 0.1), ("west", 0.3))}
    out = tmp_path_factory.mktemp("calibrated") / "run"
    return fedshift.fit("fedavg", data=sites, target="west", rounds=2, workers=0, out=out)


def test_probabilities_are_those_of_the_temperature(run: fedshift.Run) -> None:
    found, saved = calibration_of(run.results), run.model()
    assert found.temperature == pytest.approx(saved.header.temperature, abs=1e-4) and found.temperature != 1
    assert found.samples == sum(sum(map(sum, run.results["val_confusion"][site])) for site in ("north", "south"))
    x = torch.from_numpy(two_classes(0.0)[0])
    with torch.no_grad():
        wanted = (saved.uncalibrated()(x) / saved.header.temperature).softmax(1)
    assert run.predict_proba(x.numpy()) == pytest.approx(wanted.numpy(), abs=1e-6)
    assert any("divided by the temperature" in line for line in told(found))


def test_two_classes_are_told_by_auc_sensitivity_and_specificity(run: fedshift.Run) -> None:
    found = calibration_of(run.results).two_classes["west"]
    (a, b), (c, d) = run.results["confusion"]["west"]  # rows are the truth; the second class is the positive one
    assert (found.negatives, found.positives) == (a + b, c + d)
    assert found.sensitivity is not None and found.sensitivity[0] == pytest.approx(d / (c + d), abs=0.01)
    assert found.specificity is not None and found.specificity[0] == pytest.approx(a / (a + b), abs=0.01)
    assert found.auc is not None and found.auc[1] < found.auc[0] < found.auc[2]
    x, y = two_classes(0.3, 400)
    score = run.predict_proba(x)[:, 1]
    pairs = score[y == 1][:, None] - score[y == 0][None]
    assert found.auc[0] == pytest.approx(float((pairs > 0).mean()), abs=0.01)
    card = (run.path / "MODEL_CARD.md").read_text()
    for part in (
        "## Data",
        "## How sure it may be",
        "## What left the sites",
        "## Licences",
        "| west | 4",
        "sensitivity",
    ):
        assert part in card


def test_pictures_unlike_the_sources_are_marked_and_the_least_sure_are_named(tmp_path: Path) -> None:
    sites = {name: shapes(300, TINTS[name], 0.05, number) for number, name in enumerate(("amber", "blue"))}
    run = fedshift.fit("fedavg", data=sites, out=tmp_path / "run", rounds=2, batch_size=16, workers=0)
    known = shapes(40, TINTS["amber"], 0.05, 21)[0]
    strange = np.random.default_rng(0).integers(0, 256, (40, 16, 16, 3), dtype=np.uint8)
    for name, images in (("known", known), ("strange", strange)):
        (tmp_path / name).mkdir()
        for number, image in enumerate(images):
            Image.fromarray(image).save(tmp_path / name / f"{number}.png")
    assert run.model().header.far is not None
    near = predict_files(run.path, tmp_path / "known", tmp_path / "known.csv")
    far = predict_files(run.path, tmp_path / "strange", tmp_path / "strange.csv")
    assert near.unlike <= 4 and far.unlike >= 36
    rows = list(csv.DictReader((tmp_path / "strange.csv").open()))
    assert sum(row["note"] == UNLIKE for row in rows) == far.unlike
    lowest = sorted(float(row["confidence"]) for row in rows)[:5]
    assert [confidence for _, confidence in far.unsure] == pytest.approx(lowest)


def test_counts_that_cannot_be_are_refused() -> None:
    expect = CountsOf((2, 3, 2), "val", slices=2)
    good = torch.zeros(2, 3, 2, dtype=torch.int64)
    good[:, 1, 0] = 7
    expect.check(good, {"val": 7})
    for wrong in (good[:1], good.float(), good + 1, -good, good * 2):
        with pytest.raises(Refused):
            expect.check(wrong, {"val": 7})
    half = good.clone()
    half[1] = 0
    with pytest.raises(Refused):
        expect.check(half, {"val": 7})
    some = CountsOf((4,), "val", or_none=True)
    some.check(torch.zeros(4, dtype=torch.int64), {"val": 7})
    some.check(torch.tensor([1, 0, 0, 6]), {"val": 7})
    with pytest.raises(Refused):
        some.check(torch.tensor([1, 0, 0, 0]), {"val": 7})
