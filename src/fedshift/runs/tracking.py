"""Experiment trackers: the rows of `metrics.jsonl`, streamed to TensorBoard or MLflow as they are written.

`metrics.jsonl` stays the record. A run that goes on after an interruption brings the tracker to the same state first:
every round is there once, also those from before tracking was asked for.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib
import json
import logging
import os
import re
import shutil
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from fedshift.errors import InputError, nearest
from fedshift.files import write_atomically
from fedshift.runs.config import RunConfig

Row = Mapping[str, Any]

_MLFLOW_FILE = "mlflow.json"
_ODD = re.compile(r"[^A-Za-z0-9_\-. ]")


class Tracker(Protocol):
    def begin(self, rows: Sequence[Row]) -> None:
        """Brings the tracker to exactly these rows of earlier rounds."""

    def log(self, rows: Sequence[Row]) -> None: ...

    def end(self, finished: bool) -> None: ...


class TensorBoard:
    """Scalars under `<run>/tensorboard`, by phase, name and site."""

    def __init__(self, config: RunConfig, folder: Path) -> None:
        _need("tensorboard", "tensorboard")
        self._folder, self._config = folder / "tensorboard", config

    def begin(self, rows: Sequence[Row]) -> None:
        from torch.utils.tensorboard import SummaryWriter

        # Written anew from the record: the old files may hold rounds that are about to be repeated.
        shutil.rmtree(self._folder, ignore_errors=True)
        self._writer = SummaryWriter(str(self._folder))
        self._writer.add_text("config", "    " + self._config.to_yaml().replace("\n", "\n    "))
        self.log(rows)

    def log(self, rows: Sequence[Row]) -> None:
        for row in rows:
            if row["value"] is not None:
                self._writer.add_scalar(_tag(row), row["value"], row["round"])
        self._writer.flush()

    def end(self, finished: bool) -> None:
        self._writer.close()


class MLflow:
    """A run of the experiment `fedshift`: where MLFLOW_TRACKING_URI says, or in `mlflow.db` beside the run's folder."""

    def __init__(self, config: RunConfig, folder: Path) -> None:
        # Its own reports about usage would leave this machine.
        os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")
        for logger in ("mlflow", "alembic"):
            logging.getLogger(logger).setLevel(logging.WARNING)
        _need("mlflow", "mlflow")
        self._uri = os.environ.get("MLFLOW_TRACKING_URI") or f"sqlite:///{folder.resolve().parent / 'mlflow.db'}"
        if self._uri.startswith("sqlite:"):
            _need("sqlalchemy", "mlflow")
        self._config, self._folder = config, folder
        self._logged: set[tuple[str, int]] = set()

    def begin(self, rows: Sequence[Row]) -> None:
        from mlflow.tracking import MlflowClient

        self._client = MlflowClient(tracking_uri=self._uri)
        self._run = self._known_run() or self._new_run()
        self._client.update_run(self._run, status="RUNNING")
        for key in self._client.get_run(self._run).data.metrics:
            self._logged |= {(key, point.step) for point in self._client.get_metric_history(self._run, key)}
        self.log(rows)

    def log(self, rows: Sequence[Row]) -> None:
        from mlflow.entities import Metric

        now = int(1000 * time.time())
        found = {(_mlflow_key(row), row["round"]): row["value"] for row in rows if row["value"] is not None}
        new = {place: value for place, value in found.items() if place not in self._logged}
        points = [Metric(key, float(value), now, step) for (key, step), value in new.items()]
        for start in range(0, len(points), 500):  # A batch may have 1,000 at most.
            self._client.log_batch(self._run, metrics=points[start : start + 500])
        self._logged |= set(new)

    def end(self, finished: bool) -> None:
        self._client.set_terminated(self._run, "FINISHED" if finished else "KILLED")

    def _known_run(self) -> str | None:
        """The run that this run directory was tracked as, where it is still there."""
        from mlflow.exceptions import MlflowException

        with contextlib.suppress(OSError, ValueError, KeyError, TypeError, MlflowException):
            kept = json.loads((self._folder / _MLFLOW_FILE).read_text())
            if kept["uri"] == self._uri:
                return str(self._client.get_run(kept["run"]).info.run_id)
        return None

    def _new_run(self) -> str:
        from mlflow.entities import Param

        experiment = self._client.get_experiment_by_name("fedshift")
        number = experiment.experiment_id if experiment else self._client.create_experiment("fedshift")
        run = str(self._client.create_run(number, run_name=self._folder.name).info.run_id)
        write_atomically(self._folder / _MLFLOW_FILE, json.dumps({"uri": self._uri, "run": run}).encode())
        values = self._config.model_dump(mode="json") | {f"hyper.{k}": v for k, v in self._config.hyper.items()}
        params = [Param(key, str(value)[:500]) for key, value in values.items() if value not in (None, [], {}, ())]
        self._client.log_batch(run, params=params)
        return run


class Tracking:
    """All trackers of a run. One that fails in the middle is dropped with a message: the run is worth more."""

    def __init__(self, names: Sequence[str], config: RunConfig, folder: Path) -> None:
        for name in names:
            if name not in TRACKERS:
                raise InputError("unknown-name", f"there is no tracker {name!r}. {nearest(name, TRACKERS)}")
        self._trackers = {name: TRACKERS[name](config, folder) for name in dict.fromkeys(names)}
        self._say: Callable[[str], None] = lambda text: None

    def begin(self, rows: Sequence[Row], say: Callable[[str], None]) -> None:
        self._say = say
        for name, tracker in self._trackers.items():
            try:
                tracker.begin(rows)
            except Exception as error:
                raise InputError("tracker", f"{name} cannot be written to: {_first_line(error)}") from error

    def log(self, rows: Sequence[Row]) -> None:
        self._each(lambda tracker: tracker.log(rows))

    def end(self, finished: bool) -> None:
        self._each(lambda tracker: tracker.end(finished))

    def _each(self, work: Callable[[Tracker], None]) -> None:
        for name, tracker in list(self._trackers.items()):
            try:
                work(tracker)
            except Exception as error:
                del self._trackers[name]
                self._say(f"{name} failed ({_first_line(error)}): the run goes on, metrics.jsonl has everything")


TRACKERS: dict[str, Callable[[RunConfig, Path], Tracker]] = {"tensorboard": TensorBoard, "mlflow": MLflow}


def _need(package: str, extra: str) -> None:
    try:
        importlib.import_module(package)
    except ImportError as error:
        raise InputError(
            "tracker",
            f'--track {extra} needs a package that is not installed ({package}): pip install "fedshift[{extra}]"',
        ) from error


def _tag(row: Row) -> str:
    """`test/accuracy/photo`; without a site `round/seconds`."""
    return "/".join(part for part in (row["phase"], row["name"], row["site"]) if part)


def _mlflow_key(row: Row) -> str:
    """The tag in the characters that MLflow takes. What has to be changed gets a hash, so that no two become one."""
    return "/".join(_mlflow_part(part) for part in (row["phase"], row["name"], row["site"]) if part)


def _mlflow_part(part: str) -> str:
    plain = _ODD.sub("_", part)[:60]
    if plain == part and part.strip(". ") == part:
        return part
    return f"{plain.strip('. ')}_{hashlib.sha256(part.encode()).hexdigest()[:8]}"


def _first_line(error: Exception) -> str:
    return f"{type(error).__name__}: {str(error).strip().splitlines()[0] if str(error).strip() else 'no reason given'}"
