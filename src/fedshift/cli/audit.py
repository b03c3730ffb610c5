"""`fedshift audit`: attacks, carried out on your own data, and what sites have let out."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from fedshift.errors import InputError

audit_app = typer.Typer(help="See what leaks from your own federation, and what left it.", no_args_is_help=True)


@audit_app.callback()
def audit() -> None:
    """See what leaks from your own federation, and what left it."""


@audit_app.command()
def leakage(
    method: Annotated[str | None, typer.Argument(help="The method whose messages are attacked.")] = None,
    every: Annotated[bool, typer.Option("--all", help="Every method whose sites send something of their own.")] = False,
    dataset: Annotated[str | None, typer.Option(help="A named data set: `fedshift list datasets`.")] = None,
    data_dir: Annotated[Path | None, typer.Option(help="Your own data: one folder per site.")] = None,
    site: Annotated[str | None, typer.Option(help="The site that is attacked. Default: the first one.")] = None,
    sizes: Annotated[str, typer.Option(help="How many samples the site has, in turn.")] = "1,8,32,128",
    arch: Annotated[str, typer.Option(help="See `fedshift list archs`.")] = "digits-csac",
    image_size: Annotated[int | None, typer.Option(help="Images are resized to this side length, in pixels.")] = None,
    dp: Annotated[float | None, typer.Option(help="With the noise of this epsilon, for 40 rounds.")] = None,
    secure: Annotated[bool, typer.Option(help="With secure aggregation: only the sum over sites is seen.")] = False,
    steps: Annotated[int, typer.Option(help="Steps of a search for images.", min=1)] = 300,
    shadows: Annotated[int, typer.Option(help="Shadow sites for membership.", min=0)] = 6,
    minutes: Annotated[float, typer.Option(help="For each method; what is left then is not tried, and said so.")] = 10,
    seed: Annotated[int, typer.Option(help="Seed of every random choice.")] = 0,
    set_: Annotated[list[str] | None, typer.Option("--set", help="Set any configuration key: key=value.")] = None,
    out: Annotated[Path, typer.Option(help="The folder for leakage.html, .json and .md.")] = Path("runs/leakage"),
) -> None:
    """Attack what really leaves a site: rebuild images, recognise samples, tell who took part."""
    from rich.console import Console

    from fedshift.audit.leakage.study import attackable, leakage
    from fedshift.bench.suite import with_time_left
    from fedshift.cli.show import show_progress
    from fedshift.report.leakage import read_leakage, write_leakage
    from fedshift.runs.config import apply_settings

    if dataset is None and data_dir is None:
        raise InputError("data-missing", "say whose images to attack: --dataset NAME or --data-dir DIR")
    if (method is None) != every:
        raise InputError("config-value", "name a method, or say --all")
    given = {"dataset": dataset, "data_dir": data_dir, "image_size": image_size}
    keys = apply_settings({key: value for key, value in given.items() if value is not None}, set_ or [])
    console = Console(highlight=False, markup=False, soft_wrap=True)
    for name in attackable() if method is None else (method,):
        try:
            found = leakage(
                name,
                sizes=_sizes(sizes),
                site=site,
                steps=steps,
                shadows=shadows,
                dp=dp,
                secure=secure,
                minutes=minutes,
                seed=seed,
                progress=with_time_left(show_progress),
                **{"arch": arch, **keys},
            )
        except InputError as error:
            if method is not None:
                raise
            console.print(f"{name}: not studied. {error.message}")
            continue
        page = write_leakage(found, out)
        for case in found.cases:
            worst = case.worst
            by = f" by {worst.attack}" if worst and case.verdict != "nothing found" else ""
            usual = f" (by default the site refuses: {case.by_default})" if case.by_default else ""
            missing = f"; not tried: {', '.join(case.left_out)}" if case.left_out else ""
            console.print(f"{found.method}, {case.size} samples: {case.verdict}{by}{usual}{missing}")
    console.print(f"page: {page}\nnumbers: {page.with_suffix('.json')} ({len(read_leakage(out))} studies)")


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


def _sizes(text: str) -> tuple[int, ...]:
    parts = [part.strip() for part in text.split(",")]
    if not all(part.isdecimal() and int(part) > 0 for part in parts):
        raise InputError("config-value", f"sizes: {text!r} is not a list of numbers such as 1,8,32")
    return tuple(int(part) for part in parts)
