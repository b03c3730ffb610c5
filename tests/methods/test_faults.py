"""What happens to a run when processes are killed, disks are full and sites are away, wherever it can happen.

Python tells audit hooks of every file that is opened, renamed or removed. A hook in a forked process counts those that
write below the run's folder, and at the one it is told it kills the process, or says that the disk is full from there.
"""

from __future__ import annotations

import errno
import gc
import mmap
import os
import random
import signal
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from test_contract import Wrapped, settings, wrap_engine

from fedshift.errors import FedshiftError
from fedshift.federation.engines import Failure
from fedshift.federation.step import Request
from fedshift.methods import METHODS
from fedshift.runs.config import make_config
from fedshift.runs.execute import run
from fedshift.runs.progress import Silent

pytestmark = pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")

FAST = ("fedavg",)
ENDED, TOLD, CRASHED = 0, 2, 1
_WRITING = os.O_WRONLY | os.O_RDWR | os.O_CREAT


def short(method: str, data: Path, **changes: Any) -> Any:
    """Two rounds on few images. With a quorum of 1, a site that dies ends the run."""
    setting = METHODS[method].about.settings[0]
    keys = {"rounds": 2, "train_per_site": 16, "quorum": 1.0, "workers": 1, **changes}
    return make_config(settings(method, setting, data, **keys))


def writes(event: str, arguments: tuple[Any, ...], folder: str) -> bool:
    """Whether an audit event is about to change something below `folder`, other than the file for those who watch,
    which comes by the clock."""
    if event == "open":
        path, mode, flags = arguments
        is_writing = any(letter in mode for letter in "wxa+") if isinstance(mode, str) else bool(flags & _WRITING)
    else:
        path, is_writing = arguments[0] if arguments else None, event in ("os.rename", "os.remove")
    is_below = isinstance(path, str | os.PathLike) and os.fspath(path).startswith(folder)
    return is_writing and is_below and not Path(os.fspath(path)).name.startswith(".progress")


class Fault:
    """Runs a training in a forked process in which something happens at the `at`-th write of the coordinator, or of
    the sites' worker processes. `count` is how many of these writes there were, `others` how many of the other side."""

    def __init__(self, folder: Path, at: int, *, at_site: bool = False, is_full: bool = False) -> None:
        self.folder, self.at, self.at_site, self.is_full = str(folder), at, at_site, is_full
        self._shared = mmap.mmap(-1, 16)

    @property
    def count(self) -> int:
        return int.from_bytes(self._shared[:8], "little")

    @property
    def others(self) -> int:
        return int.from_bytes(self._shared[8:], "little")

    def during(self, work: Callable[[], Any]) -> int:
        """How it ended: `ENDED`, `TOLD` (one clear error), `CRASHED`, or minus the signal that killed it."""
        child = os.fork()
        if child == 0:
            gc.freeze()  # As in a forked worker.
            code = CRASHED
            try:
                sys.addaudithook(self._hook(os.getpid()))
                os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
                work()
                code = ENDED
            except FedshiftError:
                code = TOLD
            finally:
                os._exit(code)
        return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])

    def _hook(self, coordinator: int) -> Callable[[str, tuple[Any, ...]], None]:
        def hook(event: str, arguments: tuple[Any, ...]) -> None:
            if event not in ("open", "os.rename", "os.remove") or not writes(event, arguments, self.folder):
                return
            if not self.is_full and self.at_site == (os.getpid() == coordinator):
                self._shared[8:] = (self.others + 1).to_bytes(8, "little")
                return
            self._shared[:8] = (self.count + 1).to_bytes(8, "little")
            if self.is_full and self.count >= self.at and event == "open":
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), os.fspath(arguments[0]))
            if not self.is_full and self.count == self.at:
                os.kill(os.getpid(), signal.SIGKILL)

        return hook


NEVER = 10**9
EVERYWHERE = os.environ.get("FEDSHIFT_FAULTS") == "everywhere"
"""Whether all writes of all methods are tried, which takes about an hour; a sample of them otherwise."""


def sampled(count: int, wanted: int, seed: str) -> list[int]:
    """`wanted` of the numbers from 1 to `count`: with the first and the last, unless it is one."""
    if wanted >= count:
        return list(range(1, count + 1))
    if wanted == 1:
        return [random.Random(seed).randint(1, count)]
    return sorted({1, count, *random.Random(seed).sample(range(2, count), max(0, wanted - 2))})


def killed(method: str, data: Path, place: Path, wanted: tuple[int, int]) -> tuple[int, int]:
    """Kills the coordinator, and then sites, at as many of all writes as are `wanted` of each, and resumes each time.
    Returns how many were tried and how many ended in the same model as the undisturbed run."""
    config = short(method, data)
    undisturbed = Fault(place / "whole", NEVER)
    assert undisturbed.during(lambda: run(config, place / "whole")) == ENDED
    expected = run(config, place / "whole", resume=True)["model_sha256"]
    tried = equal = 0
    for at_site, count in ((False, undisturbed.count), (True, undisturbed.others)):
        for at in sampled(count, NEVER if EVERYWHERE else wanted[at_site], f"{method} {at_site}"):
            folder = place / f"{'site' if at_site else 'coordinator'}-{at}"
            fault = Fault(folder, at, at_site=at_site)
            ended = fault.during(lambda folder=folder: run(config, folder))  # type: ignore[misc]
            # After the last round sites only count for calibration: without one of them a run ends all the same.
            told = (TOLD, ENDED) if at > count // 2 else (TOLD,)
            assert ended in (told if at_site else (-signal.SIGKILL,)), f"write {at} of {count}: {ended}"
            results = run(config, folder, resume=True)
            tried += 1
            equal += results["model_sha256"] == expected
            assert [path for path in folder.rglob(".*.*") if path.is_file() and path.name.startswith(".round")] == []
    return tried, equal


