"""Every command, thin: read the flags, call the library, show the result."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal

import typer
from typer.core import TyperGroup

from fedshift.cli import deploy, handover, own
from fedshift.cli.audit import audit_app
from fedshift.cli.early import refuse_early, refuse_unknown_suite
from fedshift.cli.runs import runs_app
from fedshift.errors import SITE_FAILED, STOPPED, InputError

PANELS = {
    "Data": ("init", "list", "check-data"),
    "Train": ("train", "ui", "demo", "doctor"),
    "Use": ("predict", "export", "serve", "adapt", "estimate", "weights"),
    "Compare": ("compare", "report", "runs", "bench"),
    "Trust": ("privacy", "audit", "cost"),
    "Real machines": ("deploy", "site", "coordinator", "status", "stop"),
}
"""The panels of `fedshift --help` and the commands in each, the most used first."""


class PanelGroup(TyperGroup):
    """Shows the commands in the panels and the order of PANELS."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        commands: dict[str, Any] = dict(self.commands)
        for panel, names in PANELS.items():
            for name in names:
                commands[name].rich_help_panel = panel

    def list_commands(self, ctx: Any) -> list[str]:
        return [name for names in PANELS.values() for name in names]


app = typer.Typer(
    name="fedshift",
    cls=PanelGroup,
    help="Train models across sites that may not share data and whose data look different.",
    no_args_is_help=True,
    add_completion=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
weights_app = typer.Typer(help="Convert weights files.", no_args_is_help=True)
app.add_typer(weights_app, name="weights")
app.add_typer(audit_app, name="audit")
app.add_typer(runs_app, name="runs")
app.add_typer(deploy.deploy_app, name="deploy")
app.add_typer(deploy.site_app, name="site")
app.add_typer(deploy.coordinator_app, name="coordinator")
app.command()(own.init)
app.command()(own.compare)
app.command()(deploy.status)
app.command()(deploy.stop)
app.command()(handover.predict)
app.command()(handover.export)
app.command()(handover.serve)
app.command()(handover.adapt)
app.command()(handover.estimate)

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
    import_: Annotated[
        list[str] | None,
        typer.Option("--import", help="Import a module with your own methods or networks.", metavar="MODULE"),
    ] = None,
) -> None:
    """Train models across sites that may not share data and whose data look different."""
    for module in import_ or ():
        _allow(module)


def _allow(module: str) -> None:
    """The user names code to run: it is looked for in the current folder too, as `python -m` does."""
    import sys

    from fedshift.registry import allow_import, import_module

    if "" not in sys.path:
        sys.path.insert(0, "")
    allow_import(module)
    import_module(module)


@app.command()
def demo(
    out: Annotated[Path, typer.Option(help="The folder for the runs and report.html.")] = Path("runs/demo"),
) -> None:
    """Compare methods on built-in data: a table, and a report to open in a browser."""
    from fedshift.cli.demo import run_demo

    run_demo(out)


