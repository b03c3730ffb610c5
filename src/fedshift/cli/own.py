"""`fedshift init`, `compare` and `train --method auto`: from folders to a method, for people who have read no paper."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from fedshift.errors import SITE_FAILED, STOPPED, InputError

if TYPE_CHECKING:
    from fedshift.bench.auto import Choice
    from fedshift.bench.own import Comparison

DataFolder = Annotated[Path, typer.Argument(help="Your data: a folder, npz file or table per site.", metavar="DIR")]


def init(
    folder: DataFolder,
    out: Annotated[Path, typer.Option(help="The configuration file to write.")] = Path("fedshift.yaml"),
    label_column: Annotated[str | None, typer.Option(help="For tables: the column with the class.")] = None,
    minutes: Annotated[float, typer.Option("--budget", help="How many minutes the training may take, roughly.")] = 30.0,
    force: Annotated[bool, typer.Option("--force", help="Write over an existing file.")] = False,
) -> None:
    """Look at your data, propose what to train, and write a configuration with a reason for each line."""
    typer.echo(f"looking at {folder}", err=True)  # What comes next imports torch and reads every file.
    from fedshift.bench.proposal import propose, write_proposal
    from fedshift.cli.show import show_data_report
    from fedshift.data import DataSource, check_data
    from fedshift.runs.progress import reading_lines

    if out.exists() and not force:
        raise InputError("run-exists", f"{out} exists: choose another --out, or write over it with --force")
    report = check_data(DataSource(None, folder, None, label_column), reading_lines())
    show_data_report(report)
    if not report.ok:
        typer.echo("Nothing was written. Solve the problems above, then call this again.", err=True)
        raise typer.Exit(2)
    typer.echo("measuring how long networks take on this machine", err=True)
    found = propose(report, folder, label_column, minutes)
    write_proposal(found, out)
    typer.echo("")
    for key, value, reason in found.lines:
        typer.echo(f"{key}: {value}  ({reason})")
    for note in found.notes:
        typer.echo(f"note: {note}")
    typer.echo(f"\nwrote {out}. Look through it, then:\n  fedshift train {out} --out runs/first")


def compare(
    folder: Annotated[Path | None, typer.Argument(help="Your own data: one folder per site.", metavar="[DIR]")] = None,
    methods: Annotated[str, typer.Option(help="The methods: a,b,c. See `fedshift list methods`.")] = "fedavg,copa,csac",
    dataset: Annotated[str | None, typer.Option(help="A named data set instead: `fedshift list datasets`.")] = None,
    target: Annotated[str | None, typer.Option(help="The labelled site to hold out. Default: each in turn.")] = None,
    setting: Annotated[str | None, typer.Option(help="generalize or adapt. Default: what the methods are for.")] = None,
    arch: Annotated[str | None, typer.Option(help="See `fedshift list archs`.")] = None,
    weights: Annotated[str | None, typer.Option(help="Initial weights: imagenet, or a .safetensors file.")] = None,
    rounds: Annotated[int | None, typer.Option(help="Number of rounds.")] = None,
    seeds: Annotated[str, typer.Option(help="Seeds: 0,1,2.")] = "0",
    label_column: Annotated[str | None, typer.Option(help="For tables: the column with the class.")] = None,
    image_size: Annotated[int | None, typer.Option(help="Images are resized to this side length, in pixels.")] = None,
    out: Annotated[Path, typer.Option(help="The folder for trainings, table and report.")] = Path("runs/compare"),
    jobs: Annotated[int | None, typer.Option(help="How many trainings run in parallel. Default: one per core.")] = None,
    set_: Annotated[list[str] | None, typer.Option("--set", help="Set any configuration key: key=value.")] = None,
) -> None:
    """Compare methods on your own folders: one table, one report. Run it again to continue it."""
    from fedshift.bench.own import compare_methods
    from fedshift.cli.show import show_progress
    from fedshift.report import write_report
    from fedshift.runs.config import apply_settings

    flags = {
        "data_dir": folder,
        "dataset": dataset,
        "target": target,
        "setting": setting,
        "arch": arch,
        "weights": weights,
        "rounds": rounds,
        "label_column": label_column,
        "image_size": image_size,
    }
    values = apply_settings({key: value for key, value in flags.items() if value is not None}, set_ or [])
    try:
        numbers = tuple(int(seed) for seed in seeds.split(","))
    except ValueError:
        raise InputError("config-value", f"--seeds {seeds}: write whole numbers, 0,1,2") from None
    named = [name.strip() for name in methods.split(",") if name.strip()]
    try:
        found = compare_methods(named, values, out, seeds=numbers, jobs=jobs, progress=show_progress)
    except KeyboardInterrupt:
        typer.echo("stopped; the same command continues from here", err=True)
        raise typer.Exit(STOPPED) from None
    show_comparison(found)
    if found.runs:
        write_report(found.runs, out / "report.html", features=False)
        typer.echo(f"tables: {out / 'table'}.txt, .md, .csv; report: {out / 'report.html'}")
    if found.failures:
        raise typer.Exit(SITE_FAILED)


def show_comparison(found: Comparison) -> None:
    from fedshift.bench.publish import caption
    from fedshift.bench.tables import text

    for table in found.tables:
        typer.echo(f"\n{caption(table)}\n{text(table)}", nl=False)
    for failure in found.failures:
        typer.echo(f"failed: {failure.job.row}, {failure.job.column}: {failure.message} (log: {failure.log})", err=True)


def train_auto(values: Mapping[str, Any], folder: Path, minutes: float, **options: Any) -> dict[str, Any]:
    """Chooses a method, trains it on all sources into `folder`, and returns the results."""
    from fedshift.bench.auto import choose_method, keep_choice
    from fedshift.cli.show import show_progress
    from fedshift.report import write_report
    from fedshift.runs.config import make_config
    from fedshift.runs.execute import run

    search = folder.with_name(f"{folder.name}-auto")
    choice = choose_method(
        values, search, minutes=minutes, progress=show_progress, say=lambda text: typer.echo(text, err=True)
    )
    _show_choice(choice)
    chosen: dict[str, Any] = {**values, "method": choice.method}
    if choice.rounds is not None:
        chosen["rounds"] = choice.rounds
    resume = bool(options.pop("resume", False)) or (folder / "config.yaml").exists()
    results = run(make_config(chosen), folder, resume=resume, **options)
    keep_choice(choice, folder)
    if choice.comparison:
        write_report([folder, *choice.comparison.runs], search / "report.html", features=False)
        typer.echo(f"the comparison: {search / 'table'}.txt, {search / 'report.html'}")
    return results


def minutes_of(flag: float | None, values: dict[str, Any]) -> float:
    """The budget of method auto, which is no key of a run: taken out of the values."""
    from fedshift.bench.auto import DEFAULT_MINUTES

    given = values.pop("budget", None)
    if (flag or given) is not None and values.get("method") != "auto":
        raise InputError("config-value", "budget: only --method auto has one; set --rounds instead")
    try:
        minutes = float(flag if flag is not None else DEFAULT_MINUTES if given is None else given)
    except (TypeError, ValueError):
        minutes = 0.0
    if not 0 < minutes < float("inf"):
        raise InputError("config-value", "budget: minutes, a number above 0")
    return minutes


def _show_choice(choice: Choice) -> None:
    if choice.comparison:
        show_comparison(choice.comparison)
    typer.echo(f"auto chose {choice.method}: {choice.reason}")
