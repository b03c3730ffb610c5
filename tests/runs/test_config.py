from __future__ import annotations

import dataclasses
import math
from pathlib import Path
from typing import Any

import pytest

from fedshift.errors import InputError
from fedshift.federation.plan import Training
from fedshift.methods import METHODS, find_method
from fedshift.runs.config import apply_settings, make_config, read_config
from fedshift.runs.planning import prepare

FROZEN_KD3A = {"method": "kd3a", "target": "dim", "weights": "x", "norm": "frozen"}


def test_an_unknown_key_names_the_nearest_known_one() -> None:
    with pytest.raises(InputError, match="Did you mean 'momentum'") as caught:
        make_config({"method": "fedavg", "momentun": 0.9})
    assert caught.value.code == "config-key"


def test_an_unknown_method_names_the_nearest_and_case_does_not_matter() -> None:
    assert make_config({"method": "FedAvg"}).method == "fedavg"
    with pytest.raises(InputError, match="Did you mean 'fedavg'"):
        make_config({"method": "fedavgg"})


def test_keys_of_another_method_are_an_error() -> None:
    with pytest.raises(InputError, match="the run's method is 'fedavg'"):
        make_config({"method": "fedavg", "deepall": {"x": 1}})


def test_an_unknown_key_of_the_method_and_of_the_policy_are_errors() -> None:
    with pytest.raises(InputError, match=r"unknown key fedavg\.gate"):
        make_config({"method": "fedavg", "fedavg": {"gate": 1}})
    with pytest.raises(InputError, match="Did you mean 'min_samples'"):
        make_config({"method": "fedavg", "policy": {"min_sample": 3}})


def test_what_makes_a_variant_cannot_be_set_to_something_else() -> None:
    with pytest.raises(InputError, match=r"fed-oracle\.mixtures is always False"):
        make_config({"method": "fed-oracle", "fed-oracle": {"mixtures": True}})
    assert make_config({"method": "fed-oracle", "fed-oracle": {"mixtures": False}}).hyper["mixtures"] is False


@pytest.mark.parametrize(
    "wrong",
    [
        {"rounds": 0},
        {"lr": -1},
        {"quorum": 1.5},
        {"precision": "float8"},
        {"loss": "hinge"},
        {"rounds": "many"},
        {"workers": -1},
    ],
)
def test_a_value_out_of_range_names_its_key(wrong: dict[str, Any]) -> None:
    with pytest.raises(InputError, match=next(iter(wrong))) as caught:
        make_config(wrong)
    assert caught.value.code == "config-value"


@pytest.mark.parametrize(
    ("setting", "told"),
    [
        ("dualadapt.lambda_st=abc", 'dualadapt.lambda_st: "abc" is not a number'),
        ("dualadapt.lambda_st=true", "dualadapt.lambda_st: true is not a number"),
        ("dualadapt.points=many", 'dualadapt.points: "many" is not a whole number'),
        ("dualadapt.points=8.5", "dualadapt.points: 8.5 is not a whole number"),
        ("dualadapt.mixtures=maybe", 'dualadapt.mixtures: "maybe" is not true or false'),
        ("dualadapt.mixtures=1", "dualadapt.mixtures: 1 is not true or false"),
        ("dualadapt.statistics=both", 'dualadapt.statistics: "both" is not one of auto, client, home'),
        ("dualadapt.alignment=much", 'dualadapt.alignment: "much" is not a number or null'),
        ("dualadapt.energy=", "dualadapt.energy: null is not a number"),
        ("csac.lambda=[1]", "csac.lambda: [1] is not a number"),
        ("csac.channels=few", 'csac.channels: "few" is not a whole number (digits only) or null'),
        ("csac.layers=last", 'csac.layers: "last" is not a list such as [a, b]'),
        ("csac.layers=[1, 2]", "csac.layers: [1, 2] is not a list such as [a, b]"),
        ("copa.cutout=often", 'copa.cutout: "often" is not true or false or auto'),
        ("kd3a.mixup=a lot", 'kd3a.mixup: "a lot" is not a number or auto'),
        ("kd3a.ballot={}", "kd3a.ballot: {} is not one of auto, vector, top"),
        ("fed-dann.hidden=2020-01-01", 'fed-dann.hidden: "2020-01-01" is not a whole number'),
    ],
)
def test_a_key_of_a_method_with_a_value_of_another_type_names_key_value_and_type(setting: str, told: str) -> None:
    with pytest.raises(InputError) as caught:
        make_config(apply_settings({"method": setting.partition(".")[0]}, [setting]))
    assert caught.value.message.startswith(told)
    assert caught.value.code == "config-value" and caught.value.exit_code == 2


@pytest.mark.parametrize("method", METHODS)
def test_every_key_of_every_method_is_checked_before_the_method_sees_it(method: str) -> None:
    for field in dataclasses.fields(find_method(method).hyper_type):
        key = field.name.rstrip("_")
        with pytest.raises(InputError) as caught:
            make_config({"method": method, method: {key: {"not": "a value"}}})
        assert f"{method}.{key}" in caught.value.message and caught.value.code == "config-value"
        assert "<class" not in caught.value.message and "instances of" not in caught.value.message


def test_values_of_the_right_type_are_kept() -> None:
    given = {"lambda": 1, "layers": ["a"], "channels": None, "attention": "none", "cross_entropy": True}
    hyper = make_config({"method": "csac", "csac": given}).hyper
    assert hyper["lambda_"] == 1.0 and isinstance(hyper["lambda_"], float)
    assert hyper["layers"] == ("a",) and hyper["channels"] is None and hyper["attention"] == "none"