@app.command()
def train(
    config: Annotated[
        Path | None, typer.Argument(help="A YAML file with configuration keys. Options override it.", metavar="CONFIG")
    ] = None,
    method: Annotated[
        str | None,
        typer.Option(help="See `fedshift list methods`; auto: chosen on your data; or package.module:Class."),
    ] = None,
    dataset: Annotated[str | None, typer.Option(help="A named data set: `fedshift list datasets`.")] = None,
    data_dir: Annotated[Path | None, typer.Option(help="Your own data: one folder per site.")] = None,
    target: Annotated[
        str | None, typer.Option(help="The site to do well on: held out (generalize) or used without labels (adapt).")
    ] = None,
    sources: Annotated[str | None, typer.Option(help="Labelled sites: a,b,c. Default: all except the target.")] = None,
    home: Annotated[str | None, typer.Option(help="multi-adapt: the labelled site.")] = None,
    targets: Annotated[
        str | None, typer.Option(help="multi-adapt: client sites: a,b,c. Default: all except home.")
    ] = None,
    setting: Annotated[str | None, typer.Option(help="generalize, adapt or multi-adapt.")] = None,
    arch: Annotated[
        str | None, typer.Option(help="See `fedshift list archs`; or your own: package.module:function.")
    ] = None,
    weights: Annotated[str | None, typer.Option(help="Initial weights: imagenet, or a .safetensors file.")] = None,
    rounds: Annotated[
        int | None,
        typer.Option(help="Number of rounds. With --resume it may be another than before."),
    ] = None,
    seed: Annotated[int | None, typer.Option(help="Seed of every random choice.")] = None,
    label_column: Annotated[str | None, typer.Option(help="For tables: the column with the class.")] = None,
    image_size: Annotated[int | None, typer.Option(help="Images are resized to this side length, in pixels.")] = None,
    attack: Annotated[
        list[str] | None, typer.Option(help="Simulate a bad site: poison:SITE:0.3, noise:SITE or other-task:SITE.")
    ] = None,
    engine: Annotated[
        str | None, typer.Option(help="Where sites run: inprocess (here) or nvflare (real machines).")
    ] = None,
    federation: Annotated[Path | None, typer.Option(help="With nvflare: the coordinator's folder.")] = None,
    budget: Annotated[
        float | None, typer.Option(help="With --method auto: minutes for choosing and training. Default: 30.")
    ] = None,
    out: Annotated[Path | None, typer.Option(help="Run directory. Default: runs/METHOD-DATA-TARGET-seedN.")] = None,
    set_: Annotated[list[str] | None, typer.Option("--set", help="Set any configuration key: key=value.")] = None,
    track: Annotated[
        list[str] | None, typer.Option(help="Also send the metrics to tensorboard or mlflow (extras of those names).")
    ] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Continue a run; --resume --out RUN is enough.")] = False,
    debug: Annotated[
        bool, typer.Option("--debug", help="Use one process. A failing step shows its traceback, site and batch.")
    ] = False,
) -> None:
    """Train a model across sites."""
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
    for name in (method, arch):
        if name and ":" in name:
            _allow(name.partition(":")[0])
    if resume and out and config is None and not (method or dataset or data_dir):
        # All else is as the run has it: `--resume --out RUN`, perhaps with other --rounds.
        config = out / "config.yaml" if (out / "config.yaml").is_file() else None
    refuse_early(flags, set_ or [], config)

    from fedshift.cli.show import show_results
    from fedshift.runs.api import default_out
    from fedshift.runs.config import apply_settings, make_config, read_config
    from fedshift.runs.execute import run
    from fedshift.runs.progress import for_terminal

    values = read_config(config) if config else {}
    values |= {key: value for key, value in flags.items() if value is not None}
    values = apply_settings(values, set_ or [])
    minutes = own.minutes_of(budget, values)
    is_auto = values.get("method") == "auto"
    checked = make_config({**values, **({"method": "fedavg"} if is_auto else {})})
    folder = out or default_out(checked, "auto" if is_auto else "")
    options: dict[str, Any] = {"debug": debug, "progress": for_terminal(), "track": track or (), "resume": resume}
    try:
        results = own.train_auto(values, folder, minutes, **options) if is_auto else run(checked, folder, **options)
    except KeyboardInterrupt:
        typer.echo(f"stopped; to continue {folder}, add --resume to the same command", err=True)
        raise typer.Exit(STOPPED) from None
    show_results(results, folder)


