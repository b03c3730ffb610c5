"""Federations in this process, for tests that look at single steps."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from fedshift.federation import codec
from fedshift.runs import planning

Opener = Callable[..., tuple[Any, Any, Any]]


@pytest.fixture
def open_method(tmp_path: Path) -> Iterator[Opener]:
    """From a prepared run to the method with its keys, the network before round 1, and a federation in `round` whose
    errors are raised."""
    opened: list[Any] = []

    def open_it(method: Any, ready: planning.Prepared, round: int = 1) -> tuple[Any, Any, Any]:
        opened.append(planning.open_federation(ready, tmp_path / str(len(opened)), debug=True))
        opened[-1].begin(round)
        hyper = codec.restore(method.hyper_type, dict(ready.plan.hyper))
        return method(hyper), planning.base_network(ready)[0], opened[-1]

    yield open_it
    for fed in opened:
        fed.engine.close()
