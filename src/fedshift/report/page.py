"""From records to HTML. Every name in a run is hostile until escaped, so the templates escape everything."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime

from jinja2 import Environment, PackageLoader, StrictUndefined

from fedshift._version import __version__
from fedshift.report.details import describe
from fedshift.report.gallery import Gallery
from fedshift.report.overview import Comparison, compare
from fedshift.report.reading import Record
from fedshift.report.words import plural, sentence_list

_MAX_OPEN = 3


def templates() -> Environment:
    return Environment(
        loader=PackageLoader("fedshift.report"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )


def render(records: Sequence[Record], galleries: Sequence[Gallery]) -> str:
    """The whole page. Runs are unfolded while there are few enough to read one after the other."""
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
            details=[
                describe(number, record, gallery) for (number, record), gallery in zip(numbered, galleries, strict=True)
            ],
            is_open=len(records) <= _MAX_OPEN,
        )
    )


def _title(records: Sequence[Record]) -> str:
    methods = list(dict.fromkeys(record.method for record in records))
    datasets = list(dict.fromkeys(record.dataset for record in records))
    return f"{sentence_list(methods)} on {sentence_list(datasets)}"


def _facts(records: Sequence[Record], comparisons: Sequence[Comparison]) -> list[str]:
    """What is compared, in a few words each."""
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
