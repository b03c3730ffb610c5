"""Named by what must be refused at the coordinator's gate."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

import pytest
import torch

from fedshift.federation import codec
from fedshift.federation.admission import Failed, Refused, admit
from fedshift.federation.releases import Count, Release, Tally, Weights, kinds
from fedshift.federation.site import Labelled
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


def admitted(data: bytes, max_norm: float = 100.0) -> Learned:
    return admit(data, REQUEST, STEP, {"model": MODEL}, max_norm).release


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
    ],
)
def test_refused(reason: str, data: bytes) -> None:
    with pytest.raises(Refused) as caught:
        admitted(data)
    assert caught.value.reason == reason


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


def test_a_field_that_does_not_say_what_it_is_cannot_be_declared() -> None:
    @dataclass(frozen=True)
    class Leaky(Release):
        images: torch.Tensor

    with pytest.raises(TypeError, match=r"Leaky\.images must declare"):
        kinds(Leaky)
    assert set(kinds(Learned)) == {f.name for f in dataclasses.fields(Learned)}
