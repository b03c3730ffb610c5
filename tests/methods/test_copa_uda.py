"""COPA with a target: who is believed about it, what is learned from it, and what happens when nobody is sure."""

from __future__ import annotations

import dataclasses
import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from fedshift.data.batches import LabelledBatch
from fedshift.errors import InputError
from fedshift.federation import codec
from fedshift.federation.federation import Replies
from fedshift.methods.base import SHARED
from fedshift.methods.copa import copa_uda, parts
from fedshift.methods.copa.copa import State
from fedshift.methods.copa.copa_uda import CopaUda, LocalModel, Trained, train
from fedshift.nn.network import Network
from fedshift.runs import planning
from fedshift.runs.config import make_config
from fedshift.runs.execute import run

SITES = ("amber", "blue", "coral")
COMMON = {"method": "copa-uda", "target": "dim", "arch": "digits-copa", "batch_size": 999, "rounds": 2, "workers": 0}


@pytest.fixture
def open_federation(tiny_data: Path, open_method: Any) -> Any:
    return lambda **keys: open_method(CopaUda, planning.prepare(make_config({"data_dir": tiny_data} | COMMON | keys)))


def classifiers(net: Network, count: int) -> list[dict[str, Tensor]]:
    drawn = torch.Generator().manual_seed(5)
    shapes = {key: value.shape for key, value in net.head.state_dict().items()}
    return [{key: torch.randn(shape, generator=drawn) for key, shape in shapes.items()} for _ in range(count)]


def target_images(fed: Any) -> Tensor:
    return torch.from_numpy(np.array(fed.home_host.domain.train.inputs)).permute(0, 3, 1, 2).float() / 255


def noted(fed: Any, name: str) -> dict[str, float]:
    return {note.site: note.value for note in fed.notes if note.name == name}


def scripted(monkeypatch: pytest.MonkeyPatch, fed: Any, values: dict[str, float]) -> list[dict[str, Any]]:
    """Sites answer with models whose every number is `values[site]`; who is not named is missing. What was asked is
    recorded."""
    asked: list[dict[str, Any]] = []

    def ask(sites: Any, step: Any, each: Any, extractor: Any) -> Any:
        asked.append({site: {"extractor": extractor} | each[site] for site in sites})
        replies = Replies(train)
        for site, value in values.items():
            filled = {
                field: {
                    key: torch.full_like(old, value) if old.is_floating_point() else old
                    for key, old in asked[-1][site][field].items()
                }
                for field in ("extractor", "head")
            }
            replies.add(site, Trained(loss=value, **filled), 1)
        return replies

    monkeypatch.setattr(fed, "ask", ask)
    return asked


def scripted_opinions(monkeypatch: pytest.MonkeyPatch, said: dict[str, list[list[float]]]) -> None:
    """Local models say of the target what is written here; the rest of the target's images leave them cold."""

    def predict(home: Any, model: LocalModel, rng: Any) -> Tensor:
        even = torch.full((len(home.train), 3), 1 / 3)
        even[: len(said[model.site])] = torch.tensor(said[model.site])
        return even

    monkeypatch.setattr(copa_uda, "predict", predict)


SURE = {
    # The mean is above 0.95 for samples 0, 1 and 2; of sample 3 only amber is sure, and coral is of another opinion.
    "amber": [[0.98, 0.01, 0.01], [0.01, 0.98, 0.01], [0.97, 0.02, 0.01], [0.98, 0.01, 0.01]],
    "blue": [[0.97, 0.02, 0.01], [0.01, 0.98, 0.01], [0.99, 0.00, 0.01], [0.40, 0.30, 0.30]],
    "coral": [[0.99, 0.01, 0.00], [0.02, 0.96, 0.02], [0.90, 0.05, 0.05], [0.20, 0.70, 0.10]],
}


# --- Steps 2 and 3 --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("rule", ["probabilities", "logits"])
def test_a_local_model_predicts_by_the_mean_of_its_classifiers(rule: str, open_federation: Any) -> None:
    method, base, fed = open_federation(**{"copa-uda": {"predict": rule}})
    extractor, heads = method.init(base, fed).extractor, classifiers(base, 3)
    found = fed.at_home(copa_uda.predict, model=LocalModel("amber", extractor, heads))
    net = parts.converted_network(fed.plan, method.hyper).eval()
    net.backbone.load_state_dict(dict(extractor))
    with torch.no_grad():
        features = net.features(target_images(fed))
    scores = torch.stack([features @ head["weight"].T + head["bias"] for head in heads])
    expected = scores.softmax(2).mean(0) if rule == "probabilities" else scores.mean(0).softmax(1)
    torch.testing.assert_close(found, expected)


