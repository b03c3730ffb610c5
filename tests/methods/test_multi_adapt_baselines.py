from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tinydata import TINTS, write_domain
from torch import Tensor, nn
from typer.testing import CliRunner

import fedshift
from fedshift.cli.app import app
from fedshift.errors import InputError, SiteError
from fedshift.federation.engines.inprocess import Sequential
from fedshift.federation.federation import Federation
from fedshift.federation.site import Labelled, SiteHost, Unlabelled, WithSource, WithTargets
from fedshift.functional.losses import cross_entropy, discrepancy
from fedshift.functional.mmd import mmd
from fedshift.methods import METHODS, transfer
from fedshift.methods import discrepancy as mcd
from fedshift.methods.base import SHARED
from fedshift.methods.clients import endless_batches, paired_batches, split_network
from fedshift.methods.local import weights_of
from fedshift.rng import Rng
from fedshift.runs.config import make_config
from fedshift.runs.planning import base_network, open_federation, prepare

RNG = Rng.of("test")
COPYING = ("fed-dan", "fed-dann", "fed-mcd")
CLIENTS = ("blue", "coral", "dim")


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("tiny")
    for number, name in enumerate(TINTS):
        write_domain(root, name, seed=10 * number)
    return root


def keys(method: str, data: Path, **changes: Any) -> dict[str, Any]:
    common = {
        "method": method,
        "data_dir": data,
        "home": "amber",
        "arch": "digits-copa",
        "rounds": 1,
        "batch_size": 16,
        "lr": 0.02,
        "momentum": 0.0,
        "weight_decay": 0.0,
        "workers": 0,
        "policy": {"min_samples": 2},
    }
    return common | changes


def federation(method: str, data: Path, folder: Path, **changes: Any) -> Federation:
    fed = open_federation(prepare(make_config(keys(method, data, **changes))), folder)
    fed.begin(1)
    return fed


def host(fed: Federation, site: str) -> SiteHost:
    assert isinstance(fed.engine, Sequential)
    return fed.engine._hosts[site]


def client(fed: Federation, site: str = "blue") -> WithSource:
    view = host(fed, site).view(WithSource, 1)
    assert isinstance(view, WithSource)
    return view


# --- Who holds whose data -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("method", COPYING)
def test_clients_hold_exactly_what_the_home_trains_on(method: str, data: Path, tmp_path: Path) -> None:
    fed = federation(method, data, tmp_path, client_fraction=0.5)
    home = fed.home.train
    for name in CLIENTS:
        site = client(fed, name)
        for ours, theirs in zip(home.in_order(99), site.source.in_order(99), strict=True):
            assert torch.equal(ours.x, theirs.x) and torch.equal(ours.y, theirs.y)
        assert len(site.train) < 40 < len(home), "only the clients' own data is cut to the fraction"


@pytest.mark.parametrize("method", ["cent-mcd", "fed-oracle"])
def test_the_home_holds_exactly_what_clients_train_on_without_labels(method: str, data: Path, tmp_path: Path) -> None:
    fed = federation(method, data, tmp_path, client_fraction=0.5, train_per_site=40)
    home = fed.home
    assert isinstance(home, WithTargets) and tuple(home.targets) == CLIENTS
    for name in CLIENTS:
        own = host(fed, name).view(Unlabelled, 1)
        assert isinstance(own, Unlabelled)
        (copied,), (there,) = home.targets[name].in_order(99), own.train.in_order(99)
        assert torch.equal(copied.x, there.x) and not hasattr(copied, "y")
    assert len(home.combined) == sum(len(part) for part in home.targets.values())


@pytest.mark.parametrize("method", ["dualadapt", "source-only", "fedavg"])
def test_nobody_else_gets_copies(method: str, data: Path, tmp_path: Path) -> None:
    fed = federation(method, data, tmp_path)
    assert type(fed.home) is Labelled
    for name in CLIENTS:
        with pytest.raises(SiteError, match="WithSource"):
            host(fed, name).view(WithSource, 1)


