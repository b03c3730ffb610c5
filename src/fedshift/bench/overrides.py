"""How a call differs from its suite: fewer rows, other seeds, other settings. The tables of such a call say so, and are
written to a separate folder so that they do not replace the tables of the unchanged suite."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from fedshift.bench.jobs import chosen_rows
from fedshift.bench.suite import Suite, SuiteRequest
from fedshift.errors import InputError
from fedshift.methods import METHODS
from fedshift.runs.config import apply_settings

LONGEST_NAME = 48


@dataclass(frozen=True)
class Overrides:
    """`settings` by key, labels of the remaining rows, seeds; each is empty if it is the suite's own."""

    settings: dict[str, str] = field(default_factory=dict)
    methods: tuple[str, ...] = ()
    seeds: tuple[int, ...] = ()

    @property
    def options(self) -> list[str]:
        """The overrides as command-line options."""
        values = {
            "--set": [f"{key}={value}" for key, value in self.settings.items()],
            "--methods": list(self.methods),
            "--seeds": [str(seed) for seed in self.seeds],
        }
        return [f"{option} {', '.join(given)}" for option, given in values.items() if given]

    @property
    def notes(self) -> tuple[str, ...]:
        """A sentence for the top of the tables; nothing without overrides."""
        return (f"Not the unchanged suite. This call gave {'; '.join(self.options)}.",) if self.options else ()


def overrides_of(suite: Suite, request: SuiteRequest) -> Overrides:
    """How the request differs from the suite. It does not matter in which order the options were given."""
    settings: dict[str, str] = {}
    for setting in request.settings:
        key, _, value = setting.partition("=")
        settings[key.strip()] = " ".join(value.split())
    rows = chosen_rows(suite.rows, request.methods)
    own = suite.seeds.get(request.scale, ())
    seeds = tuple(sorted(set(request.seeds))) if request.seeds is not None and own else own
    return Overrides(
        settings=dict(sorted(settings.items())),
        methods=tuple(row.label for row in rows) if len(rows) < len(suite.rows) else (),
        seeds=seeds if seeds != tuple(sorted(own)) else (),
    )


def folder_of(suite: Suite, request: SuiteRequest, records: Sequence[Path] = ()) -> str:
    """Where the tables of a request belong, relative to the folder of all suites: the suite's folder, or one inside it
    for another scale, other data, rows, seeds or settings."""
    overrides = overrides_of(suite, request)
    data = request.data_dir.resolve() if request.data_dir is not None else None
    parts = [
        *(["paper"] if request.scale == "paper" else []),
        *([data.name] if data is not None else []),
        *(["records"] if records else []),
        *(option.removeprefix("--").removeprefix("set ") for option in overrides.options),
    ]
    if not parts:
        return suite.name
    name = re.sub(r"[^\w.]+", "-", "-".join(parts)).strip("-.")[:LONGEST_NAME]
    exact = [request.scale, str(data), [str(path.resolve()) for path in records], vars(overrides)]
    return f"{suite.name}/{name}-{hashlib.sha256(json.dumps(exact).encode()).hexdigest()[:8]}"


def check_sections(suite: Suite, request: SuiteRequest) -> None:
    """Refuses keys of methods that the suite does not train: they would change nothing."""
    trained = sorted({row.method for row in suite.rows})
    for section, keys in apply_settings({}, request.settings).items():
        if section in METHODS and section not in trained:
            key = f"{section}.{next(iter(keys))}" if isinstance(keys, dict) and keys else section
            known = f"It trains {', '.join(trained)}." if trained else "It trains no method."
            raise InputError("config-key", f"--set {key}: the suite {suite.name} does not train {section}. {known}")
