"""The demo, with trainings cut to a round: all of its rows and its report."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from fedshift.cli import demo
from fedshift.methods import find_about

CUT = {"train_per_site": 40, "rounds": 2, "workers": 0}


def test_every_setting_has_a_baseline_a_control_and_a_paper() -> None:
    found = {comparison.settings["setting"]: set(comparison.methods) for comparison in demo.COMPARISONS}
    assert set(found) == {"generalize", "adapt", "multi-adapt"}
    for setting, methods in found.items():
        assert methods & {"fedavg", "source-only"} and methods & {"deepall", "adabn"}
        assert methods & {"copa", "csac", "kd3a", "dualadapt"}
        assert all(setting in find_about(method).settings for method in methods)
    for comparison in demo.COMPARISONS:
        assert comparison.reading.count(". ") == 1 and comparison.reading.endswith(".")


@pytest.mark.slow
def test_all_rows_run_and_are_in_the_report(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    short = [
        replace(
            comparison,
            settings={**comparison.settings, **CUT},
            methods={name: {**own, "rounds": 2} for name, own in comparison.methods.items()},
        )
        for comparison in demo.COMPARISONS
    ]
    monkeypatch.setattr(demo, "COMPARISONS", short)
    demo.run_demo(tmp_path / "demo")
    told = capsys.readouterr().out
    page = (tmp_path / "demo" / "report.html").read_text()
    for comparison in short:
        assert comparison.question.split(":")[0] in told
        for name in comparison.methods:
            assert (tmp_path / "demo" / f"{comparison.settings['setting']}-{name}" / "model.safetensors").is_file()
            assert name in told and name in page
