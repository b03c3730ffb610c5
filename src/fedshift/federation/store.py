"""What a site keeps for itself between rounds (a local model, an optimizer), versioned so that a run can go back."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from fedshift.federation import codec
from fedshift.files import write_atomically

# The coordinator may fall back to the checkpoint before its last: the site must still have that round's state.
_KEPT_VERSIONS = 3


class SiteStore:
    """Named trees, one file a round: `<name>@<round>.safetensors`."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def load(self, name: str) -> Any | None:
        """The newest version, or None."""
        versions = self._versions(name)
        return codec.unpack(versions[max(versions)].read_bytes()) if versions else None

    def save(self, name: str, tree: Any, round: int) -> None:
        write_atomically(self._folder / f"{name}@{round}.safetensors", codec.pack(tree))
        versions = self._versions(name)
        for old in sorted(versions)[:-_KEPT_VERSIONS]:
            versions[old].unlink(missing_ok=True)

    def rewind(self, round: int) -> None:
        """Forgets everything written after `round`: what an interrupted attempt at a later round left behind."""
        for path in self._folder.glob("*@*.safetensors"):
            match = re.search(r"@(\d+)$", path.stem)
            if match and int(match.group(1)) > round:
                path.unlink(missing_ok=True)

    def _versions(self, name: str) -> dict[int, Path]:
        return {int(path.stem.rsplit("@", 1)[1]): path for path in self._folder.glob(f"{name}@*.safetensors")}
