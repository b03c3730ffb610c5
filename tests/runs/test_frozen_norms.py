"""A run with `freeze_norm`: everything learns but the statistics of BatchNorm layers, and what it takes is counted."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from fedshift.audit.counting import flops_per_sample
from fedshift.nn.archs import build_network
from fedshift.runs.config import make_config
from fedshift.runs.execute import run

STATISTICS = ("running_mean", "running_var")


@pytest.mark.parametrize("method", ["fedavg", pytest.param("csac", marks=pytest.mark.slow), "copa", "kd3a"])
def test_statistics_stay_those_of_the_initial_weights(method: str, tiny_data: Path, tmp_path: Path) -> None:
    start = {key: value.clone() for key, value in build_network("digits-copa", (3, 32, 32), 3, 0).state_dict().items()}
    for key, value in start.items():
        if key.endswith(STATISTICS):
            start[key] = value + torch.rand(value.shape, generator=torch.Generator().manual_seed(1))
    save_file(start, tmp_path / "start.safetensors")
    keys = {"method": method, "data_dir": tiny_data, "target": "dim", "arch": "digits-copa", "rounds": 1, "workers": 0}
    own = {"csac": {"acquisition_epochs": 1}, "kd3a": {"mmd": False}}.get(method, {})
    weights = {"weights": str(tmp_path / "start.safetensors"), "freeze_norm": True, "batch_size": 8, method: own}
    config = make_config({**keys, **weights})
    run(config, tmp_path / "run")
    assert flops_per_sample(config) > 0
    trained = load_file(tmp_path / "run" / "model.safetensors")
    for key, value in trained.items():
        name = next((own for own in start if key.endswith(own)), None)
        if key.endswith(STATISTICS):
            assert name is not None and torch.equal(value, start[name]), key
        elif key.endswith("weight") and name is not None and name.startswith("backbone"):
            assert not torch.equal(value, start[name]), key
