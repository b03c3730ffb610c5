"""What a site decides itself: where its data is, how it is read, its policy. The coordinator never learns of it."""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

FILE = "local/fedshift.json"


@dataclass(frozen=True)
class SiteSettings:
    """Written by `fedshift site start` into the site's kit. `policy` holds the keys of the site's policy file, `worker`
    names the module that the site's child process runs."""

    site: str
    data: str | None
    worker: str
    dataset: str | None = None
    policy: Mapping[str, Any] = field(default_factory=dict)
    device: str = "cpu"

    def write(self, kit: Path) -> None:
        (kit / FILE).write_text(json.dumps(dataclasses.asdict(self), indent=2))

    @classmethod
    def read(cls, kit: Path) -> SiteSettings:
        return cls(**json.loads((kit / FILE).read_text()))


def run_folder(kit: Path, run: str) -> Path:
    """Where a site keeps its state, ledger and log of a run. The name comes from outside: letters and digits only."""
    if not re.fullmatch(r"[0-9a-f]{8,64}", run):
        raise ValueError(f"{run!r} is not the name of a run")
    return kit / "runs" / run


def worker_setup(
    settings: SiteSettings, kit: Path, run: str, part: Mapping[str, Any], plan: Mapping[str, Any] | None
) -> dict[str, Any]:
    """What the site's child process is told: the coordinator's `part` for this site, and all else the site's own."""
    spec = {
        "name": settings.site,
        "role": part["role"],
        "source": {"name": settings.dataset, "data_dir": settings.data, **part["reading"]},
        "domains": part["domains"],
        "folder": str(run_folder(kit, run)),
        "policy": settings.policy,
        "train_cap": part["train_cap"],
        "train_share": part["train_share"],
        "device": settings.device,
        "copies": part["copies"],
        "attacks": [],
    }
    # Nothing that came from outside may name a place to read from or write to.
    if not set(part["reading"]) <= {"image_size", "label_column", "task", "classes"}:
        raise ValueError("the coordinator may say how data is read, not where it is")
    return {"plan": plan, "specs": [spec]}
