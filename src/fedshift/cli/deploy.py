"""The commands for federations of real machines."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

deploy_app = typer.Typer(help="Set up a federation of real machines.", no_args_is_help=True)
site_app = typer.Typer(help="Check and run a site.", no_args_is_help=True)
coordinator_app = typer.Typer(help="Run the coordinator's server.", no_args_is_help=True)

Kit = Annotated[Path, typer.Argument(help="The folder that the site was given.", metavar="KIT")]
Folder = Annotated[Path, typer.Argument(help="The coordinator's folder.", metavar="COORDINATOR")]
Data = Annotated[Path | None, typer.Option(help="The site's data: DIR/SITE/CLASS/*.png, DIR/SITE.npz or .csv.")]
PolicyFile = Annotated[
    Path | None, typer.Option("--policy", help="A YAML file: the site's own rules on what may leave it.")
]
Named = Annotated[str | None, typer.Option(help="Read the data as this data set: `fedshift list datasets`.")]
LabelColumn = Annotated[str | None, typer.Option(help="For tables: the column with the class.")]


@deploy_app.command("init")
def init(
    project: Annotated[Path, typer.Argument(help="A YAML file: name, address, sites.", metavar="PROJECT.yaml")],
    out: Annotated[Path | None, typer.Option(help="The folder to write to. Default: the project's name.")] = None,
    renew: Annotated[bool, typer.Option("--renew", help="Renew every certificate.")] = False,
) -> None:
    """Write the coordinator's folder and a folder to hand to each site."""
    from fedshift.deploy.project import read_project
    from fedshift.deploy.provision import init_federation

    described = read_project(project)
    folder = out or Path(described.name)
    given = init_federation(described, folder, renew=renew)
    typer.echo(f"coordinator   {folder / 'coordinator'}")
    for kit in given:
        typer.echo(f"hand out      {kit}")
    typer.echo(f"keep offline  {folder / 'authority'}   (its owner can add sites)")


@site_app.command("check")
def check(
    kit: Kit,
    data: Data = None,
    policy: PolicyFile = None,
    dataset: Named = None,
    label_column: LabelColumn = None,
) -> None:
    """Check kit, data, policy and connection; exit code 2 if one of them is not in order."""
    from fedshift.deploy.site import SiteOptions, check_site

    checks = check_site(kit, SiteOptions(data, policy, dataset, label_column))
    for line in checks:
        typer.echo(f"{'ok  ' if line.ok else 'FAIL'}  {line.what:<11} {line.says}")
    if not all(line.ok for line in checks):
        raise typer.Exit(2)


@site_app.command("start")
def start_site(
    kit: Kit,
    data: Data = None,
    policy: PolicyFile = None,
    dataset: Named = None,
    label_column: LabelColumn = None,
    device: Annotated[str, typer.Option(help="cpu or cuda.")] = "cpu",
) -> None:
    """Take part in runs until stopped (Ctrl-C or SIGTERM)."""
    from fedshift.deploy import site

    options = site.SiteOptions(data, policy, dataset, label_column, device=device)
    raise typer.Exit(site.start_site(kit, options, tell=typer.echo))


@coordinator_app.command("start")
def start_coordinator(folder: Folder) -> None:
    """Run the server that sites connect to until stopped (Ctrl-C, SIGTERM or `fedshift stop`)."""
    from fedshift.deploy import coordinator

    raise typer.Exit(coordinator.start_coordinator(folder, ready=typer.echo))


def status(folder: Folder) -> None:
    """Show which sites are connected, their versions, and how far the last run is."""
    from fedshift.deploy.coordinator import federation_status

    found = federation_status(folder)
    run = f"run {found.run}, round {found.round}" if found.run else "no run yet"
    typer.echo(f"{found.project} at {found.address}: {run}, {found.jobs} running now")
    for site in found.sites:
        seen = "not connected" if site.seen is None else f"seen {site.seen:.0f} s ago"
        typer.echo(f"  {site.name:<20} {seen:<18} fedshift {site.version or '?':<10} {site.last or ''}")


def stop(folder: Folder) -> None:
    """Stop the coordinator's server. A run in progress ends and can be resumed."""
    from fedshift.deploy.coordinator import stop_coordinator

    typer.echo("stopped" if stop_coordinator(folder) else "no server is running")
