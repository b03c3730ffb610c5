"""SHOT: which rounds are whose, what learns at the target and what does not, who predicts."""

from __future__ import annotations

import itertools
import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from fedshift.errors import InputError
from fedshift.methods import shot
from fedshift.methods.base import SHARED
from fedshift.methods.ensembles import StateAlone
from fedshift.methods.local import plain_network, weights_of
from fedshift.methods.shot import Shot, source_rounds
from fedshift.runs import planning
from fedshift.runs.config import make_config
from fedshift.runs.execute import run

SITES = ("amber", "blue", "coral")
COMMON = {"method": "shot", "target": "dim", "arch": "digits-copa", "batch_size": 999, "rounds": 3, "workers": 0}


@pytest.fixture
def open_federation(tiny_data: Path, open_method: Any) -> Any:
    return lambda **keys: open_method(
        Shot, planning.prepare(make_config({"data_dir": tiny_data} | COMMON | keys)), round=3
    )


def target_images(fed: Any) -> Tensor:
    return torch.from_numpy(np.array(fed.home_host.domain.train.inputs)).permute(0, 3, 1, 2).float() / 255


@pytest.mark.parametrize(
    ("rounds", "share", "expected"),
    [(45, 0.67, 30), (3, 0.67, 2), (2, 0.67, 1), (1, 0.67, 1), (10, 0.01, 1), (10, 0.99, 9)],
)
def test_both_halves_get_a_round_where_there_are_two(rounds: int, share: float, expected: int) -> None:
    assert source_rounds(rounds, share) == expected


def test_each_half_has_a_whole_schedule_of_its_own(open_federation: Any) -> None:
    """Four rounds of the sites and two of the target, by hand: half a cosine from 0.08 to 0.02 over each part."""
    _, _, fed = open_federation(rounds=6, lr=0.08, lr_min=0.02, schedule="cosine")
    rates = [shot.lr_of_part(fed.plan.training, shot.Hyper(), number) for number in range(1, 7)]
    wave = 0.03 * math.sqrt(0.5)
    assert rates == pytest.approx([0.08, 0.05 + wave, 0.05, 0.05 - wave, 0.08, 0.05])


@pytest.mark.parametrize(("number", "expected"), [(4, 0.05 - 0.03 * math.sqrt(0.5)), (5, 0.08)])
def test_training_steps_at_the_rate_of_its_half(number: int, expected: float, open_federation: Any) -> None:
    """The last round of the sites and the first of the target: one step of SGD with one batch shows the rate."""
    keys = {"rounds": 6, "lr": 0.08, "lr_min": 0.02, "schedule": "cosine", "momentum": 0.0, "weight_decay": 0.0}
    _, base, fed = open_federation(**keys)
    fed.begin(number)
    before = weights_of(base)

    def moved() -> Tensor:
        if number == 4:
            after = fed.ask(("amber",), shot.train_source, model=before, epochs=1.0)["amber"].model
        else:
            after = fed.at_home(shot.adapt, model=before, source="amber").model
        key = next(key for key in before if key.startswith("backbone.") and key.endswith("weight"))
        return after[key] - before[key]

    cosine = moved()
    _, _, fed = open_federation(**keys | {"schedule": "constant", "lr": 0.08})
    fed.begin(number)
    torch.testing.assert_close(cosine, moved() * (expected / 0.08), rtol=1e-3, atol=1e-6)


