"""What a site keeps between rounds: named trees of tensors and plain values, by round, which never leave it."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from fedshift.errors import FedshiftError
from fedshift.federation import codec
from fedshift.federation.engines.workers import MOST_ROUNDS
from fedshift.federation.sealed import damaged, read_tensor_file, unseal, write_sealed

# The coordinator may fall back to the checkpoint before its last: the site must still have that round's state.
_KEPT_VERSIONS = 3
_STATE_FORMAT = 1
_NAME_OF_STATE = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]{0,63}")


class SiteStore:
    """Named trees, one file per round: `<name>@<round>.safetensors`, each with its checksum, name and round inside. A
    damaged file is a `run-corrupt` error: going on without it would end in another model."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def load(self, name: str) -> Any | None:
        """The newest version, or None."""
        _require_name(name)
        versions = self._versions().get(name)
        return read_state(versions[max(versions)]) if versions else None

    def versions(self, name: str) -> Iterator[Any]:
        """Every version that is kept, the newest first."""
        _require_name(name)
        for _, path in sorted(self._versions().get(name, {}).items(), reverse=True):
            yield read_state(path)

    def save(self, name: str, tree: Any, round: int) -> None:
        _require_name(name)
        _require_round(round)
        about = {"format": _STATE_FORMAT, "name": name, "round": round}
        write_sealed(self._folder / f"{name}@{round}.safetensors", tree, about)
        versions = self._versions()[name]
        for old in sorted(versions)[:-_KEPT_VERSIONS]:
            versions[old].unlink(missing_ok=True)

    def rewind(self, round: int) -> None:
        """Forgets everything written after `round`, which is what an interrupted attempt at a later round left behind,
        and checks what stays."""
        _require_round(round)
        for versions in self._versions().values():
            for number, path in versions.items():
                if number > round:
                    path.unlink(missing_ok=True)
        for path in self.newest():
            read_state(path)

    def newest(self) -> list[Path]:
        """The file of the newest version of every name."""
        return [versions[max(versions)] for _, versions in sorted(self._versions().items())]

    def _versions(self) -> dict[str, dict[int, Path]]:
        found: dict[str, dict[int, Path]] = {}
        for path in self._folder.glob("*@*.safetensors"):
            name, _, number = path.stem.rpartition("@")
            if number.isdecimal():
                found.setdefault(name, {})[int(number)] = path
        return found


def read_state(path: Path) -> Any:
    """What a site stored in a file. Those of 0.2.0 and before have no checksum."""
    data = read_tensor_file(path)
    try:
        header = codec.read_header(codec.read_safetensors(data)[1])
        if not header.keys() & {"format", "sha256", "values"}:
            return codec.unpack(data)
        tree, header = unseal(data)
        if f"{header.get('name')}@{header.get('round')}" != path.stem or header.get("format") != _STATE_FORMAT:
            raise FedshiftError("message-invalid", "it is the state of another name, round or version")
        return tree
    except FedshiftError as error:
        raise damaged(path, error) from error


def _require_name(name: str) -> None:
    if type(name) is not str or not _NAME_OF_STATE.fullmatch(name):
        raise FedshiftError("message-invalid", f"{name!r} cannot name a site's state: use letters, digits, - and _")


def _require_round(round: int) -> None:
    if type(round) is not int or not 0 <= round <= MOST_ROUNDS:
        raise FedshiftError("message-invalid", f"{round!r} is not a round")
