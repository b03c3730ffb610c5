"""The one reader of a run directory: what the run was, how far it is, every number it wrote.

It reads finished, unfinished and failed runs. Lines that were cut off are counted; a damaged file is a named error.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import cached_property
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

from pydantic import AfterValidator, BaseModel, Field, ValidationError

from fedshift.errors import CATALOGUE, InputError
from fedshift.files import read_bounded
from fedshift.methods import find_about
from fedshift.methods.base import About
from fedshift.runs.calibrated import Calibrated
from fedshift.runs.directory import RunDirectory, parse_metrics
from fedshift.yamlfiles import LARGEST, YamlError, load_yaml

Points = list[tuple[int, float | None]]
"""(round, value) of one metric at one site."""
CHOICE = "choice.json"
"""Written into a run whose method was chosen by `method: auto`."""
HEADLINES = ("accuracy", "miou")
"""Metrics that can be a run's score."""

T = TypeVar("T", bound=BaseModel)
Count = Annotated[int, Field(ge=0, lt=2**63)]
"""What a run counts. Larger numbers come from damaged files, and no chart could show them."""


def _as_many_columns(rows: list[list[int]]) -> list[list[int]]:
    if any(len(row) != len(rows) for row in rows):
        raise ValueError("a confusion matrix has as many columns as rows")
    return rows


Matrix = Annotated[list[list[Count]], AfterValidator(_as_many_columns)]


class RuleScores(BaseModel):
    """The score on one target under the three rules that choose a round."""

    last: float
    source_val: float
    oracle: float


class Warned(BaseModel):
    """What is wrong with a run: a code of `fedshift.runs.health`, the site (empty: the run), words and advice."""

    code: str
    site: str = ""
    text: str
    advice: str = ""


class Promised(BaseModel):
    """The budget of differential privacy that a site keeps, and what it has spent of it, where that is known."""

    level: Literal["site", "record"]
    epsilon: float
    delta: float
    noise: float
    spent: float | None = None


class Results(BaseModel):
    """The parts of `results.json` that readers use."""

    method: str
    setting: str
    task: str
    dataset: str
    sources: list[str]
    target: str | None = None
    home: str | None = None
    seed: int
    rounds: Count
    classes: list[str] = Field(default_factory=list)
    per_target: dict[str, RuleScores] = Field(default_factory=dict)
    source_val: dict[str, float] = Field(default_factory=dict)
    chosen_round: int | None = None
    confusion: dict[str, Matrix] = Field(default_factory=dict)
    val_confusion: dict[str, Matrix] = Field(default_factory=dict)
    samples: dict[str, dict[str, Count]] = Field(default_factory=dict)
    warnings: list[Warned] = Field(default_factory=list)
    replans: list[Replanned] = Field(default_factory=list)
    bytes: dict[str, Count] = Field(default_factory=dict)
    seconds: dict[str, float | None] = Field(default_factory=dict)
    counters: dict[str, Count] = Field(default_factory=dict)
    privacy: dict[str, Promised] = Field(default_factory=dict)
    calibration: Calibrated = Field(default_factory=Calibrated)
    model_sha256: str = ""


class Choice(BaseModel):
    """How `method: auto` chose: a method, a sentence on why, and each method's score at each held-out site."""

    method: str
    reason: str
    scores: dict[str, dict[str, float]] = Field(default_factory=dict)
    left_out: dict[str, str] = Field(default_factory=dict)


class Replanned(BaseModel):
    """The number of rounds was changed when `after` of them were done."""

    after: Count
    before: Count
    now: Count


class MetricRow(BaseModel):
    """One line of `metrics.jsonl`."""

    round: Count
    phase: str
    site: str
    name: str
    value: float | None


class LedgerLine(BaseModel):
    """One field that left a site, once. Lines without `event` are of versions that listed nothing else."""

    round: Count
    step: str
    field: str
    kind: str
    values: Count
    bytes: Count


@dataclass
class Scores:
    """One scored round: validation by source, test by target."""

    round: int
    val: dict[str, float]
    test: dict[str, float]

    @property
    def source_val(self) -> float:
        """The mean over sources, each counting the same."""
        return sum(self.val.values()) / len(self.val) if self.val else math.nan


def chosen_round(history: list[Scores]) -> Scores:
    """The round with the best mean validation score over sources, the latest of equals; without validation the last."""
    scored = [scores for scores in history if scores.val]
    return max(scored, key=lambda s: (s.source_val, s.round)) if scored else history[-1]


