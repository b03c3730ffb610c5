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
SECRET = "local/secret"
"""The site's own key: the noise that its policy asks for is made from it."""


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


def run_folder(kit: Path, run: object) -> Path:
    """Where a site keeps its state, ledger and log of a run. The name comes from outside: letters and digits only."""
    if type(run) is not str or not re.fullmatch(r"[0-9a-f]{8,64}", run):
        raise ValueError(f"{run!r} is not the name of a run")
    return kit / "runs" / run


_MOST_DOMAINS = 1000


def worker_setup(settings: SiteSettings, kit: Path, run: object, part: object, plan: object) -> dict[str, Any]:
    """What the site's child process is told: the coordinator's `part` for this site, and all else the site's own.
    ValueError for a part that is not of exactly these types. `plan` is checked by the child."""
    if plan is not None and type(plan) is not dict:
        raise ValueError("the plan is not one")
    keys = {"role", "domains", "reading", "train_cap", "train_share", "copies"}
    if type(part) is not dict or set(part) != keys:
        raise ValueError(f"a site's part is {sorted(keys)}")
    reading, copies, cap = part["reading"], part["copies"], part["train_cap"]
    # Nothing that came from outside may name a place to read from or write to, or a column that holds the labels.
    if type(reading) is not dict or set(reading) != {"image_size", "tile", "task", "classes"}:
        raise ValueError(
            "the coordinator may say image size, tile, task and classes, not where data is or what its labels are"
        )
    sizes, classes = [reading["image_size"], reading["tile"]], reading["classes"]
    if (
        part["role"] not in ("labelled", "unlabelled", "held-out")
        or not _are_names(part["domains"])
        or not part["domains"]
        or not all(size is None or (type(size) is int and size > 0) for size in sizes)
        or reading["task"] not in (None, "classification", "segmentation")
        or not (classes is None or _are_names(classes))
        or not (cap is None or (type(cap) is int and cap > 0))
        or not _is_share(part["train_share"])
        or type(copies) is not list
        or not all(type(copy) is dict and set(copy) == {"domain", "train_share"} for copy in copies)
        or not _are_names([copy["domain"] for copy in copies])
        or not all(_is_share(copy["train_share"]) for copy in copies)
    ):
        raise ValueError("a site's part has a value of the wrong type, or a name twice")
    most = settings.policy.get("max_image_size")
    if most is not None and (larger := [size for size in sizes if size is not None and size > most]):
        raise ValueError(f"images of {larger[0]} pixels are above policy.max_image_size={most}")
    source = {"name": settings.dataset, "data_dir": settings.data, "label_column": settings.policy.get("label_column")}
    spec = {
        "name": settings.site,
        "role": part["role"],
        "source": source | reading,
        "domains": part["domains"],
        "folder": str(run_folder(kit, run)),
        "policy": settings.policy,
        "train_cap": cap,
        "train_share": part["train_share"],
        "device": settings.device,
        "copies": copies,
        "attacks": [],
        "is_remote": True,
        "secret": str(kit / SECRET),
        "kit": str(kit),
    }
    return {"plan": plan, "specs": [spec]}


def _are_names(value: object) -> bool:
    """Whether it is a list of names without one that is there twice: a domain that is pooled with itself would seem to
    have twice as many samples."""
    return (
        type(value) is list
        and len(value) <= _MOST_DOMAINS
        and all(type(name) is str and 0 < len(name) <= 255 for name in value)
        and len(set(value)) == len(value)
    )


def _is_share(value: object) -> bool:
    return type(value) in (int, float) and 0 < value <= 1  # type: ignore[operator]
