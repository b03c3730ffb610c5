"""A site against a coordinator that is not to be trusted: what it may ask, how often, and what of it leaves."""

from __future__ import annotations

import dataclasses
import json
import multiprocessing
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tinydata import write_domain

from fedshift.audit.ledger import audit_ledger
from fedshift.data import open_dataset
from fedshift.data.domain import DataSource
from fedshift.errors import FedshiftError, SiteError
from fedshift.federation import codec
from fedshift.federation.engines.workers import MOST_ROUNDS, question_head
from fedshift.federation.handshake import introduce
from fedshift.federation.policy import Policy
from fedshift.federation.site import SiteHost, SiteSpec
from fedshift.federation.step import Request, answer
from fedshift.federation.store import SiteStore
from fedshift.federation.survey import answer_survey, look
from fedshift.methods import csac, fada, fedadg
from fedshift.methods.averaging import train
from fedshift.methods.evaluation import score, score_triggered
from fedshift.methods.feddg import lend_spectra
from fedshift.runs.config import make_config
from fedshift.runs.execute import run
from fedshift.runs.planning import base_network, prepare
from fedshift.runs.worker import _hosts

KEYS: dict[str, Any] = {"target": "dim", "arch": "digits-copa", "batch_size": 8, "rounds": 3, "workers": 0}


@dataclasses.dataclass
class Site:
    """Amber, whose coordinator is somebody else."""

    host: SiteHost
    model: dict[str, torch.Tensor]
    folder: Path

    def ask(self, step: Any, round: Any = 1, nonce: str = "a1", **payload: Any) -> dict[str, Any]:
        reply: dict[str, Any] = codec.unpack(self.raw(step, round, nonce, **payload))
        return reply

    def raw(self, step: Any, round: Any = 1, nonce: str = "a1", **payload: Any) -> bytes:
        return answer(self.host, Request("amber", step.name, round, nonce, codec.pack(payload)))

    def ledger(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in (self.host.spec.folder / "ledger.jsonl").read_text().splitlines()]


def opened(
    data: Path, folder: Path, policy: Policy | None = None, method: str = "fedavg", run: str = "run", **changes: Any
) -> Site:
    prepared = prepare(make_config({"method": method, "data_dir": data, **KEYS, **changes}))
    model = {key: value.clone() for key, value in base_network(prepared)[0].state_dict().items()}
    spec = SiteSpec(
        "amber",
        "labelled",
        DataSource(data_dir=data),
        ("amber",),
        folder / "runs" / run,
        policy or Policy(),
        prepared.config.train_per_site,
        is_remote=True,
        secret=folder / "secret",
    )
    return Site(SiteHost(spec, prepared.plan, open_dataset), model, folder)


# --- What a question may be ---------------------------------------------------------------------------------------

GOOD: dict[str, Any] = {"site": "amber", "step": "averaging.train", "round": 1, "nonce": "0f"}
ANYTHING = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=20),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=5,
)


@settings(max_examples=300, deadline=None)
@given(key=st.sampled_from(sorted(GOOD)), value=ANYTHING)
def test_a_question_is_of_these_types_or_it_is_refused(key: str, value: Any) -> None:
    try:
        head = question_head(GOOD | {key: value})
    except ValueError:
        return
    assert [type(head[name]) for name in ("site", "step", "round", "nonce")] == [str, str, int, str]
    assert (
        0 <= head["round"] <= MOST_ROUNDS and head["nonce"].isalnum() and head["step"].replace(".", "_").isidentifier()
    )


@pytest.mark.parametrize(
    "change",
    [
        {"round": True},
        {"round": 1.0},
        {"round": "1"},
        {"round": -1},
        {"round": 10**7},
        {"round": "../../evil"},
        {"nonce": "A\n"},
        {"nonce": "f" * 65},
        {"step": "a/b"},
        {"step": "x\n"},
        {"site": ""},
        {"setup": {"specs": []}},
    ],
    ids=str,
)
def test_such_questions_are_refused(change: dict[str, Any]) -> None:
    assert question_head(GOOD) == GOOD
    with pytest.raises(ValueError, match=r".+"):
        question_head(GOOD | change)
    for key in GOOD:
        with pytest.raises(ValueError, match="a question has"):
            question_head({name: value for name, value in GOOD.items() if name != key})


