"""COPA's coordinator: what each site is sent, what is averaged and what collected, what the result predicts."""

from __future__ import annotations

import copy
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fedshift.federation import codec
from fedshift.federation.federation import Federation, Replies, Rules
from fedshift.methods.base import SHARED
from fedshift.methods.copa import copa
from fedshift.methods.copa.copa import Copa, State, Trained, TrainedTogether
from fedshift.methods.copa.parts import Hyper
from fedshift.nn.archs import build_network
from fedshift.nn.network import Network
from fedshift.nn.normalisation import HybridNorm
from fedshift.runs import planning
from fedshift.runs.config import make_config

SITES = ("amber", "blue", "coral")


# --- Who is sent what, and Eq. (6) ----------------------------------------------------------------------------------


class Scripted:
    """A federation whose sites answer by script: (site, round) -> release; who has none is missing. It averages as with
    `aggregation=mean`."""

    rules = Rules(aggregation="mean")
    average, clipped = Federation.average, Federation.clipped

    def __init__(self, answers: dict[tuple[str, int], Any], sites: tuple[str, ...] = SITES) -> None:
        plan = SimpleNamespace(model=SimpleNamespace(input_shape=(3, 16, 16)), training=SimpleNamespace(rounds=4))
        self.labelled, self.plan, self.round = sites, plan, 1
        self.answers, self.asked, self.notes, self.counters = answers, [], {}, {}

    def ask(self, sites: tuple[str, ...], step: Any, each: Any = None, **payload: Any) -> Any:
        self.asked.append({site: payload | dict((each or {}).get(site, {})) for site in sites})
        replies = Replies(step)
        for site in sites:
            if (site, self.round) in self.answers:
                replies.add(site, self.answers[site, self.round], 1)
        self.round += 1
        return replies

    def note(self, name: str, value: float, site: str = "") -> None:
        self.notes[site] = value

    def count(self, name: str, amount: int = 1) -> None:
        self.counters[name] = self.counters.get(name, 0) + amount


def reply(extractor: dict[str, Tensor], head: dict[str, Tensor], value: float) -> Trained:
    """A site whose every floating number became `value`, and whose counters say `value`."""
    filled = {key: torch.full_like(old, value) for key, old in extractor.items()}
    return Trained(extractor=filled, head={key: torch.full_like(old, value) for key, old in head.items()}, loss=value)


@pytest.fixture
def base() -> Network:
    return build_network("digits-copa", (3, 16, 16), 3, 0)


def answers(base: Network, script: dict[tuple[str, int], float]) -> dict[tuple[str, int], Trained]:
    net = copy.deepcopy(base)
    copa.convert_norms(net.backbone, "hbin")
    extractor, head = net.backbone.state_dict(), net.head.state_dict()
    return {key: reply(extractor, head, value) for key, value in script.items()}


def test_extractors_are_averaged_evenly_and_classifiers_collected(base: Network) -> None:
    fed: Any = Scripted(answers(base, {("amber", 1): 1.0, ("blue", 1): 2.0, ("coral", 1): 6.0}))
    method = Copa(Hyper())
    state = method.round(method.init(base, fed), fed)
    assert all(bool((value == 3.0).all()) for value in state.extractor.values() if value.is_floating_point())
    assert state.extractor["block1.norm.num_batches_tracked"].item() == 1  # the first site's counter, not a mean
    assert {site: head["bias"].tolist() for site, head in state.heads.items()} == {
        "amber": [1.0] * 3,
        "blue": [2.0] * 3,
        "coral": [6.0] * 3,
    }
    assert fed.notes == {"amber": 1.0, "blue": 2.0, "coral": 6.0}


def test_each_site_gets_its_own_classifier_to_train_and_the_others_frozen(base: Network) -> None:
    script = {(site, number): 10.0 * number + place for number in (1, 2) for place, site in enumerate(SITES)}
    fed: Any = Scripted(answers(base, script))
    method = Copa(Hyper())
    state = method.init(base, fed)
    for _ in range(2):
        state = method.round(state, fed)
    first, second = fed.asked
    for site in SITES:
        others = [other for other in SITES if other != site]
        assert sorted(first[site]["frozen"]) == sorted(second[site]["frozen"]) == others
        assert all(torch.equal(head["weight"], base.head.weight) for head in first[site]["frozen"].values())
        assert torch.equal(first[site]["head"]["weight"], base.head.weight)
        for other in others:
            assert second[site]["frozen"][other]["bias"][0] == script[other, 1]
        assert second[site]["head"]["bias"][0] == script[site, 1]
        assert float(second[site]["extractor"]["block1.conv.bias"][0]) == pytest.approx(11.0)


