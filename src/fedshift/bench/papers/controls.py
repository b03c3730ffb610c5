"""Rows that stand beside methods that adapt. Without them a table cannot tell what the method itself contributes."""

from __future__ import annotations

from dataclasses import replace

from fedshift.bench.jobs import Row

POOLED = Row("pooled sources", "deepall")
"""All labelled data in one place. KD3A's paper calls this source-only."""
ADABN = Row("AdaBN", "adabn", {"norm": "own"})
"""Source-only, normalised by the target's own statistics: what normalisation alone gains."""


def with_own_statistics(*rows: Row) -> tuple[Row, ...]:
    """The same rows, normalised by the target's or the client's own statistics, as AdaBN is. The papers have no such
    numbers."""
    return tuple(
        replace(row, label=f"{row.label} (own statistics)", settings={**row.settings, "norm": "own"}, theirs={})
        for row in rows
    )
