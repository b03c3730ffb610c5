"""A run directory as the report needs it: what it was, how far it is, every number it wrote."""

from __future__ import annotations

import json
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import cached_property
from pathlib import Path
from typing import Any, TypeVar

import yaml
from pydantic import BaseModel, Field, ValidationError

from fedshift.errors import CATALOGUE, InputError
from fedshift.methods import find_about
from fedshift.methods.base import About
from fedshift.runs.directory import RunDirectory, read_metrics
from fedshift.runs.execute import Scores, chosen_round

HEADLINES = {"accuracy": "accuracy", "miou": "mIoU"}
"""The metric that is the run's score, and how it is written."""

Points = list[tuple[int, float | None]]
T = TypeVar("T", bound=BaseModel)


class Rules(BaseModel):
    """A score under the three ways to choose a round."""

    last: float
    source_val: float
    oracle: float


class Results(BaseModel):
    """`results.json`, as far as the report shows it."""

    method: str
    setting: str
    task: str
    dataset: str
    sources: list[str]
    target: str | None = None
    home: str | None = None
    seed: int
    rounds: int
    classes: list[str] = Field(default_factory=list)
    per_target: dict[str, Rules] = Field(default_factory=dict)
    source_val: dict[str, float] = Field(default_factory=dict)
    chosen_round: int | None = None
    confusion: dict[str, list[list[int]]] = Field(default_factory=dict)
    samples: dict[str, dict[str, int]] = Field(default_factory=dict)
    bytes: dict[str, int] = Field(default_factory=dict)
    seconds: dict[str, float | None] = Field(default_factory=dict)
    counters: dict[str, int] = Field(default_factory=dict)
    model_sha256: str = ""


class MetricRow(BaseModel):
    round: int
    phase: str
    site: str
    name: str
    value: float | None


class LedgerLine(BaseModel):
    """One field that left a site once."""

    round: int
    step: str
    field: str
    kind: str
    values: int
    bytes: int


@dataclass(frozen=True)
class Record:
    """One run, finished or not. `broken` counts lines of its files that were not whole; `failure` has words on what
    ended it, if an error did."""

    path: Path
    config: Mapping[str, Any]
    config_text: str
    environment_text: str
    rows: tuple[MetricRow, ...]
    ledger: Mapping[str, tuple[LedgerLine, ...]]
    broken: int
    written: datetime
    results: Results | None
    failure: str = ""

    @property
    def method(self) -> str:
        return self.results.method if self.results else str(self.config.get("method"))

    @property
    def dataset(self) -> str:
        if self.results:
            return self.results.dataset
        folder = self.config.get("data_dir")
        return str(self.config.get("dataset") or (Path(str(folder)).name if folder else "data"))

    @property
    def setting(self) -> str:
        return self.results.setting if self.results else str(self.config.get("setting"))

    @property
    def home(self) -> str | None:
        return self.results.home if self.results else self._text("home")

    @property
    def target(self) -> str | None:
        return self.results.target if self.results else self._text("target")

    @property
    def attacks(self) -> tuple[str, ...]:
        """Bad sites that were played, for a study."""
        found = self.config.get("attack") or []
        return tuple(map(str, found)) if isinstance(found, list) else (str(found),)

    @property
    def seed(self) -> int:
        return self.results.seed if self.results else int(self.config.get("seed") or 0)

    @property
    def rounds(self) -> int:
        """How many are planned."""
        return self.results.rounds if self.results else int(self.config.get("rounds") or 0)

    @property
    def sources(self) -> tuple[str, ...]:
        return tuple(self.results.sources if self.results else map(str, self.config.get("sources") or ()))

    @property
    def targets(self) -> tuple[str, ...]:
        """The domains it is tested on, also before the first test."""
        if self.results:
            return tuple(self.results.per_target)
        named = map(str, self.config.get("targets") or ())
        return tuple(named) or ((self.target,) if self.target else tuple(self.series("test")))

    @cached_property
    def round(self) -> int:
        """The last round that wrote metrics."""
        return max((row.round for row in self.rows), default=0)

    @cached_property
    def headline(self) -> str:
        """The metric that is this run's score."""
        if self.results:
            return "accuracy" if self.results.task == "classification" else "miou"
        scored = (row.name for row in self.rows if row.phase in ("val", "test"))
        return next((name for name in scored if name in HEADLINES), "accuracy")

    @property
    def about(self) -> About | None:
        try:
            return find_about(self.method)
        except InputError:  # A run of a method that this installation does not have.
            return None

    @property
    def bound(self) -> str:
        """Empty for what can be deployed; otherwise what the method sees that a federation may not."""
        return self.about.data if self.about and self.about.is_bound else ""

    @property
    def moved(self) -> str:
        """What data is where it was not, for a method that moves data and is no bound; else empty."""
        return self.about.needs if self.about and self.about.data == "source-copies" else ""

    def series(self, phase: str, name: str | None = None) -> dict[str, Points]:
        """Site -> (round, value) of one metric; without a name, of the run's score."""
        wanted = name or self.headline
        found: dict[str, Points] = {}
        for row in self.rows:
            if row.phase == phase and row.name == wanted:
                found.setdefault(row.site, []).append((row.round, row.value))
        return found

    @cached_property
    def history(self) -> list[Scores]:
        """Every scored round so far."""
        rounds: dict[int, Scores] = {}
        for row in self.rows:
            if row.name == self.headline and row.phase in ("val", "test") and row.value is not None:
                scores = rounds.setdefault(row.round, Scores(row.round, {}, {}))
                (scores.val if row.phase == "val" else scores.test)[row.site] = row.value
        return [rounds[number] for number in sorted(rounds)]

    @cached_property
    def chosen(self) -> int | None:
        """The round that the sources' validation data choose, so far."""
        if self.results:
            return self.results.chosen_round
        return chosen_round(self.history).round if self.history else None

    @cached_property
    def scores(self) -> dict[str, Rules]:
        """By target; of an unfinished run, as far as it is."""
        if self.results:
            return self.results.per_target
        by_round = {scores.round: scores.test for scores in self.history}
        found: dict[str, Rules] = {}
        for target in self.targets:
            values = {number: test[target] for number, test in by_round.items() if target in test}
            if values:
                last = values[max(values)]
                picked = values.get(self.chosen, last) if self.chosen is not None else last
                found[target] = Rules(last=last, source_val=picked, oracle=max(values.values()))
        return found

    @cached_property
    def validation(self) -> dict[str, float]:
        """Source -> its validation score in the last scored round."""
        if self.results:
            return self.results.source_val
        return self.history[-1].val if self.history else {}

    def _text(self, key: str) -> str | None:
        value = self.config.get(key)
        return None if value is None else str(value)


def read_run(path: Path) -> Record:
    """The run in `path`. Lines that were cut off in the middle are left out and counted."""
    directory = RunDirectory(path)
    if not directory.config.is_file():
        raise InputError(
            "run-missing", f"{path} is not a run: it has no config.yaml. Give the folder that `fedshift train` wrote."
        )
    config_text = directory.config.read_text(errors="replace")
    environment = path / "env.json"
    lines, broken = read_metrics(directory.metrics)
    rows = [row for line in lines if (row := _checked(MetricRow, line)) is not None]
    ledger, cut_off = _read_ledgers(directory.sites)
    newest = directory.metrics if directory.metrics.exists() else directory.config
    return Record(
        path=path,
        config=_read_config(directory.config, config_text),
        config_text=config_text,
        environment_text=environment.read_text(errors="replace") if environment.is_file() else "",
        rows=tuple(rows),
        ledger=ledger,
        broken=broken + len(lines) - len(rows) + cut_off,
        written=datetime.fromtimestamp(newest.stat().st_mtime, UTC),
        results=_read_results(directory.results) if directory.results.is_file() else None,
        failure=_read_failure(directory.failed) if directory.failed.is_file() else "",
    )


def _read_config(path: Path, text: str) -> dict[str, Any]:
    try:
        config = yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise InputError("run-corrupt", f"{path} is not readable as YAML: restore it from a copy") from error
    if not isinstance(config, dict):
        raise InputError("run-corrupt", f"{path} does not hold a configuration: restore it from a copy")
    return config


def _read_results(path: Path) -> Results:
    try:
        return Results.model_validate(json.loads(path.read_text()))
    except ValueError as error:
        raise InputError(
            "run-corrupt",
            f"{path} is damaged: delete it and the file `done` beside it, then run again with --resume",
        ) from error


def _read_failure(path: Path) -> str:
    code = path.read_text(errors="replace").strip()
    if code in CATALOGUE:
        return f"{CATALOGUE[code].rstrip('.')} ({code})."
    return "An unexpected error ended it: the terminal or log that it ran in has more."


def _read_ledgers(folder: Path) -> tuple[dict[str, tuple[LedgerLine, ...]], int]:
    ledgers: dict[str, tuple[LedgerLine, ...]] = {}
    broken = 0
    for path in sorted(folder.glob("*/ledger.jsonl")):
        lines = path.read_text(errors="replace").splitlines()
        whole = []
        for line in lines:
            with suppress(ValueError):
                entry = _checked(LedgerLine, json.loads(line))
                whole += [entry] if entry else []
        ledgers[path.parent.name] = tuple(whole)
        broken += len(lines) - len(whole)
    return ledgers, broken


def _checked(model: type[T], values: Any) -> T | None:
    try:
        return model.model_validate(values)
    except ValidationError:
        return None