@pytest.mark.parametrize("round", ["../../../evil", True, -1, 1.5, 4, None])
def test_a_round_never_becomes_a_path(round: Any, tiny_data: Path, tmp_path: Path) -> None:
    """CSAC's site keeps its model under the name of the round."""
    site = opened(tiny_data, tmp_path, Policy(min_samples=2), "csac")
    before = set(tmp_path.parent.rglob("*evil*"))
    reply = site.ask(csac.acquire, round, model=site.model)
    assert reply["code"] == "message-invalid" and reply["release"] is None
    assert not list(site.host.spec.folder.glob("state/*")) and before == {*tmp_path.parent.rglob("*evil*")}
    assert b"evil" not in codec.pack(reply), "nothing of it is repeated"
    assert [row["event"] for row in site.ledger()] == ["asked", "answered"]


def test_a_question_for_another_site_is_refused(tiny_data: Path, tmp_path: Path) -> None:
    site = opened(tiny_data, tmp_path)
    reply = codec.unpack(answer(site.host, Request("blue", train.name, 1, "a", codec.pack({"model": site.model}))))
    assert (reply["code"], reply["site"]) == ("message-invalid", "amber")


@pytest.mark.parametrize("name", ["../evil", "a/b", "", ".hidden", "a@1", "*", "x" * 65])
def test_what_a_site_keeps_has_a_plain_name(name: str, tmp_path: Path) -> None:
    store = SiteStore(tmp_path)
    for use in (lambda: store.save(name, {}, 1), lambda: store.load(name)):
        with pytest.raises(FedshiftError, match="cannot name"):
            use()
    with pytest.raises(FedshiftError, match="not a round"):
        store.save("model", {}, "../1")  # type: ignore[arg-type]
    with pytest.raises(FedshiftError, match="not a round"):
        store.rewind(True)


