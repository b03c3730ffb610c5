"""Bad sites in whole runs: they change what is learned, nothing else, and cannot be put where there are no labels."""

from __future__ import annotations

from pathlib import Path

import pytest

import fedshift
from fedshift.errors import InputError
from fedshift.runs.config import make_config
from fedshift.runs.planning import prepare


def accuracy(data: Path, **changes: object) -> float:
    run = fedshift.fit("fedavg", data_dir=data, target="dim", rounds=4, batch_size=8, lr=0.02, workers=0, **changes)
    return float(run.results["accuracy"]["last"])


def test_wrong_labels_everywhere_cost_accuracy(tiny_data: Path) -> None:
    everyone = [f"poison:{site}:1" for site in ("amber", "blue", "coral")]
    assert accuracy(tiny_data) > 0.6 > 0.3 > accuracy(tiny_data, attack=everyone)


def test_an_attack_is_part_of_the_written_configuration() -> None:
    assert "poison:amber:0.3" in make_config({"attack": ["poison:amber:0.3"]}).to_yaml()


def test_the_target_cannot_be_attacked(tiny_data: Path) -> None:
    config = make_config({"data_dir": tiny_data, "target": "dim", "attack": ["noise:dim"]})
    with pytest.raises(InputError, match="attack noise:dim: 'dim' does not train with labels"):
        prepare(config)
