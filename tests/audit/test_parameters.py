"""Models of one domain are closer to each other than to those of another, and the study can be resumed."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from fedshift.audit.parameters import DomainModels, layers_of, train_domain_models
from fedshift.errors import InputError
from fedshift.nn.archs import build_network

KEYS = {"arch": "digits-copa", "local_epochs": 3.0, "batch_size": 16, "sources": ["amber", "dim"]}


@pytest.fixture(scope="module")
def found(tiny_data: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[DomainModels, Path]:
    work = tmp_path_factory.mktemp("work")
    return train_domain_models(3, data_dir=tiny_data, work=work, **KEYS), work


def test_models_that_start_alike_know_their_domain(found: tuple[DomainModels, Path]) -> None:
    population, _ = found
    assert population.domains == ("amber", "dim") and population.groups.tolist() == [0, 0, 0, 1, 1, 1]
    separations = population.separations()
    assert list(separations) == ["block1", "block2", "block3", "block4"]
    assert separations["block1"].between > separations["block1"].within > 0
    assert separations["block1"].nearest == 1.0
    assert population.chance == pytest.approx(2 / 5)


def test_distances_are_those_of_the_layers_themselves(found: tuple[DomainModels, Path]) -> None:
    population, work = found
    from safetensors.torch import load_file

    models = [load_file(path)["block2"] for path in (work / "models").iterdir()]
    assert len(models) == 6
    pairs = sorted(float((a - b).norm()) for a in models for b in models)
    torch.testing.assert_close(torch.tensor(pairs), population.distances["block2"].flatten().sort().values)


def test_a_second_call_trains_nothing(
    found: tuple[DomainModels, Path], tiny_data: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    population, work = found
    monkeypatch.setattr("fedshift.audit.parameters._train", lambda *arguments: pytest.fail("trained again"))
    again = train_domain_models(3, data_dir=tiny_data, work=work, **KEYS)
    assert all(torch.equal(again.distances[layer], own) for layer, own in population.distances.items())


def test_random_starts_are_far_apart_whatever_the_domain(found: tuple[DomainModels, Path], tiny_data: Path) -> None:
    random = train_domain_models(2, "random", data_dir=tiny_data, **KEYS)
    far, near = random.separations()["block3"], found[0].separations()["block3"]
    assert far.within > 2 * near.within and far.between / far.within < near.between / near.within


def test_layers_are_the_last_convolutions_of_the_papers_blocks() -> None:
    assert layers_of(build_network("resnet18", (3, 64, 64), 5, 0)) == {
        f"layer{number}": f"backbone.layer{number}.1.conv2.weight" for number in (1, 2, 3, 4)
    }
    assert layers_of(build_network("digits-csac", (3, 28, 28), 10, 0))["fc1"] == "backbone.fc1.weight"


def test_one_model_or_one_domain_are_too_few(tiny_data: Path) -> None:
    with pytest.raises(InputError, match="need 2 or more"):
        train_domain_models(1, data_dir=tiny_data)
    with pytest.raises(InputError, match="two or more are needed"):
        train_domain_models(2, data_dir=tiny_data, sources=["amber"])
