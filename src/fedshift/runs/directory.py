"""A run on disk: configuration, environment, metrics as they come, checkpoints, results."""

from __future__ import annotations

import hashlib
import json
import os
import platform
import secrets
import shutil
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import cached_property
from importlib.metadata import version
from pathlib import Path
from typing import IO, Any

from fedshift._version import __version__
from fedshift.errors import FedshiftError, InputError
from fedshift.federation import codec
from fedshift.federation.store import SiteStore, read_state
from fedshift.files import (
    LARGEST_JSON,
    is_plain_file,
    is_unfinished,
    open_without_waiting,
    read_bounded,
    read_json,
    write_atomically,
    write_failed,
)
from fedshift.runs.config import RunConfig, differing_keys, read_config
from fedshift.runs.files.checkpoint import read_checkpoint, write_checkpoint
from fedshift.yamlfiles import LARGEST

_KEPT_CHECKPOINTS = 2
_LOCK, _IDENTITY = ".lock", ".identity"


_locks: set[IO[str]] = set()


def _let_go() -> None:
    """A forked worker that lives a moment longer than a killed run would keep the run's folder locked."""
    for lock in _locks:
        lock.close()
    _locks.clear()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_let_go)


class RunDirectory:
    """`config.yaml, env.json, metrics.jsonl, results.json, checkpoints/, model.safetensors, MODEL_CARD.md, done`, and
    `sites/<name>/` with what each simulated site keeps: its state, its ledger, its log. `failed` is there after an
    error, until the run goes on. `done` has the checksums of a finished run's files."""

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
        self.progress = path / ".progress"

    def prepare(self, config: RunConfig, resume: bool) -> None:
        """Makes a new run directory, or accepts one of the same configuration to resume."""
        config_yaml = config.to_yaml()
        if not self.config.exists():
            # One that was killed while it wrote its first files has no configuration yet.
            known = (_LOCK, _IDENTITY, self.environment.name, self.progress.name, f"{self.progress.name}.new")
            if any(entry.name not in known and not is_unfinished(entry) for entry in self.path.iterdir()):
                raise InputError("run-exists", f"{self.path} exists and is not a run: choose another --out")
            self._write(self.environment, json.dumps(environment(config.threads), indent=2))
            self._write(self.config, config_yaml)
            return
        self.read(self.config)  # Of a finished run: as it was when it ended.
        different = differing_keys(read_config(self.config, "run-corrupt"), config)
        if resume and different == ["rounds"]:
            self._replan(config)
        elif different:
            raise InputError(
                "run-exists",
                f"{self.path} holds a run of another configuration ({', '.join(different)}):"
                " choose another --out, or run with the same settings",
            )
        if not resume and self.done.exists():
            raise InputError("run-exists", f"{self.path} holds a finished run: choose another --out")
        if not resume:
            raise InputError("run-exists", f"{self.path} holds an unfinished run: add --resume to continue it")
        if self.written_by() != __version__ and not self.done.exists():
            self._write(self.config, config_yaml)  # with the keys that came since
            self._note_version()

    def _replan(self, config: RunConfig) -> None:
        """Writes another number of rounds into a run. One that was finished is so no longer."""
        rounds = config.rounds or 0
        names = (path.stem.rpartition("-")[2] for path in self.checkpoints.glob("round-*.safetensors"))
        newest = max((int(name) for name in names if name.isdecimal()), default=0)
        if rounds < newest:
            raise InputError(
                "config-value",
                f"{self.path} has done {newest} rounds, which cannot be undone: choose --rounds {newest} or more, or"
                " another --out",
            )
        if self.done.exists():
            if not newest:
                raise InputError(
                    "run-exists", f"{self.path} is finished and has no checkpoint to go on from: choose another --out"
                )
            self.require_whole()
            for path in (self.done, self.results, self.card):
                path.unlink(missing_ok=True)
            self.__dict__.pop("digests", None)
        self._write(self.config, config.to_yaml())

    def identity(self) -> str:
        """The name that sites on other machines know this run by, the same when it is resumed or its folder moved."""
        file = self.path / _IDENTITY
        if not file.exists():
            self._write(file, secrets.token_hex(8))
        return read_bounded(file, LARGEST).decode(errors="replace")

    @contextmanager
    def locked(self) -> Iterator[None]:
        """One process at a time writes here; the lock goes with the process, however it ends."""
        fresh = [folder for folder in (self.path, *self.path.parents) if not folder.exists()]
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
        try:
            lock = (self.path / _LOCK).open("w")
        except OSError as error:
            raise write_failed(self.path / _LOCK, error) from error
        with lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError as error:
                raise InputError("run-exists", f"{self.path} is in use by another process") from error
            _locks.add(lock)
            try:
                yield
            except InputError:
                self._remove_false_start(fresh)
                raise
            finally:
                _locks.discard(lock)

    def _remove_false_start(self, fresh: Sequence[Path]) -> None:
        """What was wrong with the input: a run that has not trained has nothing that anybody needs. `fresh` are the
        folders that were made for it."""
        if self.path in fresh and not any(self.checkpoints.glob("*")) and not any(self.sites.glob("*/site.log")):
            shutil.rmtree(self.path, ignore_errors=True)
            for folder in fresh[1:]:
                with suppress(OSError):  # Somebody else may have put something in by now.
                    folder.rmdir()

    @contextmanager
    def failure_marked(self) -> Iterator[None]:
        """An error leaves its code, so that the run does not look like one that its user stopped. Its text stays in the
        terminal: run directories are passed on."""
        if self.failed.is_dir():
            raise InputError("run-corrupt", f"{self.failed} is a folder, not the mark of a failed run: move it away")
        self.failed.unlink(missing_ok=True)
        self._remove_unfinished()
        try:
            yield
        except Exception as error:
            with suppress(FedshiftError):  # A full disk must not hide what happened first.
                self._write(self.failed, f"{error.code if isinstance(error, FedshiftError) else 'unexpected'}\n")
            raise

    def _remove_unfinished(self) -> None:
        """What a killed process left half written."""
        for folder in (self.path, self.checkpoints, *self.sites.glob("*/state")):
            for path in folder.glob(".*"):
                if is_unfinished(path):
                    path.unlink(missing_ok=True)

    def save_checkpoint(self, round: int, tree: Any) -> None:
        """Writes `round-NNNNN.safetensors`, then drops old ones."""
        write_checkpoint(self.checkpoints / f"round-{round:05d}.safetensors", tree)
        for path in sorted(self.checkpoints.glob("round-*.safetensors"))[:-_KEPT_CHECKPOINTS]:
            path.unlink(missing_ok=True)

    def load_checkpoint(self) -> tuple[Any | None, list[str]]:
        """The newest checkpoint that can be continued from, and what is wrong with newer ones. What sites on this
        machine stored by then is part of it."""
        if self.checkpoints.exists() and not self.checkpoints.is_dir():
            raise InputError("run-corrupt", f"{self.checkpoints} is not a folder: start in another folder")
        paths = sorted(self.checkpoints.glob("round-*.safetensors"), reverse=True)
        stored = self.sites.glob("*/state/*@*.safetensors")
        if folder := next((path for path in (*paths, *stored) if path.is_dir()), None):
            raise InputError("run-corrupt", f"{folder} is a folder, not a file of the run: move it away")
        problems: list[str] = []
        for path in paths:
            try:
                tree = read_checkpoint(path)
                self._check_states(tree)
                return tree, problems
            except FedshiftError as error:
                problems.append(f"checkpoint {path.name} cannot be used, {error.message}")
        if problems:
            raise InputError(
                "run-corrupt", f"no checkpoint of {self.path} can be used: {problems[-1]}; start in another folder"
            )
        return None, []

    def site_states(self) -> tuple[str, ...]:
        """The newest version of all that sites on this machine store, as paths below `sites`."""
        stores = [SiteStore(folder) for folder in sorted(self.sites.glob("*/state"))]
        return tuple(path.relative_to(self.sites).as_posix() for store in stores for path in store.newest())

    def _check_states(self, tree: Any) -> None:
        """Methods would begin anew without a file that a site stored, and end in another model."""
        for name in codec.restore(tuple[str, ...], tree.get("states", ()), "states"):
            read_state(self.sites / name)

    @contextmanager
    def metrics_from(self, round: int, size: int, sha256: str) -> Iterator[MetricsLog]:
        """The metrics file for appending, cut back to what belongs to rounds up to `round`: its first `size` bytes,
        which have the given SHA-256. Checkpoints of 0.2.0 and before do not say that."""
        if not sha256:
            kept = "".join(json.dumps(row) + "\n" for row in read_metrics(self.metrics)[0] if row["round"] <= round)
            data = kept.encode()
        elif self.metrics.exists():
            data = read_bounded(self.metrics, LARGEST_JSON)[:size]
            if hashlib.sha256(data).hexdigest() != sha256:
                raise InputError(
                    "run-corrupt",
                    f"{self.metrics} is damaged: restore it from a copy, or delete it to go on without the numbers of"
                    f" the rounds up to {round}",
                )
        else:
            data = b""
        write_atomically(self.metrics, data)
        with self.metrics.open("ab") as file:
            yield MetricsLog(file, self.metrics, data)

    def write_results(self, results: dict[str, Any]) -> None:
        self._write(self.results, json.dumps(results, indent=2) + "\n")

    def write_card(self, text: str) -> None:
        self._write(self.card, text)

    def mark_done(self) -> None:
        """The last file of a run: the checksums of the others."""
        listed = [self.config, self.environment, self.metrics, self.results, self.model, self.chosen_model, self.card]
        listed += sorted(self.sites.glob("*/ledger.jsonl"))
        digests = {path.relative_to(self.path).as_posix(): _digest(path) for path in listed if path.exists()}
        self._write(self.done, json.dumps({"sha256": digests}, indent=2) + "\n")

    @cached_property
    def digests(self) -> dict[str, str]:
        """The checksums of a finished run's files, by path below it. Nothing for one that is not finished, or that was
        written by 0.2.0 or before: then `done` is empty."""
        # A line for each file of each site.
        text = read_bounded(self.done, LARGEST_JSON) if self.done.exists() else b""
        if not text:
            return {}
        try:
            return codec.restore(dict[str, str], json.loads(text)["sha256"])
        except (ValueError, KeyError, TypeError, RecursionError, FedshiftError) as error:
            raise InputError(
                "run-corrupt", f"{self.done} is damaged: delete it and run again with --resume to make it anew"
            ) from error

    def read(self, path: Path, limit: int = LARGEST_JSON) -> bytes:
        """A file of the run; one that is not as the finished run left it is an error."""
        data = read_bounded(path, limit)
        self._compare(path, hashlib.sha256(data).hexdigest())
        return data

    def require_whole(self) -> None:
        """An error if a file is not as the finished run left it. The card is for people, who may add to it."""
        for name in self.digests:
            if name != self.card.name:
                self._compare(self.path / name, _digest(self.path / name))

    @property
    def is_card_changed(self) -> bool:
        return self.card.name in self.digests and _digest(self.card) != self.digests[self.card.name]

    def _compare(self, path: Path, found: str) -> None:
        if found != self.digests.get(path.relative_to(self.path).as_posix(), found):
            raise InputError(
                "run-corrupt",
                f"{path} is not as the run left it when it ended, damaged or changed by hand: restore it from a copy"
                f" (or empty the file {self.done} to use it as it is)",
            )

    def _write(self, path: Path, text: str) -> None:
        write_atomically(path, text.encode())

    def written_by(self) -> str:
        """The version of fedshift that began the run."""
        return str(self._environment().get("fedshift", "(unknown)"))

    def _environment(self) -> dict[str, Any]:
        if not self.environment.exists():
            return {}
        found = read_json(self.environment, limit=LARGEST)
        if not isinstance(found, dict):
            raise InputError("run-corrupt", f"{self.environment} is damaged: restore it from a copy, or delete it")
        return found

    def _note_version(self) -> None:
        known = self._environment()
        before = known.get("continued_by")
        known["continued_by"] = sorted({*(map(str, before) if isinstance(before, list) else ()), __version__})
        self._write(self.environment, json.dumps(known, indent=2))


