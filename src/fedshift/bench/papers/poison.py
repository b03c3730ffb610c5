"""The suite `robust/poison`: one wrong, lazy or hostile site of five, for every method with labelled sites. No paper's
table: a study on built-in data."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from fedshift.bench import recipes
from fedshift.bench.columns import DomainRoles
from fedshift.bench.grid import Experiment
from fedshift.bench.jobs import Column, Row
from fedshift.bench.records import Record
from fedshift.bench.suite import Drawn, SuiteRequest
from fedshift.bench.tables import Cell, Sheet, Value

ATTACKS = {
    "15 % flipped": ("poison:{site}:0.15",),
    "30 % flipped": ("poison:{site}:0.3",),
    "50 % flipped": ("poison:{site}:0.5",),
    "irrelevant": ("irrelevant:{site}",),
    "free-rider": ("free-rider:{site}",),
    "forged confidence": ("forged-confidence:{site}:2",),
    "backdoor": ("backdoor:{site}:0.3",),
    "backdoor x5": ("backdoor:{site}:0.3", "boost:{site}:5"),
}
"""At the second of the sites that train, as in `robust/sites`. A classifier that is twice as sure passes for an update
of usual length; one that is ten times as sure does not."""


def one_bad_site(roles: DomainRoles) -> list[Column]:
    kept = roles.targets[0]
    bad = roles.others(kept)[1]
    columns = [Column("honest", {"target": kept})]
    for label, texts in ATTACKS.items():
        columns.append(Column(label, {"target": kept, "attack": [text.format(site=bad) for text in texts]}))
    return columns


_ADAPT: Mapping[str, Any] = {"setting": "adapt"}
_AVERAGED = ("clipped", "mean", "median", "krum")
_OTHERS = _AVERAGED[:2]
"""Those that do not average by themselves take these only; for variants of FedAvg, its rows say enough of the rest."""


def _rows(label: str, method: str, rules: Sequence[str], **settings: Any) -> list[Row]:
    return [Row(f"{label}, {rule}", method, {"aggregation": rule, **settings}) for rule in rules]


ROWS = (
    *_rows("FedAvg", "fedavg", _AVERAGED),
    *_rows("COPA", "copa", _AVERAGED),
    *_rows("CSAC", "csac", _OTHERS),
    *_rows("FedDG", "feddg", _OTHERS),
    *_rows("FedSR", "fedsr", _OTHERS),
    *_rows("FedDG-GA", "feddg-ga", _OTHERS),
    *_rows("FedOMG", "fedomg", _OTHERS),
    *_rows("guided head", "guided-head", _OTHERS),
    *_rows("FedLooks", "fedlooks", _AVERAGED),
    *_rows("KD3A", "kd3a", _OTHERS, **_ADAPT),
    *_rows("COPA-UDA", "copa-uda", _OTHERS, **_ADAPT),
    *_rows("FADA", "fada", _OTHERS, **_ADAPT),
    Row("SHOT, own ensemble", "shot", dict(_ADAPT)),
    *_rows("FedLooks, adapt", "fedlooks", _AVERAGED, **_ADAPT, norm="own"),
)


def accuracy_and_backdoors(records: Sequence[Record], request: SuiteRequest) -> Drawn:
    """Two sheets in per cent, of the last round: accuracy at the target, and how many of its images of other classes
    are taken for the attacker's class once they show the trigger. `-` where the attack ended the run."""
    found: dict[tuple[str, str], dict[int, Record]] = {}
    for record in records:
        found.setdefault((record.row, record.column), {})[record.seed] = record
    rows = list(dict.fromkeys(row for row, _ in found))
    columns = [label for label in ("honest", *ATTACKS) if any(column == label for _, column in found)]

    def cell(row: str, column: str, is_success: bool) -> Value:
        trained = found.get((row, column), {})
        if not trained or trained.keys() != found.get((row, "honest"), trained).keys():
            return None
        score = _success if is_success else _accuracy
        return Cell({seed: score(record) for seed, record in trained.items()}).text

    accuracy = {row: [cell(row, column, False) for column in columns] for row in rows}
    sheets = [Sheet("accuracy, one bad site of five", tuple(columns), accuracy)]
    doors = [column for column in columns if column.startswith("backdoor")]
    if doors:
        success = {row: [cell(row, column, True) for column in doors] for row in rows}
        sheets.append(Sheet("success of the backdoor", tuple(doors), success))
    return sheets, []


def _accuracy(record: Record) -> float:
    (scores,) = record.scores.values()
    return scores["last"]


def _success(record: Record) -> float:
    (by_round,) = record.notes["backdoor"].values()
    return float(by_round[-1] or 0.0)


EXPERIMENTS = (
    Experiment(
        "robust/poison",
        "no paper: a practical question",
        "What do wrong labels, a backdoor, a free-rider, an irrelevant or an over-sure site of five do to each method?",
        ROWS,
        one_bad_site,
        (recipes.CSAC_ROTATED.at("M30").with_seeds(0),),
        recipes.POISONED,
        tables=False,
        draw=accuracy_and_backdoors,
    ),
)
