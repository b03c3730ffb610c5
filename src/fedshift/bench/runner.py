"""Runs jobs side by side, each in a process of its own; what is finished is skipped, what is half-done goes on."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from fedshift.bench.jobs import Job
from fedshift.bench.launch import Launcher, Processes
from fedshift.bench.records import Record, append, read, read_run


@dataclass(frozen=True)
class Failure:
    """A job that ended with an error: its last words, and where all of them are."""

    job: Job
    words: str
    log: Path


@dataclass(frozen=True)
class Outcome:
    records: list[Record]
    failures: list[Failure]
    broken_lines: int


Tell = Callable[[str, int, int, float], None]
"""(what just happened, jobs done, jobs in all, seconds left)"""


def silent(text: str, done: int, total: int, left: float) -> None:
    """Tells nobody."""


def run_jobs(jobs: Sequence[Job], out: Path, workers: int, tell: Tell, launcher: Launcher | None = None) -> Outcome:
    """Runs every job once under `out`; several runners may work on one folder at a time."""
    launcher = launcher or Processes()
    records_path = out / "records.jsonl"
    distinct = list({job.digest: job for job in jobs}.values())
    known, _ = read([records_path])
    finished = {record.job for record in known}
    failures: list[Failure] = []
    started = time.monotonic()
    waiting = [job for job in distinct if job.digest not in finished]
    done = skipped = len(distinct) - len(waiting)
    tell(f"trainings there already, {len(waiting)} to do", done, len(distinct), 0.0)
    pool = ThreadPoolExecutor(workers)
    try:
        futures = [pool.submit(_run, job, out, launcher) for job in waiting]
        for future in as_completed(futures):
            job, failure, told = future.result()
            done += 1
            if failure:
                failures.append(failure)
            left = (time.monotonic() - started) / (done - skipped) * (len(distinct) - done)
            tell(f"{job.row}, {job.column}, seed {job.config.seed}: {told}", done, len(distinct), left)
    except BaseException:
        pool.shutdown(wait=False, cancel_futures=True)
        raise
    finally:
        launcher.stop()
        pool.shutdown(cancel_futures=True)
    everything, broken = read([records_path])
    return Outcome(placed(everything, jobs), failures, broken)


def placed(records: Sequence[Record], jobs: Sequence[Job]) -> list[Record]:
    """The records of `jobs`. One training may stand in several places of a table."""
    by_job = {record.job: record for record in records}
    fields = [(job, by_job[job.digest]) for job in jobs if job.digest in by_job]
    return [Record(**{**vars(record), "row": job.row, "column": job.column}) for job, record in fields]


def _run(job: Job, out: Path, launcher: Launcher) -> tuple[Job, Failure | None, str]:
    """Trains and records it, unless another runner did meanwhile; says how long it took."""
    folder, log = out / "jobs" / job.digest, out / "logs" / f"{job.digest}.log"
    wanted, records = out / "wanted", out / "records.jsonl"
    for parent in (folder.parent, log.parent, wanted):
        parent.mkdir(parents=True, exist_ok=True)
    with _claimed(wanted / f"{job.digest}.lock"):
        started = time.monotonic()
        told = "trained before"
        if not (folder / "done").exists():
            config = wanted / f"{job.digest}.yaml"
            config.write_text(job.config.to_yaml())
            code = launcher.train(config, folder, log, job.config.threads)
            if code != 0:
                lines = log.read_text(errors="replace").strip().splitlines()
                return job, Failure(job, lines[-1] if lines else f"exit code {code}", log), "FAILED"
            told = f"{time.monotonic() - started:.0f} s"
        if all(record.job != job.digest for record in read([records])[0]):
            append(records, read_run(folder, job.digest, job.row, job.column))
        return job, None, told


@contextmanager
def _claimed(path: Path) -> Iterator[None]:
    """Waits until no other runner has the job: the second then finds it done."""
    try:
        import fcntl
    except ImportError:  # Windows
        yield
        return
    with path.open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield
