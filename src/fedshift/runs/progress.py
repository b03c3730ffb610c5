"""What a run shows while it goes: a live bar on a terminal, plain lines anywhere else."""

from __future__ import annotations

import sys
import time
from collections.abc import Mapping
from typing import Any, Protocol

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeRemainingColumn
from rich.progress import Progress as Bar


class Progress(Protocol):
    def __enter__(self) -> Any: ...

    def __exit__(self, *details: Any) -> None: ...

    def begin(self, rounds: int, done: int, title: str) -> None: ...

    def message(self, text: str) -> None: ...

    def site(self, step: str, site: str) -> None:
        """A site has answered."""

    def round(self, round: int, val: Mapping[str, float], test: Mapping[str, float]) -> None: ...

    def finish(self, results: Mapping[str, Any]) -> None: ...


class Silent:
    """Shows nothing: the default of the Python interface."""

    def __enter__(self) -> Silent:
        return self

    def __exit__(self, *details: Any) -> None:
        return None

    def begin(self, rounds: int, done: int, title: str) -> None:
        return None

    def message(self, text: str) -> None:
        return None

    def site(self, step: str, site: str) -> None:
        return None

    def round(self, round: int, val: Mapping[str, float], test: Mapping[str, float]) -> None:
        return None

    def finish(self, results: Mapping[str, Any]) -> None:
        return None


class Lines:
    """One line per round, for logs and pipes."""

    def __enter__(self) -> Lines:
        return self

    def __exit__(self, *details: Any) -> None:
        return None

    def begin(self, rounds: int, done: int, title: str) -> None:
        self._rounds, self._first, self._started = rounds, done, time.monotonic()
        self.message(title + (f", resuming after round {done}" if done else ""))

    def message(self, text: str) -> None:
        print(text, file=sys.stderr, flush=True)

    def site(self, step: str, site: str) -> None:
        return None

    def round(self, round: int, val: Mapping[str, float], test: Mapping[str, float]) -> None:
        spent = time.monotonic() - self._started
        left = spent / max(round - self._first, 1) * (self._rounds - round)
        self.message(f"round {round}/{self._rounds}  {summary(val, test)}  {spent:.0f} s, {left:.0f} s left")

    def finish(self, results: Mapping[str, Any]) -> None:
        return None


class Live:
    """A bar with rounds, the site that answered last, scores and the time left."""

    def __init__(self, console: Console) -> None:
        self._bar = Bar(
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("{task.fields[scores]}"),
            TimeRemainingColumn(),
            TextColumn("[dim]{task.fields[site]}"),
            console=console,
        )

    def __enter__(self) -> Live:
        self._bar.start()
        return self

    def __exit__(self, *details: Any) -> None:
        self._bar.stop()

    def begin(self, rounds: int, done: int, title: str) -> None:
        self._task = self._bar.add_task(title, total=rounds, completed=done, scores="", site="")

    def message(self, text: str) -> None:
        self._bar.console.print(text, markup=False, highlight=False)

    def site(self, step: str, site: str) -> None:
        self._bar.update(self._task, site=f"{step.rsplit('.', 1)[-1]} {site}")

    def round(self, round: int, val: Mapping[str, float], test: Mapping[str, float]) -> None:
        self._bar.update(self._task, completed=round, scores=summary(val, test))

    def finish(self, results: Mapping[str, Any]) -> None:
        self._bar.update(self._task, site="")


def summary(val: Mapping[str, float], test: Mapping[str, float]) -> str:
    """`val 91.2 %  photo 63.0 %`: the sources' mean validation score, then the targets' test scores."""
    parts = [f"val {100 * sum(val.values()) / len(val):.1f} %"] if val else []
    if len(test) > 4:
        parts.append(f"mean of {len(test)} targets {100 * sum(test.values()) / len(test):.1f} %")
    else:
        parts += [f"{site} {100 * value:.1f} %" for site, value in test.items()]
    return "  ".join(parts)


def for_terminal() -> Progress:
    """Live on a terminal, lines elsewhere."""
    console = Console(stderr=True)
    return Live(console) if console.is_terminal else Lines()
