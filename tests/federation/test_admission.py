"""Named by what must be refused at the coordinator's gate."""

from __future__ import annotations

import dataclasses
import struct
from dataclasses import dataclass
from typing import Any

import pytest
import torch

from fedshift.federation import admission, codec
from fedshift.federation.admission import UNKNOWN_CODE, Failed, Refused, admit
from fedshift.federation.checks import Confusion
from fedshift.federation.releases import Count, Counts, Metric, Release, Tally, Weights, kinds
from fedshift.federation.site import Evaluated, Labelled
from fedshift.federation.step import Request, Step

MODEL = {"w": torch.zeros(7, 3), "seen": torch.tensor(5)}


@dataclass(frozen=True)
class Learned(Release):
    model: Weights
    samples: Count


STEP: Step[Learned] = Step("test.learn", lambda: None, Labelled, Learned, {})
REQUEST = Request(site="a", step="test.learn", round=3, nonce="n1", body=b"")


def reply(**changes: Any) -> bytes:
    envelope: dict[str, Any] = {"site": "a", "step": "test.learn", "round": 3, "nonce": "n1", "code": None}
    envelope |= {"release": {"model": MODEL, "samples": 10}, "seconds": "00000001.000", "clipped": 0}
    return codec.pack(envelope | changes)


def admitted(data: bytes, max_norm: float = 100.0, sizes: dict[str, int] | None = None) -> Learned:
    return admit(data, REQUEST, STEP, {"model": MODEL}, max_norm, sizes).release


def model(**changes: torch.Tensor) -> dict[str, Any]:
    return {"model": MODEL | changes, "samples": 10}


def test_an_honest_reply_is_admitted() -> None:
    release = admitted(reply(release=model(w=torch.ones(7, 3))))
    assert release.samples == 10 and torch.equal(release.model["w"], torch.ones(7, 3))


@pytest.mark.parametrize(
    ("reason", "data"),
    [
        ("wrong-site", reply(site="b")),
        ("wrong-round", reply(round=2)),
        ("wrong-nonce", reply(nonce="an older one")),
        ("wrong-step", reply(step="other")),
        ("undecodable", b"\x80\x04not safetensors"),
        ("undecodable", codec.pack([1, 2])),
        ("schema", reply(release={"model": MODEL, "samples": 10, "images": torch.ones(3)})),
        ("schema", reply(release={"model": MODEL})),
        ("schema", reply(release={"model": MODEL, "samples": 10.5})),
        ("seconds", reply(seconds="long")),
        ("count", reply(release={"model": MODEL, "samples": -2})),
        ("keys", reply(release={"model": {"w": MODEL["w"]}, "samples": 10})),
        ("keys", reply(release=model(v=torch.ones(1)))),
        ("shape", reply(release=model(w=torch.ones(1, 3)))),
        ("dtype", reply(release=model(w=torch.ones(7, 3, dtype=torch.float64)))),
        ("dtype", reply(release=model(seen=torch.tensor(5.0)))),
        ("non-finite", reply(release=model(w=torch.full((7, 3), torch.nan)))),
        ("non-finite", reply(release=model(w=torch.full((7, 3), torch.inf)))),
        ("norm", reply(release=model(w=torch.full((7, 3), 1e6)))),
        ("wrong-round", reply(round=torch.tensor(3))),
        ("wrong-round", reply(round=3.0)),
        ("wrong-site", reply(site=["a"])),
        ("schema", reply(clipped=True)),
        ("schema", reply(clipped=-1)),
        ("schema", reply(clipped=3)),
        ("schema", reply(more="than was asked")),
        ("schema", reply(code=7)),
        ("schema", reply(release={"model": MODEL, "samples": True})),
        ("schema", reply(release={"model": {**MODEL, "w": "text"}, "samples": 10})),
        ("schema", reply(release={"model": {**MODEL, "w": {"w": torch.zeros(7, 3)}}, "samples": 10})),
        ("seconds", reply(seconds="nan")),
        ("seconds", reply(seconds="inf")),
        ("seconds", reply(seconds="-1.000")),
        ("seconds", reply(seconds="1" + 400 * "0")),
        ("seconds", reply(seconds=1.0)),
        ("seconds", reply(seconds=10**400)),
        ("count", reply(release={"model": MODEL, "samples": 0})),
        ("count", reply(release={"model": MODEL, "samples": 10**13})),
        ("dtype", reply(release=model(w=torch.ones(7, 3).to(torch.float8_e4m3fn)))),
        ("dtype", reply(release=model(w=torch.ones(7, 3, dtype=torch.complex64)))),
        ("variance", reply(release=model(w=MODEL["w"], **{"bn.running_var": torch.tensor([1.0, -1e-9])}))),
        ("count", reply(release=model(**{"bn.num_batches_tracked": torch.tensor(-1)}))),
        ("size", reply(release=model(w=torch.ones(100_000)))),
        ("undecodable", reply(release={"model": MODEL, "samples": 10}, seconds=[[]] * 3000)),
    ],
)
def test_refused(reason: str, data: bytes) -> None:
    with pytest.raises(Refused) as caught:
        admitted(data)
    assert caught.value.reason == reason


def test_nothing_is_made_of_more_samples_than_the_site_says_it_has() -> None:
    ten = reply(release={"model": MODEL, "samples": 10})
    assert admitted(ten, sizes={"train": 10}).samples == 10
    with pytest.raises(Refused, match="count"):
        admitted(ten, sizes={"train": 9})