@dataclass(frozen=True)
class RunRecord:
    """One run, finished or not: `results` is None until it is finished. `ledger` has the lines of each site. `broken`
    counts unreadable lines of its files. `failure` is a sentence on the error that ended the run, else empty. `written`
    is when the last metrics were written."""

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
    choice: Choice | None = None

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
        """The attacks that were simulated, for a study."""
        found = self.config.get("attack") or []
        return tuple(map(str, found)) if isinstance(found, list) else (str(found),)

    @property
    def seed(self) -> int:
        return self.results.seed if self.results else int(self.config.get("seed") or 0)

    @property
    def rounds(self) -> int:
        """How many rounds are planned."""
        return self.results.rounds if self.results else int(self.config.get("rounds") or 0)

    @property
    def sources(self) -> tuple[str, ...]:
        return tuple(self.results.sources if self.results else map(str, self.config.get("sources") or ()))

    @property
    def targets(self) -> tuple[str, ...]:
        """The domains that the run is tested on, known before the first test."""
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
        except InputError:  # This installation does not have the method.
            return None

    @property
    def bound(self) -> str:
        """What a bound sees that a federation may not; empty for a method that can be deployed."""
        return self.about.data if self.about and self.about.is_bound else ""

    @property
    def moved_data(self) -> str:
        """What data the method copies between sites; empty for a bound and for a method that moves no data."""
        return self.about.needs if self.about and self.about.data == "source-copies" else ""

    def series(self, phase: str, name: str | None = None) -> dict[str, Points]:
        """Site -> (round, value) of one metric. Without a name, of the run's score."""
        wanted = name or self.headline
        found: dict[str, Points] = {}
        for row in self.rows:
            if row.phase == phase and row.name == wanted:
                found.setdefault(row.site, []).append((row.round, row.value))
        return found

    @cached_property
    def history(self) -> list[Scores]:
        """Every scored round so far, in order."""
        rounds: dict[int, Scores] = {}
        for row in self.rows:
            if row.name == self.headline and row.phase in ("val", "test") and row.value is not None:
                scores = rounds.setdefault(row.round, Scores(row.round, {}, {}))
                (scores.val if row.phase == "val" else scores.test)[row.site] = row.value
        return [rounds[number] for number in sorted(rounds)]

    @cached_property
    def chosen(self) -> int | None:
        """The round chosen on the sources' validation data, among those so far."""
        if self.results:
            return self.results.chosen_round
        return chosen_round(self.history).round if self.history else None

    @cached_property
    def scores(self) -> dict[str, RuleScores]:
        """Target -> its scores. In an unfinished run, those of the rounds so far."""
        if self.results:
            return self.results.per_target
        by_round = {scores.round: scores.test for scores in self.history}
        found: dict[str, RuleScores] = {}
        for target in self.targets:
            values = {number: test[target] for number, test in by_round.items() if target in test}
            if values:
                last = values[max(values)]
                picked = values.get(self.chosen, last) if self.chosen is not None else last
                found[target] = RuleScores(last=last, source_val=picked, oracle=max(values.values()))
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


def read_record(path: Path) -> RunRecord:
    """Everything that the run in `path` has written so far."""
    directory = RunDirectory(path)
    if not directory.config.exists():
        raise InputError(
            "run-missing", f"{path} is not a run: it has no config.yaml. Give the folder that `fedshift train` wrote."
        )
    config_text = directory.read(directory.config, LARGEST).decode(errors="replace")
    lines, broken = parse_metrics(directory.read(directory.metrics)) if directory.metrics.exists() else ([], 0)
    rows = [row for line in lines if (row := _checked(MetricRow, line)) is not None]
    ledger, cut_off = read_ledgers(directory)
    newest = directory.metrics if directory.metrics.exists() else directory.config
    return RunRecord(
        path=path,
        config=_read_config(directory.config, config_text),
        config_text=config_text,
        environment_text=_read_environment(directory),
        rows=tuple(rows),
        ledger=ledger,
        broken=broken + len(lines) - len(rows) + cut_off,
        written=datetime.fromtimestamp(newest.stat().st_mtime, UTC),
        results=_checked_results(directory)[0] if directory.results.exists() or directory.done.exists() else None,
        failure=_read_failure(directory.failed) if directory.failed.exists() else "",
        choice=_read_choice(path / CHOICE),
    )


