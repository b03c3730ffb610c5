"""`fedshift runs`: what is in a folder of runs, what two of them did differently, and away with those not needed."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from fedshift.errors import InputError

if TYPE_CHECKING:
    from rich.table import Table

    from fedshift.report.live import WatchedRun
    from fedshift.runs.record import RunRecord

runs_app = typer.Typer(help="List, compare and delete runs.", invoke_without_command=True)

Folder = Annotated[Path, typer.Argument(help="A folder that contains run directories, at any depth.", metavar="DIR")]
Runs = Annotated[list[Path], typer.Argument(help="Run directories.", metavar="RUN...")]


@runs_app.callback()
def runs(context: typer.Context) -> None:
    """List, compare and delete runs. Without a command: list those in the folder runs."""
    if context.invoked_subcommand is None:
        list_runs(Path("runs"))


@runs_app.command("list")
def list_runs(folder: Folder = Path("runs")) -> None:
    """List the runs in a folder: rounds, scores, size on disk; running ones first, then the newest."""
    from rich.console import Console
    from rich.markup import escape

    from fedshift.report.live import Watcher
    from fedshift.report.text import byte_size

    if not folder.is_dir():
        raise InputError("data-missing", f"there is no folder {folder}: give the folder that contains your runs")
    found = Watcher(folder).runs()
    console = Console()
    if not found:
        console.print(f"no runs in {folder}", markup=False)
        return
    table = _table("run", "method", "target", "rounds", "status", "last", "source-val", "size", "written")
    for run in found:
        record = run.record
        cells = [escape(run.name), *(_cells(record) if record else [""] * 3)]
        cells += [_status(run), *(_scores(record) if record else ["", ""]), byte_size(_size(run.path))]
        table.add_row(*cells, f"{record.written:%Y-%m-%d %H:%M}" if record else "")
    console.print(table)
    console.print(
        f"{byte_size(sum(_size(run.path) for run in found))} in {len(found)} runs. Scores in %, means over targets."
    )


@runs_app.command("compare")
def compare_runs(runs: Runs) -> None:
    """Compare runs: their scores, and the keys of their configurations that differ."""
    from rich.console import Console
    from rich.markup import escape

    from fedshift.runs.record import read_record

    records = [read_record(path) for path in runs]
    console = Console()
    table = _table("run", "method", "target", "rounds", "last", "source-val", "seconds", "MB up")
    for record in records:
        results = record.results
        cost = (
            [f"{results.seconds.get('total') or 0:.0f}", f"{results.bytes.get('up', 0) / 1e6:.1f}"] if results else []
        )
        table.add_row(escape(str(record.path)), *_cells(record), *_scores(record), *(cost or ["", ""]))
    console.print(table)
    differing = _differing(records)
    keys = _table("key", *(escape(str(record.path)) for record in records))
    for key, values in differing.items():
        keys.add_row(escape(key), *(escape(value) for value in values))
    console.print(keys if differing else "Their configurations are the same.")


@runs_app.command("delete")
def delete_runs(runs: Runs, yes: Annotated[bool, typer.Option("--yes", help="Do not ask.")] = False) -> None:
    """Delete runs with all that is in their folders. Asks first, unless --yes is given; refuses one that is running."""
    import shutil

    from fedshift.report.text import byte_size
    from fedshift.runs.directory import RunDirectory

    for path in runs:
        if path.is_symlink() or not ((path / "config.yaml").is_file() and (path / "env.json").is_file()):
            raise InputError("run-missing", f"{path} is not a run: nothing was deleted")
    for path in runs:
        with RunDirectory(path).locked():
            pass  # A process that trains there holds the lock, which is an error here: nothing was deleted.
    if not yes:
        total = byte_size(sum(map(_size, runs)))
        typer.confirm(f"Delete {', '.join(map(str, runs))} ({total})?", abort=True, err=True)
    for path in runs:
        with RunDirectory(path).locked():
            shutil.rmtree(path)
        typer.echo(f"deleted {path}")


def _table(*columns: str) -> Table:
    from rich.table import Table

    table = Table(box=None, header_style="bold", pad_edge=False)
    for column in columns:
        right = column in ("rounds", "last", "source-val", "size", "seconds", "MB up")
        table.add_column(column, justify="right" if right else "left", overflow="fold")
    return table


def _cells(record: RunRecord) -> list[str]:
    from rich.markup import escape

    where = f"home {record.home}" if record.home else record.target or "none"
    return [escape(record.method), escape(where), f"{record.round}/{record.rounds}"]


def _status(run: WatchedRun) -> str:
    failed = run.record.failure.rpartition("(")[2].rstrip(").") if run.record and run.status == "failed" else ""
    return f"{run.status}{f': {failed}' if failed else ''}"


def _scores(record: RunRecord) -> list[str]:
    scores = list(record.scores.values())
    if not scores:
        return ["", ""]
    return [f"{100 * sum(getattr(s, rule) for s in scores) / len(scores):.1f}" for rule in ("last", "source_val")]


def _differing(records: list[RunRecord]) -> dict[str, list[str]]:
    """The keys, own keys of methods included, that are not the same in all runs, with each run's value."""
    flat = [dict(_flat(record.config)) for record in records]
    keys = dict.fromkeys(key for values in flat for key in values)
    shown = {key: [str(values.get(key, "-")) for values in flat] for key in keys}
    return {key: values for key, values in shown.items() if len(set(values)) > 1}


def _flat(values: Any, before: str = "") -> list[tuple[str, Any]]:
    found: list[tuple[str, Any]] = []
    for key, value in values.items():
        found += _flat(value, f"{before}{key}.") if isinstance(value, dict) else [(f"{before}{key}", value)]
    return found


def _size(path: Path) -> int:
    return sum(file.stat().st_size for file in path.rglob("*") if file.is_file() and not file.is_symlink())
