"""Runs jobs side by side, each in its own process. Finished jobs are skipped, unfinished ones are resumed."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from threading import Lock
from typing import Protocol, TypeVar

from fedshift.bench.jobs import Job
from fedshift.bench.records import Record, append, read, read_run
from fedshift.files import locked
from fedshift.runs.directory import RunDirectory
from fedshift.runs.heartbeat import read_moment
from fedshift.runs.progress import QUIET_SECONDS

T = TypeVar("T")

OnProgress = Callable[[str, int, int, float], None]
"""Called with (what just happened, jobs done, jobs in total, estimated seconds left)."""


def silent(text: str, done: int, total: int, left: float) -> None:
    """Reports no progress."""


@dataclass(frozen=True)
class FailedJob:
    """A job that ended with an error. `message` is the last line of `log`."""

    job: Job
    message: str
    log: Path


@dataclass(frozen=True)
class Outcome:
    """What `run_jobs` returns. `broken_lines` counts half-written lines of the record file."""

    records: list[Record]
    failures: list[FailedJob]
    broken_lines: int


def run_jobs(
    jobs: Sequence[Job], out: Path, workers: int, progress: OnProgress, launcher: Launcher | None = None
) -> Outcome:
    """Runs each distinct job once under `out`, `workers` at a time. Several runners may share one folder."""
    launcher = launcher or Processes()
    records_path = out / "records.jsonl"
    distinct = list({job.digest: job for job in jobs}.values())
    known, _ = read([records_path])
    finished = {record.job for record in known}
    failures: list[FailedJob] = []
    started = time.monotonic()
    waiting = [job for job in distinct if job.digest not in finished]
    done = skipped = len(distinct) - len(waiting)
    progress(f"trainings finished earlier, {len(waiting)} to do", done, len(distinct), 0.0)
    pool = ThreadPoolExecutor(workers)
    try:
        futures = [pool.submit(_run, job, out, launcher) for job in waiting]
        for future in _completed(futures):
            if future is None:
                progress(_under_way(waiting, out), done, len(distinct), 0.0)
                continue
            job, failure, summary = future.result()
            done += 1
            if failure:
                failures.append(failure)
            left = (time.monotonic() - started) / (done - skipped) * (len(distinct) - done)
            progress(f"{job.row}, {job.column}, seed {job.config.seed}: {summary}", done, len(distinct), left)
    except BaseException:
        pool.shutdown(wait=False, cancel_futures=True)
        raise
    finally:
        launcher.stop()
        pool.shutdown(cancel_futures=True)
    everything, broken = read([records_path])
    return Outcome(records_for_jobs(everything, jobs), failures, broken)


def _completed(futures: Iterable[Future[T]]) -> Iterator[Future[T] | None]:
    """Each as it is done, and None whenever none was for a while."""
    left = set(futures)
    while left:
        done, left = wait(left, timeout=QUIET_SECONDS, return_when=FIRST_COMPLETED)
        if not done:
            yield None
        yield from done


def _under_way(jobs: Sequence[Job], out: Path) -> str:
    """How far the trainings are that run now."""
    moments = [(job, read_moment(RunDirectory(out / "jobs" / job.digest).progress)) for job in jobs]
    told = [f"{job.row}, {job.column}: {moment.text}" for job, moment in moments if moment is not None]
    return "; ".join(told) or "starting"


def records_for_jobs(records: Sequence[Record], jobs: Sequence[Job]) -> list[Record]:
    """The record of each job that has one, with the job's row and column: one training may be in several cells."""
    by_job = {record.job: record for record in records}
    found = [(job, by_job[job.digest]) for job in jobs if job.digest in by_job]
    return [Record(**{**vars(record), "row": job.row, "column": job.column}) for job, record in found]


def _run(job: Job, out: Path, launcher: Launcher) -> tuple[Job, FailedJob | None, str]:
    """Trains and records a job unless another runner has done so. The string says how long it took."""
    folder, log = out / "jobs" / job.digest, out / "logs" / f"{job.digest}.log"
    wanted, records = out / "wanted", out / "records.jsonl"
    for parent in (folder.parent, log.parent, wanted):
        parent.mkdir(parents=True, exist_ok=True)
    # Another runner may be training the same job; afterwards this one finds it done.
    with locked(wanted / f"{job.digest}.lock"):
        started = time.monotonic()
        summary = "trained before"
        if not (folder / "done").exists():
            config = wanted / f"{job.digest}.yaml"
            config.write_text(job.config.to_yaml(only_given=job.is_open))
            code = launcher.train(config, folder, log, job.config.threads)
            if code != 0:
                lines = log.read_text(errors="replace").strip().splitlines()
                return job, FailedJob(job, lines[-1] if lines else f"exit code {code}", log), "FAILED"
            summary = f"{time.monotonic() - started:.0f} s"
        if all(record.job != job.digest for record in read([records])[0]):
            append(records, read_run(folder, job.digest, job.row, job.column))
        return job, None, summary


class Launcher(Protocol):
    """Trains one job to the end, resuming an unfinished run."""

    def train(self, config: Path, folder: Path, log: Path, threads: int) -> int:
        """Returns the exit code. All output of the training is in `log`."""

    def stop(self) -> None:
        """Ends running trainings, which can be resumed later, and idle processes."""


class Processes:
    """Trains each job in its own process. On Linux they are forked from a process that has already imported
    everything (`fedshift.bench.starter`), which saves seconds per job."""

    def __init__(self) -> None:
        self._lock = Lock()
        self._idle: list[tuple[int, subprocess.Popen[bytes]]] = []
        self._started: list[subprocess.Popen[bytes]] = []

    def train(self, config: Path, folder: Path, log: Path, threads: int) -> int:
        # On other systems, libraries that torch loads do not survive a fork.
        if sys.platform != "linux":
            with log.open("wb") as file:
                command = [sys.executable, "-m", "fedshift.bench.starter", str(config), str(folder)]
                return self._start(command, threads, file.fileno()).wait()
        starter = self._starter(threads)
        assert starter.stdin is not None and starter.stdout is not None
        with suppress(BrokenPipeError):
            wanted = {"config": str(config), "folder": str(folder), "log": str(log)}
            starter.stdin.write(json.dumps(wanted).encode() + b"\n")
            starter.stdin.flush()
        answer = starter.stdout.readline()
        if not answer:  # it was stopped or killed
            return starter.wait() or 1
        with self._lock:
            self._idle.append((threads, starter))
        return int(answer)

    def stop(self) -> None:
        for process in self._started:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGTERM) if sys.platform == "linux" else process.terminate()
            process.wait()
        self._started, self._idle = [], []

    def _starter(self, threads: int) -> subprocess.Popen[bytes]:
        """An idle starter with this number of threads, or a new one: torch reads the number when it is imported."""
        with self._lock:
            for waiting in self._idle:
                if waiting[0] == threads:
                    self._idle.remove(waiting)
                    return waiting[1]
        return self._start([sys.executable, "-m", "fedshift.bench.starter"], threads, subprocess.PIPE)

    def _start(self, command: list[str], threads: int, output: int) -> subprocess.Popen[bytes]:
        # Jobs share the cores: more threads per job would only compete with each other.
        environment = {**os.environ, "OMP_NUM_THREADS": str(threads)}
        process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=output,
            stderr=None if output == subprocess.PIPE else output,
            env=environment,
            start_new_session=True,  # so that it can be ended together with its forks
        )
        self._started.append(process)
        return process
