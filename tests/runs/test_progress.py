"""What is shown while a run goes."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import pytest

import fedshift
from fedshift.beats import beat, beats
from fedshift.runs import progress
from fedshift.runs.heartbeat import Heartbeat, read_moment
from fedshift.runs.progress import Lines, Moment, Notebook, Silent, clock

QUICK: dict[str, Any] = {"target": "dim", "arch": "digits-csac", "batch_size": 16, "policy": {"min_samples": 2}}


class Clock:
    now = 1000.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def ticking(monkeypatch: pytest.MonkeyPatch) -> Clock:
    found = Clock()
    monkeypatch.setattr(time, "monotonic", found)
    return found


def test_the_first_round_is_estimated_from_batches(tmp_path: Path, ticking: Clock) -> None:
    heart = Heartbeat(Silent(), tmp_path / ".progress")
    heart.begin_round(1, 5, expected=40)
    heart.asked("averaging.train_site", ("blue", "red", "green"))
    for _ in range(10):
        beat()
    heart.answered("averaging.train_site", "red")
    ticking.now += 6
    now = heart.moment()
    assert now.doing == "train site, 1 of 3 sites done, waiting for blue, green, batch 10 of about 40"
    # A quarter of a round took 6 s: 18 s of it are left, and four rounds of 24 s.
    assert (now.share, now.left, now.seconds) == (0.25, 18 + 4 * 24, 6)


def test_a_method_that_uses_its_data_more_often_than_guessed_gives_no_false_share(
    tmp_path: Path, ticking: Clock
) -> None:
    heart = Heartbeat(Silent(), tmp_path / ".progress")
    heart.begin_round(1, 5, expected=3)
    for _ in range(8):
        beat()
    ticking.now += 4
    now = heart.moment()
    assert (now.share, now.left) == (None, None) and now.doing.endswith("batch 8")
    heart.end_round()
    heart.begin_round(2, 5, expected=3)
    for _ in range(2):
        beat()
    ticking.now += 1
    now = heart.moment()
    assert now.doing.endswith("batch 2 of 8") and now.share == 0.25
    assert now.left == 0.75 * 4 + 3 * 4


def test_sites_elsewhere_are_estimated_by_time(tmp_path: Path, ticking: Clock) -> None:
    heart = Heartbeat(Silent(), tmp_path / ".progress")
    heart.begin_round(1, 3, expected=100)
    heart.asked("train", ("north",))
    ticking.now += 10
    now = heart.moment()
    assert (now.doing, now.share, now.left) == ("train at north", None, None)
    heart.end_round()
    heart.begin_round(2, 3, expected=100)
    ticking.now += 4
    assert (heart.moment().share, heart.moment().left) == (0.4, 6 + 10)


def test_lines_speak_when_nothing_else_does(ticking: Clock, capsys: pytest.CaptureFixture[str]) -> None:
    lines, now = Lines(), Moment(1, 3, "train, 1 of 3 sites done", 9, 0.5, 130)
    lines.begin(3, 0, "fedavg")
    for _ in range(20):
        ticking.now += 1
        lines.moment(now)
    told = capsys.readouterr().err.splitlines()
    assert told[0] == "fedavg" and len(told) == 4, "after 2, 10 and 18 seconds"
    assert told[1] == "  round 1/3: train, 1 of 3 sites done, 50 % of the round, 9 s, about 2 min 10 s left"
    lines.round(1, {}, {})
    assert "not scored" in capsys.readouterr().err


def test_a_notebook_writes_over_its_line(capsys: pytest.CaptureFixture[str]) -> None:
    shown = Notebook()
    shown.moment(Moment(1, 3, "train, waiting for north and south", 9))
    shown.moment(Moment(1, 3, "score", 9))
    shown.message("round 1 done")
    first, second, third = capsys.readouterr().out.split("\r")[1:]
    assert len(second) == len(first) and second.rstrip() == "round 1/3: score, 9 s" and third.endswith("\n")


def test_clock_is_read_at_a_glance() -> None:
    assert [clock(s) for s in (0.4, 59.4, 61, 3599, 7500)] == ["0 s", "59 s", "1 min 01 s", "59 min 59 s", "2 h 05 min"]


class Watching(Silent):
    def __init__(self) -> None:
        self.rounds: list[tuple[int, bool]] = []

    def round(self, round: int, val: Any, test: Any) -> None:
        self.rounds.append((round, bool(val or test)))


@pytest.mark.parametrize("workers", [0, 2])
def test_batches_of_all_processes_are_counted_and_unscored_rounds_show_no_old_scores(
    tiny_data: Path, tmp_path: Path, workers: int
) -> None:
    before, watching = beats(), Watching()
    run = fedshift.fit(
        data=tiny_data, rounds=3, evaluate_every=2, workers=workers, out=tmp_path / "run", progress=watching, **QUICK
    )
    assert watching.rounds == [(1, False), (2, True), (3, True)]
    sizes = run.results["samples"]
    trained = sum(-(-sizes[site]["train"] // 16) for site in run.results["sources"])
    # Each round trains once; two rounds are scored, every split in one batch, and the end looks at the same once more.
    assert beats() - before == 3 * trained + 3 * (len(run.results["sources"]) + 1)
    assert not (tmp_path / "run" / ".progress").exists()


def test_python_shows_progress_when_asked(
    tiny_data: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(progress, "QUIET_SECONDS", 0.0)
    fedshift.fit(data=tiny_data, rounds=1, workers=0, progress=True, **QUICK)
    assert "round 1/1  val" in capsys.readouterr().err


def test_a_file_tells_the_live_page_and_rubbish_tells_nothing(tmp_path: Path) -> None:
    file, seen = tmp_path / ".progress", 0
    with Heartbeat(Silent(), file) as heart:
        heart.begin_round(2, 9, 0)
        heart.asked("averaging.train", ("blue",))
        while read_moment(file) is None and seen < 300:
            time.sleep(0.02)
            seen += 1
        now = read_moment(file)
    assert now is not None and (now.round, now.rounds, now.doing) == (2, 9, "train at blue")
    assert not file.exists() and read_moment(file) is None
    for rubbish in ("", "[]", json.dumps({"round": "x"}), "[" * 5000):
        file.write_text(rubbish)
        assert read_moment(file) is None