@app.command()
def bench(
    suite: Annotated[str, typer.Argument(help="See `fedshift list suites`.", metavar="SUITE")],
    more: Annotated[list[Path] | None, typer.Argument(help="More record files.", hidden=True, metavar="")] = None,
    methods: Annotated[str | None, typer.Option(help="Only these rows: methods or labels, a,b.")] = None,
    seeds: Annotated[str | None, typer.Option(help="Seeds: 0,1,2. Default: those of the suite.")] = None,
    scale: Annotated[
        Literal["mini", "paper"], typer.Option(help="mini: minutes on two cores; paper: the protocol of the paper.")
    ] = "mini",
    data_dir: Annotated[
        Path | None, typer.Option(help="The folder of the data set, or your own data: one folder per site.")
    ] = None,
    out: Annotated[
        Path | None, typer.Option(help="The folder for runs and tables. Default: one in runs/bench.")
    ] = None,
    jobs: Annotated[int | None, typer.Option(help="How many trainings run in parallel. Default: one per core.")] = None,
    set_: Annotated[list[str] | None, typer.Option("--set", help="Set any configuration key: key=value.")] = None,
    records: Annotated[
        list[Path] | None, typer.Option(help="Suite selection: compare rules on these record files without training.")
    ] = None,
) -> None:
    """Reproduce a table or figure of a paper. Run it again to continue it; exit code 3 if trainings failed."""
    refuse_unknown_suite(suite)

    from fedshift.bench.api import benchmark
    from fedshift.cli.show import show_found, show_progress

    if more and not records:
        raise InputError("config-value", f"bench {suite} {more[0]}: one suite per call")
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
            progress=show_progress,
        )
    except KeyboardInterrupt:
        typer.echo("stopped; the same command continues from here", err=True)
        raise typer.Exit(STOPPED) from None
    show_found(found)
    if found.failures:
        raise typer.Exit(SITE_FAILED)


@app.command("list")
def list_(
    what: Annotated[Literal["methods", "datasets", "archs", "suites"], typer.Argument(help="What to list.")],
    part: Annotated[str, typer.Argument(help="Show only names that contain this.", metavar="[PART]")] = "",
    json: Annotated[bool, typer.Option("--json", help="Print JSON, for programs.")] = False,
) -> None:
    """List methods, data sets, architectures or suites."""
    from fedshift.cli.catalogue import show_list

    show_list(what, part, as_json=json)


@app.command("check-data")
def check_data(
    folder: Annotated[Path, typer.Argument(help="A data folder: one folder per site.", metavar="DIR")],
    dataset: Annotated[str | None, typer.Option(help="Read it as this public data set.")] = None,
    label_column: Annotated[str | None, typer.Option(help="For tables: the column with the class.")] = None,
    image_size: Annotated[int | None, typer.Option(help="Images are resized to this side length, in pixels.")] = None,
    shift: Annotated[
        bool, typer.Option("--shift", help="Also show how each site looks and how far they are apart.")
    ] = False,
    json: Annotated[bool, typer.Option("--json", help="Print JSON, for programs.")] = False,
) -> None:
    """Show what is in a data folder and whether a run can start; exit code 2 if not."""
    if not json:
        typer.echo(f"looking at {folder}", err=True)  # What comes next imports torch and reads every file.
    from fedshift.cli.show import show_data_report
    from fedshift.data import DataSource, check_data, open_dataset
    from fedshift.data.shift import measure_shift
    from fedshift.runs.progress import reading_lines

    source = DataSource(dataset, folder, image_size, label_column)
    report = check_data(source, None if json else reading_lines())
    seen = measure_shift(open_dataset(source)) if shift and report.ok else None
    show_data_report(report, as_json=json, shift=seen)
    if not report.ok:
        raise typer.Exit(2)


@app.command()
def doctor() -> None:
    """Check this machine and installation; exit code 2 if something that fedshift needs is broken."""
    from fedshift.cli.doctor import examine

    if not examine():
        raise typer.Exit(2)


@app.command()
def report(
    runs: Annotated[list[Path], typer.Argument(help="Run directories.", metavar="RUN...")],
    out: Annotated[Path, typer.Option(help="The file to write.")] = Path("report.html"),
    features: Annotated[
        bool | None,
        typer.Option(
            "--features/--no-features",
            help="Include samples with predictions and maps of features, made from the run's data."
            " Default: for fewer than 8 runs.",
        ),
    ] = None,
) -> None:
    """Compare runs in one self-contained HTML page."""
    from fedshift.report import write_report

    write_report(runs, out, features=features, say=lambda text: typer.echo(text, err=True))
    typer.echo(f"wrote {out}")