def test_extractors_count_by_agreement(open_federation: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    said = SURE | {"coral": [[0.99, 0.01, 0.00], [0.02, 0.96, 0.02], [0.05, 0.90, 0.05]]}
    # Coral is now alone with sample 2, whose mean falls below the threshold: samples 0 and 1 are kept, all agree.
    method, base, fed = open_federation(aggregation="mean")
    scripted(monkeypatch, fed, {"amber": 1.0, "blue": 2.0, "coral": 6.0})
    scripted_opinions(monkeypatch, said)
    monkeypatch.setattr(method, "_fine_tuned", lambda state, *rest: state)
    state = method.round(method.init(base, fed), fed)
    assert float(state.extractor["block1.conv.bias"][0]) == pytest.approx(3.0)
    assert noted(fed, "weight") == pytest.approx(dict.fromkeys(SITES, 1 / 3))

    # By the most confident model, samples 0 to 3 are kept: Z = 4, 4, 3.
    method, base, fed = open_federation(aggregation="mean", **{"copa-uda": {"agreement": "max"}})
    scripted(monkeypatch, fed, {"amber": 1.0, "blue": 2.0, "coral": 6.0})
    scripted_opinions(monkeypatch, SURE)
    monkeypatch.setattr(method, "_fine_tuned", lambda state, *rest: state)
    state = method.round(method.init(base, fed), fed)
    parts = [math.exp(4 / 11), math.exp(4 / 11), math.exp(3 / 11)]
    alpha = [part / sum(parts) for part in parts]
    assert list(noted(fed, "weight").values()) == pytest.approx(alpha)
    expected = alpha[0] * 1.0 + alpha[1] * 2.0 + alpha[2] * 6.0
    assert float(state.extractor["block1.conv.bias"][0]) == pytest.approx(expected)
    assert noted(fed, "agreement") == pytest.approx({"amber": 1.0, "blue": 1.0, "coral": 0.75})
    assert noted(fed, "pseudo_labels") == {"": 4} and noted(fed, "pseudo_label_share")[""] == pytest.approx(
        4 / len(fed.home.train)
    )
    assert {site: float(state.heads[site]["bias"][0]) for site in SITES} == {"amber": 1.0, "blue": 2.0, "coral": 6.0}


def test_none_means_equal_weights_and_pseudo_labels_all_the_same(
    open_federation: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    method, base, fed = open_federation(**{"copa-uda": {"agreement": "none"}})
    scripted(monkeypatch, fed, dict.fromkeys(SITES, 0.01))
    scripted_opinions(monkeypatch, SURE)
    state = method.round(method.init(base, fed), fed)
    assert noted(fed, "weight") == pytest.approx(dict.fromkeys(SITES, 1 / 3))
    assert noted(fed, "pseudo_labels") == {"": 3} and state.trained["dim"]


def test_a_model_that_predicts_nan_is_left_out_and_counted(
    open_federation: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Finite weights, which admission lets through, that overflow on the way to a prediction."""
    method, base, fed = open_federation()
    scripted(monkeypatch, fed, {"amber": 0.01, "blue": 3e38, "coral": 0.03})
    before = method.init(base, fed)
    state = method.round(before, fed)
    assert fed.counters["copa-uda.unusable-model"] == 1
    assert set(noted(fed, "weight")) == {"amber", "coral"}
    assert float(state.extractor["block1.conv.bias"][0]) == pytest.approx(0.02)
    assert state.trained == {"amber": True, "blue": False, "coral": True, "dim": False}
    assert torch.equal(state.heads["blue"]["weight"], before.heads["blue"]["weight"])

    scripted(monkeypatch, fed, dict.fromkeys(SITES, 3e38))
    assert method.round(state, fed) is state
    assert fed.counters["copa-uda.unusable-model"] == 4


def test_everyone_is_sent_the_classifier_of_the_target_once_it_has_learned(
    open_federation: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    method, base, fed = open_federation()
    asked = scripted(monkeypatch, fed, {"amber": 0.01, "blue": 0.02})
    scripted_opinions(monkeypatch, SURE)
    state = method.round(method.init(base, fed), fed)
    method.round(state, fed)
    first, second = asked
    assert sorted(first["amber"]["frozen"]) == ["blue", "coral", "dim"]
    assert all(torch.equal(head["weight"], base.head.weight) for head in first["amber"]["frozen"].values())
    # Coral never answered: it has nothing to say, and it is told what the others have learned.
    assert sorted(second["amber"]["frozen"]) == ["blue", "dim"]
    assert sorted(second["coral"]["frozen"]) == ["amber", "blue", "dim"]
    assert torch.equal(second["blue"]["frozen"]["dim"]["weight"], state.heads["dim"]["weight"])
    assert not torch.equal(state.heads["dim"]["weight"], base.head.weight)


def test_in_a_shared_start_the_target_waits_and_then_starts_from_the_common_classifier(
    open_federation: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    method, base, fed = open_federation(**{"copa-uda": {"shared_start": 0.5}})
    scripted(monkeypatch, fed, {"amber": 0.01, "blue": 0.02, "coral": 0.06})
    scripted_opinions(monkeypatch, SURE)  # Enough to learn from, if it were asked.
    fed.round = 1
    state = method.round(method.init(base, fed), fed)
    assert [round(float(head["bias"][0]), 4) for head in state.heads.values()] == [0.03] * 4
    assert state.trained == {"amber": True, "blue": True, "coral": True, "dim": False}
    assert not noted(fed, "pseudo_labels")
    fed.round = 2
    state = method.round(state, fed)
    assert state.trained["dim"] and noted(fed, "pseudo_labels") == {"": 3}


def test_equation_7_is_over_the_sources_and_what_a_site_was_sent(
    open_federation: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    method, base, fed = open_federation()
    heads = dict(zip([*SITES, "dim"], classifiers(base, 4), strict=True))
    first = method.init(base, fed)
    state = State(first.extractor, heads, dict.fromkeys(heads, True), first.first_head, {})
    scripted(monkeypatch, fed, {"blue": 0.5})
    replies = fed.ask(SITES, train, {site: {"head": heads[site]} for site in SITES}, extractor=first.extractor)
    (model,) = method._local_models(state, replies, fed)
    assert model.site == "blue" and len(model.heads) == 3
    assert bool((model.heads[0]["weight"] == 0.5).all())  # C_i as trained now, the others as they were sent
    assert torch.equal(model.heads[1]["weight"], heads["amber"]["weight"])
    assert torch.equal(model.heads[2]["weight"], heads["coral"]["weight"])


# --- Step 4 ---------------------------------------------------------------------------------------------------------


def darker(x: Tensor, generator: torch.Generator, ops: int, magnitude: float, draw: str) -> Tensor:
    return x * 0.3


@pytest.mark.parametrize("collaboration", ["frozen", "none", "enlarge"])
def test_one_step_of_fine_tuning_follows_the_gradient(
    collaboration: str, open_federation: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """F_t takes both terms, C_t the first only (both where there are no frozen ones), and the frozen stay."""
    monkeypatch.setattr(parts, "rand_augment", darker)
    keys = {"copa-uda": {"collaboration": collaboration}, "lr": 0.1, "momentum": 0.0, "weight_decay": 0.0}
    method, base, fed = open_federation(**keys)
    extractor = method.init(base, fed).extractor
    own, *others = classifiers(base, 3)
    kept, labels = (
        torch.tensor([3, 8, 11, 40]),
        torch.full((len(fed.home.train),), -7),
    )  # a label that was not kept would fail
    labels[kept] = torch.tensor([0, 2, 1, 1])
    frozen = {"amber": others[0], "coral": others[1]} if collaboration == "frozen" else {}
    asked = [{key: value.clone() for key, value in head.items()} for head in others]
    tuned = fed.at_home(copa_uda.fine_tune, extractor=extractor, head=own, frozen=frozen, labels=labels, kept=kept)

    net = parts.converted_network(fed.plan, method.hyper).train()
    net.backbone.load_state_dict(dict(extractor))
    net.head.load_state_dict(own)
    images, truth = target_images(fed)[kept], labels[kept]
    loss = nn.functional.cross_entropy(net.head(net.features(images)), truth)
    if collaboration != "none":
        again = net.features(images * 0.3)
        judges = [own] if collaboration == "enlarge" else others
        if collaboration == "enlarge":
            loss = loss + nn.functional.cross_entropy(net.head(again), truth)
        else:
            for judge in judges:
                loss = loss + nn.functional.cross_entropy(again @ judge["weight"].T + judge["bias"], truth)
    loss.backward()
    assert tuned.loss == pytest.approx(loss.item(), rel=1e-4)
    for key, parameter in net.backbone.named_parameters():
        change = tuned.extractor[key] - extractor[key]
        torch.testing.assert_close(change, -0.1 * parameter.grad, rtol=1e-2, atol=2e-5)
    assert bool((tuned.extractor["block1.conv.weight"] != extractor["block1.conv.weight"]).any())
    torch.testing.assert_close(tuned.head["bias"] - own["bias"], -0.1 * net.head.bias.grad, rtol=1e-3, atol=1e-6)
    for head, before in zip(others, asked, strict=True):
        assert torch.equal(head["weight"], before["weight"])


def test_frozen_classifiers_take_no_gradient_and_hand_it_on(open_federation: Any) -> None:
    method, base, fed = open_federation()
    state = method.init(base, fed)
    net = parts.converted_network(fed.plan, method.hyper)
    net = parts.loaded(net, state.extractor, state.first_head, torch.device("cpu"))
    judges = parts.judges_of(net, {"amber": base.head.state_dict(), "blue": base.head.state_dict()}, method.hyper)
    batch = LabelledBatch(target_images(fed)[:8], torch.arange(8) % 3, torch.arange(8))
    own, others = parts.collaborative_loss(net, judges, lambda x: x.flip(3), parts.Hyper())
    (own(batch) + others(batch)).backward()
    assert all(parameter.grad is None for judge in judges for parameter in judge.parameters())
    assert all(bool(parameter.grad.abs().sum() > 0) for parameter in net.head.parameters())
    assert bool(net.backbone.block1.conv.weight.grad.abs().sum() > 0)


def test_only_kept_samples_are_trained_on_and_every_one_of_them(open_federation: Any) -> None:
    _, _, fed = open_federation(batch_size=4, local_epochs=1.5)
    kept = torch.tensor([1, 5, 7, 20, 33, 34, 50, 51])
    labels = torch.arange(len(fed.home.train)) % 3
    batches = list(copa_uda._pseudo_labelled(fed.home, labels, kept, copa_uda.Rng.of("x")))
    assert [len(batch.x) for batch in batches] == [4, 4, 4]
    seen = torch.cat([batch.index for batch in batches])
    assert sorted(seen[:8].tolist()) == kept.tolist() and set(seen[8:].tolist()) < set(kept.tolist())
    for batch in batches:
        assert torch.equal(batch.y, batch.index % 3)
        assert torch.equal(batch.x, target_images(fed)[batch.index])


def test_nothing_above_the_threshold_is_said_and_nothing_is_learned(tiny_data: Path, tmp_path: Path) -> None:
    keys = COMMON | {"data_dir": tiny_data, "batch_size": 16, "copa-uda": {"threshold": 0.9999999}}
    results = run(make_config(keys), tmp_path / "run")
    assert results["counters"]["copa-uda.no-pseudo-labels"] == 2
    rows = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    weights = [row["value"] for row in rows if row["name"] == "weight"]
    assert weights == pytest.approx([1 / 3] * 6)
    assert {row["value"] for row in rows if row["name"] == "pseudo_labels"} == {0}


def test_without_a_trained_target_classifier_the_sources_predict_alone(
    open_federation: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    method, base, fed = open_federation()
    scripted(monkeypatch, fed, dict.fromkeys(SITES, 0.01))
    scripted_opinions(monkeypatch, {site: said[:1] for site, said in SURE.items()})  # one pseudo label is too few
    state = method.round(method.init(base, fed), fed)
    assert fed.counters == {"copa-uda.no-pseudo-labels": 1} and not state.trained["dim"]
    assert method.models(state)[SHARED]["head.shares"].tolist() == pytest.approx([1 / 3, 1 / 3, 1 / 3, 0])
    scripted_opinions(monkeypatch, SURE)
    state = method.round(state, fed)
    assert state.trained["dim"] and method.models(state)[SHARED]["head.shares"].tolist() == [0.25] * 4


def test_fine_tuning_that_diverges_is_thrown_away(open_federation: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def fine_tune(home: Any, extractor: Any, head: Any, rng: Any, **rest: Any) -> copa_uda.FineTuned:
        return copa_uda.FineTuned({**extractor, "block1.conv.bias": torch.full((64,), torch.nan)}, head, 0.5)

    method, base, fed = open_federation()
    scripted(monkeypatch, fed, dict.fromkeys(SITES, 0.01))
    scripted_opinions(monkeypatch, SURE)
    monkeypatch.setattr(copa_uda, "fine_tune", fine_tune)
    state = method.round(method.init(base, fed), fed)
    assert fed.counters == {"copa-uda.fine-tuning-diverged": 1} and not state.trained["dim"]
    assert float(state.extractor["block1.conv.bias"][0]) == pytest.approx(0.01)


# --- Whole rounds ---------------------------------------------------------------------------------------------------


def test_a_round_learns_pseudo_labels_that_are_right(open_federation: Any) -> None:
    """Real rounds: the target's classifier is trained, and the model recognises most of the target."""
    method, base, fed = open_federation(batch_size=8, lr=0.02, rounds=3, **{"copa-uda": {"threshold": 0.7}})
    state = method.init(base, fed)
    for number in (1, 2, 3):
        fed.begin(number)
        state = method.round(state, fed)
    assert state.trained["dim"] and noted(fed, "pseudo_label_share")[""] > 0.1
    assert sum(noted(fed, "weight").values()) == pytest.approx(1)
    net: Any = CopaUda.network(fed.plan)
    net.load_state_dict(dict(method.models(state)[SHARED]))
    with torch.no_grad():
        right = net.eval()(target_images(fed)).argmax(1) == torch.from_numpy(fed.home_host.domain.train.labels)
    assert right.float().mean() > 0.6
    restored = codec.restore(State, codec.unpack(codec.pack(state)))
    assert codec.pack(restored) == codec.pack(state)


def test_without_iteration_sites_never_hear_of_the_target(
    open_federation: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    method, base, fed = open_federation(**{"copa-uda": {"iterate": False}})
    asked = scripted(monkeypatch, fed, {"amber": 0.01, "blue": 0.02, "coral": 0.03})
    scripted_opinions(monkeypatch, SURE)
    state = method.round(method.init(base, fed), fed)
    scripted(monkeypatch, fed, {"amber": 0.07})
    seen: dict[str, Any] = {}

    def fine_tune(home: Any, rng: Any, **given: Any) -> copa_uda.FineTuned:
        seen.update(given)
        return copa_uda.FineTuned(given["extractor"], given["head"], 0.0)

    monkeypatch.setattr(copa_uda, "fine_tune", fine_tune)
    after = method.round(state, fed)
    assert float(after.apart["amber"]["block1.conv.bias"][0]) == pytest.approx(0.07)
    assert all(torch.equal(head["weight"], base.head.weight) for head in asked[0]["amber"]["frozen"].values())
    # All three are in the mean, blue and coral with what they trained before; C_t starts anew every time.
    weights = noted(fed, "weight")
    assert set(weights) == set(SITES)
    expected = 0.07 * weights["amber"] + 0.02 * weights["blue"] + 0.03 * weights["coral"]
    assert float(seen["extractor"]["block1.conv.bias"][0]) == pytest.approx(expected)
    assert torch.equal(seen["head"]["weight"], base.head.weight) and sorted(seen["frozen"]) == list(SITES)


def test_a_single_source_has_the_target_to_collaborate_with(tiny_data: Path, tmp_path: Path) -> None:
    keys = COMMON | {"data_dir": tiny_data, "sources": ["amber"], "batch_size": 16, "rounds": 3}
    results = run(make_config(keys), tmp_path / "run")
    assert results["counters"].get("copa-uda.unusable-model") is None
    assert 0 <= results["accuracy"]["last"] <= 1


@pytest.mark.parametrize("count", [0, 1])
def test_a_target_with_too_few_images_is_named(count: int, open_federation: Any) -> None:
    method, base, fed = open_federation()
    domain = fed.home_host.domain
    fed.home_host.domain = dataclasses.replace(domain, train=domain.train.take(np.arange(count)))
    with pytest.raises(InputError, match=f"target 'dim' has {count} training samples") as caught:
        method.init(base, fed)
    assert caught.value.code == "method-needs"


@pytest.mark.parametrize(
    ("keys", "complaint"),
    [
        ({"threshold": 0.0}, "threshold"),
        ({"threshold": 1.0}, "threshold"),
        ({"agreement": "all"}, "agreement"),
        ({"collaboration": "consistency"}, "collaboration"),
        ({"magnitude": 11}, "magnitude"),
    ],
)
def test_keys_that_make_no_sense_are_refused(keys: dict[str, Any], complaint: str) -> None:
    with pytest.raises(InputError, match=complaint):
        make_config({"method": "copa-uda", "copa-uda": keys})
