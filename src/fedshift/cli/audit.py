"""`fedshift audit`: attacks, carried out on your own data, and what sites have let out."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from fedshift.errors import InputError

if TYPE_CHECKING:
    from fedshift.audit.leakage import Message

audit_app = typer.Typer(help="See what leaks from your own federation, and what left it.", no_args_is_help=True)


@audit_app.callback()
def audit() -> None:
    """See what leaks from your own federation, and what left it."""


@audit_app.command()
def leakage(
    dataset: Annotated[str | None, typer.Option(help="A named data set: `fedshift list datasets`.")] = None,
    data_dir: Annotated[Path | None, typer.Option(help="Your own data: one folder per site.")] = None,
    site: Annotated[
        str | None, typer.Option(help="The site whose images are attacked. Default: the first one.")
    ] = None,
    arch: Annotated[str, typer.Option(help="See `fedshift list archs`.")] = "digits-csac",
    image_size: Annotated[int | None, typer.Option(help="Images are resized to this side length, in pixels.")] = None,
    messages: Annotated[
        str, typer.Option(help="IMAGES/BATCH of each message: 4/4 is one step, 16/4 an epoch of four steps.")
    ] = "1/1,4/4,4/2,16/4",
    trials: Annotated[int, typer.Option(help="Trials per message, each with other images.", min=1)] = 4,
    steps: Annotated[int, typer.Option(help="Steps of the attacker's search.", min=1)] = 400,
    noise: Annotated[
        float, typer.Option(help="Noise added to the weights before they leave, as policy.noise.", min=0)
    ] = 0.0,
    seed: Annotated[int, typer.Option(help="Seed of every random choice.")] = 0,
    set_: Annotated[list[str] | None, typer.Option("--set", help="Set any configuration key: key=value.")] = None,
    out: Annotated[Path, typer.Option(help="The folder for leakage.png and leakage.json.")] = Path("runs/leakage"),
) -> None:
    """Rebuild a site's images from the model that it sends, after one batch and after an epoch."""
    from rich.console import Console

    from fedshift.audit.leakage import leakage
    from fedshift.bench.papers.kd3a import LEAKAGE_NOTES, leakage_sheet, write_leakage
    from fedshift.bench.suite import with_time_left
    from fedshift.bench.tables import text
    from fedshift.cli.show import show_progress
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
        progress=with_time_left(show_progress),
        **keys,
    )
    (picture,) = write_leakage(found, out)
    console = Console(highlight=False, markup=False, soft_wrap=True)
    for note in LEAKAGE_NOTES:
        console.print(note)
    sheet = leakage_sheet(found)
    console.print(f"\n{found.dataset}, site {found.site}, {found.arch}: {sheet.title}\n{text(sheet)}")
    console.print(f"picture: {picture}\nnumbers: {picture.with_suffix('.json')}")


@audit_app.command()
def ledger(
    folder: Annotated[Path, typer.Argument(help="The folder of a site, of a run, or a site's kit.")],
) -> None:
    """Verify the ledgers in a folder and sum up what they list; exit code 2 if one was changed."""
    from rich.console import Console

    from fedshift.audit.ledger import audit_ledger, find_ledgers
    from fedshift.cli.show import show_ledger

    broken: list[InputError] = []
    console = Console(highlight=False, markup=False, soft_wrap=True)
    for path in find_ledgers(folder):
        try:
            show_ledger(console, audit_ledger(path))
        except InputError as error:
            broken.append(error)
            console.print(f"{path}: BROKEN. {error.message}\n")
    if broken:
        more = f" ({len(broken) - 1} more are broken)" if len(broken) > 1 else ""
        raise InputError(broken[0].code, broken[0].message + more)


@audit_app.command()
def dpia(
    run: Annotated[Path, typer.Argument(help="The directory of a finished run.")],
    out: Annotated[Path | None, typer.Option(help="A Markdown file to write. Default: print it.")] = None,
) -> None:
    """Draft a data-protection impact assessment from a run; what only people can say is left open."""
    from fedshift.audit.dpia import assessment
    from fedshift.files import write_atomically

    text = assessment(run)
    if out is None:
        print(text)
        return
    write_atomically(out, text.encode())
    print(f"draft: {out}")


def _message(text: str) -> Message:
    from fedshift.audit.leakage import Message

    images, _, batch = text.strip().partition("/")
    if not (images.isdecimal() and batch.isdecimal() and 1 <= int(batch) <= int(images)):
        raise InputError("config-value", f"messages: {text.strip()!r} is not IMAGES/BATCH, such as 1/1 or 16/4")
    return Message(int(images), int(batch))
