"""The suite `selection`: how much accuracy each rule for choosing a round loses to the oracle."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from fedshift.bench import recipes
from fedshift.bench.columns import DomainRoles
from fedshift.bench.grid import Experiment, as_suite, run_experiment
from fedshift.bench.jobs import Column, Row
from fedshift.bench.records import Record
from fedshift.bench.selection import rules_compared
from fedshift.bench.suite import SuiteRequest, SuiteResult

WITHOUT = " without "


def with_inner_runs(roles: DomainRoles) -> list[Column]:
    """Every target. For leave-one-site-out also each source as the target of the other sources."""
    columns = [Column(target, {"target": target}) for target in roles.targets]
    for target in roles.targets:
        sources = roles.others(target)
        columns += [
            Column(
                f"{site}{WITHOUT}{target}",
                {"target": site, "sources": [other for other in sources if other != site]},
            )
            for site in sources
        ]
    return columns


EXPERIMENT = Experiment(
    "selection",
    "no paper: a practical question",
    "How much accuracy does each rule for choosing a round lose to the best round, which is unknown in practice?",
    (
        Row("source-only", "source-only"),
        Row("KD3A", "kd3a"),
        Row("COPA", "copa-uda"),
    ),
    with_inner_runs,
    (recipes.KD3A_DIGIT_FIVE,),
    recipes.ADAPT_DIGITS.at("photo", "street"),
    tables=False,
)


def run_selection(request: SuiteRequest) -> SuiteResult:
    found = run_experiment(EXPERIMENT, request)
    main, inner = split(found.records)
    tables = (rules_compared(main, inner, "selection"),) if main else ()
    return replace(found, tables=tables)


def split(records: Sequence[Record]) -> tuple[list[Record], list[Record]]:
    """The runs whose rounds are chosen, and the runs that only help to choose them."""
    is_inner = [WITHOUT in record.column for record in records]
    return (
        [record for record, inner in zip(records, is_inner, strict=True) if not inner],
        [record for record, inner in zip(records, is_inner, strict=True) if inner],
    )


SELECTION = replace(as_suite(EXPERIMENT), run=run_selection)
