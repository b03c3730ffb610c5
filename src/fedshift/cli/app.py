"""Every command, thin: read the flags, call the library, show the result."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from fedshift.cli import deploy
from fedshift.cli.audit import audit_app
from fedshift.errors import SITE_FAILED, STOPPED, InputError

app = typer.Typer(
    name="fedshift",
    help="Train models across sites that may not share data and whose data look different.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
weights_app = typer.Typer(help="Weights files.", no_args_is_help=True)
app.add_typer(weights_app, name="weights")
app.add_typer(audit_app, name="audit")
app.add_typer(deploy.deploy_app, name="deploy")
app.add_typer(deploy.site_app, name="site")
app.add_typer(deploy.coordinator_app, name="coordinator")
app.command()(deploy.status)
app.command()(deploy.stop)

RunFolder = Annotated[Path, typer.Argument(help="A run directory.", metavar="RUN")]


def _version(wanted: bool) -> None:
    if wanted:
        from fedshift._version import __version__

        typer.echo(f"fedshift {__version__}")
        raise typer.Exit


@app.callback()
def root(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    """Train models across sites that may not share data and whose data look different."""


@app.command()
def demo(
    out: Annotated[Path, typer.Option(help="Where the runs and report.html go.")] = Path("runs/demo"),
) -> None:
    """Compare methods on built-in data: a table, and a report to open in a browser."""
    from fedshift.cli.demo import run_demo

    run_demo(out)


@app.command()
def train(
    config: Annotated[
        Path | None, typer.Argument(help="A YAML file with any of the keys below.", metavar="CONFIG")
    ] = None,
    method: Annotated[str | None, typer.Option(help="See `fedshift list methods`.")] = None,
    dataset: Annotated[str | None, typer.Option(help="A named data set: `fedshift list datasets`.")] = None,
    data_dir: Annotated[Path | None, typer.Option(help="Your own folder, one sub-folder a site.")] = None,
    target: Annotated[
        str | None, typer.Option(help="generalize: held out for testing; adapt: used unlabelled.")
    ] = None,
    sources: Annotated[str | None, typer.Option(help="Labelled sites, a,b,c. Default: all but the target.")] = None,
    home: Annotated[str | None, typer.Option(help="multi-adapt: the labelled site.")] = None,
    targets: Annotated[
        str | None, typer.Option(help="multi-adapt: client sites, a,b,c. Default: all but home.")
    ] = None,
    setting: Annotated[str | None, typer.Option(help="generalize, adapt or multi-adapt.")] = None,
    arch: Annotated[str | None, typer.Option(help="See `fedshift list archs`.")] = None,
    weights: Annotated[str | None, typer.Option(help="imagenet, or a .safetensors file to start from.")] = None,
    rounds: Annotated[int | None, typer.Option(help="Rounds of communication.")] = None,
    seed: Annotated[int | None, typer.Option(help="Decides every random choice.")] = None,
    label_column: Annotated[str | None, typer.Option(help="Tables: the column with the class.")] = None,
    image_size: Annotated[int | None, typer.Option(help="Side in pixels that images are resized to.")] = None,
    attack: Annotated[
        list[str] | None, typer.Option(help="A bad site, for studies: poison:SITE:0.3, noise:SITE, other-task:SITE.")
    ] = None,
    engine: Annotated[str | None, typer.Option(help="Where sites run: inprocess, nvflare (real machines).")] = None,
    federation: Annotated[Path | None, typer.Option(help="nvflare: the coordinator's folder.")] = None,
    out: Annotated[Path | None, typer.Option(help="Run directory. Default: runs/METHOD-DATA-TARGET-seedN.")] = None,
    set_: Annotated[list[str] | None, typer.Option("--set", help="Any configuration key, key=value.")] = None,
    track: Annotated[
        list[str] | None, typer.Option(help="Stream the metrics to tensorboard or mlflow too (extras of those names).")
    ] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Go on with an interrupted run.")] = False,
    debug: Annotated[
        bool, typer.Option("--debug", help="One process; a failing step shows its traceback, site and batch.")
    ] = False,
) -> None:
    """Train one model across sites."""
    from fedshift.cli.show import show_results
    from fedshift.runs.api import default_out
    from fedshift.runs.config import apply_settings, make_config, read_config
    from fedshift.runs.execute import run
    from fedshift.runs.progress import for_terminal

    flags: dict[str, Any] = {
        "method": method,
        "dataset": dataset,
        "data_dir": data_dir,
        "target": target,
        "sources": _names(sources),
        "home": home,
        "targets": _names(targets),
        "setting": setting,
        "arch": arch,
        "weights": weights,
        "rounds": rounds,
        "seed": seed,
        "label_column": label_column,
        "image_size": image_size,
        "attack": attack,
        "engine": engine,
        "federation": federation,
    }
    values = read_config(config) if config else {}
    values |= {key: value for key, value in flags.items() if value is not None}
    checked = make_config(apply_settings(values, set_ or []))
    folder = out or default_out(checked)
    try:
        results = run(checked, folder, resume=resume, debug=debug, progress=for_terminal(), track=track or ())
    except KeyboardInterrupt:
        typer.echo(f"stopped; {folder} goes on with the same command and --resume", err=True)
        raise typer.Exit(STOPPED) from None
    show_results(results, folder)


@app.command()
def bench(
    suite: Annotated[str, typer.Argument(help="See `fedshift list suites`.", metavar="SUITE")],
    more: Annotated[list[Path] | None, typer.Argument(help="More record files.", hidden=True, metavar="")] = None,
    methods: Annotated[str | None, typer.Option(help="Some rows only: methods or labels, a,b.")] = None,
    seeds: Annotated[str | None, typer.Option(help="0,1,2. Default: the suite's own.")] = None,
    scale: Annotated[
        Literal["mini", "paper"], typer.Option(help="Minutes on two cores, or the paper's protocol.")
    ] = "mini",
    data_dir: Annotated[Path | None, typer.Option(help="The data set's folder, or your own folders.")] = None,
    out: Annotated[Path | None, typer.Option(help="For runs and tables. Default: in runs/bench.")] = None,
    jobs: Annotated[int | None, typer.Option(help="Trainings side by side. Default: one a core.")] = None,
    set_: Annotated[list[str] | None, typer.Option("--set", help="Any configuration key, key=value.")] = None,
    records: Annotated[
        list[Path] | None, typer.Option(help="selection: compare rules on these record files, train nothing.")
    ] = None,
) -> None:
    """Make a table or figure of a paper. Started again, it goes on where it was left; exit code 3 if runs failed."""
    from fedshift.bench.api import benchmark
    from fedshift.cli.bench import show_found, told

    if more and not records:
        raise InputError("config-value", f"bench {suite} {more[0]}: one suite a call")
    try:
        found = benchmark(
            suite,
            scale=scale,
            methods=_names(methods),
            seeds=_seeds(seeds),
            data_dir=data_dir,
            out=out,
            jobs=jobs,
            settings=set_ or (),
            records=[*(records or []), *(more or [])],
            tell=told,
        )
    except KeyboardInterrupt:
        typer.echo("stopped; the same command goes on from here", err=True)
        raise typer.Exit(STOPPED) from None
    show_found(found)
    if found.failures:
        raise typer.Exit(SITE_FAILED)


@app.command("list")
def list_(
    what: Annotated[Literal["methods", "datasets", "archs", "suites"], typer.Argument(help="What to list.")],
    part: Annotated[str, typer.Argument(help="Only names that contain this.", metavar="[PART]")] = "",
    json: Annotated[bool, typer.Option("--json", help="For programs.")] = False,
) -> None:
    """List methods, data sets, architectures or suites."""
    from fedshift.cli.show import show_list

    show_list(what, part, as_json=json)


@app.command("check-data")
def check_data(
    folder: Annotated[Path, typer.Argument(help="A data folder, one sub-folder a site.", metavar="DIR")],
    dataset: Annotated[str | None, typer.Option(help="Read it as this public data set.")] = None,
    label_column: Annotated[str | None, typer.Option(help="Tables: the column with the class.")] = None,
    image_size: Annotated[int | None, typer.Option(help="Side in pixels that images are resized to.")] = None,
) -> None:
    """Say what is in a data folder and whether a run could start; exit code 2 if not."""
    from fedshift.cli.show import show_data_report
    from fedshift.data import DataSource, check_data

    report = check_data(DataSource(dataset, folder, image_size, label_column))
    show_data_report(report)
    if not report.ok:
        raise typer.Exit(2)


@app.command()
def doctor() -> None:
    """Check this machine and installation; exit code 2 if something fedshift needs is broken."""
    from fedshift.cli.doctor import examine

    if not examine():
        raise typer.Exit(2)


@app.command()
def predict(
    run: RunFolder,
    inputs: Annotated[Path, typer.Argument(help="A folder of images, or a .csv table.", metavar="FOLDER")],
    out: Annotated[
        Path, typer.Option(help="The CSV file to write (segmentation: a folder for masks beside it).")
    ] = Path("predictions.csv"),
    site: Annotated[str | None, typer.Option(help="Whose model, where a run has one a site.")] = None,
    select: Annotated[
        Literal["last", "source-val"],
        typer.Option(help="The last round's model or the one chosen on source validation."),
    ] = "last",
) -> None:
    """Predict classes for new images or rows with a trained run."""
    from fedshift.runs.predict import predict_files

    counts = predict_files(run, inputs, out, site=site, select=select)
    typer.echo(
        f"{counts.predicted} predictions in {out}"
        + (f", {counts.skipped} unreadable" if counts.skipped else "")
        + f", by {counts.model}"
    )


@app.command()
def report(
    runs: Annotated[list[Path], typer.Argument(help="Run directories.", metavar="RUN...")],
    out: Annotated[Path, typer.Option(help="The file to write.")] = Path("report.html"),
    features: Annotated[
        bool | None,
        typer.Option(
            "--features/--no-features",
            help="Maps of features and samples with predictions, from the run's data. Default: for fewer than 8 runs.",
        ),
    ] = None,
) -> None:
    """Write one self-contained HTML page about one or several runs."""
    from fedshift.report import write_report

    write_report(runs, out, features=features, say=lambda text: typer.echo(text, err=True))
    typer.echo(f"wrote {out}")


@app.command()
def ui(
    folder: Annotated[
        Path, typer.Argument(help="A folder with run directories somewhere in it.", metavar="DIR")
    ] = Path("runs"),
    port: Annotated[int | None, typer.Option(help="Default: 8642, or a free one where that is in use.")] = None,
) -> None:
    """Show runs while they go on, in a browser on this machine. Ctrl-C ends it; runs are not touched."""
    from fedshift.report.live import open_server

    with open_server(folder, port) as server:
        typer.echo(f"{server.address} shows the runs below {folder}. Ctrl-C ends it.")
        try:
            server.serve_forever()
        except KeyboardInterrupt:
            server.stopping.set()
            typer.echo("ended")


@app.command()
def privacy(method: Annotated[str, typer.Argument(help="See `fedshift list methods`.")]) -> None:
    """Print what leaves a site under a method, read from the declared types."""
    from fedshift.cli.show import show_privacy

    show_privacy(method)


@app.command()
def cost(
    method: Annotated[str, typer.Argument(help="See `fedshift list methods`.")],
    arch: Annotated[str, typer.Option(help="See `fedshift list archs`.")] = "digits-copa",
    classes: Annotated[int, typer.Option(help="Classes to tell apart.")] = 10,
    sites: Annotated[int, typer.Option(help="Sites that take part.")] = 3,
    image_size: Annotated[int | None, typer.Option(help="Side in pixels. Default: the architecture's own.")] = None,
    batch: Annotated[int, typer.Option(help="Samples in a batch.")] = 8,
    samples: Annotated[int | None, typer.Option(help="Samples at a site. Default: one batch.")] = None,
    json: Annotated[bool, typer.Option("--json", help="For programs.")] = False,
) -> None:
    """Count what a method costs a site, on made-up data: operations a sample, numbers and bytes a round."""
    from fedshift.audit.cost import cost
    from fedshift.cli.cost import show_cost

    found = cost(method, arch, classes, sites=sites, image_size=image_size, batch=batch, samples=samples)
    show_cost(found, as_json=json)


@weights_app.command("convert")
def convert(
    file: Annotated[Path, typer.Argument(help="A PyTorch checkpoint (.pth).")],
    sha256: Annotated[str, typer.Option(help="The published SHA-256 of the file.")],
    out: Annotated[Path | None, typer.Option(help="Default: the same name with .safetensors.")] = None,
) -> None:
    """Turn a .pth file you trust into safetensors, after checking its SHA-256."""
    from fedshift.nn.weights import convert_checkpoint

    written = out or file.with_suffix(".safetensors")
    convert_checkpoint(file, sha256, written)
    typer.echo(f"wrote {written}")


def _names(text: str | None) -> tuple[str, ...] | None:
    return tuple(name.strip() for name in text.split(",") if name.strip()) if text else None


def _seeds(text: str | None) -> tuple[int, ...] | None:
    try:
        return tuple(int(number) for number in _names(text) or ()) or None
    except ValueError:
        raise InputError("config-value", f"--seeds {text}: write whole numbers, 0,1,2") from None