@pytest.mark.parametrize(
    ("policy", "told"),
    [({"min_samples": "few"}, "a whole number"), ({"noise": "loud"}, "a number"), ({"allow": "weights"}, "a list")],
)
def test_a_value_of_the_policy_of_another_type_names_its_key(policy: dict[str, Any], told: str) -> None:
    (key, value) = next(iter(policy.items()))
    with pytest.raises(InputError, match=rf'policy\.{key}: "{value}" is not {told}') as caught:
        make_config({"policy": policy})
    assert caught.value.code == "config-value"


def test_settings_reach_into_sections_and_read_numbers() -> None:
    merged = apply_settings(
        {"lr": 1.0, "policy": {"noise": 0.5}}, ["lr=1e-3", "policy.min_samples=4", "augment=[flip]"]
    )
    assert merged == {"lr": 0.001, "policy": {"noise": 0.5, "min_samples": 4}, "augment": ["flip"]}
    with pytest.raises(InputError, match="key=value"):
        apply_settings({}, ["rounds"])


def test_a_configuration_file_that_is_missing_or_not_yaml(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="no configuration file"):
        read_config(tmp_path / "none.yaml")
    (tmp_path / "bad.yaml").write_text("a: [1")
    with pytest.raises(InputError, match="not valid YAML"):
        read_config(tmp_path / "bad.yaml")


@pytest.mark.parametrize(
    ("keys", "match"),
    [
        ({"target": "dimm"}, "no domain 'dimm'. Did you mean 'dim'"),
        ({"target": "dim", "sources": ["dim", "blue"]}, "the target and a source"),
        ({"method": "oracle"}, "needs a --target"),
        ({"method": "fedavg", "setting": "adapt"}, "needs a --target"),
        ({"home": "dim", "targets": ["dim", "blue"]}, "the home and a client"),
        ({"home": "dim", "target": "blue"}, "not --target"),
        ({"setting": "multi-adapt"}, "needs a --home"),
        ({"target": "dim", "arch": "resnet"}, "no architecture 'resnet'"),
        ({"target": "dim", "schedule": "linear"}, "schedule"),
        ({"target": "dim", "arch": "mlp"}, "mlp"),
        ({"target": "dim", "arch": "segnet-small"}, "segnet-small"),
        ({"target": "dim", "freeze_norm": True}, "freeze_norm: .* from scratch remember nothing"),
        ({"method": "kd3a", "target": "dim", "weights": "x", "freeze_norm": True}, "freeze_norm: kd3a works with"),
        ({**FROZEN_KD3A, "kd3a": {"mmd": False, "weighting": "h-divergence"}}, "norm=frozen: .*h-divergence compares"),
        ({**FROZEN_KD3A, "kd3a": {"preset": "reference"}}, "norm=frozen: kd3a.teachers=train records"),
        ({"method": "dualadapt", "home": "dim", "weights": "x", "norm": "frozen"}, "norm=frozen: dualadapt works with"),
    ],
)
def test_contradictions_are_found_before_anything_starts(tiny_data: Path, keys: dict[str, Any], match: str) -> None:
    with pytest.raises(InputError, match=match):
        prepare(make_config({"method": "fedavg", "data_dir": tiny_data, **keys}))


def test_a_run_without_data_says_what_to_give() -> None:
    with pytest.raises(InputError, match="--dataset NAME or --data-dir DIR"):
        prepare(make_config({"method": "fedavg"}))


def training(schedule: str, lr_min: float = 0.0) -> Training:
    return Training(10, 64, 0.1, lr_min, 0.9, 0.0, 1.0, schedule, "float32", ())


def test_schedules_by_hand() -> None:
    assert training("constant").lr_at(7) == 0.1
    # Cosine over 10 rounds: cos(0) in round 1, cos(pi / 2) in round 6.
    assert training("cosine").lr_at(1) == pytest.approx(0.1)
    assert training("cosine").lr_at(6) == pytest.approx(0.05)
    assert training("cosine", 0.02).lr_at(6) == pytest.approx(0.06)
    # One round late, as in the code of KD3A's authors: rounds 1 and 2 have the first rate.
    late = [training("cosine:1").lr_at(r) for r in (1, 2, 7, 10)]
    assert late == pytest.approx([0.1, 0.1, 0.05, 0.05 * (1 + math.cos(0.8 * math.pi))])
    assert [training("step:4:0.1").lr_at(r) for r in (1, 4, 5, 9)] == pytest.approx([0.1, 0.1, 0.01, 0.001])


@pytest.mark.parametrize("schedule", ["cosine:", "cosine:-1", "cosine:x", "cosine:1:2", "step:0:0.1", "step:a:0.1"])
def test_a_schedule_that_makes_no_sense_is_refused(schedule: str) -> None:
    with pytest.raises(InputError, match="schedule"):
        training(schedule).lr_at(1)


def test_what_is_chosen_leaves_out_every_default() -> None:
    """So that new keys, common or a method's own, do not rename the runs of before."""
    given = {"method": "csac", "dataset": "digits", "lr": 0.02, "csac": {"lambda": 0.1, "smoothing": 0.1}}
    assert make_config(given).chosen() == {
        "method": "csac",
        "dataset": "digits",
        "lr": 0.02,
        "csac": {"lambda_": 0.1},
    }