class MetricsLog:
    """`metrics.jsonl` while a run writes to it. `size` and `sha256` are those of the whole file."""

    def __init__(self, file: IO[bytes], path: Path, begun: bytes) -> None:
        self._file, self._path = file, path
        self._hash = hashlib.sha256(begun)
        self.size = len(begun)

    @property
    def sha256(self) -> str:
        return self._hash.hexdigest()

    def append(self, rows: Sequence[Mapping[str, Any]]) -> None:
        data = "".join(json.dumps(row) + "\n" for row in rows).encode()
        try:
            self._file.write(data)
            self._file.flush()
            # A checkpoint that counts on these lines must not be on the disk before them.
            os.fsync(self._file.fileno())
        except OSError as error:
            raise write_failed(self._path, error) from error
        self._hash.update(data)
        self.size += len(data)


def read_metrics(path: Path) -> tuple[list[dict[str, Any]], int]:
    """The rows of a metrics file and how many lines were not whole (a run killed while it wrote)."""
    return parse_metrics(read_bounded(path, LARGEST_JSON)) if path.exists() else ([], 0)


def parse_metrics(data: bytes) -> tuple[list[dict[str, Any]], int]:
    rows, broken = [], 0
    for line in data.decode(errors="replace").splitlines():
        with suppress(ValueError, RecursionError):
            row = json.loads(line)
            if isinstance(row, dict) and {"round", "phase", "site", "name", "value"} <= set(row):
                rows.append(row)
                continue
        broken += 1
    return rows, broken


def _digest(path: Path) -> str:
    """The SHA-256 of a file, which may be larger than memory; empty if it is gone or no file."""
    try:
        with open(path, "rb", opener=open_without_waiting) as file:
            return hashlib.file_digest(file, "sha256").hexdigest() if is_plain_file(file) else ""
    except OSError:
        return ""


def environment(threads: int) -> dict[str, Any]:
    """What a run depends on besides its configuration. `threads` are those of torch: the run's own, which no variable
    of the environment changes."""
    packages = ("torch", "numpy", "pillow", "scikit-learn", "safetensors", "pydantic")
    return {
        "fedshift": __version__,
        "python": sys.version.split()[0],
        "platform": platform.platform(),
        "processor": platform.machine(),
        "cpus": os.cpu_count(),
        "threads": threads,
        "packages": {name: version(name) for name in packages},
    }
