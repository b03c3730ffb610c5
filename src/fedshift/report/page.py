"""From run records to HTML. A name in a run may be hostile, so the templates escape everything."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime

from jinja2 import Environment, PackageLoader, StrictUndefined

from fedshift._version import __version__
from fedshift.report.comparison import Comparison, compare
from fedshift.report.run_page import run_page
from fedshift.report.samples import DataView
from fedshift.report.text import plural, sentence_list
from fedshift.runs.record import RunRecord

_MAX_OPEN = 3
"""Up to this many runs are shown unfolded."""


def templates() -> Environment:
    return Environment(
        loader=PackageLoader("fedshift.report"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )


def render(records: Sequence[RunRecord], views: Sequence[DataView]) -> str:
    """The whole page: comparisons, curves, then every run."""
    numbered = list(enumerate(records, start=1))
    comparisons = compare(numbered)
    return (
        templates()
        .get_template("report.html")
        .render(
            title=_title(records),
            facts=_facts(records, comparisons),
            made=datetime.now(UTC),
            version=__version__,
            comparisons=comparisons,
            pages=[run_page(number, record, view) for (number, record), view in zip(numbered, views, strict=True)],
            is_open=len(records) <= _MAX_OPEN,
        )
    )


def _title(records: Sequence[RunRecord]) -> str:
    methods = list(dict.fromkeys(record.method for record in records))
    datasets = list(dict.fromkeys(record.dataset for record in records))
    return f"{sentence_list(methods)} on {sentence_list(datasets)}"


def _facts(records: Sequence[RunRecord], comparisons: Sequence[Comparison]) -> list[str]:
    """What is compared, in a few words each: `2 runs`, `3 targets`, `adapt`."""
    counted: dict[str, set[object]] = {
        "method": {record.method for record in records},
        "target": {target for record in records for target in record.targets},
        "seed": {record.seed for record in records},
    }
    unfinished = sum(record.results is None for record in records)
    facts = [
        plural(len(records), "run"),
        *(plural(len(things), noun) for noun, things in counted.items() if len(things) > 1),
        *dict.fromkeys(c.setting for c in comparisons),
    ]
    return facts + ([f"{unfinished} not finished"] if unfinished else [])