by_method = pytest.mark.parametrize(
    "method", [pytest.param(name, marks=[] if name in FAST else [pytest.mark.slow]) for name in sorted(METHODS.builtin)]
)


@by_method
@pytest.mark.timeout(3600 if EVERYWHERE else 300)
def test_killed_processes_resume_to_the_same_bytes(method: str, tiny_data: Path, tmp_path: Path) -> None:
    """A killed site ends the run: its quorum is 1. CSAC is killed most often: its sites write the most."""
    wanted = (3, 2) if method in FAST else (5, 5) if method == "csac" else (1, 1)
    tried, equal = killed(method, tiny_data, tmp_path, wanted)
    print(f"{method}: {equal} of {tried} kills end in the same model")
    at_home = 0 if METHODS[method].about.data in ("pooled", "target-copies") else wanted[1]
    assert tried == equal >= wanted[0] + at_home


@pytest.mark.timeout(3600 if EVERYWHERE else 300)
@pytest.mark.slow
def test_a_full_disk_is_one_error_and_loses_no_round(tiny_data: Path, tmp_path: Path) -> None:
    config = short("csac", tiny_data, workers=0)
    whole = Fault(tmp_path / "whole", NEVER, is_full=True)
    assert whole.during(lambda: run(config, tmp_path / "whole")) == ENDED
    expected = run(config, tmp_path / "whole", resume=True)["model_sha256"]
    for at in sampled(whole.count, NEVER if EVERYWHERE else 6, "full"):
        folder = tmp_path / f"full-{at}"
        ended = Fault(folder, at, is_full=True).during(lambda folder=folder: run(config, folder))  # type: ignore[misc]
        # What is written last may only be removed or renamed: that works on a full disk.
        assert ended == TOLD or (ended == ENDED and at == whole.count), f"write {at} of {whole.count}: {ended}"
        assert run(config, folder, resume=True)["model_sha256"] == expected
    print(f"full disks at {whole.count} writes")


class SometimesAway(Wrapped):
    """Every answer after the handshake is lost with a probability, by a seed."""

    share = 0.0
    draw = random.Random(0)
    lost = 0

    def call(self, requests: Sequence[Request], deadline: float | None) -> Iterator[tuple[str, bytes | Failure]]:
        for site, outcome in self.inner.call(requests, deadline):
            is_lost = requests[0].round > 0 and SometimesAway.draw.random() < SometimesAway.share
            SometimesAway.lost += is_lost
            yield site, Failure("unreachable") if is_lost else outcome


@by_method
@pytest.mark.timeout(300)
@pytest.mark.parametrize("share", [0.1, 0.3, 0.5] if EVERYWHERE else [0.3])
def test_sites_that_are_sometimes_away(
    method: str, share: float, tiny_data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A run ends with finite scores, or says how many answers it lacked."""
    wrap_engine(monkeypatch, SometimesAway)
    SometimesAway.share, SometimesAway.draw, SometimesAway.lost = share, random.Random(f"{method} {share}"), 0
    config = short(method, tiny_data, quorum=0.3, workers=0)
    try:
        results = run(config, tmp_path / "run")
    except FedshiftError as error:
        assert error.code == "site-failed" and "gave a usable answer" in error.message
        assert SometimesAway.lost
    else:
        assert all(np.isfinite(row["last"]) for row in results["per_target"].values())
        assert results["counters"].get("missing.unreachable", 0) == SometimesAway.lost


class Memory(Silent):
    """Notes how much memory the process has, by round."""

    def __init__(self) -> None:
        self.megabytes: dict[int, float] = {}

    def round(self, round: int, val: Any, test: Any) -> None:
        pages = int(Path("/proc/self/statm").read_text().split()[1])
        self.megabytes[round] = pages * os.sysconf("SC_PAGE_SIZE") / 2**20


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="needs /proc")
def test_memory_does_not_grow_with_rounds(tmp_path: Path) -> None:
    tables = Path(__file__).parent.parent / "fixtures" / "v0.1.0" / "tables"
    rounds = int(os.environ.get("FEDSHIFT_ROUNDS", "60"))
    keys = {"data_dir": tables, "label_column": "outcome", "target": "west", "workers": 0, "batch_size": 32}
    memory = Memory()
    run(make_config({"method": "fedavg", "rounds": rounds, **keys}), tmp_path / "run", progress=memory)
    shown = {number: round(size, 1) for number, size in memory.megabytes.items() if number in (20, 50, 100, rounds)}
    print(shown)
    assert memory.megabytes[rounds] - memory.megabytes[20] < 8, shown