def test_methods_that_move_data_say_so() -> None:
    for method in COPYING:
        about = METHODS[method].about
        assert about.data == "source-copies" and not about.is_bound
        shown = CliRunner().invoke(app, ["privacy", method]).output
        assert "needs a copy of the home's labelled training data at every client" in " ".join(shown.split())
    for method in ("cent-mcd", "fed-oracle"):
        assert METHODS[method].about.is_bound
        assert "unlabelled data at the home" in " ".join(CliRunner().invoke(app, ["privacy", method]).output.split())
    assert "needs" not in CliRunner().invoke(app, ["privacy", "dualadapt"]).output
    assert [m for m in ("dualadapt", "fed-oracle") if "mixture" in CliRunner().invoke(app, ["privacy", m]).output] == [
        "dualadapt"
    ]


def test_batches_pair_source_with_client_and_never_end_on_the_clients_side(data: Path, tmp_path: Path) -> None:
    site = client(federation("fed-dan", data, tmp_path, client_fraction=0.1, local_epochs=2, batch_size=7))
    assert len(site.train) == 6
    pairs = list(paired_batches(site, RNG))
    assert sum(len(source.x) for source, _ in pairs) == 2 * len(site.source)
    stream = endless_batches(site.train, 4, RNG)
    seen = torch.cat([next(stream).index for _ in range(4)])
    assert torch.bincount(seen).tolist() == [2] * 6


# --- Fed-DAN and Fed-DANN -----------------------------------------------------------------------------------------


def one_batch(fed: Federation, model: dict[str, Tensor]) -> tuple[nn.Module, Any, Any]:
    site = client(fed)
    ((source, target),) = paired_batches(site, RNG)
    net = split_network(fed.plan).train()
    net.load_state_dict(model)
    return net, source, target


def test_dan_adds_the_mmd_of_features_to_the_source_loss(data: Path, tmp_path: Path) -> None:
    fed = federation("fed-dan", data, tmp_path, batch_size=64, **{"fed-dan": {"weight": 0.5}})
    model = weights_of(split_network(fed.plan))
    net, source, target = one_batch(fed, model)
    ours, theirs = net.features(source.x), net.features(target.x)  # type: ignore[operator]
    gap = mmd(ours, theirs)
    loss = cross_entropy(net.head(ours), source.y) + 0.5 * gap  # type: ignore[operator]
    found = transfer.train_dan.run(client(fed), model=model, rng=RNG)
    assert found.gap == pytest.approx(float(gap.detach()), rel=1e-4)
    assert found.loss == pytest.approx(float(loss.detach()), rel=1e-4)
    loss.backward()
    moved = model["backbone.block1.conv.weight"] - 0.02 * net.backbone.block1.conv.weight.grad  # type: ignore[union-attr]
    assert torch.allclose(found.model["backbone.block1.conv.weight"], moved, atol=1e-6)
    assert found.samples == len(client(fed).train)


def test_domain_loss_by_hand() -> None:
    """Verdicts of 0 are undecided: log 2. A sure and right discriminator has no loss."""
    assert float(transfer.domain_loss(torch.zeros(3, 1), torch.zeros(5, 1))) == pytest.approx(np.log(2))
    assert float(transfer.domain_loss(torch.full((3, 1), 50.0), torch.full((5, 1), -50.0))) == pytest.approx(0)
    one_sided = float(transfer.domain_loss(torch.tensor([[1.0]]), torch.full((9, 1), -50.0)))
    assert one_sided == pytest.approx(np.log(1 + np.exp(-1)) / 2)


