"""Commands for a finished model: into other programs, to people, to a new site."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import typer

from fedshift.cli.early import refuse_missing_run

RunFolder = Annotated[Path, typer.Argument(help="A run directory.", metavar="RUN")]
Site = Annotated[str | None, typer.Option(help="The site whose model is used, if the run has one per site.")]
Selected = Annotated[
    Literal["last", "source-val"],
    typer.Option(help="The model of the last round, or of the round chosen on source validation."),
]


def predict(
    run: RunFolder,
    inputs: Annotated[Path, typer.Argument(help="A folder of images, or a .csv table.", metavar="FOLDER")],
    out: Annotated[
        Path, typer.Option(help="The CSV file to write. For segmentation, a folder of masks is written beside it.")
    ] = Path("predictions.csv"),
    site: Annotated[str | None, typer.Option(help="The site whose model is used, if the run has one per site.")] = None,
    select: Annotated[
        Literal["last", "source-val"],
        typer.Option(help="The model of the last round, or of the round chosen on source validation."),
    ] = "last",
) -> None:
    """Predict classes for new images or rows with a trained run."""
    refuse_missing_run(run)
    from fedshift.runs.health import PREDICT_RULE
    from fedshift.runs.predict import predict_files

    counts = predict_files(run, inputs, out, site=site, select=select)
    typer.echo(
        f"{counts.predicted} predictions in {out}"
        + (f", {counts.skipped} unreadable" if counts.skipped else "")
        + f", by {counts.model}"
    )
    if counts.unsure:
        kind = "calibrated on the sources' validation" if counts.calibrated else "not calibrated"
        shown = ", ".join(f"{name} ({confidence:.2f})" for name, confidence in counts.unsure)
        typer.echo(f"least sure of: {shown}; confidence is {kind}")
    if counts.unlike:
        typer.echo(
            f"note: {counts.unlike} of {counts.predicted} are unlike the sources' data: see the column note", err=True
        )
    for note in filter(None, (counts.together, counts.note)):
        typer.echo(f"note: {note}", err=True)
    if select == "last":
        typer.echo(PREDICT_RULE, err=True)


def export(
    run: RunFolder,
    format: Annotated[
        Literal["onnx", "torch", "safetensors"],
        typer.Option(help="onnx: any runtime; torch: plain PyTorch (torch.export); safetensors: weights only."),
    ] = "onnx",
    out: Annotated[
        Path | None, typer.Option(help="The file to write. Default: model.onnx, model.pt2 or model.safetensors.")
    ] = None,
    site: Site = None,
    select: Selected = "last",
    check: Annotated[
        Path | None,
        typer.Option(help="Pictures or a table to compare the exported model on. Default: the run's own data."),
    ] = None,
) -> None:
    """Write a model for programs without fedshift, and check that it predicts the same."""
    from fedshift.handover.export import TOLERANCE, export_model

    for made in export_model(run, out, format, site=site, select=select, check=check):
        typer.echo(
            f"wrote {made.path}: {made.whose}; largest difference of a probability to predict:"
            f" {made.largest_difference:.1e} (allowed {TOLERANCE:g}) on {made.samples} samples from {made.checked_on}"
        )


def serve(
    run: RunFolder,
    port: Annotated[int | None, typer.Option(help="Default: 8643, or a free port if that is in use.")] = None,
    host: Annotated[
        str, typer.Option(help="The address to listen on. Any but 127.0.0.1 can be reached from other machines.")
    ] = "127.0.0.1",
    site: Site = None,
    select: Selected = "last",
    max_megabytes: Annotated[int, typer.Option(help="Larger pictures are refused unread.", min=1, max=256)] = 20,
) -> None:
    """Answer predictions over HTTP, with a page to drop a picture on. Ctrl-C ends it."""
    from fedshift.handover.serve import open_model_server
    from fedshift.localserver import HOST

    with open_model_server(run, site=site, select=select, port=port, host=host, max_megabytes=max_megabytes) as server:
        if host != HOST:
            typer.echo(
                f"warning: {host} can be reached from other machines, and the connection is not encrypted: put a"
                " server with TLS in front of it",
                err=True,
            )
        typer.echo(f"{server.model.name}, by {server.model.whose}: open {server.page}")
        typer.echo(
            f'programs: curl -H "Authorization: Bearer {server.token}" --data-binary @PICTURE {server.address}predict'
        )
        typer.echo("Pictures are not kept, requests are not logged. Ctrl-C ends it.")
        try:
            server.serve_forever()
        except KeyboardInterrupt:
            typer.echo("ended")


def adapt(
    run: RunFolder,
    folder: Annotated[
        Path,
        typer.Argument(help="The new site, pictures or a .csv table, without labels.", metavar="FOLDER"),
    ],
    out: Annotated[Path, typer.Option(help="The run directory to write.")],
    site: Annotated[
        str | None, typer.Option(help="Begin with the model of this site, if the run has one per site.")
    ] = None,
    select: Selected = "last",
    epochs: Annotated[int, typer.Option(help="With --keep adapted: passes over the new site's data.", min=1)] = 8,
    keep: Annotated[
        Literal["auto", "statistics", "adapted"],
        typer.Option(help="auto: as it was or with own statistics, by the estimate. adapted: check it with labels."),
    ] = "auto",
    seed: Annotated[int, typer.Option(help="Seed of every random choice.")] = 0,
) -> None:
    """Fit a finished model to a new site without labels, while no other site is online."""
    from fedshift.handover.adapt import adapt_run

    say = lambda text: typer.echo(text, err=True)  # noqa: E731
    found = adapt_run(run, folder, out, site=site, select=select, epochs=epochs, keep=keep, seed=seed, say=say)
    for line in found.lines():
        typer.echo(line.removeprefix("- "))
    typer.echo(f"kept: {found.kept.name}; run in {found.path}")


def estimate(
    run: RunFolder,
    out: Annotated[Path | None, typer.Option(help="The folder for its trainings. Default: beside the run.")] = None,
) -> None:
    """Train a run again without each site in turn: what to expect at a site that nobody has seen."""
    from fedshift.errors import STOPPED
    from fedshift.handover.estimate import estimate_run

    try:
        found = estimate_run(run, out, say=lambda text: typer.echo(text, err=True))
    except KeyboardInterrupt:
        typer.echo("stopped; the same command continues from here", err=True)
        raise typer.Exit(STOPPED) from None
    for line in found.lines():
        typer.echo(line)
