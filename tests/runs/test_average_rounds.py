"""The key `average_rounds`: the mean of the last models is what is scored and kept, however the run got there."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from fedshift.functional.averaging import weighted_mean
from fedshift.runs.config import make_config
from fedshift.runs.execute import run
from fedshift.runs.progress import Silent


def averaged(data: Path, out: Path, rounds: int, share: float, **how: Any) -> dict[str, torch.Tensor]:
    values = {"data_dir": data, "target": "dim", "arch": "digits-copa", "batch_size": 8, "schedule": "constant"}
    values |= {"rounds": rounds, "average_rounds": share, "workers": 0, "train_per_site": 16, "lr": 0.01}
    run(make_config(values | {"policy": {"min_samples": 2}}), out, **how)
    return load_file(out / "model.safetensors")


class StopBeforeTheLast(Silent):
    def round(self, round: int, val: Any, test: Any) -> None:
        if round == 2:
            raise KeyboardInterrupt


def test_two_of_three_rounds_are_averaged_and_a_resumed_run_is_the_same(tiny_data: Path, tmp_path: Path) -> None:
    second, third = (averaged(tiny_data, tmp_path / str(rounds), rounds, 0) for rounds in (2, 3))
    found = averaged(tiny_data, tmp_path / "mean", 3, 0.67)
    expected = weighted_mean([(second, 1.0), (third, 1.0)])
    for name, tensor in expected.items():
        if tensor.is_floating_point():
            assert torch.allclose(found[name], tensor, atol=1e-7), name
    assert any(not torch.equal(found[name], third[name]) for name in found)
    with pytest.raises(KeyboardInterrupt):
        averaged(tiny_data, tmp_path / "resumed", 3, 0.67, progress=StopBeforeTheLast())
    resumed = averaged(tiny_data, tmp_path / "resumed", 3, 0.67, resume=True)
    assert all(torch.equal(found[name], resumed[name]) for name in found)
