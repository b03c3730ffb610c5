"""What a run shows while it goes: a live bar on a terminal, a changing line in a notebook, plain lines elsewhere."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from rich.console import Console, Group
from rich.live import Live as Display
from rich.progress import BarColumn, TextColumn
from rich.progress import Progress as Bar
from rich.text import Text

QUIET_SECONDS = 8.0
"""Where lines are shown, one comes after this much silence."""


@dataclass(frozen=True)
class Moment:
    """How far a run is. `round` is the one under way, 0 before the first; `share` is how much of it is done, as far as
    that is known. `doing` says in words what is going on. `left` is the estimated time to the end of the run."""

    round: int
    rounds: int
    doing: str
    seconds: float
    share: float | None = None
    left: float | None = None

    @property
    def text(self) -> str:
        place = f"round {self.round}/{self.rounds}: " if self.round else ""
        share = f", {100 * self.share:.0f} % of the round" if self.share is not None else ""
        left = f", about {clock(self.left)} left" if self.left is not None else ""
        seconds = f", {clock(self.seconds)}" if self.seconds else ""
        return f"{place}{self.doing}{share}{seconds}{left}"


class Progress(Protocol):
    def __enter__(self) -> Any: ...

    def __exit__(self, *details: Any) -> None: ...

    def begin(self, rounds: int, done: int, title: str) -> None: ...

    def message(self, text: str) -> None: ...

    def moment(self, moment: Moment) -> None:
        """About once a second, from another thread."""

    def round(self, round: int, val: Mapping[str, float], test: Mapping[str, float]) -> None:
        """A round is done. There are no scores if it was not scored."""

    def finish(self, results: Mapping[str, Any]) -> None: ...


class Silent:
    """Shows nothing: the default of the Python interface."""

    def __enter__(self) -> Any:
        return self

    def __exit__(self, *details: Any) -> None:
        return None

    def begin(self, rounds: int, done: int, title: str) -> None:
        return None

    def message(self, text: str) -> None:
        return None

    def moment(self, moment: Moment) -> None:
        return None

    def round(self, round: int, val: Mapping[str, float], test: Mapping[str, float]) -> None:
        return None

    def finish(self, results: Mapping[str, Any]) -> None:
        return None


class Lines(Silent):
    """A line per round, and one where nothing was shown for a while: for logs and pipes."""

    def __init__(self) -> None:
        self._soon()

    def begin(self, rounds: int, done: int, title: str) -> None:
        self._rounds, self._first, self._started = rounds, done, time.monotonic()
        self.message(title + (f", resuming after round {done}" if done else ""))
        self._soon()

    def _soon(self) -> None:
        """The first line comes after two seconds."""
        self._shown = time.monotonic() - QUIET_SECONDS + 2

    def message(self, text: str) -> None:
        self._shown = time.monotonic()
        print(text, file=sys.stderr, flush=True)

    def moment(self, moment: Moment) -> None:
        if time.monotonic() - self._shown >= QUIET_SECONDS:
            self.message(f"  {moment.text}")

    def round(self, round: int, val: Mapping[str, float], test: Mapping[str, float]) -> None:
        spent = time.monotonic() - self._started
        left = spent / max(round - self._first, 1) * (self._rounds - round)
        self.message(f"round {round}/{self._rounds}  {summary(val, test)}  {spent:.0f} s, {left:.0f} s left")


class Notebook(Lines):
    """One line below the cell that changes until a round is done. Notebooks understand a carriage return."""

    _width = 0

    def message(self, text: str) -> None:
        print(f"\r{text:<{self._width}}", flush=True)
        self._width = 0

    def moment(self, moment: Moment) -> None:
        print(f"\r{moment.text:<{self._width}}", end="", flush=True)
        self._width = len(moment.text)


class Live(Silent):
    """Two lines: a bar with the rounds, the time left and the last scores; below it what is going on."""

    def __init__(self, console: Console) -> None:
        columns = (BarColumn(bar_width=24), *map(TextColumn, ("{task.description}", "[dim]{task.fields[scores]}")))
        self._bar = Bar(*columns, console=console)
        self._task = self._bar.add_task("starting", total=None, scores="")
        self._doing = Text("")
        self._live = Display(console=console, get_renderable=lambda: Group(self._bar.get_renderable(), self._doing))

    def __enter__(self) -> Live:
        self._live.start()
        return self

    def __exit__(self, *details: Any) -> None:
        self._doing = Text("")
        self._live.stop()

    def begin(self, rounds: int, done: int, title: str) -> None:
        self.message(title + (f", resuming after round {done}" if done else ""))
        self._rounds = rounds
        self._bar.update(self._task, total=rounds, completed=done, description=f"{done} of {rounds} rounds")

    def message(self, text: str) -> None:
        self._live.console.print(text, markup=False, highlight=False)

    def moment(self, moment: Moment) -> None:
        self._doing = Text(moment.doing, style="dim", overflow="ellipsis", no_wrap=True)
        if moment.round:
            left = f"about {clock(moment.left)} left" if moment.left is not None else clock(moment.seconds)
            self._bar.update(self._task, description=f"round {moment.round} of {moment.rounds}, {left}")
            if moment.share is not None:
                self._bar.update(self._task, completed=moment.round - 1 + moment.share)

    def round(self, round: int, val: Mapping[str, float], test: Mapping[str, float]) -> None:
        self._bar.update(self._task, completed=round, description=f"{round} of {self._rounds} rounds")
        if val or test:
            self._bar.update(self._task, scores=f"round {round}: {summary(val, test)}")


def summary(val: Mapping[str, float], test: Mapping[str, float]) -> str:
    """`val 91.2 %  photo 63.0 %`: the sources' mean validation score, then the targets' test scores."""
    parts = [f"val {100 * sum(val.values()) / len(val):.1f} %"] if val else []
    if len(test) > 4:
        parts.append(f"mean of {len(test)} targets {100 * sum(test.values()) / len(test):.1f} %")
    else:
        parts += [f"{site} {100 * value:.1f} %" for site, value in test.items()]
    return "  ".join(parts) or "not scored"


def clock(seconds: float) -> str:
    """`45 s`, `3 min 20 s`, `2 h 05 min`."""
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60:02d} s"
    return f"{whole // 3600} h {whole % 3600 // 60:02d} min"


def for_terminal() -> Progress:
    """Live on a terminal, lines elsewhere."""
    console = Console(stderr=True)
    return Live(console) if console.is_terminal else Lines()


def for_python() -> Progress:
    """What `fit(progress=True)` shows."""
    return Notebook() if _is_in_notebook() else for_terminal()


def reading_lines() -> Callable[[str, int, int], None]:
    """For reading files before anything else: a line whenever nothing was shown for a while."""
    lines = Lines()
    return lambda name, done, total: lines.moment(Moment(0, 0, f"reading {name}: {done:,} of {total:,}", 0.0))


def _is_in_notebook() -> bool:
    interactive = sys.modules.get("IPython")
    shell = interactive.get_ipython() if interactive else None
    return shell is not None and type(shell).__name__ == "ZMQInteractiveShell"
