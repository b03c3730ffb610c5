"""`fedshift audit`: what could go wrong, tried out."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from fedshift.errors import InputError

if TYPE_CHECKING:
    from fedshift.audit.leakage import Message

audit_app = typer.Typer(help="Try out what could go wrong.", no_args_is_help=True)


@audit_app.callback()
def audit() -> None:
    """Try out what could go wrong."""


@audit_app.command()
def leakage(
    dataset: Annotated[str | None, typer.Option(help="A named data set: `fedshift list datasets`.")] = None,
    data_dir: Annotated[Path | None, typer.Option(help="Your own folder, one sub-folder a site.")] = None,
    site: Annotated[str | None, typer.Option(help="Whose images are attacked. Default: the first domain.")] = None,
    arch: Annotated[str, typer.Option(help="See `fedshift list archs`.")] = "digits-csac",
    image_size: Annotated[int | None, typer.Option(help="Side in pixels that images are resized to.")] = None,
    messages: Annotated[
        str, typer.Option(help="IMAGES/BATCH of each message: 4/4 is one step, 16/4 an epoch of four.")
    ] = "1/1,4/4,4/2,16/4",
    trials: Annotated[int, typer.Option(help="Sites, each with other images, for every message.", min=1)] = 4,
    steps: Annotated[int, typer.Option(help="Of the attacker's search.", min=1)] = 400,
    noise: Annotated[float, typer.Option(help="Added to the weights before they leave, as policy.noise.", min=0)] = 0.0,
    seed: Annotated[int, typer.Option(help="Decides every random choice.")] = 0,
    set_: Annotated[list[str] | None, typer.Option("--set", help="Any configuration key, key=value.")] = None,
    out: Annotated[Path, typer.Option(help="For leakage.png and leakage.json.")] = Path("runs/leakage"),
) -> None:
    """Rebuild a site's images from the model it sends: after every batch, and after a whole epoch."""
    from rich.console import Console

    from fedshift.audit.leakage import leakage
    from fedshift.bench.functions import timed
    from fedshift.bench.leaks import NOTES, sheet, write_leakage
    from fedshift.bench.tables import text
    from fedshift.cli.bench import told
    from fedshift.functional.inversion import Search
    from fedshift.runs.config import apply_settings

    if dataset is None and data_dir is None:
        raise InputError("data-missing", "say whose images to attack: --dataset NAME or --data-dir DIR")
    given = {"dataset": dataset, "data_dir": data_dir, "arch": arch, "image_size": image_size}
    keys = apply_settings({key: value for key, value in given.items() if value is not None}, set_ or [])
    found = leakage(
        site,
        messages=[_message(part) for part in messages.split(",")],
        trials=trials,
        search=Search(steps=steps),
        noise=noise,
        seed=seed,
        tell=timed(told),
        **keys,
    )
    (picture,) = write_leakage(found, out)
    console = Console(highlight=False, markup=False, soft_wrap=True)
    for note in NOTES:
        console.print(note)
    console.print(f"\n{found.dataset}, site {found.site}, {found.arch}: {sheet(found).title}\n{text(sheet(found))}")
    console.print(f"picture: {picture}\nnumbers: {picture.with_suffix('.json')}")


def _message(text: str) -> Message:
    from fedshift.audit.leakage import Message

    images, _, batch = text.strip().partition("/")
    if not (images.isdecimal() and batch.isdecimal() and 1 <= int(batch) <= int(images)):
        raise InputError("config-value", f"messages: {text.strip()!r} is not IMAGES/BATCH, such as 1/1 or 16/4")
    return Message(int(images), int(batch))
