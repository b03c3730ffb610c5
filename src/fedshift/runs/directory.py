"""A run on disk: configuration, environment, metrics as they come, checkpoints, results."""

from __future__ import annotations

import hashlib
import json
import os
import platform
import re
import secrets
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from importlib.metadata import version
from pathlib import Path
from typing import IO, Any

from fedshift._version import __version__
from fedshift.errors import FedshiftError, InputError
from fedshift.federation import codec
from fedshift.files import write_atomically

_KEPT_CHECKPOINTS = 2
_LOCK, _IDENTITY = ".lock", ".identity"


class RunDirectory:
    """`config.yaml, env.json, metrics.jsonl, results.json, checkpoints/, model.safetensors, MODEL_CARD.md, done`, and
    `sites/<name>/` with what each simulated site keeps: its state, its ledger, its log. `failed` is there after an
    error, until the run goes on."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.config = path / "config.yaml"
        self.metrics = path / "metrics.jsonl"
        self.results = path / "results.json"
        self.model = path / "model.safetensors"
        self.chosen_model = path / "model-source-val.safetensors"
        self.card = path / "MODEL_CARD.md"
        self.done = path / "done"
        self.failed = path / "failed"
        self.checkpoints = path / "checkpoints"
        self.sites = path / "sites"

    def prepare(self, config_yaml: str, resume: bool) -> None:
        """Makes a new run directory, or accepts one of the same configuration to resume."""
        if not self.config.exists():
            if any(entry.name not in (_LOCK, _IDENTITY) for entry in self.path.iterdir()):
                raise InputError("run-exists", f"{self.path} exists and is not a run: choose another --out")
            self._write(self.config, config_yaml)
            self._write(self.path / "env.json", json.dumps(environment(), indent=2))
            return
        if self.config.read_text() != config_yaml:
            raise InputError(
                "run-exists",
                f"{self.path} holds a run of another configuration ({self._difference(config_yaml)}):"
                " choose another --out, or run with the same settings",
            )
        if not resume and self.done.exists():
            raise InputError("run-exists", f"{self.path} holds a finished run: choose another --out")
        if not resume:
            raise InputError("run-exists", f"{self.path} holds an unfinished run: add --resume to go on with it")

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
        """Writes `round-NNNN.safetensors` with its SHA-256 in front, then drops old ones."""
        data = codec.pack(tree)
        write_atomically(self._checkpoint(round), bytes.fromhex(codec.sha256(data)) + data)
        for path in sorted(self.checkpoints.glob("round-*.safetensors"))[:-_KEPT_CHECKPOINTS]:
            path.unlink(missing_ok=True)

    def load_checkpoint(self) -> tuple[Any | None, list[str]]:
        """The newest checkpoint that can be read, and the names of newer ones that cannot."""
        damaged: list[str] = []
        for path in sorted(self.checkpoints.glob("round-*.safetensors"), reverse=True):
            content = path.read_bytes()
            digest, data = content[:32], content[32:]
            try:
                if hashlib.sha256(data).digest() != digest:
                    raise FedshiftError("run-corrupt", "checksum")
                return codec.unpack(data), damaged
            except FedshiftError:
                damaged.append(path.name)
        if damaged:
            raise InputError(
                "run-corrupt",
                f"no checkpoint of {self.path} can be read ({', '.join(damaged)} damaged): start in another folder",
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

    def _difference(self, config_yaml: str) -> str:
        old, new = set(self.config.read_text().splitlines()), set(config_yaml.splitlines())
        keys = sorted({re.split(r"[:\s]", line.strip(), maxsplit=1)[0] for line in old ^ new})
        return ", ".join(key for key in keys if key not in ("", "-")) or "settings"


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
