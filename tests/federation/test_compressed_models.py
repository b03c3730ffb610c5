"""Models in fewer bytes, between a coordinator and sites of which each may be hostile to the other."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import zstandard
from torch import Tensor

from fedshift.errors import SiteError
from fedshift.federation import codec
from fedshift.federation.compression import Reference, Sent, Update, received
from fedshift.federation.federation import Federation
from fedshift.federation.releases import kinds
from fedshift.federation.step import Request, answer
from fedshift.federation.store import SiteStore
from fedshift.functional.compression import encode, form_of
from fedshift.methods.averaging import train
from fedshift.methods.local import weights_of
from fedshift.runs.config import make_config
from fedshift.runs.execute import run
from fedshift.runs.planning import base_network, open_federation, prepare

KEYS: dict[str, Any] = {
    "method": "fedavg",
    "target": "dim",
    "arch": "digits-copa",
    "batch_size": 8,
    "lr": 0.02,
    "rounds": 3,
    "workers": 0,
    "policy": {"min_samples": 2},
}


class Opened:
    """A federation of three sites that have been asked for nothing yet."""

    def __init__(self, data: Path, folder: Path, **changes: Any) -> None:
        prepared = prepare(make_config({**KEYS, "data_dir": data, "train_per_site": 16, **changes}))
        self.fed: Federation = open_federation(prepared, folder)
        self.model = weights_of(base_network(prepared)[0])
        self.folder = folder

    def round(self, number: int) -> dict[str, dict[str, Tensor]]:
        """Models that sites answered with in one round of training from the mean."""
        self.fed.begin(number)
        replies = self.fed.ask(self.fed.labelled, train, model=self.model)
        found = {site: dict(trained.model) for site, trained in replies}
        self.model = self.fed.average([(model, 1.0) for model in found.values()], since=self.model)
        return found

    def spent(self) -> tuple[int, int]:
        found = self.fed.learning.up, self.fed.learning.down
        self.fed.learning = dataclasses.replace(self.fed.learning, up=0, down=0)
        return found


@pytest.fixture
def plain(tiny_data: Path, tmp_path: Path) -> Iterator[Opened]:
    yield Opened(tiny_data, tmp_path / "plain")


@pytest.fixture
def opened(tiny_data: Path, tmp_path: Path) -> Iterator[Opened]:
    yield Opened(tiny_data, tmp_path / "coded", compress="int4")


def distance(one: Mapping[str, Tensor], other: Mapping[str, Tensor]) -> float:
    return float(sum((one[key].double() - other[key].double()).square().sum() for key in one)) ** 0.5


def test_the_same_model_arrives_in_a_tenth_of_the_bytes(plain: Opened, opened: Opened) -> None:
    start = dict(plain.model)
    exact, coded = plain.round(1), opened.round(1)
    (up, down), (few_up, few_down) = plain.spent(), opened.spent()
    assert up > 10 * few_up and down > 2.5 * few_down
    for site, model in exact.items():
        assert distance(coded[site], model) < 0.2 * distance(model, start)
    plain.round(2), opened.round(2)
    (up, down), (few_up, few_down) = plain.spent(), opened.spent()
    assert up > 10 * few_up and down > 4 * few_down, "the second model is sent as a change to the first"


def test_what_is_frozen_is_never_sent_again(opened: Opened) -> None:
    """A model that did not change takes next to nothing, and not a bit of it moves."""
    opened.fed.begin(1)
    opened.fed.ask(opened.fed.labelled, train, model=opened.model)
    opened.spent()
    reference = next(iter(opened.fed.broadcasts.state().references.values()))
    model = reference.value()
    opened.fed.begin(2)
    opened.fed.ask(opened.fed.labelled, train, model=model)
    assert opened.spent()[1] < 0.01 * 3 * sum(value.nbytes for value in model.values())
    assert list(opened.fed.broadcasts.state().references) == [reference.digest]


def test_sites_that_have_the_same_share_one_reference(opened: Opened) -> None:
    opened.round(1)
    sent = opened.fed.broadcasts.state()
    assert sorted(sent.holds) == ["amber", "blue", "coral"] and len(sent.references) == 1
    (reference,) = sent.references.values()
    for site in sent.holds:
        (stored,) = SiteStore(opened.folder / site / "state").versions("received-model")
        assert stored["digest"] == reference.digest, "what the coordinator thinks that a site has, it has"


def test_a_site_that_lost_its_model_is_sent_a_whole_one(opened: Opened) -> None:
    opened.round(1)
    opened.spent()
    for file in (opened.folder / "blue" / "state").glob("received-*"):
        file.unlink()
    assert sorted(opened.round(2)) == ["amber", "blue", "coral"]
    _, down = opened.spent()
    assert opened.fed.counters == {"failed.reference-lost": 1}
    opened.round(3)
    assert opened.spent()[1] < down and opened.fed.counters == {"failed.reference-lost": 1}


def test_what_coding_lost_is_sent_with_the_next_change(opened: Opened) -> None:
    opened.round(1)
    store = SiteStore(opened.folder / "blue" / "state")
    first = store.load("residual-model")
    assert all(form_of(one).group == "wide" for one in first) and any(bool(one.any()) for one in first)
    opened.round(2)
    store.rewind(1)
    assert all(torch.equal(a, b) for a, b in zip(store.load("residual-model"), first, strict=True))


@pytest.mark.parametrize("policy", [{"clip_norm": 0.5}, {"noise": 0.01}], ids=str)
def test_what_a_policy_made_shorter_or_noisy_is_not_coded(
    policy: dict[str, float], tiny_data: Path, tmp_path: Path
) -> None:
    """A coded update may be a little longer than the one that it stands for."""
    opened = Opened(tiny_data, tmp_path, compress="int4", policy={"min_samples": 2, **policy})
    opened.round(1)
    up, _ = opened.spent()
    assert up > 3 * sum(value.nbytes for value in opened.model.values())


def test_scores_are_exact_and_bytes_are_those_that_are_counted(tiny_data: Path, tmp_path: Path) -> None:
    config = {**KEYS, "data_dir": tiny_data, "rounds": 2, "train_per_site": 16, "compress": "int8"}
    found = run(make_config(config), tmp_path / "coded")
    usual = run(make_config({**config, "compress": "none"}), tmp_path / "none")
    assert found["bytes"]["scoring_down"] == usual["bytes"]["scoring_down"], "models are scored as they are"
    assert 4 * found["bytes"]["up"] < usual["bytes"]["up"]
    events = [
        json.loads(line)
        for site in ("amber", "blue", "coral")
        for line in (tmp_path / "coded" / "sites" / site / "ledger.jsonl").read_text().splitlines()
    ]
    trained = [event for event in events if event["step"] == train.name]
    assert found["bytes"]["up"] == sum(event["bytes"] for event in trained if event["event"] == "answered")
    assert found["bytes"]["down"] == sum(event["bytes"] for event in trained if event["event"] == "asked")
    fields = [event["bytes"] for event in trained if event["event"] == "left" and event["field"] == "model"]
    assert len(fields) == 6 and 0 < found["bytes"]["up"] - sum(fields) < 6 * 1500


# --- A hostile coordinator -------------------------------------------------------------------------------------------


def wire(**changes: Any) -> dict[str, Any]:
    model = {"w": torch.ones(3, 4), "n": torch.tensor(2)}
    tensors, tree = codec.flatten(model)
    layout = json.dumps({"tree": tree, "tensors": [["float32", [3, 4]], ["int64", []]]})
    raw = encode(list(tensors.values()), None, "full")
    good = {"format": 1, "coding": "full", "base": "", "layout": layout, "answer": "int4", "data": frame(raw)}
    return {"model": {"~coded": {**good, **changes}}}


def frame(raw: Tensor) -> Tensor:
    return torch.from_numpy(np.frombuffer(zstandard.compress(raw.numpy().tobytes()), np.uint8).copy())


def test_a_whole_model_is_read_and_kept(tmp_path: Path) -> None:
    store = SiteStore(tmp_path)
    payload, asked = received(wire(), store)
    assert torch.equal(payload["model"]["w"], torch.ones(3, 4)) and asked.answers == {"model": "int4"}
    assert store.load("received-model") is None
    asked.keep(store, 4)
    assert codec.restore(Reference, store.load("received-model")).digest == asked.references["model"].digest


HUGE = json.dumps({"tree": '{"w":{"~tensor":"0"}}', "tensors": [["float32", [2**20, 2**18]]]})


@pytest.mark.parametrize(
    "change",
    [
        {"format": 2},
        {"format": True},
        {"coding": "int4"},
        {"coding": "zip"},
        {"answer": "int3"},
        {"layout": ""},
        {"layout": HUGE},
        {"layout": HUGE, "data": frame(torch.zeros(2**22, dtype=torch.uint8))},
        {"layout": '{"tree":"{}","tensors":[["float32",[-1]]]}'},
        {"layout": '{"tree":"{}","tensors":[["float8",[1]]]}'},
        {"layout": '{"tree":"[[[","tensors":[]}'},
        {"data": torch.zeros(4)},
        {"data": torch.zeros(40, dtype=torch.uint8)},
        {"data": frame(torch.zeros(2**20, dtype=torch.uint8))},
        {"more": 1},
    ],
    ids=str,
)
def test_such_models_are_refused_before_they_take_memory(change: dict[str, Any], tmp_path: Path) -> None:
    with pytest.raises(Exception, match=r".+") as error:
        received(wire(**change), SiteStore(tmp_path))
    assert getattr(error.value, "code", None) == "message-invalid"


def test_a_coordinator_of_another_format_is_told_so(tmp_path: Path) -> None:
    with pytest.raises(Exception, match="coded in format 7, and this fedshift reads 1"):
        received(wire(format=7), SiteStore(tmp_path))


def test_a_change_to_what_nobody_sent_is_reported_lost(tmp_path: Path) -> None:
    with pytest.raises(SiteError) as error:
        received(wire(base="0" * 64, coding="int8"), SiteStore(tmp_path))
    assert error.value.code == "reference-lost"


# --- A hostile site ---------------------------------------------------------------------------------------------------


def test_an_answer_is_coded_as_it_was_asked_or_not_at_all(opened: Opened) -> None:
    like = {"w": torch.zeros(3, 4), "n": torch.tensor(0)}
    forms = [torch.ones(3, 4), torch.tensor(1)]
    expected = Update(like, "int8")
    coded = {**wire()["model"]["~coded"], "layout": "", "answer": "none"}
    honest = {**coded, "coding": "int8", "data": frame(encode(forms, list(like.values()), "int8"))}
    assert expected.decoded({"~coded": honest})["n"] == 1
    assert expected.decoded(like) is like
    for change in ({"coding": "bf16"}, {"base": "0" * 64}, {"layout": "{}"}, {"answer": "int8"}, {"coding": "full"}):
        with pytest.raises(ValueError, match="as it was asked"):
            expected.decoded({"~coded": honest | change})


def test_a_checkpoint_knows_what_sites_have(opened: Opened) -> None:
    opened.round(1)
    sent = codec.restore(Sent, codec.unpack(codec.pack(opened.fed.broadcasts.state())))
    assert sent.holds == opened.fed.broadcasts.state().holds
    opened.fed.broadcasts.restore(sent)
    before = opened.spent()
    opened.round(2)
    assert opened.spent()[1] < 0.6 * before[1], "changes go on from there"


def test_the_same_question_gets_the_same_bytes_elsewhere(opened: Opened) -> None:
    """A site on another machine answers once: also what it had lost in coding is not added twice."""
    opened.round(1)
    hosts = opened.fed.engine._hosts  # type: ignore[attr-defined]
    host = hosts["blue"]
    host.spec = dataclasses.replace(host.spec, is_remote=True)
    opened.fed.begin(2)
    asked, _ = opened.fed.broadcasts.coded("blue", {"model": opened.model}, train, ())
    question = Request("blue", train.name, 2, "a1", codec.pack(asked))
    assert answer(host, question) == answer(host, question)
    assert kinds(train.release)["model"].name == "weights"