@pytest.mark.parametrize(("epochs", "expected"), [(1.0, 1), (3.0, 3), (2.5, 3), (0.5, 1)])
def test_pseudo_labels_are_new_in_every_epoch(
    epochs: float, expected: int, open_federation: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, base, fed = open_federation(local_epochs=epochs)
    seen: list[Tensor] = []
    plain = shot.pseudo_labels

    def counted(net: Any, home: Any) -> Tensor | None:
        seen.append(weights_of(net)["backbone." + next(iter(dict(net.backbone.named_parameters())))])
        return plain(net, home)

    monkeypatch.setattr(shot, "pseudo_labels", counted)
    fed.at_home(shot.adapt, model=weights_of(base), source="amber")
    assert len(seen) == expected
    assert all(not torch.equal(one, other) for one, other in itertools.pairwise(seen))


def test_training_that_diverges_between_two_epochs_is_undone(
    open_federation: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    method, base, fed = open_federation(local_epochs=2.0)
    good = weights_of(base)
    answers = iter([shot.pseudo_labels(base, fed.home), None])
    monkeypatch.setattr(shot, "pseudo_labels", lambda net, home: next(answers))
    after = method.round(StateAlone({"amber": good}, {"amber": True}), fed)
    assert fed.counters == {"shot.adaptation-diverged": 1} and after.trained == {"amber": True}
    assert all(torch.equal(after.models["amber"][key], good[key]) for key in good)


def test_sites_are_asked_in_the_first_rounds_only(tiny_data: Path, tmp_path: Path) -> None:
    keys = COMMON | {"data_dir": tiny_data, "batch_size": 16, "rounds": 4, "shot": {"source_rounds": 0.5}}
    run(make_config(keys), tmp_path / "run")
    ledger = [json.loads(line) for line in (tmp_path / "run/sites/amber/ledger.jsonl").read_text().splitlines()]
    assert [row["round"] for row in ledger if row["step"] == "shot.train_source" and row.get("field") == "model"] == [
        1,
        2,
    ]
    rows = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert {row["round"] for row in rows if row["name"] == "train_loss"} == {1, 2}
    assert {row["round"] for row in rows if row["name"] == "adaptation_loss"} == {3, 4}
    sent = {row["round"]: row["value"] for row in rows if row["name"] == "bytes_up"}
    assert sent[2] == 2 * sent[1] and sent[4] == sent[3] == sent[2]


def test_a_single_round_cannot_adapt_and_says_so(tiny_data: Path, tmp_path: Path) -> None:
    results = run(make_config(COMMON | {"data_dir": tiny_data, "batch_size": 16, "rounds": 1}), tmp_path / "run")
    assert results["counters"] == {"shot.no-round-to-adapt": 1}


def test_sites_train_with_smoothed_labels(open_federation: Any) -> None:
    _, base, fed = open_federation(lr=1e-12)
    reply = fed.ask(("amber",), shot.train_source, model=weights_of(base), epochs=1.0)["amber"]
    split = fed.engine._hosts["amber"].domain.train
    images = torch.from_numpy(np.array(split.inputs)).permute(0, 3, 1, 2).float() / 255
    with torch.no_grad():
        log_p = base.train()(images).log_softmax(1)
    truth = nn.functional.one_hot(torch.from_numpy(split.labels), 3) * 0.9 + 0.1 / 3
    assert reply.loss == pytest.approx(-(truth * log_p).sum(1).mean().item(), rel=1e-4)


@pytest.mark.parametrize("keys", [{}, {"beta": 0.0}, {"diversity": 0.0}], ids=["all", "without-labels", "entropy"])
def test_one_step_at_the_target_follows_the_gradient(keys: dict[str, Any], open_federation: Any) -> None:
    """The extractor takes the gradient of Eq. (7) and the classifier stays."""
    method, base, fed = open_federation(lr=0.1, momentum=0.0, weight_decay=0.0, shot=keys, schedule="constant")
    labels = shot.pseudo_labels(base, fed.home)
    before = weights_of(base)
    adapted = fed.at_home(shot.adapt, model=before, source="amber")

    net: Any = plain_network(fed.plan)
    net.load_state_dict(before)
    p = net.train()(target_images(fed)).softmax(1)
    loss = -(p * p.log()).sum(1).mean()
    loss = loss + method.hyper.diversity * (p.mean(0) * p.mean(0).log()).sum()
    loss = loss + method.hyper.beta * nn.functional.nll_loss(p.log(), labels)
    loss.backward()
    assert adapted.loss == pytest.approx(loss.item(), rel=1e-3)
    for key, parameter in net.backbone.named_parameters():
        change = adapted.model[f"backbone.{key}"] - before[f"backbone.{key}"]
        torch.testing.assert_close(change, -0.1 * parameter.grad, rtol=1e-2, atol=2e-5)
    assert torch.equal(adapted.model["head.weight"], before["head.weight"])
    assert torch.equal(adapted.model["head.bias"], before["head.bias"])


def test_adaptation_helps_on_the_target(open_federation: Any) -> None:
    """A model that was trained elsewhere becomes surer of the target and keeps using all classes."""
    _, base, fed = open_federation(batch_size=8, lr=0.02, schedule="constant")
    model = weights_of(base)
    for number in (1, 2):
        fed.begin(number)
        model = fed.ask(("amber",), shot.train_source, model=model, epochs=1.0)["amber"].model

    def look(weights: Any) -> tuple[float, float]:
        net = plain_network(fed.plan)
        net.load_state_dict(weights)
        with torch.no_grad():
            p = net.eval()(target_images(fed)).softmax(1)
        return -(p * p.log()).sum(1).mean().item(), p.mean(0).min().item()

    before = look(model)
    for number in (3, 4):
        fed.begin(number)
        model = fed.at_home(shot.adapt, model=model, source="amber").model
    after = look(model)
    assert after[0] < before[0] and after[1] > 0.1


def overflowing(weights: dict[str, Tensor]) -> dict[str, Tensor]:
    """Finite weights whose predictions are not."""
    return {k: torch.full_like(v, 3e38) if v.is_floating_point() else v for k, v in weights.items()}


def test_a_model_that_predicts_nan_is_left_out_and_counted(open_federation: Any) -> None:
    method, base, fed = open_federation(batch_size=16)
    good = weights_of(base)
    state = StateAlone({"amber": good, "blue": overflowing(good), "coral": good}, dict.fromkeys(SITES, True))
    after = method.round(state, fed)
    assert fed.counters == {"shot.unusable-model": 1}
    assert after.trained == {"amber": True, "blue": False, "coral": True}
    model = method.models(after)[SHARED]
    assert model["shares"].tolist() == [0.5, 0.0, 0.5]
    net = Shot.network(fed.plan)
    net.load_state_dict(dict(model))
    with torch.no_grad():
        assert bool(torch.isfinite(net.eval()(target_images(fed))).all())


def test_an_adaptation_that_diverges_is_thrown_away(open_federation: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    method, base, fed = open_federation()
    good = weights_of(base)

    def adapt(home: Any, model: Any, source: str, rng: Any) -> shot.Adapted:
        broken = {**model, "head.bias": torch.full((3,), torch.nan)}
        return shot.Adapted(broken if source == "blue" else {**model, "head.bias": torch.ones(3)}, 0.5)

    monkeypatch.setattr(shot, "adapt", adapt)
    after = method.round(StateAlone(dict.fromkeys(SITES, good), dict.fromkeys(SITES, True)), fed)
    assert fed.counters == {"shot.adaptation-diverged": 1} and all(after.trained.values())
    assert torch.equal(after.models["blue"]["head.bias"], good["head.bias"])
    assert after.models["amber"]["head.bias"].tolist() == [1.0, 1.0, 1.0]


def test_the_prediction_is_the_mean_of_the_models_probabilities(open_federation: Any) -> None:
    method, base, fed = open_federation()
    others = [planning.build_network("digits-copa", (3, 16, 16), 3, seed) for seed in (1, 2)]
    nets = dict(zip(SITES, [base, *others], strict=True))
    state = StateAlone({site: weights_of(net) for site, net in nets.items()}, dict.fromkeys(SITES, True))
    net = Shot.network(fed.plan)
    net.load_state_dict(dict(method.models(state)[SHARED]))
    x = torch.rand(5, 3, 16, 16)
    with torch.no_grad():
        expected = torch.stack([one.eval()(x).softmax(1) for one in nets.values()]).mean(0)
        torch.testing.assert_close(net.eval()(x).softmax(1), expected)


def test_a_site_that_never_answered_is_not_adapted(open_federation: Any) -> None:
    method, base, fed = open_federation(batch_size=16)
    state = StateAlone(dict.fromkeys(SITES, weights_of(base)), {"amber": True, "blue": False, "coral": False})
    method.round(state, fed)
    assert {note.site for note in fed.notes if note.name == "adaptation_loss"} == {"amber"}


def test_a_single_source(tiny_data: Path, tmp_path: Path) -> None:
    keys = COMMON | {"data_dir": tiny_data, "batch_size": 16, "sources": ["amber"]}
    results = run(make_config(keys), tmp_path / "run")
    assert results["counters"] == {} and 0 <= results["accuracy"]["last"] <= 1


@pytest.mark.parametrize(
    "keys", [{"source_rounds": 0.0}, {"source_rounds": 1.0}, {"smoothing": 1.0}, {"beta": -0.1}, {"diversity": -1.0}]
)
def test_keys_that_make_no_sense_are_refused(keys: dict[str, Any]) -> None:
    with pytest.raises(InputError, match=next(iter(keys))):
        make_config({"method": "shot", "shot": keys})