def read_results(path: Path) -> dict[str, Any]:
    """The content of `results.json` in the run directory `path`, which must be finished."""
    directory = RunDirectory(path)
    if not directory.done.exists():
        raise InputError("run-missing", f"{path} is not a finished run")
    return _checked_results(directory)[1]


def results_so_far(path: Path) -> dict[str, Any]:
    """What is known of a run that is not finished, in the form of `results.json`. Its sites and costs are not."""
    record = read_record(path)
    if not record.history or not RunDirectory(path).model.exists():
        raise InputError(
            "run-missing", f"{path} is not finished, and no round of it was scored yet: wait, or continue it (--resume)"
        )
    return {
        "method": record.method,
        "setting": record.setting,
        "dataset": record.dataset,
        "home": record.home,
        "target": record.target,
        "rounds": record.rounds,
        "scored_round": record.history[-1].round,
        "samples": {},
        "counters": {},
        "per_target": {target: scores.model_dump() for target, scores in record.scores.items()},
    }


def _read_config(path: Path, text: str) -> dict[str, Any]:
    try:
        config = load_yaml(text)
    except YamlError as error:
        raise InputError("run-corrupt", f"{path} is not readable as YAML ({error}): restore it from a copy") from error
    if not isinstance(config, dict):
        raise InputError("run-corrupt", f"{path} does not hold a configuration: restore it from a copy")
    for key in ("seed", "rounds"):
        if not isinstance(config.get(key) or 0, int) or not 0 <= (config.get(key) or 0) < 2**63:
            raise InputError("run-corrupt", f"{path} is damaged: {key} is no count: restore it from a copy")
    for key in ("sources", "targets"):
        if not isinstance(config.get(key) or [], list):
            raise InputError("run-corrupt", f"{path} is damaged: {key} is no list: restore it from a copy")
    return config


def _checked_results(directory: RunDirectory) -> tuple[Results, dict[str, Any]]:
    again = f"{directory.results} is damaged: delete it and the file `done` beside it, then run again with --resume"
    if not directory.results.exists():
        raise InputError("run-corrupt", again.replace("is damaged: delete it and", "is missing: delete"))
    data = directory.read(directory.results)
    try:
        content = json.loads(data)
        return Results.model_validate(content), content
    except (ValueError, RecursionError) as error:
        raise InputError("run-corrupt", again) from error


def _read_environment(directory: RunDirectory) -> str:
    if not directory.environment.exists():
        return ""
    data = directory.read(directory.environment, LARGEST)
    try:
        json.loads(data)
    except (ValueError, RecursionError) as error:
        raise InputError(
            "run-corrupt", f"{directory.environment} is damaged: restore it from a copy, or delete it"
        ) from error
    return data.decode(errors="replace")


def _read_failure(path: Path) -> str:
    code = read_bounded(path, LARGEST).decode(errors="replace").strip()
    if code in CATALOGUE:
        return f"{CATALOGUE[code].rstrip('.')} ({code})."
    return "An unexpected error ended it: the terminal or log that it ran in has more."


def _read_choice(path: Path) -> Choice | None:
    """None too where the file is damaged: it only tells how a method was found."""
    if not path.exists():
        return None
    try:
        return _checked(Choice, json.loads(read_bounded(path, LARGEST)))
    except (InputError, ValueError, RecursionError):
        return None


def read_ledgers(directory: RunDirectory) -> tuple[dict[str, tuple[LedgerLine, ...]], int]:
    """What each site's ledger lists as having left it, and how many lines cannot be read."""
    found = {site: (lines, broken) for site, lines, broken in each_ledger(directory)}
    return {site: lines for site, (lines, _) in found.items()}, sum(broken for _, broken in found.values())


def each_ledger(directory: RunDirectory) -> Iterator[tuple[str, tuple[LedgerLine, ...], int]]:
    """The same, one site at a time: those of thousands do not fit into memory well."""
    for path in sorted(directory.sites.glob("*/ledger.jsonl")):
        whole, broken = [], 0
        for line in directory.read(path).decode(errors="replace").splitlines():
            values = None
            with suppress(ValueError, RecursionError):
                values = json.loads(line)
            if isinstance(values, dict) and values.get("event") in ("asked", "answered"):
                continue
            entry = _checked(LedgerLine, values)
            whole += [entry] if entry else []
            broken += entry is None
        yield path.parent.name, tuple(whole), broken


def _checked(model: type[T], values: Any) -> T | None:
    try:
        return model.model_validate(values)
    except ValidationError:
        return None
