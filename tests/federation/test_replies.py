from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch

from fedshift.federation import federation as module
from fedshift.federation.federation import Replies
from fedshift.federation.releases import Count, Release, Weights
from fedshift.federation.shelf import Shelf
from fedshift.federation.site import Labelled
from fedshift.federation.step import Step
from fedshift.functional.averaging import weighted_mean


@dataclass(frozen=True)
class Learned(Release):
    model: Weights
    samples: Count


STEP: Step[Learned] = Step("test.learn", lambda: None, Labelled, Learned, {})


def collect(count: int) -> Replies[Learned]:
    replies = Replies(STEP)
    for number in reversed(range(count)):
        replies.add(f"site-{number:03d}", Learned({"w": torch.full((100,), float(number))}, number + 1), 400)
    return replies


def test_answers_come_sorted_by_site_and_as_often_as_asked() -> None:
    replies = collect(5)
    assert [site for site, _ in replies] == [f"site-{n:03d}" for n in range(5)] == list(replies.answered)
    assert [release.samples for _, release in replies] == [1, 2, 3, 4, 5]
    assert len(list(replies)) == 5 == len(replies)


def test_beyond_the_limit_answers_wait_on_disk_and_average_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    in_memory = weighted_mean((r.model, r.samples) for _, r in collect(50))
    monkeypatch.setattr(module, "IN_MEMORY_BYTES", 1000)
    replies = collect(50)
    assert len(replies._held) == 2 and replies._shelf is not None and len(list(replies._shelf)) == 48
    spilled = weighted_mean((r.model, r.samples) for _, r in replies)
    assert torch.equal(in_memory["w"], spilled["w"])
    # sum of n (n + 1) over sum of (n + 1), n = 0 .. 49: 41650 / 1275.
    assert float(spilled["w"][0]) == pytest.approx(41650 / 1275)
    assert replies["site-049"].samples == 50


def test_what_waits_on_disk_comes_back_in_every_type_and_shape() -> None:
    model = {
        "scalar": torch.tensor(3),
        "flags": torch.tensor([True, False, True]),
        "half": torch.randn(5, generator=torch.Generator().manual_seed(0)).bfloat16(),
        "none": torch.zeros(0, 4),
        "kernel": torch.arange(24.0).reshape(1, 2, 3, 4).to(memory_format=torch.channels_last),
    }
    shelf = Shelf(STEP)
    shelf.add("a", Learned({"w": torch.zeros(2)}, 1))
    shelf.add("b", Learned(model, 2))
    found = shelf["b"].model
    assert found.keys() == model.keys() and shelf["a"].samples == 1
    assert all(torch.equal(found[key], model[key]) and found[key].dtype == model[key].dtype for key in model)
