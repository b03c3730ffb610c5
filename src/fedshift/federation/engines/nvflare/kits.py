"""The folders that provisioning made: what is where, and whom they belong to."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fedshift.errors import InputError

COORDINATOR_USER = "coordinator@fedshift.local"

LOST_AFTER_FILE = "local/lost_after.json"
_LOST_AFTER = 30
"""Seconds, where a kit does not say."""


@dataclass(frozen=True)
class SiteKit:
    """One site's folder: its certificate, its key, and where the coordinator is."""

    folder: Path
    site: str
    project: str
    host: str
    port: int

    @property
    def certificate(self) -> Path:
        return self.folder / "startup" / "client.crt"

    @property
    def key(self) -> Path:
        return self.folder / "startup" / "client.key"

    @property
    def authority(self) -> Path:
        return self.folder / "startup" / "rootCA.pem"

    @property
    def lost_after(self) -> float:
        """Seconds of silence after which the server takes this site for lost."""
        try:
            return float(json.loads((self.folder / LOST_AFTER_FILE).read_text()))
        except (OSError, ValueError, TypeError):
            return _LOST_AFTER

    @classmethod
    def read(cls, folder: Path) -> SiteKit:
        text = _read(folder / "startup" / "fed_client.json", folder, "a site's kit")
        try:
            server = text["servers"][0]
            host, port = server["service"]["target"].rsplit(":", 1)
            return cls(folder.resolve(), text["client"]["fqsn"], server["name"], host, int(port))
        except (KeyError, IndexError, TypeError, ValueError) as error:
            raise _not_a_kit(folder, "a site's kit") from error


@dataclass(frozen=True)
class Coordinator:
    """The coordinator's folder: the server's kit, the kit of the user that submits runs, and who takes part."""

    folder: Path
    project: str
    host: str
    port: int
    sites: tuple[str, ...]

    @property
    def server_kit(self) -> Path:
        return self.folder / "server"

    @property
    def admin_kit(self) -> Path:
        return self.folder / "admin"

    @property
    def status_file(self) -> Path:
        """What the last run knew of sites and rounds."""
        return self.folder / "status.json"

    @property
    def pid_file(self) -> Path:
        return self.folder / "server.pid"

    @classmethod
    def read(cls, folder: Path) -> Coordinator:
        text = _read(folder / "federation.json", folder, "a coordinator's folder")
        try:
            return cls(folder.resolve(), text["project"], text["host"], int(text["port"]), tuple(text["sites"]))
        except (KeyError, TypeError, ValueError) as error:
            raise _not_a_kit(folder, "a coordinator's folder") from error


def _read(path: Path, folder: Path, what: str) -> Any:
    try:
        return json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise _not_a_kit(folder, what) from error


def _not_a_kit(folder: Path, what: str) -> InputError:
    return InputError("deploy-kit", f"{folder} is not {what}, or is damaged: `fedshift deploy init` writes them")
