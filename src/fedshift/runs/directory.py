"""A run on disk: configuration, environment, metrics as they come, checkpoints, results."""

from __future__ import annotations

import json
import os
import platform
import secrets
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from importlib.metadata import version
from pathlib import Path
from typing import IO, Any

from fedshift._version import __version__
from fedshift.errors import FedshiftError, InputError
from fedshift.files import write_atomically
from fedshift.runs.config import RunConfig, differing_keys, read_config
from fedshift.runs.files.checkpoint import read_checkpoint, write_checkpoint

_KEPT_CHECKPOINTS = 2
_LOCK, _IDENTITY = ".lock", ".identity"


class RunDirectory:
    """`config.yaml, env.json, metrics.jsonl, results.json, checkpoints/, model.safetensors, MODEL_CARD.md, done`, and
    `sites/<name>/` with what each simulated site keeps: its state, its ledger, its log. `failed` is there after an
    error, until the run goes on."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.config = path / "config.yaml"
        self.environment = path / "env.json"
        self.metrics = path / "metrics.jsonl"
        self.results = path / "results.json"
        self.model = path / "model.safetensors"
        self.chosen_model = path / "model-source-val.safetensors"
        self.card = path / "MODEL_CARD.md"
        self.done = path / "done"
        self.failed = path / "failed"
        self.checkpoints = path / "checkpoints"
        self.sites = path / "sites"

    def prepare(self, config: RunConfig, resume: bool) -> None:
        """Makes a new run directory, or accepts one of the same configuration to resume."""
        config_yaml = config.to_yaml()
        if not self.config.exists():
            if any(entry.name not in (_LOCK, _IDENTITY) for entry in self.path.iterdir()):
                raise InputError("run-exists", f"{self.path} exists and is not a run: choose another --out")
            self._write(self.config, config_yaml)
            self._write(self.environment, json.dumps(environment(), indent=2))
            return
        if different := differing_keys(read_config(self.config), config):
            raise InputError(
                "run-exists",
                f"{self.path} holds a run of another configuration ({', '.join(different)}):"
                " choose another --out, or run with the same settings",
            )
        if not resume and self.done.exists():
            raise InputError("run-exists", f"{self.path} holds a finished run: choose another --out")
        if not resume:
            raise InputError("run-exists", f"{self.path} holds an unfinished run: add --resume to continue it")
        if self.written_by() != __version__:
            self._write(self.config, config_yaml)  # with the keys that came since
            self._note_version()

    def identity(self) -> str:
        """The name that sites on other machines know this run by, the same when it is resumed or its folder moved."""
        file = self.path / _IDENTITY
        if not file.exists():
            self._write(file, secrets.token_hex(8))
        return file.read_text()

    @contextmanager
    def locked(self) -> Iterator[None]:
        """One process at a time writes here; the lock goes with the process, however it ends."""
        try:
            self.path.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise InputError(
                "run-exists", f"{self.path} cannot be a folder ({error.strerror}): choose another --out"
            ) from error
        try:
            import fcntl
        except ImportError:  # Windows: no advisory locks of this kind.
            yield
            return
        with (self.path / _LOCK).open("w") as lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError as error:
                raise InputError("run-exists", f"{self.path} is in use by another process") from error
            yield

    @contextmanager
    def failure_marked(self) -> Iterator[None]:
        """An error leaves its code, so that the run does not look like one that its user stopped. Its text stays in the
        terminal: run directories are passed on."""
        self.failed.unlink(missing_ok=True)
        try:
            yield
        except Exception as error:
            with suppress(FedshiftError):  # A full disk must not hide what happened first.
                self._write(self.failed, f"{error.code if isinstance(error, FedshiftError) else 'unexpected'}\n")
            raise

    def save_checkpoint(self, round: int, tree: Any) -> None:
        """Writes `round-NNNNN.safetensors`, then drops old ones."""
        write_checkpoint(self._checkpoint(round), tree)
        for path in sorted(self.checkpoints.glob("round-*.safetensors"))[:-_KEPT_CHECKPOINTS]:
            path.unlink(missing_ok=True)

    def load_checkpoint(self) -> tuple[Any | None, list[str]]:
        """The newest checkpoint that can be read, and the names of newer ones that cannot."""
        damaged: list[str] = []
        for path in sorted(self.checkpoints.glob("round-*.safetensors"), reverse=True):
            try:
                return read_checkpoint(path), damaged
            except FedshiftError as error:
                damaged.append(path.name)
                why = error.message
        if damaged:
            raise InputError(
                "run-corrupt", f"no checkpoint of {self.path} can be read ({why}): start in another folder"
            )
        return None, []

    @contextmanager
    def metrics_from(self, round: int) -> Iterator[IO[str]]:
        """The metrics file for appending, cut back to what belongs to rounds up to `round`."""
        kept = "".join(json.dumps(row) + "\n" for row in read_metrics(self.metrics)[0] if row["round"] <= round)
        self._write(self.metrics, kept)
        with self.metrics.open("a") as file:
            yield file

    def write_results(self, results: dict[str, Any]) -> None:
        self._write(self.results, json.dumps(results, indent=2) + "\n")

    def _write(self, path: Path, text: str) -> None:
        write_atomically(path, text.encode())

    def _checkpoint(self, round: int) -> Path:
        return self.checkpoints / f"round-{round:05d}.safetensors"

    def written_by(self) -> str:
        """The version of fedshift that began the run."""
        return str(self._environment().get("fedshift", "(unknown)"))

    def _environment(self) -> dict[str, Any]:
        with suppress(OSError, ValueError):
            found = json.loads(self.environment.read_text())
            return found if isinstance(found, dict) else {}
        return {}

    def _note_version(self) -> None:
        known = self._environment()
        before = known.get("continued_by")
        known["continued_by"] = sorted({*(map(str, before) if isinstance(before, list) else ()), __version__})
        self._write(self.environment, json.dumps(known, indent=2))


def read_metrics(path: Path) -> tuple[list[dict[str, Any]], int]:
    """The rows of a metrics file and how many lines were not whole (a run killed while it wrote)."""
    rows, broken = [], 0
    if path.exists():
        for line in path.read_text(errors="replace").splitlines():
            with suppress(ValueError):
                row = json.loads(line)
                if isinstance(row, dict) and {"round", "phase", "site", "name", "value"} <= set(row):
                    rows.append(row)
                    continue
            broken += 1
    return rows, broken


def environment() -> dict[str, Any]:
    """What a run depends on besides its configuration."""
    packages = ("torch", "numpy", "pillow", "scikit-learn", "safetensors", "pydantic")
    return {
        "fedshift": __version__,
        "python": sys.version.split()[0],
        "platform": platform.platform(),
        "processor": platform.machine(),
        "cpus": os.cpu_count(),
        "packages": {name: version(name) for name in packages},
    }