def test_a_missing_site_keeps_its_classifier_and_a_silent_one_has_no_say(base: Network) -> None:
    """Amber answers twice, blue once, coral never."""
    fed: Any = Scripted(answers(base, {("amber", 1): 1.0, ("blue", 1): 2.0, ("amber", 2): 5.0}))
    method = Copa(Hyper())
    state = method.round(method.round(method.init(base, fed), fed), fed)
    assert float(state.extractor["block1.conv.bias"][0]) == 5.0
    assert [float(state.heads[site]["bias"][0]) for site in ("amber", "blue")] == [5.0, 2.0]
    assert sorted(fed.asked[1]["coral"]["frozen"]) == ["amber", "blue"]
    assert sorted(fed.asked[1]["amber"]["frozen"]) == ["blue"]
    model = method.models(state)[SHARED]
    assert model["head.shares"].tolist() == [0.5, 0.5, 0.0]


def test_without_iteration_every_site_goes_on_from_its_own_model(base: Network) -> None:
    script = {("amber", 1): 1.0, ("blue", 1): 3.0, ("amber", 2): 7.0, ("blue", 2): 5.0}
    fed: Any = Scripted(answers(base, script))
    method = Copa(Hyper(iterate=False, shared_start=0.5))
    state = method.round(method.round(method.init(base, fed), fed), fed)
    second = fed.asked[1]
    assert float(second["amber"]["extractor"]["block1.conv.bias"][0]) == 1.0
    assert float(second["blue"]["extractor"]["block1.conv.bias"][0]) == 3.0
    assert torch.equal(second["coral"]["extractor"]["block1.conv.weight"], base.backbone.block1.conv.weight)
    assert all(torch.equal(h["weight"], base.head.weight) for h in second["amber"]["frozen"].values())
    assert float(state.extractor["block1.conv.bias"][0]) == 6.0  # coral, never heard of, is not in the mean


def test_a_shared_start_averages_one_classifier_and_then_everyone_goes_on_from_it(base: Network) -> None:
    """Half of four rounds: two like FedAvg's, in which coral answers once, then COPA's own."""
    script = {("amber", 1): 1.0, ("blue", 1): 2.0, ("coral", 1): 6.0, ("amber", 2): 5.0, ("blue", 2): 7.0}
    fed: Any = Scripted(answers(base, {**script, ("amber", 3): 8.0, ("blue", 3): 10.0}))
    method = Copa(Hyper(shared_start=0.5))
    state = method.init(base, fed)
    for _ in range(3):
        state = method.round(state, fed)
    first, second, third = fed.asked
    assert all(asked["frozen"] == {} for round in (first, second) for asked in round.values())
    assert [float(asked["head"]["bias"][0]) for asked in second.values()] == [3.0] * 3
    assert [float(asked["head"]["bias"][0]) for asked in third.values()] == [6.0] * 3
    assert float(third["coral"]["extractor"]["block1.conv.bias"][0]) == 6.0
    # Coral's is the common one from here on, which was trained: it judges, and it predicts.
    assert sorted(third["amber"]["frozen"]) == ["blue", "coral"]
    assert [float(state.heads[site]["bias"][0]) for site in SITES] == [8.0, 10.0, 6.0]
    assert method.models(state)[SHARED]["head.shares"].tolist() == pytest.approx([1 / 3] * 3)


def test_consistency_averages_all_classifiers(base: Network) -> None:
    net = copy.deepcopy(base)
    copa.convert_norms(net.backbone, "hbin")
    extractor = net.backbone.state_dict()
    heads = nn.ModuleList([net.head] * 3).state_dict()

    def together(values: list[float]) -> TrainedTogether:
        filled = {key: torch.full_like(value, values[int(key[0])]) for key, value in heads.items()}
        return TrainedTogether(extractor=extractor, heads=filled, loss=0.0)

    fed: Any = Scripted({("amber", 1): together([1.0, 2.0, 3.0]), ("coral", 1): together([3.0, 4.0, 9.0])})
    method = Copa(Hyper(collaboration="consistency"))
    state = method.round(method.init(base, fed), fed)
    assert [float(state.heads[site]["bias"][0]) for site in SITES] == [2.0, 3.0, 6.0]
    assert state.trained == {"amber": True, "blue": False, "coral": True}


