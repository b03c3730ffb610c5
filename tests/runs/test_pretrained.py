"""A network that starts from given weights gets keys that keep it pre-trained, and the run says which."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import save_file

from fedshift.nn.archs import build_network
from fedshift.runs.config import make_config
from fedshift.runs.execute import run
from fedshift.runs.planning import prepare
from fedshift.runs.progress import Silent


@pytest.fixture
def keys(tiny_data: Path, tmp_path: Path) -> dict[str, Any]:
    """A run that starts from a file of weights."""
    save_file(build_network("mobilenet_v2", (3, 32, 32), 3, 0).state_dict(), tmp_path / "start.safetensors")
    return {
        "data_dir": tiny_data,
        "target": "dim",
        "arch": "mobilenet_v2",
        "image_size": 32,
        "weights": str(tmp_path / "start.safetensors"),
        "policy": {"min_samples": 2},
    }


def test_with_weights_the_statistics_are_frozen_and_the_backbone_is_slower(keys: dict[str, Any]) -> None:
    complete = prepare(make_config({"method": "fedavg", **keys})).config
    assert (complete.freeze_norm, complete.backbone_lr_factor, complete.lr) == (True, 0.1, 0.004)
    scratch = prepare(make_config({"method": "fedavg", **keys, "weights": None}))
    assert (scratch.config.freeze_norm, scratch.config.backbone_lr_factor, scratch.config.lr) == (False, 1.0, 0.005)
    assert scratch.choices == "" and not scratch.plan.model.freeze_norm


def test_what_the_user_sets_wins_also_where_it_is_the_usual_value(keys: dict[str, Any]) -> None:
    own = {"freeze_norm": False, "lr": 0.5, "copa": {"first_judges": "initial"}}
    complete = prepare(make_config({"method": "copa", **keys, **own}))
    assert (complete.config.freeze_norm, complete.config.lr, complete.config.backbone_lr_factor) == (False, 0.5, 0.1)
    assert complete.config.hyper["first_judges"] == "initial"
    assert complete.config.hyper["norm_where"] == "first-stage" == complete.plan.hyper["norm_where"]
    own_keys = (
        "copa.norm_where=first-stage, copa.norm_start=batch, copa.shared_start=0.5, copa.judges=mean,"
        " copa.magnitude_draw=uniform, copa.cutout=False (what"
    )
    told = f"pre-trained network: batch_size=16, backbone_lr_factor=0.1, probe_epochs=10, {own_keys}"
    assert complete.choices.startswith(told)


def test_kd3a_keeps_the_statistics_and_gives_up_batchnorm_mmd(keys: dict[str, Any]) -> None:
    prepared = prepare(make_config({"method": "kd3a", **keys}))
    complete = prepared.config
    assert (complete.norm, complete.hyper["mmd"], complete.lr, complete.backbone_lr_factor) == (
        "frozen",
        False,
        0.004,
        0.1,
    )
    assert "kd3a.mmd=False, kd3a.weighting=samples, kd3a.target_share=confident" in prepared.choices


@pytest.mark.parametrize(
    "asked", [{"norm": "average"}, {"kd3a": {"mmd": True}}, {"freeze_norm": False}, {"kd3a": {"preset": "reference"}}]
)
def test_kd3a_aligns_as_in_its_paper_where_the_user_says_so(keys: dict[str, Any], asked: dict[str, Any]) -> None:
    complete = prepare(make_config({"method": "kd3a", **keys, **asked})).config
    assert complete.norm == "average"
    assert complete.hyper["mmd"] in (True, "auto")


def test_dualadapt_does_not_freeze_the_statistics_that_it_works_with(keys: dict[str, Any]) -> None:
    roles = {"target": None, "home": keys["target"]}
    assert prepare(make_config({"method": "dualadapt", **keys, **roles})).config.norm == "average"


def test_csac_has_a_weaker_alignment_and_short_rounds_from_given_weights(keys: dict[str, Any]) -> None:
    chosen = prepare(make_config({"method": "csac", **keys})).config.hyper
    assert (chosen["lambda_"], chosen["acquisition_epochs"], chosen["calibration_epochs"]) == (0.1, 2.0, 1.0)
    assert prepare(make_config({"method": "csac", **keys, "csac": {"lambda": 0.6}})).config.hyper["lambda_"] == 0.6
    assert prepare(make_config({"method": "csac", **keys, "weights": None})).config.hyper["lambda_"] == 0.6


def test_the_complete_configuration_can_be_run_again(keys: dict[str, Any], tmp_path: Path) -> None:
    class Listener(Silent):
        said: list[str] = []  # noqa: RUF012

        def message(self, text: str) -> None:
            self.said.append(text)

    config = make_config({"method": "fedavg", **keys, "rounds": 1, "workers": 0})
    first = run(config, tmp_path / "run", progress=Listener())
    assert any(
        "batch_size=16, lr=0.004, backbone_lr_factor=0.1, probe_epochs=10, norm=frozen" in text
        for text in Listener.said
    )
    again = run(config, tmp_path / "run", resume=True)
    assert again["model_sha256"] == first["model_sha256"]
