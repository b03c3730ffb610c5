"""Commands for a finished model: into other programs, to people, to a new site."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import typer

RunFolder = Annotated[Path, typer.Argument(help="A run directory.", metavar="RUN")]
Site = Annotated[str | None, typer.Option(help="The site whose model is used, if the run has one per site.")]
Selected = Annotated[
    Literal["last", "source-val"],
    typer.Option(help="The model of the last round, or of the round chosen on source validation."),
]


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
