"""FADA: the adversaries' losses, the sources' weights, exchanges that add up to SGD, and what they cost."""

from __future__ import annotations

import json
import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from fedshift.errors import InputError, SiteError
from fedshift.federation import codec
from fedshift.federation.federation import Replies
from fedshift.federation.releases import kinds
from fedshift.functional.clusters import gap_statistic, kmeans
from fedshift.methods import fada
from fedshift.methods.fada import FEATURES, Fada, Hyper, TargetSide, Trained
from fedshift.methods.local import plain_network, weights_of
from fedshift.nn.network import Network
from fedshift.runs import planning
from fedshift.runs.config import make_config
from fedshift.runs.execute import run

SITES = ("amber", "blue", "coral")
COMMON = {
    "method": "fada",
    "target": "dim",
    "arch": "digits-copa",
    "batch_size": 16,
    "rounds": 2,
    "workers": 0,
    "lr": 0.02,
    "schedule": "constant",
    "train_per_site": 48,
}


@pytest.fixture
def open_federation(tiny_data: Path, open_method: Any) -> Any:
    return lambda **keys: open_method(Fada, planning.prepare(make_config({"data_dir": tiny_data} | COMMON | keys)))


def pictures(host: Any) -> Tensor:
    return torch.from_numpy(np.array(host.domain.train.inputs)).permute(0, 3, 1, 2).float() / 255


# --- Losses ---------------------------------------------------------------------------------------------------------


def test_the_losses_by_hand() -> None:
    """Logits log 3 and 0 are probabilities 3/4 and 1/2."""
    source, target = torch.tensor([[math.log(3)], [0.0]]), torch.tensor([[math.log(3)]])
    expected = -(math.log(3 / 4) + math.log(1 / 2)) / 2 - math.log(1 - 3 / 4)
    assert fada.identification_loss(source, target).item() == pytest.approx(expected, rel=1e-6)
    assert fada.confusion_loss(source).item() == pytest.approx(-(math.log(3 / 4) + math.log(1 / 2)) / 2, rel=1e-6)
    assert fada.confusion_loss(torch.tensor([[-200.0]])).item() == pytest.approx(200)  # no logarithm of 0


def test_an_identifier_learns_to_tell_source_from_target(open_federation: Any) -> None:
    method, base, fed = open_federation(lr=0.1)
    side = TargetSide(fed.home, method.init(base, fed))
    drawn = torch.Generator().manual_seed(0)
    width = base.backbone.out_features
    reply = Trained({}, {FEATURES: torch.rand(16, width, generator=drawn) + 0.5}, 16, 0.0)
    losses = [fada.identify(side, "blue", reply, torch.rand(16, width, generator=drawn)) for _ in range(30)]
    assert losses[0] == pytest.approx(2 * math.log(2), abs=0.3) and losses[-1] < 0.2
    untouched = method.init(base, fed).identifiers["coral"]
    assert all(torch.equal(value, untouched[key]) for key, value in weights_of(side.judges["coral"]).items())


# --- Attention ------------------------------------------------------------------------------------------------------


def shifted(base: Network, amount: float, seed: int) -> dict[str, Tensor]:
    drawn = torch.Generator().manual_seed(seed)
    return {
        key: value + amount * torch.randn(value.shape, generator=drawn) if key.endswith("conv.weight") else value
        for key, value in weights_of(base).items()
    }


def test_attention_is_the_softmax_of_gains(open_federation: Any) -> None:
    _, base, fed = open_federation()
    x = pictures(fed.home_host)[:24]
    models = {site: shifted(base, 0.02 * (place + 1), place) for place, site in enumerate(SITES)}
    found = fada.attention(plain_network(fed.plan).train(), models, x, 3, is_dynamic=True)
    spread = {}
    for site, weights in {"before": weights_of(base), **models}.items():
        net = plain_network(fed.plan).train()
        net.load_state_dict(weights)
        with torch.no_grad():
            features = net.features(x)
        spread[site] = gap_statistic(features, kmeans(features, 3))
    gains = np.array([spread["before"] - spread[site] for site in SITES])
    expected = np.exp(gains - gains.max()) / np.exp(gains - gains.max()).sum()
    assert list(found.values()) == pytest.approx(expected.tolist(), abs=1e-4)
    assert len({round(weight, 6) for weight in found.values()}) == 3
    even = fada.attention(plain_network(fed.plan).train(), models, x, 3, is_dynamic=False)
    assert even == pytest.approx(dict.fromkeys(SITES, 1 / 3))


