"""From a project file to folders: one for the coordinator, one to hand to each site, and the authority's own."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import tempfile
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import yaml

from fedshift.deploy.hardening import harden_server, harden_site
from fedshift.deploy.project import Project
from fedshift.errors import InputError
from fedshift.federation.engines.nvflare.kits import COORDINATOR_USER, LOST_AFTER_FILE

ORGANISATION = "fedshift"
_ROOT_DAYS = 3650


def init_federation(project: Project, out: Path, *, renew: bool = False) -> list[Path]:
    """Writes `coordinator/`, `sites/<name>/`, `observers/<name>/` and `authority/` below `out`; returns the folders to
    hand out. Run again it adds sites and keeps what was there; with `renew` every certificate is made anew, under the
    same authority, so that old and new ones work side by side until the old run out."""
    if find_spec("nvflare") is None:
        raise InputError("engine-missing", 'engine nvflare is not installed: pip install "fedshift[nvflare]"')
    authority = out / "authority"
    state = authority / project.name / "state" / "cert.json"
    _make_private(authority)
    if {folder.name for folder in authority.iterdir()} - {project.name}:
        raise InputError("deploy-kit", f"{out} belongs to another project: choose another --out")
    if renew and state.exists():
        kept = {key: value for key, value in json.loads(state.read_text()).items() if key.startswith("root_")}
        state.write_text(json.dumps(kept))
    kits = _provision(project, authority)
    coordinator = out / "coordinator"
    _move(kits / project.host, coordinator / "server")
    _move(kits / COORDINATOR_USER, coordinator / "admin")
    harden_server((coordinator / "server").resolve(), project.lost_after)
    facts = {
        "project": project.name,
        "host": project.host,
        "port": project.port,
        "sites": list(project.sites),
        "lost_after": project.lost_after,
    }
    (coordinator / "federation.json").write_text(json.dumps(facts, indent=2))
    given = []
    for site in project.sites:
        kit = out / "sites" / site
        _move(kits / site, kit)
        harden_site(kit)
        (kit / LOST_AFTER_FILE).write_text(json.dumps(project.lost_after))
        (kit / "README.txt").write_text(_INSTRUCTIONS.format(site=site, project=project.name, address=project.address))
        given.append(kit)
    for person in project.observers:
        _move(kits / person, out / "observers" / person)
        given.append(out / "observers" / person)
    shutil.rmtree(kits)
    _make_private(coordinator)
    for kit in given:
        _make_private(kit)
    return given


def _provision(project: Project, authority: Path) -> Path:
    """NVFlare's own provisioning, into the authority's folder; returns where the kits are."""
    with tempfile.TemporaryDirectory(prefix="fedshift-provision-") as folder:
        description = Path(folder) / "project.yml"
        description.write_text(yaml.safe_dump(_description(project)))
        code = "from nvflare.cli import main; main()"
        done = subprocess.run(
            [
                sys.executable,
                "-c",
                code,
                "provision",
                "--force",
                "-p",
                str(description),
                "-w",
                str(authority.resolve()),
            ],
            capture_output=True,
            text=True,
            cwd=folder,
        )
    made = sorted((authority / project.name).glob("prod_*"))
    if done.returncode or not made:
        said = (done.stderr + done.stdout).strip().splitlines()
        reason = next((line for line in said if not line.startswith("Project yaml file")), "no message")
        raise InputError("deploy-project", f"NVFlare could not provision this project: {reason}")
    return made[-1]


def _description(project: Project) -> dict[str, Any]:
    people: list[dict[str, Any]] = [
        {"name": project.host, "type": "server", "org": ORGANISATION, "fed_learn_port": project.port},
        *({"name": site, "type": "client", "org": ORGANISATION} for site in project.sites),
        {"name": COORDINATOR_USER, "type": "admin", "org": ORGANISATION, "role": "lead"},
        *({"name": person, "type": "admin", "org": ORGANISATION, "role": "member"} for person in project.observers),
    ]
    builders: list[dict[str, Any]] = [
        {"path": "workspace.WorkspaceBuilder", "args": {"template_file": ["master_template.yml"]}},
        {"path": "static_file.StaticFileBuilder", "args": {"config_folder": "config", "scheme": "tcp"}},
        {"path": "cert.CertBuilder", "args": {"root_valid_days": _ROOT_DAYS}},
        {"path": "signature.SignatureBuilder", "args": {}},
    ]
    return {
        "api_version": 3,
        "name": project.name,
        "description": "made by fedshift deploy init",
        "participants": people,
        "builders": [{**builder, "path": f"nvflare.lighter.impl.{builder['path']}"} for builder in builders],
    }


def _move(kit: Path, to: Path) -> None:
    """Replaces what provisioning makes and leaves the rest: runs, storage, settings."""
    to.mkdir(parents=True, exist_ok=True)
    shutil.rmtree(to / "startup", ignore_errors=True)
    shutil.move(kit / "startup", to / "startup")
    for script in (to / "startup").glob("*.sh"):
        script.unlink()  # They would start a process past the checks of `fedshift site start`.
    (to / "local").mkdir(exist_ok=True)
    for file in (kit / "local").iterdir():
        shutil.move(file, to / "local" / file.name)
    (to / "transfer").mkdir(exist_ok=True)


def _make_private(folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    folder.chmod(0o700)
    for key in folder.rglob("*.key"):
        key.chmod(0o600)


_INSTRUCTIONS = """Kit of site {site!r} in the federation {project!r}

This folder holds the site's private key: pass it on over a safe way, keep it readable for one user only, back it up.

1. Install the same version of fedshift as the coordinator:  pip install "fedshift[nvflare]"
2. Put the data where only this machine reads it: DIR/{site}/<class>/*.png, or DIR/{site}.npz, or DIR/{site}.csv
3. Write policy.yaml, the site's own rules on what may leave it, for example:

       min_samples: 50
       allow: [weights, count, counts, metric, facts]

4. Check:  fedshift site check  THIS_FOLDER --data DIR --policy policy.yaml
5. Start:  fedshift site start  THIS_FOLDER --data DIR --policy policy.yaml

The machine needs an outgoing TCP connection to {address}. Nothing connects to it from outside.
What left the site is listed in runs/<run>/ledger.jsonl in this folder, errors in runs/<run>/site.log.
"""
