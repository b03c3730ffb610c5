"""Bad sites in whole runs: they change what is learned, nothing else, and cannot be put where there are no labels."""

from __future__ import annotations

from pathlib import Path

import pytest

import fedshift
from fedshift.errors import InputError
from fedshift.runs.config import make_config
from fedshift.runs.directory import read_metrics
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
    config = make_config({"data_dir": tiny_data, "target": "dim", "attack": ["constant:dim"]})
    with pytest.raises(InputError, match="attack constant:dim: 'dim' sends nothing it has learned"):
        prepare(config)


def test_a_client_without_labels_can_forge_what_it_sends(tiny_data: Path) -> None:
    values = {"method": "dualadapt", "home": "amber", "data_dir": tiny_data, "attack": ["sign-flip:dim:10"]}
    assert prepare(make_config(values)).config.attack == ("sign-flip:dim:10",)
    with pytest.raises(InputError, match="does not train with labels"):
        prepare(make_config({**values, "attack": ["poison:dim:0.3"]}))


def test_one_hostile_site_ruins_the_mean_and_not_the_default(tiny_data: Path) -> None:
    attack = ["sign-flip:blue:20"]
    assert accuracy(tiny_data, attack=attack, aggregation="mean") < 0.45
    assert accuracy(tiny_data, attack=attack) > 0.6


def test_a_backdoor_is_measured_in_every_scored_round(tiny_data: Path) -> None:
    everyone = [f"backdoor:{site}:0.5" for site in ("amber", "blue", "coral")]
    changes = {"data_dir": tiny_data, "target": "dim", "rounds": 4, "batch_size": 8, "lr": 0.02, "workers": 0}
    run = fedshift.fit("fedavg", attack=everyone, evaluate_every=2, **changes)
    rows = [row for row in read_metrics(run.path / "metrics.jsonl")[0] if row["name"] == "backdoor"]
    assert [(row["round"], row["phase"], row["site"]) for row in rows] == [(2, "attack", "dim"), (4, "attack", "dim")]
    assert rows[-1]["value"] == round(run.results["backdoor"]["dim"], 6) > 0.8
    harmless = fedshift.fit("fedavg", attack=["backdoor:amber:0.001"], **changes)
    assert harmless.results["backdoor"]["dim"] < 0.5, "of a model that was never shown the trigger"
    assert harmless.results["model_sha256"] == fedshift.fit("fedavg", **changes).results["model_sha256"]


def test_a_backdoor_needs_images_with_classes(tmp_path: Path) -> None:
    for site in "xyz":
        lines = ["a,b,class"] + [f"{n},{n % 7},{n % 2}" for n in range(40)]
        (tmp_path / f"{site}.csv").write_text("\n".join(lines))
    config = make_config({"data_dir": tmp_path, "target": "x", "attack": ["backdoor:y:0.3"]})
    with pytest.raises(InputError, match="a trigger is put into images that have classes"):
        prepare(config)


@pytest.mark.parametrize(("rule", "bad_sites", "needed"), [("krum", 1, 5), ("trimmed", 2, 5)])
def test_a_rule_that_needs_more_sites_is_refused_before_the_run(
    tiny_data: Path, rule: str, bad_sites: int, needed: int
) -> None:
    config = make_config({"data_dir": tiny_data, "target": "dim", "aggregation": rule, "bad_sites": bad_sites})
    with pytest.raises(InputError, match=f"needs at least {needed} sites, and 3 train in this run .amber, blue, coral"):
        prepare(config)
