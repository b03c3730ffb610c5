"""Every suite by name. One that is a grid of trainings is an entry in its paper's file; one that is a function of its
own (`Order -> Found`) is a line here."""

from __future__ import annotations

from fedshift.bench.suite import Suite
from fedshift.errors import InputError, nearest

SUITES: dict[str, Suite] = {suite.name: suite for suite in ()}


def find_suite(name: str) -> Suite:
    suite = SUITES.get(name.lower())
    if suite is None:
        raise InputError("unknown-name", f"There is no suite {name!r}. {nearest(name, SUITES)}")
    return suite
