"""A site that sends rubbish costs a run its answers and nothing more, however often the run is started again."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from fedshift._version import __version__
from fedshift.errors import CATALOGUE, SiteError
from fedshift.federation import codec
from fedshift.federation.admission import tell_absent
from fedshift.federation.engines import Engine, Failure
from fedshift.federation.handshake import introduce
from fedshift.federation.step import Request
from fedshift.federation.survey import Found, agreed_dataset, survey_sites
from fedshift.methods.averaging import train
from fedshift.methods.evaluation import score
from fedshift.runs import planning
from fedshift.runs.config import make_config
from fedshift.runs.execute import run
from fedshift.runs.progress import Silent

Change = Callable[[dict[str, Any]], Any]


class Hostile:
    """An engine behind which one site changes its answers to some steps."""

    def __init__(self, inner: Engine, site: str, changes: dict[str, Change]) -> None:
        self.inner, self.site, self.changes = inner, site, changes
        self.where_to_look = inner.where_to_look

    def call(self, requests: Sequence[Request], deadline: float | None) -> Iterator[tuple[str, bytes | Failure]]:
        steps = {request.site: request.step for request in requests}
        for site, outcome in self.inner.call(requests, deadline):
            change = self.changes.get(steps[site]) if site == self.site else None
            yield site, codec.pack(change(codec.unpack(outcome))) if change and isinstance(outcome, bytes) else outcome

    def close(self) -> None:
        self.inner.close()


@pytest.fixture
def hostile(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    original = planning.local_engine

    def make(site: str, **changes: Change) -> None:
        names = {"learning": train.name, "scoring": score.name, "handshake": introduce.name}
        named = {names[key]: change for key, change in changes.items()}
        monkeypatch.setattr(planning, "local_engine", lambda *args: Hostile(original(*args), site, named))

    return make


class Heard(Silent):
    """Keeps what a run says, and ends it when a round is done."""

    def __init__(self, stop_after: int = 0) -> None:
        self.said: list[str] = []
        self.last = stop_after

    def message(self, text: str) -> None:
        self.said.append(text)

    def round(self, round: int, val: Any, test: Any) -> None:
        if round == self.last:
            raise KeyboardInterrupt


def settings(tiny_data: Path, **more: Any) -> Any:
    keys = {"method": "fedavg", "data_dir": tiny_data, "arch": "digits-csac", "rounds": 2, "batch_size": 16}
    return make_config({**keys, "target": "dim", "workers": 0, "policy": {"min_samples": 2}, **more})


def with_facts(**facts: Any) -> Change:
    return lambda reply: reply | {"release": {"facts": reply["release"]["facts"] | facts}}


RUBBISH: dict[str, Change] = {
    "classes: 5": with_facts(classes=5),
    "sizes: -1": with_facts(sizes={"train": -1, "val": 1, "test": 1}),
    "sizes: of what": with_facts(sizes={"train": 1}),
    "skipped: true": with_facts(skipped=True),
    "a terminal's codes": with_facts(classes=["\x1b[2J"]),
    "no message": lambda reply: [1, 2],
    "seconds: nan": lambda reply: reply | {"seconds": "nan"},
    "round: a tensor": lambda reply: reply | {"round": torch.tensor(0)},
}


@pytest.mark.parametrize("rubbish", RUBBISH.values(), ids=RUBBISH)
def test_a_site_that_says_rubbish_of_itself_is_left_out(
    rubbish: Change, tiny_data: Path, tmp_path: Path, hostile: Callable[..., None]
) -> None:
    hostile("blue", handshake=rubbish)
    heard = Heard(stop_after=2)
    with pytest.raises(KeyboardInterrupt):
        run(settings(tiny_data), tmp_path / "run", progress=heard)
    assert sum("blue is left out of this run" in text for text in heard.said) == 1
    results = run(settings(tiny_data), tmp_path / "run", resume=True)
    assert set(results["samples"]) == {"amber", "coral", "dim"} == {*results["source_val"], "dim"}
    assert 0 <= results["per_target"]["dim"]["last"] <= 1
    assert not list((tmp_path / "run/sites/blue").glob("state/*")), "it was not asked again"


def test_rubbish_of_too_many_ends_the_run_with_their_names(
    tiny_data: Path, tmp_path: Path, hostile: Callable[..., None]
) -> None:
    hostile("blue", handshake=RUBBISH["classes: 5"])
    with pytest.raises(SiteError, match=r"3 of 4 sites said what they have and 4 are needed\. blue: facts\.") as caught:
        run(settings(tiny_data, quorum=1.0), tmp_path / "run")
    assert caught.value.code == "site-failed"


def test_other_classes_are_an_error_at_the_start_and_cost_a_place_later(
    tiny_data: Path, tmp_path: Path, hostile: Callable[..., None]
) -> None:
    many = with_facts(classes=[f"class {number}" for number in range(1000)])
    with pytest.raises(KeyboardInterrupt):
        run(settings(tiny_data), tmp_path / "run", progress=Heard(stop_after=2))
    hostile("blue", handshake=many)
    with pytest.raises(SiteError, match=r"only there: 'class 0', .* and 995 more") as caught:
        run(settings(tiny_data), tmp_path / "other")
    assert caught.value.code == "data-classes" and len(caught.value.message) < 400
    results = run(settings(tiny_data), tmp_path / "run", resume=True)
    assert "blue" not in results["samples"]


REPLIES: dict[str, tuple[str, Change]] = {
    "no samples": ("count", lambda reply: reply | {"release": reply["release"] | {"samples": 0}}),
    "10^12 samples": ("count", lambda reply: reply | {"release": reply["release"] | {"samples": 10**12}}),
    "seconds: 10^400": ("seconds", lambda reply: reply | {"seconds": 10**400}),
    "a tensor as round": ("wrong-round", lambda reply: reply | {"round": torch.tensor(1)}),
    "float8": (
        "dtype",
        lambda reply: (
            reply
            | {
                "release": reply["release"]
                | {"model": {key: value.to(torch.float8_e4m3fn) for key, value in reply["release"]["model"].items()}}
            }
        ),
    ),
    "an unknown code": ("", lambda reply: reply | {"code": "\x1b[2Jgone", "release": None}),
}


@pytest.mark.parametrize(("reason", "change"), REPLIES.values(), ids=REPLIES)
def test_a_site_that_learns_rubbish_is_done_without(
    reason: str, change: Change, tiny_data: Path, tmp_path: Path, hostile: Callable[..., None]
) -> None:
    hostile("blue", learning=change)
    results = run(settings(tiny_data), tmp_path / "run")
    assert results["counters"] == ({f"refused.{reason}": 2} if reason else {"failed.unknown-code": 2})
    assert "\x1b" not in (tmp_path / "run" / "results.json").read_text()


def scores(change: Callable[[torch.Tensor], torch.Tensor]) -> Change:
    return lambda reply: reply | {"release": {"confusion": change(reply["release"]["confusion"])}}


SCORES: dict[str, tuple[str, Change]] = {
    "10,000 right": ("confusion", scores(lambda found: torch.diag(torch.tensor([10_000, 0, 0])))),
    "one sample more": ("confusion", scores(lambda found: found + torch.eye(3, dtype=torch.int64))),
    "another shape": ("shape", scores(lambda found: found[:2, :2])),
}


@pytest.mark.parametrize(("reason", "change"), SCORES.values(), ids=SCORES)
@pytest.mark.parametrize("site", ["blue", "dim"])
def test_scores_that_cannot_be_are_no_scores(
    site: str, reason: str, change: Change, tiny_data: Path, tmp_path: Path, hostile: Callable[..., None]
) -> None:
    """`dim` is the only target: its run has a model, and no result for it."""
    hostile(site, scoring=change)
    results = run(settings(tiny_data), tmp_path / "run")
    assert results["counters"] == {f"refused.{reason}": 2}
    assert set(results["source_val"]) == {"amber", "blue", "coral"} - {site}
    assert set(results["per_target"]) == {"dim"} - {site}
    json.loads((tmp_path / "run" / "results.json").read_text())


# --- Before there is a plan -------------------------------------------------------------------------------------------

FOUND = {
    **{"version": __version__, "task": "classification", "classes": ["cat", "dog"], "input_shape": [3, 16, 16]},
    **{"columns": [], "clock": 1000.0, "mask_ids": []},
}


class Survey:
    """An engine whose sites say what they are told to."""

    where_to_look = "Nowhere."

    def __init__(self, **facts: Any) -> None:
        self.facts = facts

    def call(self, requests: Any, deadline: float | None) -> Any:
        for request in requests:
            reply = {"code": None, "release": {"facts": self.facts[request.site]}, "clipped": 0, "seconds": "1.0"}
            yield request.site, codec.pack(request.head | reply)

    def close(self) -> None:
        return None


@pytest.mark.parametrize(
    "facts",
    [
        5,
        {"version": __version__},
        FOUND | {"classes": 5},
        FOUND | {"classes": ["cat", "cat"]},
        FOUND | {"classes": ["cat", "\x1b[31m"]},
        FOUND | {"classes": ["cat", "d" * 1000]},
        FOUND | {"classes": [str(number) for number in range(70_000)]},
        FOUND | {"input_shape": [3, -16, 16]},
        FOUND | {"task": "cooking"},
        FOUND | {"clock": True},
        FOUND | {"clock": 10**400},
        FOUND | {"columns": [torch.ones(1)]},
    ],
    ids=lambda facts: str(facts)[:40],
)
def test_a_site_that_answers_the_survey_with_rubbish_is_not_in_it(facts: Any) -> None:
    engine = Survey(north=FOUND, south=facts, west=FOUND)
    found = survey_sites(engine, ["north", "south", "west"], quorum=0.5)
    assert set(found) == {"north", "west"}
    assert agreed_dataset("lungs", found, 1000.0).classes == ("cat", "dog")
    with pytest.raises(SiteError, match="south: ") as caught:
        survey_sites(engine, ["north", "south", "west"])
    assert "\x1b" not in caught.value.message and len(caught.value.message) < 200


def test_a_version_is_shown_only_if_it_is_one() -> None:
    for version, says in (
        ("0.0.1", "runs fedshift 0.0.1"),
        ("gone\u2028", "text"),
        ("look here: evil", "unknown version"),
    ):
        with pytest.raises(SiteError, match=says):
            survey_sites(Survey(north=FOUND | {"version": version}), ["north"])


def test_sites_that_differ_in_many_names_are_told_by_a_few() -> None:
    here = codec.restore(Found, FOUND | {"columns": [f"x{number}" for number in range(500)]})
    there = codec.restore(Found, FOUND | {"columns": ["y"]})
    with pytest.raises(SiteError, match=r"'x0', 'x1', .* and 496 more") as caught:
        agreed_dataset("lungs", {"north": here, "south": there}, 1000.0)
    assert len(caught.value.message) < 300


@pytest.mark.parametrize("reason", ["\x1b[2Jgone", None, 5, ["late"], "reply", "x" * 1000])
def test_another_machine_gives_a_known_reason_or_none(reason: Any) -> None:
    assert Failure.told(reason) == Failure("crashed")
    assert Failure.told("late") == Failure("late")
    assert tell_absent({"north": Failure.told(reason).reason}, "Nowhere.") == "north: crashed. Nowhere."


def test_the_words_of_codes_are_the_coordinators_own() -> None:
    assert CATALOGUE["site-policy"].rstrip(".") in tell_absent({"north": "site-policy"}, "Look.")