@dataclass(frozen=True)
class Scored(Release):
    confusion: Counts


SCORE: Step[Scored] = Step("test.learn", lambda: None, Evaluated, Scored, {})


def scored(cells: Any, expected: Confusion, sizes: dict[str, int]) -> torch.Tensor:
    matrix = cells if isinstance(cells, torch.Tensor) else torch.tensor(cells)
    data = reply(release={"confusion": matrix})
    return admit(data, REQUEST, SCORE, {"confusion": expected}, 1.0, sizes).release.confusion


@pytest.mark.parametrize(
    ("reason", "cells"),
    [
        ("confusion", [[10_000, 0], [0, 0]]),
        ("confusion", [[99, 0], [0, 0]]),
        ("confusion", [[101, 0], [0, 0]]),
        ("count", [[150, -50], [0, 0]]),
        ("count", [[2**62, 2**62], [2**62, 2**62 + 100]]),
        ("shape", [[50, 0, 0], [0, 50, 0], [0, 0, 0]]),
        ("shape", [100]),
        ("dtype", [[50.0, 0.0], [0.0, 50.0]]),
        ("dtype", torch.tensor([[50, 0], [0, 50]], dtype=torch.int32)),
    ],
)
def test_a_site_is_scored_on_its_100_samples_and_no_others(reason: str, cells: Any) -> None:
    expected, sizes = Confusion(2, "val"), {"train": 10_000, "val": 100}
    assert int(scored([[50, 3], [7, 40]], expected, sizes).sum()) == 100
    with pytest.raises(Refused) as caught:
        scored(cells, expected, sizes)
    assert caught.value.reason == reason


def test_of_masks_no_more_pixels_are_counted_than_there_are() -> None:
    expected, sizes = Confusion(2, "test", each=16, some_void=True), {"test": 3}
    assert int(scored([[40, 0], [0, 8]], expected, sizes).sum()) == 48
    assert int(scored([[0, 0], [0, 0]], expected, sizes).sum()) == 0, "no pixel has a label"
    with pytest.raises(Refused, match="confusion"):
        scored([[40, 0], [0, 9]], expected, sizes)


def test_a_site_has_not_worked_for_longer_than_was_waited_for_it() -> None:
    data = reply(seconds="99999999.000")
    assert admit(data, REQUEST, STEP, {"model": MODEL}, 1.0, None, waited=2.5).seconds == 2.5
    assert admit(reply(), REQUEST, STEP, {"model": MODEL}, 1.0, None, waited=2.5).seconds == 1.0


@pytest.mark.parametrize("loss", ["1e999", "-Infinity", "NaN", "1e10", "1" + 400 * "0", "true", '"0.5"'])
def test_a_loss_is_a_finite_number_of_a_sane_size(loss: str) -> None:
    @dataclass(frozen=True)
    class Told(Release):
        loss: Metric

    tell: Step[Told] = Step("test.learn", lambda: None, Labelled, Told, {})
    data = reply(release={"loss": 0.625})
    assert admit(data, REQUEST, tell, {}, 1.0).release.loss == 0.625
    header = data[8:].replace(b"0.625", loss.replace('"', '\\"').encode())
    with pytest.raises(Refused):
        admit(struct.pack("<Q", len(header)) + header, REQUEST, tell, {}, 1.0)


def test_a_tally_is_checked_like_a_count() -> None:
    @dataclass(frozen=True)
    class Fitted(Release):
        dropped: Tally

    fit: Step[Fitted] = Step("test.learn", lambda: None, Labelled, Fitted, {})
    assert admit(reply(release={"dropped": 3}), REQUEST, fit, {}, 1.0).release.dropped == 3
    with pytest.raises(Refused, match="count"):
        admit(reply(release={"dropped": -1}), REQUEST, fit, {}, 1.0)


def test_the_norm_limit_is_on_the_update_not_on_the_weights() -> None:
    # ||ones(7, 3)|| = sqrt(21) = 4.58.
    admitted(reply(release=model(w=torch.ones(7, 3))), max_norm=4.6)
    with pytest.raises(Refused):
        admitted(reply(release=model(w=torch.ones(7, 3))), max_norm=4.5)


def test_a_failing_site_sends_a_code_and_nothing_else() -> None:
    with pytest.raises(Failed) as caught:
        admitted(reply(code="site-failed", release=None))
    assert caught.value.code == "site-failed"


@pytest.mark.parametrize("code", ["\x1b[2Jowned", "no such code", "x" * 1000, ""])
def test_of_a_code_that_is_none_nothing_is_passed_on(code: str) -> None:
    with pytest.raises(Failed) as caught:
        admitted(reply(code=code, release=None))
    assert caught.value.code == UNKNOWN_CODE


def test_a_check_that_stumbles_costs_one_answer_and_not_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(admission, "check_kind", lambda *_: 1 / 0)
    with pytest.raises(Refused, match="unreadable"):
        admitted(reply())


def test_a_field_that_does_not_say_what_it_is_cannot_be_declared() -> None:
    @dataclass(frozen=True)
    class Leaky(Release):
        images: torch.Tensor

    with pytest.raises(TypeError, match=r"Leaky\.images must declare"):
        kinds(Leaky)
    assert set(kinds(Learned)) == {f.name for f in dataclasses.fields(Learned)}
