"""What a call changes of a suite: some rows, other seeds, other settings. Its tables say so, and without a folder of
their own they would replace those of the suite as it is."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from fedshift.bench.jobs import chosen_rows
from fedshift.bench.suite import Order, Suite
from fedshift.errors import InputError
from fedshift.methods import METHODS
from fedshift.runs.config import apply_settings

LONGEST_NAME = 48


@dataclass(frozen=True)
class Changes:
    """`settings` by key; labels of the rows that are left and seeds, both empty where they are the suite's own."""

    settings: dict[str, str] = field(default_factory=dict)
    methods: tuple[str, ...] = ()
    seeds: tuple[int, ...] = ()

    @property
    def words(self) -> list[str]:
        """As somebody would type them."""
        options = {
            "--set": [f"{key}={value}" for key, value in self.settings.items()],
            "--methods": list(self.methods),
            "--seeds": [str(seed) for seed in self.seeds],
        }
        return [f"{option} {', '.join(values)}" for option, values in options.items() if values]

    @property
    def notes(self) -> tuple[str, ...]:
        """A sentence below the title, if there is something to say."""
        return (f"Not the suite as it is. This call gave {'; '.join(self.words)}.",) if self.words else ()


def changes_of(suite: Suite, order: Order) -> Changes:
    """In what the order differs from the suite. Equal calls have equal changes, in whatever order words were given."""
    settings: dict[str, str] = {}
    for setting in order.settings:
        key, _, value = setting.partition("=")
        settings[key.strip()] = " ".join(value.split())
    rows = chosen_rows(suite.rows, order.methods)
    own = suite.seeds.get(order.scale, ())
    seeds = tuple(sorted(set(order.seeds))) if order.seeds is not None and own else own
    return Changes(
        settings=dict(sorted(settings.items())),
        methods=tuple(row.label for row in rows) if len(rows) < len(suite.rows) else (),
        seeds=seeds if seeds != tuple(sorted(own)) else (),
    )


def folder_of(suite: Suite, order: Order, records: Sequence[Path] = ()) -> str:
    """The name of the order's tables below the folder of all suites: the suite's own, and within it one for any other
    scale, data, rows, seeds or settings."""
    changes = changes_of(suite, order)
    data = order.data_dir.resolve() if order.data_dir is not None else None
    words = [
        *(["paper"] if order.scale == "paper" else []),
        *([data.name] if data is not None else []),
        *(["records"] if records else []),
        *(word.removeprefix("--").removeprefix("set ") for word in changes.words),
    ]
    if not words:
        return suite.name
    name = re.sub(r"[^\w.]+", "-", "-".join(words)).strip("-.")[:LONGEST_NAME]
    exact = [order.scale, str(data), [str(path.resolve()) for path in records], vars(changes)]
    return f"{suite.name}/{name}-{hashlib.sha256(json.dumps(exact).encode()).hexdigest()[:8]}"


def check_sections(suite: Suite, order: Order) -> None:
    """A key of a method that the suite does not train would change nothing."""
    trained = sorted({row.method for row in suite.rows})
    for section, keys in apply_settings({}, order.settings).items():
        if section in METHODS and section not in trained:
            key = f"{section}.{next(iter(keys))}" if isinstance(keys, dict) and keys else section
            known = f"It trains {', '.join(trained)}." if trained else "It trains no method of its own."
            raise InputError("config-key", f"--set {key}: the suite {suite.name} does not train {section}. {known}")
