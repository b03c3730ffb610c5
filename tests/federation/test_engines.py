"""The engine on one machine: what happens when a site crashes, hangs or raises an error."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

import pytest

from fedshift.errors import SiteError
from fedshift.federation import codec
from fedshift.federation.admission import Failed, admit
from fedshift.federation.engines import Failure
from fedshift.federation.engines.inprocess import Parallel, Sequential
from fedshift.federation.handshake import introduce
from fedshift.federation.step import Request
from fedshift.methods.averaging import train
from fedshift.runs.config import make_config
from fedshift.runs.execute import run
from fedshift.runs.planning import WORKER, _site_spec, prepare


@pytest.fixture
def prepared(tiny_data: Path) -> Any:
    keys = {"data_dir": tiny_data, "target": "dim", "arch": "digits-csac", "policy": {"min_samples": 2}}
    return prepare(make_config({"method": "fedavg", **keys}))


def specs(prepared: Any, folder: Path) -> list[Any]:
    return [_site_spec(person, prepared, folder) for person in prepared.roles.sites]


def hello(site: str) -> Request:
    return Request(site, introduce.name, 0, "n", codec.pack({"rewind_to": 0}))


def forked(sites: list[Any], prepared: Any) -> Parallel:
    return Parallel.forked(sites, prepared.plan, prepared.open_dataset, workers=1)


def spawned(sites: list[Any], prepared: Any) -> Parallel:
    return Parallel.spawned(sites, prepared.plan, WORKER, workers=1)


@pytest.mark.parametrize("start", [forked, spawned])
@pytest.mark.timeout(120)
def test_a_killed_worker_costs_its_reply_and_nothing_more(start: Any, prepared: Any, tmp_path: Path) -> None:
    engine = start(specs(prepared, tmp_path), prepared)
    try:
        assert isinstance(dict(engine.call([hello("amber")], None))["amber"], bytes)
        os.kill(engine._idle[0].pid, 9)
        outcomes = dict(engine.call([hello("amber"), hello("blue")], None))
        assert outcomes["amber"] == Failure("crashed") and isinstance(outcomes["blue"], bytes)
        log = (tmp_path / "amber" / "site.log").read_text()
        assert "round 0, step handshake.introduce" in log and "ended by SIGKILL" in log
        assert "SIGKILL" in engine.where_to_look and "amber" in engine.where_to_look
    finally:
        engine.close()


@pytest.mark.parametrize("start", [forked, pytest.param(spawned, marks=pytest.mark.slow)])
@pytest.mark.timeout(120)
def test_a_site_past_the_deadline_is_late_and_its_worker_replaced(start: Any, prepared: Any, tmp_path: Path) -> None:
    engine = start(specs(prepared, tmp_path), prepared)
    try:
        assert isinstance(dict(engine.call([hello("amber")], None))["amber"], bytes)
        os.kill(engine._idle[0].pid, 19)  # SIGSTOP: it neither answers nor goes away.
        started = time.monotonic()
        assert dict(engine.call([hello("amber")], 0.5)) == {"amber": Failure("late")}
        assert time.monotonic() - started < 10
        assert isinstance(dict(engine.call([hello("amber")], None))["amber"], bytes)
    finally:
        engine.close()
    assert engine._idle == []


def test_an_exception_stays_at_the_site_and_only_its_code_crosses(prepared: Any, tmp_path: Path) -> None:
    engine = Sequential(specs(prepared, tmp_path), prepared.plan, prepared.open_dataset)
    request = Request("amber", train.name, 1, "n", codec.pack({"model": {}}))
    ((_, data),) = engine.call([request], None)
    assert isinstance(data, bytes) and b"Traceback" not in data and b"Missing key" not in data
    with pytest.raises(Failed) as caught:
        admit(data, request, train, {}, 1e6)
    assert caught.value.code == "site-failed"
    log = (tmp_path / "amber" / "site.log").read_text()
    assert "Missing key" in log and train.name in log


def test_an_unknown_step_and_a_wrong_payload_fail_closed(prepared: Any, tmp_path: Path) -> None:
    engine = Sequential(specs(prepared, tmp_path), prepared.plan, prepared.open_dataset)
    cases = {"step-unknown": ("os.system", {}), "message-invalid": (train.name, {"model": {}, "path": "/etc"})}
    for code, (step, payload) in cases.items():
        request = Request("amber", step, 1, "n", codec.pack(payload))
        ((_, data),) = engine.call([request], None)
        assert codec.unpack(data)["code"] == code  # type: ignore[arg-type]


def test_debug_names_step_site_and_batch(tiny_data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from fedshift.methods import averaging

    calls = iter(range(100))

    def explode(scores: Any, labels: Any) -> Any:
        if next(calls) == 2:
            raise RuntimeError("boom")
        return (scores**2).mean()

    monkeypatch.setattr(averaging, "label_loss", explode)
    keys = {"data_dir": tiny_data, "target": "dim", "arch": "digits-csac", "batch_size": 8}
    config = make_config({"method": "fedavg", "policy": {"min_samples": 2}, **keys})
    with pytest.raises(RuntimeError, match="boom") as caught:
        run(config, tmp_path / "run", debug=True)
    notes = " ".join(caught.value.__notes__)
    assert "averaging.train" in notes and "'amber'" in notes and "round 1" in notes and "batch 2" in notes


def test_too_few_answers_end_the_run_with_names_and_codes(
    tiny_data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    keys = {
        "data_dir": tiny_data,
        "target": "dim",
        "arch": "digits-csac",
        "policy": {"allow": ["facts"]},
        "workers": 0,
    }
    told = r"0 of 3 sites.* amber, blue, coral: site-policy \(A site's own policy forbids.*/amber/site\.log"
    with pytest.raises(SiteError, match=told) as caught:
        run(make_config({"method": "fedavg", **keys}), tmp_path / "run")
    assert caught.value.exit_code == 3
