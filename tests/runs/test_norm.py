"""The key `norm`: whose BatchNorm statistics normalise, in training, scoring and saved models."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from fedshift.errors import InputError
from fedshift.nn.archs import build_network
from fedshift.nn.normalisation import STATISTICS, convert_norms, remembering, statistics_of, tracking_layers
from fedshift.runs.config import make_config, recorded_norm
from fedshift.runs.execute import run
from fedshift.runs.files.model import load_model
from fedshift.runs.planning import prepare

ADAPT = {"setting": "adapt", "target": "dim", "rounds": 1, "workers": 0, "arch": "digits-copa", "batch_size": 8}
MULTI = {key: value for key, value in ADAPT.items() if key != "target"} | {"setting": "multi-adapt", "home": "amber"}


def _models(method: str, data: Path, out: Path, **keys: Any) -> dict[str, dict[str, torch.Tensor]]:
    run(make_config({"method": method, "data_dir": data, **keys}), out)
    return {site: dict(model) for site, model in load_model(out / "model.safetensors").models.items()}


def _is_statistic(key: str) -> bool:
    return key.endswith(STATISTICS)


def test_adabn_is_source_only_with_the_statistics_of_the_target(tiny_data: Path, tmp_path: Path) -> None:
    plain = _models("source-only", tiny_data, tmp_path / "plain", **ADAPT)[""]
    own = _models("adabn", tiny_data, tmp_path / "own", **ADAPT)[""]
    for key, value in plain.items():
        if _is_statistic(key):
            assert not torch.equal(value, own[key]), key
        else:
            assert torch.equal(value, own[key]), key


def test_every_client_gets_its_own_statistics_and_the_home_keeps_the_shared_ones(
    tiny_data: Path, tmp_path: Path
) -> None:
    models = _models("fedavg", tiny_data, tmp_path / "own", **MULTI)
    clients = [name for name in models if name]
    assert len(clients) >= 2
    first, second = (models[name] for name in clients[:2])
    for key, value in models[""].items():
        assert torch.equal(first[key], second[key]) != _is_statistic(key), key
        assert torch.equal(first[key], value) != _is_statistic(key), key
    plain = _models("fedavg", tiny_data, tmp_path / "plain", **MULTI, norm="average")
    assert list(plain) == [""]
    assert all(torch.equal(value, plain[""][key]) for key, value in models[""].items())


def test_a_run_that_had_ended_but_for_its_results_ends_the_same(tiny_data: Path, tmp_path: Path) -> None:
    config = make_config({"method": "adabn", "data_dir": tiny_data, **MULTI})
    first = run(config, tmp_path / "run")
    for name in ("results.json", "done", "model.safetensors"):
        (tmp_path / "run" / name).unlink()
    again = run(config, tmp_path / "run", resume=True)
    assert (again["model_sha256"], again["bytes"]) == (first["model_sha256"], first["bytes"])


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"method": "fedavg", "target": "dim", "norm": "own"}, "norm=own: a place that nobody has seen"),
        ({"method": "fedavg", "target": "dim", "norm": "frozen"}, "norm=frozen: .* from scratch remember nothing"),
        ({"method": "adabn", "target": "dim", "norm": "average"}, "norm is always own with adabn"),
        ({"method": "deepall", "setting": "adapt", "target": "dim", "norm": "own"}, "deepall does not see the target"),
        ({"method": "fedavg", "weights": "x", "norm": "average", "freeze_norm": True}, "contradicts norm=average"),
        (
            {"method": "dualadapt", "home": "dim", "norm": "average", "dualadapt": {"statistics": "client"}},
            "dualadapt.statistics=client contradicts norm=average",
        ),
    ],
)
def test_what_cannot_be_is_refused(keys: dict[str, Any], message: str, tiny_data: Path) -> None:
    with pytest.raises(InputError, match=message):
        prepare(make_config({"data_dir": tiny_data, **keys}))


@pytest.mark.parametrize(
    ("keys", "norm"),
    [
        ({"method": "fedavg", "target": "dim"}, "average"),
        ({"method": "fedavg", "target": "dim", "setting": "adapt"}, "own"),
        ({"method": "source-only", "target": "dim", "setting": "adapt"}, "average"),
        ({"method": "kd3a", "target": "dim"}, "average"),
        ({"method": "fedavg", "target": "dim", "setting": "adapt", "freeze_norm": False}, "average"),
        ({"method": "dualadapt", "home": "dim"}, "average"),
        ({"method": "fed-mcd", "home": "dim"}, "own"),
        ({"method": "dualadapt", "home": "dim", "dualadapt": {"statistics": "client"}}, "own"),
        ({"method": "dualadapt", "home": "dim", "dualadapt": {"statistics": "home"}}, "average"),
    ],
)
def test_auto_is_decided_and_written_down(keys: dict[str, Any], norm: str, tiny_data: Path) -> None:
    complete = prepare(make_config({"data_dir": tiny_data, **keys})).config
    assert (complete.norm, complete.freeze_norm) == (norm, False)
    if complete.method == "dualadapt":
        assert complete.hyper["statistics"] == ("client" if norm == "own" else "home")


def test_configurations_from_before_the_key_mean_what_they_meant() -> None:
    assert recorded_norm({"method": "fedavg", "freeze_norm": False}) == "average"
    assert recorded_norm({"method": "fedavg", "freeze_norm": True}) == "frozen"
    assert recorded_norm({"method": "dualadapt", "freeze_norm": False, "dualadapt": {"statistics": "client"}}) == "own"
    assert recorded_norm({"method": "fedavg", "norm": "own"}) == "own"


@pytest.mark.parametrize("variant", ["bn", "hbin", "switch"])
def test_measured_statistics_are_the_plain_mean_over_batches(variant: Any) -> None:
    net = build_network("digits-copa", (3, 16, 16), 3, 0).eval()
    convert_norms(net.backbone, variant)
    batches = torch.rand(3, 4, 3, 16, 16, generator=torch.Generator().manual_seed(0))
    name, layer = next(iter(tracking_layers(net).items()))
    seen: list[torch.Tensor] = []
    layer.register_forward_hook(lambda _, inputs, __: seen.append(inputs[0].detach()))
    with torch.no_grad(), remembering(net):
        for batch in batches:
            net(batch)
    found = statistics_of(net)
    means = torch.stack([x.mean((0, 2, 3)) for x in seen]).mean(0)
    variances = torch.stack([x.var((0, 2, 3)) for x in seen]).mean(0)
    assert torch.allclose(found[f"{name}.running_mean"], means, atol=1e-5)
    assert torch.allclose(found[f"{name}.running_var"], variances, rtol=1e-4)
    assert not any(part.training for part in tracking_layers(net).values())


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({"method": "fedavg", "setting": "adapt"}, "chosen: norm=own (what was measured to be best;"),
        ({"method": "fed-mcd", "target": None, "home": "dim"}, "chosen: norm=own (what was measured to be best;"),
        ({"method": "adabn"}, "chosen: norm=own (that is what adabn is)"),
        ({"method": "kd3a"}, "chosen: norm=average (as papers have it, not what was measured best)"),
        ({"method": "kd3a", "norm": "average"}, ""),
        ({"method": "fedavg"}, ""),
    ],
)
def test_the_first_line_says_what_was_chosen_and_from_what(
    given: dict[str, Any], expected: str, tiny_data: Path
) -> None:
    told = prepare(make_config({"data_dir": tiny_data, "target": "dim", "arch": "digits-copa", **given})).choices
    assert told.startswith(expected) and bool(told) == bool(expected)
