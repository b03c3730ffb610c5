from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from fedshift.runs import precision
from fedshift.runs.config import as_recorded, make_config
from fedshift.runs.planning import prepare
from fedshift.runs.precision import Choice, choose_precision, step_times

TINY: dict[str, Any] = {
    "arch": "digits-csac", "input_shape": (3, 16, 16), "classes": 3, "batch_size": 2, "threads": 1, "device": "cpu",
    "is_map": False,
}  # fmt: skip


def script(path: Path, body: str) -> str:
    path.write_text(f"#!/bin/sh\n{body}\n")
    path.chmod(0o755)
    return str(path)


def test_steps_are_timed_in_both_precisions() -> None:
    found = step_times(TINY)
    assert set(found) == {"float32", "bfloat16"} and all(seconds > 0 for seconds in found.values())


@pytest.mark.skipif(sys.platform == "win32", reason="signals")
def test_a_processor_that_ends_the_process_gets_float32_and_a_reason(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "executable", script(tmp_path / "python", "kill -ILL $$"))
    found = choose_precision(**TINY)
    assert found.precision == "float32" and "SIGILL" in found.reason


@pytest.mark.parametrize(("seconds", "expected"), [("0.5", "bfloat16"), ("0.89", "bfloat16"), ("0.95", "float32")])
def test_only_what_is_clearly_faster_is_chosen(
    seconds: str, expected: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    printed = f'echo \'{{"float32": 1.0, "bfloat16": {seconds}}}\''
    monkeypatch.setattr(sys, "executable", script(tmp_path / "python", printed))
    assert choose_precision(**TINY).precision == expected


def test_rubbish_from_the_trial_is_float32(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for body in ("exit 1", "echo nonsense", "echo '[]'", 'echo \'{"float32": 0, "bfloat16": 1}\''):
        monkeypatch.setattr(sys, "executable", script(tmp_path / "python", body))
        assert choose_precision(**TINY).precision == "float32"


def test_auto_is_decided_before_the_run_and_kept_when_it_goes_on(
    tiny_data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(precision, "choose_precision", lambda *_: Choice("bfloat16", "it is faster"))
    config = make_config(
        {"method": "fedavg", "data_dir": tiny_data, "target": "dim", "arch": "digits-csac", "precision": "auto"}
    )
    ready = prepare(config)
    assert ready.config.precision == ready.plan.training.precision == "bfloat16"
    assert "precision=bfloat16 (it is faster)" in ready.choices
    (tmp_path / "config.yaml").write_text(yaml.safe_dump({"precision": "bfloat16", "rounds": 3, "norm": "average"}))
    assert as_recorded(config, tmp_path / "config.yaml").precision == "bfloat16"


def test_other_machines_and_networks_of_the_user_are_not_judged_by_this_one(tiny_data: Path) -> None:
    config = make_config(
        {"method": "fedavg", "data_dir": tiny_data, "target": "dim", "arch": "digits-csac", "precision": "auto"}
    )
    ready = prepare(config.model_copy(update={"precision": "float32"}))
    found, told = precision.with_precision(config, ready.dataset, is_local=False)
    assert found.precision == "float32" and "other machines" in told
