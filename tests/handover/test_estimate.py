"""What to expect at an unseen site comes from leaving each site out in turn."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

import fedshift
from fedshift.cli.app import app
from fedshift.errors import InputError
from fedshift.handover.estimate import estimate_run, prediction_interval


def test_the_interval_is_that_of_one_more_value() -> None:
    """Mean 0.5, standard deviation 0.1, three values: t with two degrees of freedom is 4.3027."""
    assert prediction_interval([0.4, 0.5, 0.6]) == pytest.approx((0.5 - 0.49683, 0.5 + 0.49683), abs=1e-4)
    assert prediction_interval([0.1, 0.9, 0.5]) == (0.0, 1.0)


def test_every_site_is_left_out_once(tiny_data: Path, tmp_path: Path) -> None:
    keys = {"rounds": 1, "batch_size": 16, "workers": 0, "target": "dim"}
    run = fedshift.fit("fedavg", data=tiny_data, out=tmp_path / "run", **keys)
    shown = CliRunner().invoke(app, ["estimate", str(run.path)])
    assert shown.exit_code == 0 and "expected accuracy at an unseen site" in shown.output, shown.output
    told = json.loads((tmp_path / "run-left-out" / "estimate.json").read_text())
    assert sorted(told["left_out"]) == ["amber", "blue", "coral"]
    for site, score in told["left_out"].items():
        alone = fedshift.Run(tmp_path / "run-left-out" / site).results
        assert site not in alone["sources"] and "dim" not in alone["sources"] and len(alone["sources"]) == 2
        assert score == alone["per_target"][site]["last"]
    again = estimate_run(run.path)  # Nothing is trained twice.
    assert again.left_out == told["left_out"] and again.mean == told["mean"]


def test_two_sites_are_too_few(tiny_data: Path, tmp_path: Path) -> None:
    keys = {"rounds": 1, "batch_size": 16, "workers": 0, "sources": ("amber", "blue")}
    run = fedshift.fit("fedavg", data=tiny_data, out=tmp_path / "run", **keys)
    with pytest.raises(InputError, match="needs 3 labelled sites"):
        estimate_run(run.path)