def test_noise_hides_the_mean_and_differs_from_run_to_run(base: Network) -> None:
    script = answers(base, dict.fromkeys([(site, 1) for site in SITES], 1.0))
    method = Copa(Hyper(noise=0.25))
    once, again = (method.round(method.init(base, f), f) for f in (Scripted(script), Scripted(script)))  # type: ignore[arg-type]
    noise = torch.cat([once.extractor[f"block{number}.conv.weight"].flatten() for number in (2, 3, 4)]) - 1
    assert noise.std().item() == pytest.approx(0.25, rel=0.02)
    assert not torch.equal(once.extractor["block1.conv.weight"], again.extractor["block1.conv.weight"])
    assert torch.equal(once.heads["amber"]["weight"], again.heads["amber"]["weight"])


def test_a_state_survives_a_checkpoint(base: Network) -> None:
    fed: Any = Scripted(answers(base, {("blue", 1): 2.0}))
    for hyper in (Hyper(), Hyper(iterate=False)):
        state = Copa(hyper).round(Copa(hyper).init(base, fed), fed)
        fed.round = 1
        restored = codec.restore(State, codec.unpack(codec.pack(state)))
        assert codec.pack(restored) == codec.pack(state)


def test_before_anyone_has_trained_the_judges_are_the_common_classifier_or_nobody(base: Network) -> None:
    script = {("amber", 1): 1.0, ("blue", 1): 2.0, ("amber", 2): 1.0}
    for judges, expected in (("initial", {"blue", "coral"}), ("none", set())):
        fed: Any = Scripted(answers(base, script))
        method = Copa(Hyper(first_judges=judges))  # type: ignore[arg-type]
        state = method.round(method.init(base, fed), fed)
        assert set(fed.asked[0]["amber"]["frozen"]) == expected
        method.round(state, fed)
        # From then on those who trained: coral did not answer.
        assert set(fed.asked[1]["amber"]["frozen"]) == {"blue"}
        assert set(fed.asked[1]["coral"]["frozen"]) == {"amber", "blue"}


@pytest.mark.parametrize("judges", ["initial", "none"])
def test_without_iteration_the_common_classifier_judges_for_good(judges: Any, base: Network) -> None:
    fed: Any = Scripted(answers(base, {(site, number): 1.0 for site in SITES for number in (1, 2)}))
    method = Copa(Hyper(first_judges=judges, iterate=False))
    method.round(method.round(method.init(base, fed), fed), fed)
    for asked in fed.asked:
        assert set(asked["amber"]["frozen"]) == {"blue", "coral"}
        assert torch.equal(asked["amber"]["frozen"]["blue"]["weight"], base.head.weight)  # type: ignore[arg-type]


# --- Prediction -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("rule", ["probabilities", "logits"])
def test_the_ensemble_predicts_the_mean_of_its_classifiers(rule: str, tiny_data: Path, base: Network) -> None:
    keys = {"method": "copa", "data_dir": tiny_data, "target": "dim", "arch": "digits-copa", "copa": {"predict": rule}}
    plan = planning.prepare(make_config(keys)).plan
    fed: Any = Scripted({})
    method = Copa(Hyper())
    state = method.init(base, fed)
    drawn = torch.Generator().manual_seed(5)
    heads = {
        site: {key: torch.randn(value.shape, generator=drawn) for key, value in base.head.state_dict().items()}
        for site in SITES
    }
    state = State(state.extractor, heads, {"amber": True, "blue": True, "coral": False}, state.first_head, {})
    net: Any = Copa.network(plan)
    net.load_state_dict(method.models(state)[SHARED])
    x = torch.rand(6, 3, 16, 16)
    with torch.no_grad():
        features = net.eval().features(x)
        scores = [features @ heads[site]["weight"].T + heads[site]["bias"] for site in ("amber", "blue")]
        found = net(x).softmax(1)
    expected = torch.stack([s.softmax(1) for s in scores]).mean(0)
    if rule == "logits":
        expected = torch.stack(scores).mean(0).softmax(1)
    torch.testing.assert_close(found, expected)


def test_training_starts_from_the_given_network_with_its_norms_converted(base: Network) -> None:
    with torch.no_grad():
        base.backbone.block2.norm.running_mean.fill_(0.7)
    state = Copa(Hyper()).init(base, Scripted({}))  # type: ignore[arg-type]
    assert torch.equal(state.extractor["block2.conv.weight"], base.backbone.block2.conv.weight)
    assert bool((state.extractor["block2.norm.running_mean"] == 0.7).all())
    assert state.extractor["block2.norm.mean_logits"].tolist() == [1.0, 1.0]
    assert not isinstance(base.backbone.block2.norm, HybridNorm)  # the given one is left as it was
