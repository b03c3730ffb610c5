"""Rules that choose the round whose model is kept. Users have no labels of the target: only the oracle needs them.

`last`: the last round. `source-val`: the best mean validation score at the sources. `leave-one-site-out`: the round
that was best when each source in turn was held out as the target. Four rules use the target's unlabelled data:
`consensus` (KD3A's quality of the vote), `entropy` (the most confident predictions), `information` (confident
predictions of every class), `agreement` (of heads or teachers). `oracle`: the best test score, an upper bound that is
never ranked with the others.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace

from fedshift.bench.records import Record
from fedshift.bench.tables import Choose, Table, make_table

Curve = Sequence[float | None]
Pick = Callable[[Record, Sequence[Record]], int | None]
"""From a record, and other records that may help, to the index of a round in its curves. None: the rule does not
apply."""

ORACLE = "oracle"


def last(record: Record, others: Sequence[Record]) -> int | None:
    return len(record.rounds) - 1 if record.rounds else None


def source_val(record: Record, others: Sequence[Record]) -> int | None:
    return highest(_mean_curve(list(record.val.values()), len(record.rounds)))


def leave_one_site_out(record: Record, others: Sequence[Record]) -> int | None:
    """Needs one run per source, trained on the other sources only."""
    held_out = {other.target: other for other in others if _leaves_one_out(other, record)}
    if set(held_out) != set(record.sources) or len(record.sources) < 2:
        return None
    curves = [other.test[site] for site, other in held_out.items() if site is not None and site in other.test]
    return highest(_mean_curve(curves, len(record.rounds))) if len(curves) == len(record.sources) else None


def consensus(record: Record, others: Sequence[Record]) -> int | None:
    return highest(_noted(record, "consensus_quality"))


def entropy(record: Record, others: Sequence[Record]) -> int | None:
    return highest([None if value is None else -value for value in _noted(record, "target_entropy")])


def information(record: Record, others: Sequence[Record]) -> int | None:
    return highest(_noted(record, "target_information"))


def agreement(record: Record, others: Sequence[Record]) -> int | None:
    """COPA: the mean share of pseudo labels that local models agree with, times the share of samples that have one.
    KD3A: the share of samples whose label is supported by a teacher."""
    if "agreement" in record.notes:
        agreed = _mean_curve(list(record.notes["agreement"].values()), len(record.rounds))
        shares = _noted(record, "pseudo_label_share")
        return highest([_product(a, share) for a, share in zip(agreed, shares, strict=True)])
    voted, unsupported = _noted(record, "voted_samples"), _noted(record, "unsupported_samples")
    return highest([1 - u / v if u is not None and v else None for u, v in zip(unsupported, voted, strict=True)])


def oracle(record: Record, others: Sequence[Record]) -> int | None:
    return highest(_mean_curve(list(record.test.values()), len(record.rounds)))


def highest(curve: Curve) -> int | None:
    """The index of the highest value, the last of equal ones."""
    known = [(value, index) for index, value in enumerate(curve) if value is not None]
    return max(known)[1] if known else None


def _mean_curve(curves: Sequence[Curve], length: int) -> list[float | None]:
    """Per round, the mean over the curves that have a value."""
    found: list[float | None] = []
    for index in range(length):
        values = [value for curve in curves if index < len(curve) and (value := curve[index]) is not None]
        # The same sum as in a run: another one could resolve ties between rounds differently.
        found.append(sum(values) / len(values) if values else None)
    return found


def _noted(record: Record, name: str) -> Curve:
    """A number that was logged once per round, for the whole run or for the target only."""
    curves = list(record.notes.get(name, {}).values())
    return curves[0] if len(curves) == 1 else [None] * len(record.rounds)


def _product(a: float | None, b: float | None) -> float | None:
    return None if a is None or b is None else a * b


def _leaves_one_out(other: Record, record: Record) -> bool:
    """Whether `other` is the same run as `record`, except that a source is the target and the target takes no part."""
    same = (other.method, other.seed, other.dataset, other.rounds) == (
        record.method,
        record.seed,
        record.dataset,
        record.rounds,
    )
    return (
        same
        and other.target in record.sources
        and set(other.sources) == set(record.sources) - {other.target}
        and _without_roles(other.settings) == _without_roles(record.settings)
    )


def _without_roles(settings: Mapping[str, object]) -> dict[str, object]:
    return {key: value for key, value in settings.items() if key not in ("sources", "target")}


RULES: dict[str, Pick] = {
    "last": last,
    "source-val": source_val,
    "leave-one-site-out": leave_one_site_out,
    "consensus": consensus,
    "entropy": entropy,
    "information": information,
    "agreement": agreement,
    ORACLE: oracle,
}


def _by_results(key: str) -> Choose:
    return lambda record: {target: scores[key] for target, scores in record.scores.items()}


MAIN_RULES: dict[str, Choose] = {"last": _by_results("last"), "source-val": _by_results("source_val")}
"""The rules of every table, as applied by the runs themselves."""


def picked(record: Record, rule: str, others: Sequence[Record] = ()) -> dict[str, float]:
    """A record's test score by target in the round that the rule chooses; empty if the rule does not apply."""
    index = RULES[rule](record, others)
    scores = {} if index is None else {target: curve[index] for target, curve in record.test.items()}
    return {target: score for target, score in scores.items() if score is not None}


def rules_compared(records: Sequence[Record], others: Sequence[Record] = (), title: str = "selection") -> Table:
    """A table of rules x rows of the records: the score under each rule, and its difference to the oracle."""
    return make_table(
        list(_under_each_rule(records, others)),
        lambda record: {target: scores["picked"] for target, scores in record.scores.items()},
        "as named in the row",
        title,
        baseline=ORACLE,
        not_ranked=(ORACLE,),
    )


def _under_each_rule(records: Sequence[Record], others: Sequence[Record]) -> Iterator[Record]:
    for rule in RULES:
        for record in records:
            scores = {
                f"{record.column}/{target}": {"picked": score} for target, score in picked(record, rule, others).items()
            }
            if scores:
                yield replace(record, row=rule, column=record.row, scores=scores)