def test_dann_turns_the_domain_loss_against_the_extractor_and_keeps_the_discriminator(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(transfer, "label_loss", lambda scores, y: scores.sum() * 0)
    monkeypatch.setattr(transfer, "reversal_strength", lambda progress: 1.0)
    fed = federation("fed-dann", data, tmp_path, batch_size=64)
    model = weights_of(split_network(fed.plan))
    site = client(fed)
    judge = transfer._own_discriminator(site, split_network(fed.plan).backbone.out_features, transfer.DannHyper(), RNG)
    net, source, target = one_batch(fed, model)
    loss = transfer.domain_loss(judge(net.features(source.x)), judge(net.features(target.x)))  # type: ignore[operator]
    loss.backward()
    found = transfer.train_dann.run(site, model=model, rng=RNG)
    assert found.gap == pytest.approx(float(loss.detach()), rel=1e-4)
    key = "backbone.block1.conv.weight"
    up = model[key] + 0.02 * net.backbone.block1.conv.weight.grad  # type: ignore[union-attr]
    assert torch.allclose(found.model[key], up, atol=1e-6), "the extractor climbs the domain loss"
    kept = site.store.load(transfer.DISCRIMINATOR)
    down = judge[0].weight - 0.02 * judge[0].weight.grad  # type: ignore[index]
    assert torch.allclose(kept["0.weight"], down, atol=1e-6), "the discriminator descends it"
    assert not any("0.weight" in name and "head" not in name for name in found.model)


def test_dann_starts_gently(data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[float] = []
    monkeypatch.setattr(transfer, "reversal_strength", lambda progress: seen.append(progress) or 0.0)
    fed = federation("fed-dann", data, tmp_path, rounds=4, batch_size=16)
    model = weights_of(split_network(fed.plan))
    for round in (1, 3):
        view = host(fed, "blue").view(WithSource, round)
        transfer.train_dann.run(view, model=model, rng=RNG)
    steps = len(seen) // 2
    assert seen[0] == 0 and seen[steps] == 0.5 and all(0 <= p < 0.25 for p in seen[:steps])
    assert seen == sorted(seen)


# --- MCD ----------------------------------------------------------------------------------------------------------


def play(fed: Federation, monkeypatch: pytest.MonkeyPatch, turns: Sequence[str]) -> tuple[dict[str, Tensor], Any]:
    """Trains one batch with only these turns; returns the model before and what came out."""
    monkeypatch.setattr(mcd, "_turns", lambda batches, repeats: ((t, b) for b in batches for t in turns))
    base, _ = base_network(prepare_of(fed))
    model = mcd.first_model(base, fed)
    return model, mcd.train.run(client(fed), model=model, rng=RNG)


def prepare_of(fed: Federation) -> Any:
    source = host(fed, "blue").spec.source
    return prepare(make_config(keys("fed-mcd", source.data_dir, batch_size=64)))  # type: ignore[arg-type]


def changed(before: dict[str, Tensor], after: dict[str, Tensor]) -> set[str]:
    learned = [key for key in before if key.endswith(("weight", "bias"))]
    return {key.split(".")[0] for key in learned if not torch.equal(before[key], after[key])}


@pytest.mark.parametrize(
    ("turn", "moves"),
    [("source", {"backbone", "head"}), ("classifiers", {"head"}), ("extractor", {"backbone"})],
)
def test_each_turn_of_mcd_moves_its_own_part(
    turn: str, moves: set[str], data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fed = federation("fed-mcd", data, tmp_path, batch_size=64)
    before, found = play(fed, monkeypatch, [turn])
    assert changed(before, found.model) == moves


def test_eq_1_and_2_by_hand(data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fed = federation("fed-mcd", data, tmp_path, batch_size=64)
    before, found = play(fed, monkeypatch, ["classifiers"])
    site = client(fed)
    ((source, target),) = paired_batches(site, RNG)
    net, (first, second) = mcd._loaded(site, before)
    with torch.no_grad():
        theirs, ours = net.features(target.x), net.features(source.x)
    loss = cross_entropy(first(ours), source.y) + cross_entropy(second(ours), source.y)
    (loss - discrepancy(first(theirs), second(theirs)).mean()).backward()  # Eq. (1)
    moved = before["head.members.1.weight"] - 0.02 * second.weight.grad
    assert torch.allclose(found.model["head.members.1.weight"], moved, atol=1e-6)

    before, found = play(fed, monkeypatch, ["extractor"])
    net, (first, second) = mcd._loaded(site, before)
    features = net.features(target.x)
    gap = discrepancy(first(features), second(features)).mean()  # Eq. (2)
    gap.backward()
    key = "backbone.block1.conv.weight"
    moved = before[key] - 0.02 * net.backbone.get_submodule("block1.conv").weight.grad  # type: ignore[operator]
    assert torch.allclose(found.model[key], moved, atol=1e-6)
    assert found.gap == pytest.approx(float(gap.detach()), rel=1e-5)


def test_a_batch_has_one_turn_of_each_and_several_of_the_extractor() -> None:
    batches: list[Any] = ["b1", "b2"]
    found = list(mcd._turns(batches, 3))
    kinds = ["source", "classifiers", "extractor", "extractor", "extractor"]
    assert found == [(kind, batch) for batch in batches for kind in kinds]


def test_the_two_classifiers_start_apart_on_one_extractor(data: Path, tmp_path: Path) -> None:
    fed = federation("fed-mcd", data, tmp_path)
    base, _ = base_network(prepare_of(fed))
    model = mcd.first_model(base, fed)
    assert torch.equal(model["head.members.0.weight"], base.head.weight)  # type: ignore[arg-type]
    assert not torch.equal(model["head.members.0.weight"], model["head.members.1.weight"])
    assert model["head.shares"].tolist() == [0.5, 0.5]


def fit(method: str, data: Path, hyper: dict[str, Any], **changes: Any) -> fedshift.Run:
    settings = keys(method, data, **({method: hyper} | changes))
    return fedshift.fit(settings.pop("method"), **settings)


def extractor(model: Any) -> Tensor:
    weight: Tensor = model["backbone.block1.conv.weight"]
    return weight


def test_forms_of_cent_mcd(data: Path) -> None:
    one, combined, multiple = (
        fit("cent-mcd", data, {"form": form, "repeats": 1}).model().models
        for form in ("one-to-one", "one-to-combined", "one-to-multiple")
    )
    assert set(combined) == {SHARED} and set(one) == set(multiple) == set(CLIENTS)
    assert not torch.equal(extractor(one["blue"]), extractor(one["dim"]))
    assert torch.equal(extractor(multiple["blue"]), extractor(multiple["dim"]))
    key = "head.members.0.weight"
    assert not torch.equal(multiple["blue"][key], multiple["dim"][key])


def test_one_to_one_is_what_a_single_client_gets_from_the_others_forms(data: Path) -> None:
    found = [
        fit("cent-mcd", data, {"form": form, "repeats": 2}, targets=["dim"]).model().models
        for form in ("one-to-one", "one-to-multiple")
    ]
    assert all(torch.equal(found[0]["dim"][key], found[1]["dim"][key]) for key in found[0]["dim"])


@pytest.mark.parametrize("form", ["one-to-one", "one-to-multiple"])
def test_a_client_without_data_gets_no_model_and_is_scored_by_the_others(data: Path, tmp_path: Path, form: str) -> None:
    root = tmp_path / "data"
    root.mkdir()
    for file in data.glob("*.npz"):
        (root / file.name).write_bytes(file.read_bytes())
    write_domain(root, "coral", train=0)
    run = fit("cent-mcd", root, {"form": form, "repeats": 1})
    assert sorted(run.model().models) == ["blue", "dim"]
    own = np.load(root / "coral.npz")
    scores = [run.score(own["test_images"], own["test_labels"], site=name) for name in ("blue", "dim")]
    assert run.results["per_target"]["coral"]["last"] == pytest.approx(sum(scores) / 2)
    assert "coral (skipped)" in run.directory.card.read_text()
    with pytest.raises(InputError, match="client 'coral' was left out of training"):
        run.predict(own["test_images"], site="coral")


def test_keys_are_checked() -> None:
    for method, key, value in (
        ("fed-mcd", "repeats", 0),
        ("cent-mcd", "form", "all"),
        ("fed-dan", "weight", -1.0),
        ("fed-dann", "hidden", 0),
    ):
        with pytest.raises(InputError, match=method):
            make_config({"method": method, method: {key: value}})


def test_a_client_of_these_baselines_with_too_little_data_is_named(data: Path, tmp_path: Path) -> None:
    root = tmp_path / "data"
    root.mkdir()
    for file in data.glob("*.npz"):
        (root / file.name).write_bytes(file.read_bytes())
    write_domain(root, "coral", train=1)
    run = fit("fed-dan", root, {})
    assert run.results["counters"]["skipped.coral.site-policy"] == 1
    assert "Data is moved" in (run.path / "MODEL_CARD.md").read_text()