@app.command()
def ui(
    folder: Annotated[
        Path, typer.Argument(help="A folder that contains run directories, at any depth.", metavar="DIR")
    ] = Path("runs"),
    port: Annotated[int | None, typer.Option(help="Default: 8642, or a free port if that is in use.")] = None,
) -> None:
    """Watch runs live in a browser on this machine. Ctrl-C ends it; runs are not affected."""
    from fedshift.report.live import open_server

    with open_server(folder, port) as server:
        typer.echo(f"{server.address} shows the runs below {folder}. Ctrl-C ends it.")
        try:
            server.serve_forever()
        except KeyboardInterrupt:
            server.stopping.set()
            typer.echo("ended")


@app.command()
def privacy(
    method: Annotated[str, typer.Argument(help="See `fedshift list methods`.")],
    epsilon: Annotated[
        float | None, typer.Option(help="Say how much noise keeps a site's answers within this epsilon.")
    ] = None,
    rounds: Annotated[int, typer.Option(help="With --epsilon: rounds of the run.", min=1)] = 20,
    delta: Annotated[float, typer.Option(help="With --epsilon: delta.")] = 1e-5,
    level: Annotated[
        str, typer.Option(help="With --epsilon: site (all its data) or record (one training sample, by DP-SGD).")
    ] = "site",
    clip: Annotated[
        float, typer.Option(help="With --epsilon: the longest update of a site, or gradient of a sample.")
    ] = 1.0,
    samples: Annotated[int, typer.Option(help="With --level record: training samples of the site.", min=1)] = 800,
    batch_size: Annotated[int, typer.Option(help="With --level record: samples per batch on average.", min=1)] = 64,
    local_epochs: Annotated[float, typer.Option(help="With --level record: passes per round.")] = 1.0,
) -> None:
    """Show what leaves a site under a method, and how much noise a budget of differential privacy takes."""
    from fedshift.cli.privacy import show_privacy, show_proposal

    if ":" in method:
        _allow(method.partition(":")[0])
    if epsilon is None:
        show_privacy(method)
    else:
        how = {"clip": clip, "samples": samples, "batch_size": batch_size, "local_epochs": local_epochs}
        show_proposal(method, epsilon, rounds, delta, level, how)


@app.command()
def cost(
    method: Annotated[str, typer.Argument(help="See `fedshift list methods`.")],
    arch: Annotated[str, typer.Option(help="See `fedshift list archs`.")] = "digits-copa",
    classes: Annotated[int, typer.Option(help="Number of classes.")] = 10,
    sites: Annotated[int, typer.Option(help="Number of sites.")] = 3,
    image_size: Annotated[
        int | None, typer.Option(help="Side of the images in pixels. Default: the architecture's.")
    ] = None,
    batch: Annotated[int, typer.Option(help="Samples per batch.")] = 8,
    samples: Annotated[int | None, typer.Option(help="Samples per site. Default: one batch.")] = None,
    json: Annotated[bool, typer.Option("--json", help="Print JSON, for programs.")] = False,
) -> None:
    """Count what a method costs a site: operations per sample, numbers and bytes per round."""
    from fedshift.audit.cost import cost
    from fedshift.cli.show import show_cost

    found = cost(method, arch, classes, sites=sites, image_size=image_size, batch=batch, samples=samples)
    show_cost(found, as_json=json)


@weights_app.command("convert")
def convert(
    file: Annotated[Path, typer.Argument(help="A PyTorch checkpoint (.pth).")],
    sha256: Annotated[str, typer.Option(help="The published SHA-256 of the file.")],
    out: Annotated[Path | None, typer.Option(help="Default: the same name with .safetensors.")] = None,
) -> None:
    """Convert a .pth file that you trust to safetensors, after its SHA-256 is checked."""
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
