"""The suites `robust/sites` and `robust/clients`: hostile sites, and rules for averaging that stand them. No paper's
tables: a study on built-in data."""

from __future__ import annotations

import statistics
from collections.abc import Sequence

from fedshift.bench import recipes
from fedshift.bench.columns import DomainRoles, Layout
from fedshift.bench.grid import Experiment
from fedshift.bench.jobs import Column, Row
from fedshift.bench.records import Record
from fedshift.bench.suite import Drawn, SuiteRequest
from fedshift.bench.tables import Cell, Sheet, Value
from fedshift.data.attacks import parse_attack

SOURCE = "no paper: a practical question"

FORGERIES = {
    "sign flip x1": "sign-flip:{site}:1",
    "sign flip x3": "sign-flip:{site}:3",
    "sign flip x10": "sign-flip:{site}:10",
    "sign flip x100": "sign-flip:{site}:100",
    "constant": "constant:{site}",
    "noise x10": "scaled-noise:{site}:10",
    "forged count": "forged-count:{site}",
}
"""A forged count is the gate's business: it refuses the answer before any rule sees it."""
ATTACKS = {**FORGERIES, "30 % wrong labels": "poison:{site}:0.3"}
BAD = {1: "one bad site", 2: "two bad sites"}
"""The second and the fourth of the sites that train: neither the most unusual ones nor neighbours."""


def under_attack(attacks: dict[str, str], *, clients: bool) -> Layout:
    """All sites honest, then each attack by one and by two sites."""

    def layout(roles: DomainRoles) -> list[Column]:
        kept = roles.home if clients else roles.targets[0]
        own = {"home": kept, "setting": "multi-adapt"} if clients else {"target": kept}
        bad = roles.others(kept)[1::2]
        return [Column("none", own)] + [
            Column(f"{attack}, {count}", {**own, "attack": [text.format(site=site) for site in bad[:count]]})
            for attack, text in attacks.items()
            for count in BAD
        ]

    return layout


def rows(label: str, method: str, *rules: str) -> list[Row]:
    return [Row(f"{label}, {rule}", method, {"aggregation": rule}) for rule in rules]


def accuracy_under_attack(records: Sequence[Record], request: SuiteRequest) -> Drawn:
    """A sheet for each number of bad sites: rows x attacks, the last round's accuracy in per cent. Of several targets,
    the mean over those that no attack of the sheet is at; `-` where the attack ended the run, with any seed."""
    found: dict[tuple[str, str], dict[int, Record]] = {}
    for record in records:
        found.setdefault((record.row, record.column), {})[record.seed] = record
    labels = list(dict.fromkeys(row for row, _ in found))

    def cell(row: str, column: str, bad: set[str]) -> Value:
        trained = found.get((row, column), {})
        if not trained or trained.keys() != found.get((row, "none"), trained).keys():
            return None
        return Cell({seed: _mean_accuracy(record, bad) for seed, record in trained.items()}).text

    sheets = []
    for count, title in BAD.items():
        columns = {attack: f"{attack}, {count}" for attack in ATTACKS}
        attacked = [
            record for (_, column), own in found.items() if column in columns.values() for record in own.values()
        ]
        bad = {parse_attack(text).domain for record in attacked for text in record.settings["attack"]}
        known = {record.column for record in attacked}
        shown = {"none": "none"} | {attack: column for attack, column in columns.items() if column in known}
        if attacked:
            values = {row: [cell(row, column, bad) for column in shown.values()] for row in labels}
            sheets.append(Sheet(f"accuracy under attack, {title}", tuple(shown), values))
    return sheets, []


def _mean_accuracy(record: Record, bad: set[str]) -> float:
    return statistics.fmean(scores["last"] for target, scores in record.scores.items() if target not in bad)


EXPERIMENTS = (
    Experiment(
        "robust/sites",
        SOURCE,
        "Which rule for averaging stands one or two hostile sites of five, and what does it cost where all are honest?",
        (
            *rows("FedAvg", "fedavg", "mean", "clipped", "median", "trimmed"),
            Row("FedAvg, trimmed, bad_sites=2", "fedavg", {"aggregation": "trimmed", "bad_sites": 2}),
            *rows("FedAvg", "fedavg", "krum"),
            *rows("COPA", "copa", "mean", "clipped", "median", "krum"),
            *rows("CSAC", "csac", "mean", "clipped"),
            *rows("KD3A", "kd3a", "mean", "clipped"),
        ),
        under_attack(ATTACKS, clients=False),
        (recipes.CSAC_ROTATED.at("M30").with_seeds(0),),
        recipes.ATTACKED,
        tables=False,
        draw=accuracy_under_attack,
    ),
    Experiment(
        "robust/clients",
        SOURCE,
        "What can one or two hostile clients of five do to the others in DualAdapt?",
        tuple(rows("DualAdapt", "dualadapt", "mean", "clipped")),
        under_attack(FORGERIES, clients=True),
        (recipes.DUAL_DIGIT_FIVE.with_seeds(0),),
        recipes.ATTACKED_CLIENTS,
        tables=False,
        draw=accuracy_under_attack,
    ),
)