def test_in_bfloat16_every_source_is_judged_by_its_own_model(open_federation: Any) -> None:
    """Autocast keeps converted weights while it is on: one context for all would judge the first model three times."""
    _, base, fed = open_federation()
    x = pictures(fed.home_host)[:24]
    models = {site: shifted(base, 0.2 * (place + 1), place) for place, site in enumerate(SITES)}
    found = {
        precision: fada.attention(plain_network(fed.plan).train(), models, x, 3, is_dynamic=True, precision=precision)
        for precision in ("float32", "bfloat16")
    }
    assert found["bfloat16"] == pytest.approx(found["float32"], abs=0.05)
    assert max(found["bfloat16"].values()) - min(found["bfloat16"].values()) > 0.1


def test_a_model_that_gives_nan_is_left_out_and_counted(open_federation: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    method, base, fed = open_federation(fada={"attention": False})
    scripted(monkeypatch, fed, {"amber": 0.0, "blue": 3e38, "coral": 0.0})
    state = method.round(method.init(base, fed), fed)
    assert fed.counters == {"fada.unusable-model": 3}  # once an exchange: 48 samples in batches of 16
    weights = {note.site: note.value for note in fed.notes if note.name == "weight"}
    assert weights == pytest.approx({"amber": 0.5, "coral": 0.5})
    assert all(bool(torch.isfinite(value).all()) for value in state.model.values())
    scripted(monkeypatch, fed, dict.fromkeys(SITES, 3e38))
    after = method.round(state, fed)
    assert fed.counters == {"fada.unusable-model": 12} and codec.pack(after) == codec.pack(state)


# --- Exchanges ------------------------------------------------------------------------------------------------------


def scripted(monkeypatch: pytest.MonkeyPatch, fed: Any, shifts: dict[str, float], samples: int = 48) -> list[Any]:
    """Sites answer with the model they were sent, every parameter moved by `shifts[site]`."""
    asked: list[Any] = []

    def ask(sites: Any, step: Any, each: Any, expect: Any, model: Any, exchange: int) -> Any:
        asked.append(model)
        replies = Replies(step)
        for site, shift in shifts.items():
            moved = {key: value + shift if key.endswith(("weight", "bias")) else value for key, value in model.items()}
            features = {FEATURES: torch.rand_like(expect["features"].like[FEATURES])}
            exchanges = fada.full_exchanges(samples, fed.plan, Hyper())
            replies.add(site, Trained(moved, features, exchanges, 0.0), 1)
        return replies

    monkeypatch.setattr(fed, "ask", ask)
    return asked


def identifier(state: fada.State, site: str) -> Any:
    judge = fada.domain_identifier(64)
    judge.load_state_dict(dict(state.identifiers[site]))
    return judge


@pytest.mark.parametrize("factor", [1.0, 0.25])
def test_the_first_exchange_is_a_step_of_sgd_on_the_whole_loss(factor: float, open_federation: Any) -> None:
    """sum_i alpha_i (CE_i + w L_G(source i) + w L_G(target)). At the target, identifiers have made a step already."""
    keys = {"fada": {"attention": False, "adversarial": 0.5}, "batch_size": 48, "weight_decay": 1e-2, "lr": 0.1}
    method, base, fed = open_federation(**keys, backbone_lr_factor=factor)
    state = method.init(base, fed)
    after = method.round(state, fed)  # 48 samples: one exchange

    net: Any = plain_network(fed.plan).train()
    net.load_state_dict(dict(state.model))
    total = torch.zeros(())
    for site in SITES:
        host = fed.engine._hosts[site]
        features = net.features(pictures(host))
        total = total + nn.functional.cross_entropy(net.head(features), torch.from_numpy(host.domain.train.labels)) / 3
        total = total + 0.5 * fada.confusion_loss(identifier(state, site)(features)) / 3
    target = net.features(pictures(fed.home_host))
    for site in SITES:
        total = total + 0.5 * fada.confusion_loss(identifier(after, site)(target)) / 3
    gradients = torch.autograd.grad(total, list(net.parameters()))
    for (name, parameter), gradient in zip(net.named_parameters(), gradients, strict=True):
        change = after.model[name] - state.model[name]
        rate = 0.1 * factor if name.startswith("backbone.") else 0.1
        expected = -rate * (gradient + 1e-2 * parameter.detach())
        torch.testing.assert_close(change, expected, rtol=2e-2, atol=5e-5)
    assert not torch.equal(after.identifiers["amber"]["0.weight"], state.identifiers["amber"]["0.weight"])


def test_momentum_goes_on_from_exchange_to_exchange(open_federation: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every site moves by 0.01 each time: the model by 0.01, then 0.019, then 0.0271."""
    method, base, fed = open_federation(fada={"adversarial": 0.0}, momentum=0.9)
    asked = scripted(monkeypatch, fed, dict.fromkeys(SITES, 0.01))
    after = method.round(method.init(base, fed), fed)
    steps = [float(model["head.bias"][0]) for model in asked] + [float(after.model["head.bias"][0])]
    assert np.diff(steps).tolist() == pytest.approx([0.01, 0.019, 0.0271], abs=1e-5)


def test_the_statistics_of_normalisation_are_the_targets(open_federation: Any) -> None:
    method, base, fed = open_federation(batch_size=48)
    state = method.init(base, fed)
    after = method.round(state, fed)
    net: Any = plain_network(fed.plan).train()
    net.load_state_dict(dict(state.model))
    with torch.no_grad():
        net.features(pictures(fed.home_host))
    for number in (1, 2, 3, 4):
        key = f"backbone.block{number}.norm.running_mean"
        torch.testing.assert_close(after.model[key], net.state_dict()[key], rtol=1e-4, atol=1e-6)


def test_a_step_that_diverges_is_taken_back(open_federation: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    method, base, fed = open_federation()
    scripted(monkeypatch, fed, dict.fromkeys(SITES, 0.01), samples=16)

    def meet(home: Any, side: Any, sent: Any, models: Any, replies: Any, exchange: int, rng: Any) -> fada.Met:
        with torch.no_grad():
            side.net.head.bias.fill_(torch.nan)
        return fada.Met(dict.fromkeys(SITES, 1 / 3), dict.fromkeys(SITES, 0.1), 0.2)

    monkeypatch.setattr(fada, "meet", meet)
    state = method.init(base, fed)
    after = method.round(state, fed)
    assert fed.counters == {"fada.step-diverged": 1}
    assert torch.equal(after.model["head.bias"], state.model["head.bias"])


@pytest.mark.parametrize(
    ("samples", "epochs", "together", "expected"),
    [
        ([64], 1.0, 1, 4),
        ([65], 1.0, 1, 5),
        ([65], 1.0, 2, 3),
        ([64], 0.25, 1, 1),
        ([64], 2.0, 1, 8),
        ([3], 0.1, 4, 1),
        ([32, 64, 10**12], 1.0, 1, 4),  # one that lies makes no endless round
        ([64, 10**12], 1.0, 1, 4),
    ],
)
def test_a_round_exchanges_as_often_as_an_epoch_has_batches(
    samples: list[int], epochs: float, together: int, expected: int
) -> None:
    plan: Any = SimpleNamespace(training=SimpleNamespace(local_epochs=epochs, batch_size=16))
    wanted = [fada.full_exchanges(count, plan, Hyper(sync_batches=together)) for count in samples]
    assert fada.exchanges_of(wanted) == expected


def test_a_site_sends_the_features_of_its_batches(open_federation: Any) -> None:
    """Two batches of 16 an exchange, two plain steps; another exchange draws other batches."""
    method, base, fed = open_federation(fada={"sync_batches": 2, "adversarial": 0.0}, weight_decay=0.0, momentum=0.9)
    state = method.init(base, fed)
    each = {"amber": {"identifier": state.identifiers["amber"]}}

    def ask(exchange: int) -> Any:
        fed.begin(1)
        return fed.ask(("amber",), fada.train, each=each, model=state.model, exchange=exchange)["amber"]

    first, again, other = ask(0), ask(0), ask(1)
    assert first.features[FEATURES].shape == (32, base.backbone.out_features) and first.exchanges == 2
    assert torch.equal(first.features[FEATURES], again.features[FEATURES])
    assert not torch.equal(first.features[FEATURES], other.features[FEATURES])

    host = fed.engine._hosts["amber"]
    images, labels = pictures(host), torch.from_numpy(host.domain.train.labels)
    rng = fada.Rng.of(fed.plan.seed, 1, "amber", "fada.train").child("exchange", 0)
    order = torch.randperm(48, generator=rng.torch())[:32]
    net: Any = plain_network(fed.plan).train()
    net.load_state_dict(dict(state.model))
    for index, seen in zip(order.split(16), first.features[FEATURES].split(16), strict=True):
        features = net.features(images[index])
        torch.testing.assert_close(features.detach(), seen, rtol=1e-3, atol=1e-4)
        gradients = torch.autograd.grad(
            nn.functional.cross_entropy(net.head(features), labels[index]), list(net.parameters())
        )
        with torch.no_grad():
            for parameter, gradient in zip(net.parameters(), gradients, strict=True):
                parameter -= 0.02 * gradient
    torch.testing.assert_close(first.model["head.weight"], net.head.weight.detach(), rtol=1e-3, atol=1e-5)


def test_a_site_smaller_than_a_batch_repeats_itself(open_federation: Any) -> None:
    method, base, fed = open_federation(batch_size=100)
    state = method.init(base, fed)
    each = {"amber": {"identifier": state.identifiers["amber"]}}
    sent = fed.ask(("amber",), fada.train, each=each, model=state.model, exchange=0)["amber"].features[FEATURES]
    assert sent.shape[0] == 100 and torch.equal(sent[48:96], sent[:48])


# --- What it costs and gives away -----------------------------------------------------------------------------------


def test_features_are_declared_counted_and_can_be_forbidden(tiny_data: Path, tmp_path: Path) -> None:
    assert kinds(Trained)["features"].name == "features" and "single samples" in kinds(Trained)["features"].meaning
    assert not Trained.summed and not Trained.passed_on
    keys = COMMON | {"data_dir": tiny_data, "rounds": 1}
    results = run(make_config(keys), tmp_path / "run")
    rows = [json.loads(line) for line in (tmp_path / "run/sites/blue/ledger.jsonl").read_text().splitlines()]
    left = [row for row in rows if row.get("kind") == "features"]
    assert [(row["values"], row["bytes"]) for row in left] == [(16 * 64, 4 * 16 * 64)] * 3  # 48 samples
    model_bytes = sum(row["bytes"] for row in rows if row.get("field") == "model")
    payload = 3 * (model_bytes + 3 * 4 * 16 * 64)
    assert payload < results["bytes"]["up"] < 1.02 * payload

    forbidden = keys | {"policy": {"allow": ["weights", "count", "metric", "counts", "facts"]}}
    with pytest.raises(SiteError, match="site-policy"):
        run(make_config(forbidden), tmp_path / "forbidden")


def test_fewer_exchanges_send_less(tiny_data: Path, tmp_path: Path) -> None:
    keys = COMMON | {"data_dir": tiny_data, "rounds": 1}
    often = run(make_config(keys), tmp_path / "often")
    seldom = run(make_config(keys | {"fada": {"sync_batches": 3}}), tmp_path / "seldom")
    assert seldom["bytes"]["down"] == pytest.approx(often["bytes"]["down"] / 3, rel=0.01)


def test_a_single_source(tiny_data: Path, tmp_path: Path) -> None:
    results = run(make_config(COMMON | {"data_dir": tiny_data, "sources": ["amber"], "rounds": 1}), tmp_path / "run")
    assert results["counters"] == {} and 0 <= results["accuracy"]["last"] <= 1


@pytest.mark.parametrize("keys", [{"adversarial": -1.0}, {"sync_batches": 0}])
def test_keys_that_make_no_sense_are_refused(keys: dict[str, Any]) -> None:
    with pytest.raises(InputError, match=next(iter(keys))):
        make_config({"method": "fada", "fada": keys})