def test_the_executor_hands_a_worker_nothing_but_a_question(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A head with `setup` would tell the worker which data to read and under which policy."""
    from fedshift.federation.engines.nvflare import executor
    from fedshift.federation.engines.nvflare.settings import SiteSettings

    reading = {"image_size": None, "tile": None, "task": None, "classes": None}
    part = {"role": "labelled", "domains": ["amber"], "reading": reading, "train_cap": None, "train_share": 1.0}
    head = {"run": "0" * 16, "plan": None, "part": part | {"copies": []}, "request": GOOD, "deadline": None, "call": 1}
    (tmp_path / "local").mkdir()
    SiteSettings("amber", "/data", "fedshift.runs.worker").write(tmp_path)
    handed: list[Any] = []
    door = executor.SiteDoor()
    monkeypatch.setattr(door, "_worker_for", lambda module, setup: handed.append(json.loads(setup)))
    monkeypatch.setattr(door, "_work", lambda worker, request, *rest: (handed.append(request), ("reply", b""))[1])

    def put(question: Any, body: Any = b"") -> str:
        return door._answer({"head": question, "body": body}, tmp_path, None)[0]  # type: ignore[arg-type]

    assert put(json.dumps(head)) == "reply" and handed[1] == GOOD
    assert handed[0]["specs"][0]["source"]["data_dir"] == "/data"
    handed.clear()
    evil = {"plan": None, "specs": [{"source": {"data_dir": "/"}, "policy": {"min_samples": 1}}]}
    for wrong in (
        {"request": GOOD | {"setup": evil}},
        {"request": GOOD | {"site": "blue"}},
        {"request": [GOOD]},
        {"setup": evil},
        {"deadline": True},
        {"deadline": -1},
        {"deadline": float("nan")},
        {"run": "../up"},
        {"plan": "fedavg"},
        {"part": part | {"copies": [], "reading": reading | {"label_column": "ssn"}}},
    ):
        assert put(json.dumps(head | wrong)) == "refused", wrong
    assert put("[" * 100_000) == put(None) == put(json.dumps(head), "text") == put(json.dumps([head])) == "refused"
    assert handed == []


def test_a_plan_that_makes_no_sense_is_refused_and_listed(tiny_data: Path, tmp_path: Path) -> None:
    site = opened(tiny_data, tmp_path)
    spec = codec.plain(site.host.spec)
    plan = codec.plain(site.host.plan)
    request = Request("amber", introduce.name, 0, "a", codec.pack({"rewind_to": 0}))

    def code_of(changed: Any) -> Any:
        told = json.loads(json.dumps({"plan": changed, "specs": [spec]}))
        return codec.unpack(_hosts(told)["amber"](request))["code"]

    assert code_of(plan) is None
    assert code_of(plan | {"method": "nobody's"}) == "unknown-name"
    assert code_of(plan | {"seed": "1"}) == code_of([1]) == code_of({}) == "message-invalid"
    for key, value in (("local_epochs", 0.0), ("local_epochs", float("inf")), ("batch_size", 0), ("lr", -1.0)):
        assert code_of(plan | {"training": plan["training"] | {key: value}}) == "message-invalid", key
    assert code_of(plan | {"threads": 10**6}) == "message-invalid"
    assert len([row for row in site.ledger() if row["event"] == "answered"]) == 10


def test_only_steps_of_the_plans_method_are_run(tiny_data: Path, tmp_path: Path) -> None:
    site = opened(tiny_data, tmp_path, Policy(min_samples=2, allow=("features", "weights", "tally", "metric")))
    told = {"plan": codec.plain(site.host.plan), "specs": [codec.plain(site.host.spec)]}
    respond = _hosts(json.loads(json.dumps(told)))["amber"]
    assert fada.train.name.startswith("fada.")  # Imported, and so known here.
    # Nor what measures a backdoor: attacks are played on one machine.
    for step in (fada.train, score_triggered):
        reply = codec.unpack(respond(Request("amber", step.name, 1, "a", codec.pack({}))))
        assert reply["code"] == "step-unknown"


@pytest.mark.parametrize(
    ("policy", "changes"),
    [
        (Policy(methods=("copa",)), {}),
        (Policy(max_rounds=2), {}),
        (Policy(min_batch_size=9), {}),
        (Policy(max_image_size=8), {}),
    ],
    ids=["methods", "max_rounds", "min_batch_size", "max_image_size"],
)
def test_a_plan_beyond_the_sites_policy_is_refused(
    policy: Policy, changes: Any, tiny_data: Path, tmp_path: Path
) -> None:
    site = opened(tiny_data, tmp_path, policy)
    assert site.ask(train, model=site.model)["code"] == "site-policy"


# --- How often ----------------------------------------------------------------------------------------------------


def test_the_same_question_gets_the_very_same_bytes_also_after_a_restart(tiny_data: Path, tmp_path: Path) -> None:
    policy = Policy(noise=0.1)
    site = opened(tiny_data, tmp_path, policy)
    first = site.raw(train, model=site.model)
    assert site.raw(train, model=site.model) == first
    again = opened(tiny_data, tmp_path, policy)
    assert again.raw(train, model=site.model) == first
    other = again.ask(train, model={key: value * 2 for key, value in site.model.items()})
    assert (other["code"], other["release"]) == ("site-policy", None), "another payload is another look"
    assert [row["event"] for row in site.ledger()].count("asked") == 4


def test_another_payload_or_plan_gets_no_second_answer_in_a_round(tiny_data: Path, tmp_path: Path) -> None:
    site = opened(tiny_data, tmp_path, Policy(min_samples=2))
    other = {key: value * 2 for key, value in site.model.items()}
    for split in ("val", "test"):  # What scoring is numbered by.
        assert site.ask(score, models=[site.model], split=split)["code"] is None
        assert site.ask(score, models=[other], split=split)["code"] == "site-policy"
        assert site.ask(score, models=[site.model, site.model], split=split)["code"] == "site-policy"
    assert site.ask(train, model=site.model)["code"] is None
    replanned = opened(tiny_data, tmp_path, Policy(min_samples=2), lr=0.002)
    assert replanned.ask(train, model=site.model)["code"] == "site-policy"


@pytest.mark.skipif(sys.platform != "linux", reason="two processes of one run are forked")
def test_two_jobs_of_one_run_at_a_time_get_one_answer_and_leave_the_ledger_whole(
    tiny_data: Path, tmp_path: Path
) -> None:
    site = opened(tiny_data, tmp_path)
    assert len(site.host.domain.train)  # Read here, so that both processes begin at once.

    def ask(number: int) -> None:
        model = {key: value * number for key, value in site.model.items()}
        codes = [site.ask(train, round, model=model)["code"] for round in (1, 2, 3)]
        (tmp_path / f"{number}.json").write_text(json.dumps(codes))

    processes = [multiprocessing.get_context("fork").Process(target=ask, args=(number,)) for number in (1, 2)]
    for process in processes:
        process.start()
    for process in processes:
        process.join(60)
        assert process.exitcode == 0
    told = [json.loads((tmp_path / f"{number}.json").read_text()) for number in (1, 2)]
    for codes in zip(*told, strict=True):
        assert list(codes).count(None) <= 1 and set(codes) <= {None, "site-policy"}
    assert None in told[0] + told[1]
    assert audit_ledger(site.host.spec.folder / "ledger.jsonl").questions[train.name] == 6


def test_exchanges_of_fada_are_numbered_and_each_is_answered_once(tiny_data: Path, tmp_path: Path) -> None:
    allowed = ("weights", "features", "tally", "metric")
    site = opened(tiny_data, tmp_path, Policy(min_samples=2, allow=allowed), "fada", setting="adapt")
    judge = fada.domain_identifier(fada.plain_network(site.host.plan).backbone.out_features).state_dict()
    other = {key: value * 2 for key, value in judge.items()}
    for exchange in (0, 1):
        assert site.ask(fada.train, model=site.model, identifier=judge, exchange=exchange)["code"] is None
        assert site.ask(fada.train, model=site.model, identifier=other, exchange=exchange)["code"] == "site-policy"


def test_a_run_is_resumed_only_so_often(tiny_data: Path, tmp_path: Path) -> None:
    """Each time, another payload for the last rounds is another look."""
    for number in range(3):
        site = opened(tiny_data, tmp_path, Policy(max_resumes=1))
        resumed = site.ask(introduce, 0, rewind_to=0)["code"]
        changed = {key: value * (1 + number) for key, value in site.model.items()}
        assert (resumed, site.ask(train, model=changed)["code"]) == (
            (None, None) if number < 2 else (("site-policy",) * 2)
        )
        (site.host.spec.folder / "ledger.head").unlink()  # It is counted again from the lines.


def test_a_step_with_a_memory_is_not_run_twice(tiny_data: Path, tmp_path: Path) -> None:
    """FedADG's discriminator stays at the site and learns with every run."""
    site = opened(tiny_data, tmp_path, Policy(min_samples=2), "fedadg")
    plan = site.host.plan
    hyper = codec.restore(fedadg.Hyper, dict(plan.hyper))
    width = fedadg.plain_network(plan).backbone.out_features
    maker = {k: v.clone() for k, v in fedadg.Generator(width, len(plan.model.classes), hyper).state_dict().items()}
    first = site.raw(fedadg.train, model=site.model, generator=maker)
    assert codec.unpack(first)["code"] is None
    assert site.raw(fedadg.train, model=site.model, generator=maker) == first


def test_rounds_go_forward_and_a_rewind_gives_the_same_weights_again(tiny_data: Path, tmp_path: Path) -> None:
    site = opened(tiny_data, tmp_path, Policy(noise=0.1))
    first = site.ask(train, 1, model=site.model)["release"]
    assert site.ask(train, 2, model=site.model)["code"] is None
    assert site.ask(train, 1, model=site.model)["code"] == "site-policy"
    assert site.ask(introduce, 0, rewind_to=0)["code"] is None
    again = site.ask(train, 1, model=site.model)["release"]
    assert all(torch.equal(again["model"][key], value) for key, value in first["model"].items())


def test_neither_another_run_nor_a_key_without_effect_draws_fresh_noise(tiny_data: Path, tmp_path: Path) -> None:
    policy = Policy(noise=0.1)
    plain = opened(tiny_data, tmp_path, Policy()).ask(train, model={})
    assert plain["code"] == "site-failed"
    sent = [
        site.ask(train, model=site.model)["release"]["model"]
        for site in (
            opened(tiny_data, tmp_path, policy, run="one"),
            opened(tiny_data, tmp_path, policy, run="two"),
            opened(tiny_data, tmp_path, policy, run="three", lr_min=1e-5),
        )
    ]
    for other in sent[1:]:
        assert all(torch.equal(sent[0][key], value) for key, value in other.items())
    assert (tmp_path / "secret").stat().st_mode & 0o777 == 0o600


def test_there_are_only_so_many_questions_and_a_restart_forgets_none(tiny_data: Path, tmp_path: Path) -> None:
    policy = Policy(max_questions=2)
    site = opened(tiny_data, tmp_path, policy)
    assert site.ask(introduce, 0, rewind_to=0)["code"] is None
    assert opened(tiny_data, tmp_path, policy).ask(introduce, 0, rewind_to=0)["code"] is None
    assert opened(tiny_data, tmp_path, policy).ask(introduce, 0, rewind_to=0)["code"] == "site-policy"


def test_a_number_that_is_none_does_not_get_past_clipping_and_noise(tiny_data: Path, tmp_path: Path) -> None:
    """BatchNorm does not read its statistics in training, so that a NaN in them does no harm, but to the norm."""
    site = opened(tiny_data, tmp_path, Policy(clip_norm=1e-3))
    model = {key: value.clone() for key, value in site.model.items()}
    next(value for key, value in model.items() if key.endswith("running_var"))[0] = float("nan")
    assert site.ask(train, model=model)["code"] == "site-policy"
    assert site.ask(train, model=site.model)["clipped"] == 1


def test_a_sites_log_quotes_nothing_that_steers_a_terminal(tiny_data: Path, tmp_path: Path) -> None:
    site = opened(tiny_data, tmp_path)
    evil = "\x1b[2J\r\u2028\n2026-01-01T00:00:00.000+00:00 all is well" + "x" * 100_000
    assert site.ask(train, model={evil: torch.zeros(1)})["code"] == "site-failed"
    text = (site.host.spec.folder / "site.log").read_text()
    assert "\\x1b[2J\\r" in text and len(text) < 25_000
    assert all(sign.isprintable() or sign == "\n" for sign in text)
    assert [line for line in text.splitlines() if line.startswith("2026-01-01")] == []


# --- From how many samples ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("epochs", [1e-9, 0.1])
def test_an_update_from_few_samples_does_not_leave(epochs: float, tiny_data: Path, tmp_path: Path) -> None:
    site = opened(tiny_data, tmp_path, Policy(min_samples=10), local_epochs=epochs)
    assert len(site.host.domain.train) > 10
    reply = site.ask(train, model=site.model)
    assert (reply["code"], reply["release"]) == ("site-policy", None)
    assert [row["event"] for row in site.ledger()] == ["asked", "answered"]
    assert "different samples" in (site.host.spec.folder / "site.log").read_text()


def test_a_part_of_a_step_that_uses_few_samples_is_no_way_around(tiny_data: Path, tmp_path: Path) -> None:
    """FedADG's generator learns in the game only, of which `warmup` leaves two samples."""
    site = opened(tiny_data, tmp_path, Policy(min_samples=10), "fedadg", fedadg={"warmup": 0.97})
    plan = site.host.plan
    hyper = codec.restore(fedadg.Hyper, dict(plan.hyper))
    width = fedadg.plain_network(plan).backbone.out_features
    maker = fedadg.Generator(width, len(plan.model.classes), hyper).state_dict()
    assert site.ask(fedadg.train, model=site.model, generator=maker)["code"] == "site-policy"
    assert "used 2 different samples" in (site.host.spec.folder / "site.log").read_text()


@pytest.mark.parametrize(
    ("training", "code"),
    [
        ({"lr": 0.1, "weight_decay": 0.5}, None),
        ({"lr": 0.1, "weight_decay": 10.0}, "site-policy"),
        ({"lr": 1e-9, "schedule": "step:1:1e9", "weight_decay": 1.0}, "site-policy"),
        ({"backbone_lr_factor": 1e4, "weight_decay": 0.05}, "site-policy"),
        ({"momentum": 1.0}, "message-invalid"),
        ({"momentum": 1e6}, "message-invalid"),
    ],
    ids=str,
)
def test_weights_that_remember_the_first_or_last_batch_only_do_not_leave(
    training: dict[str, Any], code: str | None, tiny_data: Path, tmp_path: Path
) -> None:
    site = opened(tiny_data, tmp_path)
    told = site.host.plan.training
    site.host.plan = dataclasses.replace(site.host.plan, training=dataclasses.replace(told, **training))
    assert site.ask(train, 2, model=site.model)["code"] == code


def test_the_count_that_leaves_is_the_count_that_was_used(tiny_data: Path, tmp_path: Path) -> None:
    count = len(opened(tiny_data, tmp_path).host.domain.train)
    for epochs, used in ((0.5, -(-count // 2)), (1.0, count), (3.0, count)):
        site = opened(tiny_data, tmp_path, run=f"run{epochs}", local_epochs=epochs)
        assert site.ask(train, model=site.model)["release"]["samples"] == used


def test_a_method_that_claims_more_samples_than_it_used_is_corrected(
    tiny_data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from fedshift.federation.step import STEPS

    def boast(*args: Any, **kwargs: Any) -> Any:
        return dataclasses.replace(train.run(*args, **kwargs), samples=10**6)

    monkeypatch.setitem(STEPS, train.name, dataclasses.replace(train, run=boast))
    site = opened(tiny_data, tmp_path)
    count = len(site.host.domain.train)
    boast.__signature__ = __import__("inspect").signature(train.run)  # type: ignore[attr-defined]
    assert site.ask(train, model=site.model)["release"]["samples"] == count


def test_few_optimiser_steps_are_refused(tiny_data: Path, tmp_path: Path) -> None:
    """Samples in batches of 8."""
    count = len(opened(tiny_data, tmp_path).host.domain.train)
    for least, code in ((count // 8, None), (count, "site-policy")):
        site = opened(tiny_data, tmp_path, Policy(min_steps=least), run=f"run{least}")
        assert site.ask(train, model=site.model)["code"] == code


@pytest.fixture
def few_to_score(tmp_path: Path) -> Path:
    """Nobody has 10 validation samples, and dim has 6 test samples."""
    (tmp_path / "data").mkdir()
    for name in ("amber", "blue", "coral", "dim"):
        write_domain(tmp_path / "data", name, train=48, test=6 if name == "dim" else 48)
    return tmp_path / "data"


def test_a_small_split_is_not_scored_and_the_run_says_so(few_to_score: Path, tmp_path: Path) -> None:
    site = opened(few_to_score, tmp_path / "site")
    sizes = {split: len(getattr(site.host.domain, split)) for split in ("val", "test")}
    assert sizes["val"] < 10 <= sizes["test"]
    assert site.ask(score, models=[site.model], split="val")["code"] == "site-policy"
    assert site.ask(score, models=[site.model], split="test")["release"]["confusion"].sum() == sizes["test"]
    assert site.ask(introduce, 0, rewind_to=0)["code"] is None
    told: list[str] = []
    from fedshift.runs.progress import Silent

    class Listening(Silent):
        def message(self, text: str) -> None:
            told.append(text)

    results = run(
        make_config({"method": "fedavg", "data_dir": few_to_score, **KEYS, "policy": {"min_samples": 10}}),
        tmp_path / "run",
        progress=Listening(),
    )
    assert results["per_target"] == {} and results["source_val"] == {}
    unscored = [text for text in told if "not scored" in text]
    assert any(text.startswith("dim has no labels in a test split, or fewer") for text in unscored)
    assert len([text for text in unscored if "val split" in text]) == 3
    relaxed = run(make_config({"method": "fedavg", "data_dir": few_to_score, **KEYS}), tmp_path / "all-on-one-machine")
    assert set(relaxed["per_target"]) == {"dim"} and len(relaxed["source_val"]) == 3


# --- Which names --------------------------------------------------------------------------------------------------


def table(folder: Path, labels: list[str], column: str = "label") -> Path:
    folder.mkdir(exist_ok=True, parents=True)
    rows = [f"{number},{number * 3},{label}" for number, label in enumerate(labels)]
    (folder / "amber.csv").write_text("\n".join([f"age,dose,{column}", *rows]) + "\n")
    return folder


def remote(data: Path, policy: Policy | None = None, label_column: str | None = None) -> SiteSpec:
    source = DataSource(data_dir=data, label_column=label_column)
    return SiteSpec("amber", "held-out", source, ("amber",), data.parent / "site", policy or Policy(), is_remote=True)


def test_a_column_of_identifiers_does_not_leave_as_classes(tmp_path: Path) -> None:
    numbers = [f"{number:09d}" for number in range(100_000_000, 100_000_200)]
    spec = remote(table(tmp_path / "data", numbers, "ssn"), label_column="ssn")
    reply = answer_survey(spec, Request("amber", "survey.look", 0, "a", codec.pack({})))
    assert codec.unpack(reply)["code"] == "site-policy"
    assert not any(number.encode() in reply for number in numbers)
    with pytest.raises(SiteError, match="200 classes"):
        look(spec)
    # Fewer than the cap, but each is one person's.
    with pytest.raises(SiteError, match="does not leave the site"):
        look(remote(table(tmp_path / "data", numbers[:50], "ssn"), label_column="ssn"))


def test_a_rare_class_is_named_only_if_the_site_lists_it(tmp_path: Path) -> None:
    data = table(tmp_path / "data", ["healthy"] * 30 + ["ill"] * 20 + ["rare"] * 3)
    with pytest.raises(SiteError, match="'rare' has 3 samples") as caught:
        look(remote(data))
    assert caught.value.code == "site-policy"
    assert look(remote(data, Policy(min_samples=3))).classes == ("healthy", "ill", "rare")
    assert look(remote(data, Policy(classes=("healthy", "ill", "rare")))).classes == ("healthy", "ill", "rare")
    with pytest.raises(SiteError, match="does not list: 'rare'"):
        look(remote(data, Policy(min_samples=3, classes=("healthy", "ill"))))


def test_a_class_cap_of_its_own(tmp_path: Path) -> None:
    data = table(tmp_path / "data", [f"c{number % 150}" for number in range(1500)])
    with pytest.raises(SiteError, match="150 classes and the site's policy allows 100"):
        look(remote(data))
    assert len(look(remote(data, Policy(max_classes=150))).classes) == 150


def test_the_handshake_names_no_class_that_the_survey_would_not(tmp_path: Path) -> None:
    """A coordinator may leave the survey out."""
    labels = ["0"] * 40 + ["1"] * 40 + ["7"] * 3
    data = table(tmp_path / "data", labels)
    rows = "\n".join(f"{n},{n},{label}" for n, label in enumerate(labels))
    (data / "dim.csv").write_text("age,dose,label\n" + rows + "\n")
    prepared = prepare(make_config({"method": "fedavg", "data_dir": data, "target": "dim", "rounds": 1}))
    reply = answer(
        SiteHost(remote(data), prepared.plan, open_dataset),
        Request("amber", introduce.name, 0, "a", codec.pack({"rewind_to": 0})),
    )
    assert codec.unpack(reply)["code"] == "site-policy"


# --- Which kinds --------------------------------------------------------------------------------------------------


def test_single_samples_leave_only_if_they_are_allowed_by_name(tiny_data: Path, tmp_path: Path) -> None:
    for policy, code in ((Policy(), "site-policy"), (Policy(allow=("spectra", "facts")), None)):
        site = opened(tiny_data, tmp_path, policy, "feddg", run=f"run{code}", feddg={"bank": 16})
        assert site.ask(lend_spectra)["code"] == code


@pytest.mark.parametrize("method", ["feddg", "fada"])
def test_sites_that_are_played_on_one_machine_need_no_permission(method: str, tiny_data: Path, tmp_path: Path) -> None:
    keys = {**KEYS, "rounds": 1, "batch_size": 16, "setting": "adapt" if method == "fada" else "generalize"}
    results = run(make_config({"method": method, "data_dir": tiny_data, **keys}), tmp_path / "run")
    assert "failed.site-policy" not in results["counters"]


# --- Its own rules ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "rule",
    [{"noise": value} for value in (-1.0, float("nan"), float("inf"), True, "0.1", None)]
    + [{"clip_norm": value} for value in (-1.0, 0.0, float("nan"), float("inf"), True)]
    + [{"min_samples": value} for value in (0, -5, True, 10.0, None)]
    + [{"allow": value} for value in ("weights", ["weight"], [1], [""])]
    + [{key: value} for key in ("max_rounds", "max_questions", "min_batch_size") for value in (0, True, 1.5, None)]
    + [{"min_steps": -1}, {"max_classes": 1}, {"max_image_size": 4}, {"max_image_size": 4096}]
    + [{"imports": ["os; rm"]}, {"imports": None}, {"classes": "a"}, {"label_column": ""}, {"methods": "fedavg"}],
    ids=str,
)
def test_a_policy_that_makes_no_sense_is_an_error_that_names_its_key(rule: dict[str, Any]) -> None:
    (key,) = rule
    with pytest.raises(FedshiftError, match=f"policy.{key}") as caught:
        Policy(**rule)
    assert caught.value.exit_code == 2


@pytest.mark.parametrize(
    ("text", "key"),
    [
        ("noise: -1", "noise"),
        ("noise: .nan", "noise"),
        ("clip_norm: -1", "clip_norm"),
        ("min_samples: 0", "min_samples"),
        ("min_samples: true", "min_samples"),
        ("allow: [weihgts]", "allow"),
        ("methods: [fedavgg]", "methods"),
        ("clip_norm: .inf", "clip_norm"),
        ("max_rounds: 0", "max_rounds"),
        ("noise: '0.5'", "noise"),
    ],
)
def test_a_wrong_value_in_a_sites_file_names_file_and_key(text: str, key: str, tmp_path: Path) -> None:
    from fedshift.deploy.site import read_policy

    path = tmp_path / "policy.yaml"
    path.write_text(text + "\n")
    with pytest.raises(FedshiftError, match=rf"policy\.yaml: .*{key}") as caught:
        read_policy(path)
    assert caught.value.exit_code == 2


def test_labels_of_arrays_count_too(tmp_path: Path) -> None:
    """A class that only two images have."""
    (tmp_path / "data").mkdir()
    write_domain(tmp_path / "data", "amber", train=48)
    with np.load(tmp_path / "data" / "amber.npz") as file:
        parts = dict(file)
    parts["train_labels"][:] = 0
    parts["train_labels"][:2] = 1
    parts["test_labels"][:] = 0
    np.savez(tmp_path / "data" / "amber.npz", **parts)
    with pytest.raises(SiteError, match="does not leave the site"):
        look(remote(tmp_path / "data"))


# --- Differences of answers ---------------------------------------------------------------------------------------


def asked_for(site: Site, round: int = 1) -> str | None:
    code: str | None = site.ask(train, round, model=site.model)["code"]
    return code


@pytest.mark.parametrize(
    "second", [{"local_epochs": 59.5 / 61}, {"train_per_site": 60}, {"train_per_site": 52}], ids=str
)
def test_two_answers_do_not_differ_by_a_few_samples(second: Any, tiny_data: Path, tmp_path: Path) -> None:
    """From the same weights, the difference of two answers would be what these samples contributed."""
    rules = Policy(min_samples=10)
    whole = opened(tiny_data, tmp_path, rules, run="a" * 8, batch_size=100)
    assert len(whole.host.domain.train) == 61 and asked_for(whole) is None
    other = opened(tiny_data, tmp_path, rules, run="b" * 8, batch_size=100, **second)
    assert asked_for(other) == "site-policy"
    assert "differ from those of an earlier answer by" in (other.host.spec.folder / "site.log").read_text()
    # In either order, and in every round.
    other = opened(tiny_data, tmp_path / "other", rules, run="b" * 8, batch_size=100, **second)
    whole = opened(tiny_data, tmp_path / "other", rules, run="a" * 8, batch_size=100)
    assert (asked_for(other), asked_for(whole), asked_for(whole, 2)) == (None, "site-policy", "site-policy")


def test_sets_of_samples_may_differ_by_many_or_not_at_all(tiny_data: Path, tmp_path: Path) -> None:
    rules = Policy(min_samples=10)
    for run_of, changes in (("a", {}), ("b", {"train_per_site": 45}), ("c", {"seed": 1}), ("d", {"local_epochs": 0.5})):
        site = opened(tiny_data, tmp_path, rules, run=run_of * 8, **changes)
        assert [asked_for(site, round) for round in (1, 2, 3)] == [None] * 3, changes


def test_a_pass_uses_every_sample_whatever_the_size_of_its_batches(tiny_data: Path, tmp_path: Path) -> None:
    """A sample that would be left over alone is in the last batch: else two rounds differ by two samples."""
    for size in (5, 12, 60):
        site = opened(tiny_data, tmp_path, Policy(min_samples=10), run=f"{size:08}", batch_size=size)
        assert 61 % size == 1 and [asked_for(site, round) for round in (1, 2)] == [None, None]
        assert site.ask(train, 3, model=site.model)["release"]["samples"] == 61


def test_a_run_keeps_the_plan_that_it_began_with(tiny_data: Path, tmp_path: Path) -> None:
    site = opened(tiny_data, tmp_path, run="a" * 8)
    assert asked_for(site) is None
    for changes in ({"train_per_site": 30}, {"lr": 0.5}, {"method": "fedsr"}, {"seed": 7}):
        other = opened(tiny_data, tmp_path, run="a" * 8, **changes)
        assert asked_for(other, 2) == "site-policy", changes
        assert "another plan" in (other.host.spec.folder / "site.log").read_text()
    # A run that is resumed may have another number of rounds.
    assert asked_for(opened(tiny_data, tmp_path, run="a" * 8, rounds=5), 2) is None


def test_what_is_kept_of_used_samples_is_checked_and_bounded(
    tiny_data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from fedshift.federation import asked

    site = opened(tiny_data, tmp_path)
    assert asked_for(site) is None
    (file,) = (tmp_path / "used-samples").glob("*.bits")
    file.write_bytes(file.read_bytes()[:-1])
    assert asked_for(site, 2) == "run-corrupt", "a damaged record is no weaker rule"
    file.unlink()
    monkeypatch.setattr(asked, "MOST_BYTES", 20)
    site = opened(tiny_data, tmp_path, Policy(min_samples=2), run="c" * 8, local_epochs=0.3)
    assert [asked_for(site, round) for round in (1, 2, 3)] == [None, None, "site-policy"]
