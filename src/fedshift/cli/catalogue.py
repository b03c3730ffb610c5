"""What `fedshift list` shows, and names that options are checked against before torch is imported. It reads a
packaged file, because importing the registries takes seconds.

`python -m fedshift.cli.catalogue` writes that file anew; a test fails while it is out of date.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any

from fedshift.errors import InputError

FILE = Path(__file__).with_name("catalogue.json")

ENTRY_POINTS = {"methods": "fedshift.methods", "datasets": "fedshift.datasets", "archs": "fedshift.nets"}
"""The entry point groups through which installed packages add names."""

Row = dict[str, Any]


def show_list(what: str, part: str = "", *, as_json: bool) -> None:
    """Prints the names that contain `part`, with what is known about each."""
    rows = [row for row in listed(what) if part.lower() in row["name"].lower()]
    if not rows:
        raise InputError("unknown-name", f"no {what} with {part!r} in their name: see fedshift list {what}")
    if as_json:
        print(json.dumps(rows, indent=2))
        return
    from rich.console import Console
    from rich.table import Table

    if what == "suites":
        rows = [_in_two_columns(row) for row in rows]
    table = Table(box=None, header_style="bold", pad_edge=False)
    for column in rows[0]:
        table.add_column(column, overflow="fold")
    for row in rows:
        table.add_row(*(_cell(value) for value in row.values()))
    Console().print(table)


def listed(what: str) -> list[Row]:
    """The built-in names from the file. The registries are imported only where an installed package adds names."""
    if what in ENTRY_POINTS and entry_points(group=ENTRY_POINTS[what]):
        return registered(what)
    found: list[Row] = json.loads(FILE.read_text(encoding="utf-8"))[what]
    return found


def registered(what: str) -> list[Row]:
    """All names from the registries themselves."""
    return {"methods": _methods, "datasets": _datasets, "archs": _archs, "suites": _suites, "keys": _keys}[what]()


def built_in() -> dict[str, list[Row]]:
    """What belongs in the file: every name that comes with fedshift, and none that packages or scripts added."""
    from fedshift.data.registry import DATASETS
    from fedshift.methods import METHODS
    from fedshift.nn.archs import ARCHS

    added = {name for table in (METHODS, DATASETS, ARCHS) for name in set(table) - set(table.builtin)}
    return {
        what: [row for row in registered(what) if row["name"] not in added]
        for what in ("methods", "datasets", "archs", "suites", "keys")
    }


def _methods() -> list[Row]:
    from fedshift.methods import METHODS, find_about

    return [
        {"name": name, "setting": ", ".join(about.settings), "paper": about.paper, "needs": about.needs}
        for name in METHODS
        for about in [find_about(name)]
    ]


def _datasets() -> list[Row]:
    from fedshift.data import list_datasets

    return [
        {
            "name": info.name,
            "domains": list(info.domains),
            "classes": list(info.classes),
            "builtin": info.builtin,
            "description": info.description,
        }
        for info in list_datasets()
    ]


def _archs() -> list[Row]:
    from fedshift.nn.archs import ARCHS, find_arch

    return [
        {"name": name, "kind": arch.kind, "imagenet": arch.imagenet, "description": arch.description}
        for name in ARCHS
        for arch in [find_arch(name)]
    ]


def _suites() -> list[Row]:
    from fedshift.bench.papers import describe

    return describe()


def _keys() -> list[Row]:
    """The configuration's keys that are not a method's own, to find spelling mistakes before torch is imported."""
    from fedshift.runs.config import KEYS

    return [{"name": key} for key in KEYS]


def _in_two_columns(suite: Mapping[str, Any]) -> Row:
    """Five columns of sentences are unreadable: paper, needs and cost go below the question."""
    lines = (suite["question"], f"  {suite['paper']}", f"  needs {suite['needs']}", f"  costs {suite['cost']}")
    return {"name": suite["name"], "question, needs and cost": "\n".join(lines)}


def _cell(value: Any) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    return ", ".join(str(item) for item in value) if isinstance(value, list | tuple) else str(value)


def as_text(catalogue: Mapping[str, list[Row]]) -> str:
    """The content of the file."""
    return json.dumps(catalogue, indent=1, ensure_ascii=False) + "\n"


if __name__ == "__main__":
    FILE.write_text(as_text(built_in()), encoding="utf-8")
    print(f"wrote {FILE.name}")
