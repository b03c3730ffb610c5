"""Mistakes in the options of a training that can be told without torch, whose import takes seconds.

What is accepted here is checked again, and wholly, by the configuration. Where scripts or packages may add names,
nothing is refused here.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any

from fedshift.cli.catalogue import ENTRY_POINTS, listed
from fedshift.errors import InputError, nearest
from fedshift.registry import names_may_be_added


def refuse_early(flags: Mapping[str, Any], settings: Sequence[str], config: Path | None) -> None:
    """Raises what the configuration would raise, for flags of `fedshift train` and `key=value` settings."""
    if config is not None and not config.is_file():
        raise InputError("data-missing", f"there is no configuration file {config}")
    folder = flags.get("data_dir")
    is_own = folder is not None and flags.get("dataset") is None and config is None
    if is_own and str(folder).isprintable() and not Path(str(folder)).is_dir():
        raise InputError("data-missing", f"There is no folder {folder}.")
    if config is None:
        _refuse_unknown_keys(settings, str(flags.get("method") or "fedavg"))
    if names_may_be_added() or any(entry_points(group=group) for group in ENTRY_POINTS.values()):
        return
    for key, what, kind in (("method", "methods", "method"), ("arch", "archs", "architecture")):
        name = flags.get(key)
        known = [row["name"] for row in listed(what)]
        if name is not None and ":" not in name and name != "auto" and name.lower() not in known:
            raise InputError("unknown-name", f"There is no {kind} {name!r}. {nearest(name, known)}")
    name, known = flags.get("dataset"), [row["name"] for row in listed("datasets")]
    if name is not None and not name.startswith("memory:") and name not in known:
        raise InputError("unknown-name", f"There is no data set {name!r}. {nearest(name, known)}")
    changed = {setting.partition("=")[0].strip() for setting in settings}
    if name is not None and config is None and "dataset" not in changed:
        _refuse_unknown_domains(
            name, {key: flags.get(key) for key in ("target", "home", "sources", "targets")}, changed
        )


def refuse_unknown_suite(suite: str) -> None:
    known = [row["name"] for row in listed("suites")]
    if suite.lower() not in known:
        raise InputError("unknown-name", f"There is no suite {suite!r}. {nearest(suite, known)}")


def refuse_missing_run(run: Path) -> None:
    """Of a run there is a folder at least."""
    if not run.exists():
        raise InputError("run-missing", f"there is no run {run}")


def _refuse_unknown_domains(dataset: str, roles: Mapping[str, Any], changed: set[str]) -> None:
    """Those of data sets that are always the same, in roles that no setting has `changed`."""
    for row in listed("datasets"):
        if row["name"] == dataset and row["builtin"]:
            named = [value for key, value in roles.items() if value is not None and key not in changed]
            for domain in (name for value in named for name in ([value] if isinstance(value, str) else value)):
                if domain not in row["domains"]:
                    hint = nearest(domain, row["domains"])
                    raise InputError("unknown-name", f"data set {dataset!r} has no domain {domain!r}. {hint}")


def _refuse_unknown_keys(settings: Sequence[str], method: str) -> None:
    """Those of a method, which have a dot or are its name, are left to the configuration."""
    known = [row["name"] for row in listed("keys")]
    methods = {row["name"] for row in listed("methods")} | {method}
    for setting in settings:
        key, equals, _ = setting.partition("=")
        key = key.strip()
        if not equals or not key:
            raise InputError("config-value", f"--set {setting}: write it as key=value")
        if "." not in key and key not in known and key.lower() not in methods:
            raise InputError("config-key", f"unknown configuration key {key!r}. {nearest(key, [*known, method])}")
