"""Which round's model to keep, by rule. Users have no labels of the target: all rules but the oracle do without them.

`last`: the last one. `source-val`: the best mean validation score at the sources. `leave-one-site-out`: the round that
was best when each source in turn was held out and played the target. Label-free, from the target's unlabelled data:
`consensus` (KD3A's quality of the vote), `entropy` (the surest predictions), `information` (sure ones of every class),
`agreement` (of heads or teachers). `oracle`: the best test score. That is a bound, and never a row among the others.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace

from fedshift.bench.records import Record
from fedshift.bench.tables import Choose, Table, make_table

Curve = Sequence[float | None]
Pick = Callable[[Record, Sequence[Record]], int | None]
"""A record, and others that may help, to the place of a round in its curves; None where the rule does not apply."""

ORACLE = "oracle"


def last(record: Record, others: Sequence[Record]) -> int | None:
    return len(record.rounds) - 1 if record.rounds else None


def source_val(record: Record, others: Sequence[Record]) -> int | None:
    return highest(_mean_curve(list(record.val.values()), len(record.rounds)))


def leave_one_site_out(record: Record, others: Sequence[Record]) -> int | None:
    """Needs a run for each source, trained on the rest of the sources alone."""
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
    """Of COPA's local models: the mean share of the pseudo labels that they agree with, times the share of samples that
    have one. Of KD3A's teachers: the share of samples whose label somebody supports."""
    if "agreement" in record.notes:
        agreed = _mean_curve(list(record.notes["agreement"].values()), len(record.rounds))
        shares = _noted(record, "pseudo_label_share")
        return highest([_product(a, share) for a, share in zip(agreed, shares, strict=True)])
    voted, unsupported = _noted(record, "voted_samples"), _noted(record, "unsupported_samples")
    return highest([1 - u / v if u is not None and v else None for u, v in zip(unsupported, voted, strict=True)])


def oracle(record: Record, others: Sequence[Record]) -> int | None:
    return highest(_mean_curve(list(record.test.values()), len(record.rounds)))


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
"""The rules of every table, as the runs themselves applied them."""


def picked(record: Record, rule: str, others: Sequence[Record] = ()) -> dict[str, float]:
    """A record's test score by target in the round that the rule chooses; nothing where it does not apply."""
    place = RULES[rule](record, others)
    scores = {} if place is None else {target: curve[place] for target, curve in record.test.items()}
    return {target: score for target, score in scores.items() if score is not None}


def rules_compared(records: Sequence[Record], others: Sequence[Record] = (), title: str = "selection") -> Table:
    """Rules x rows of the records: what each rule would have scored, and how much it loses to the oracle."""
    return make_table(
        list(_under_each_rule(records, others)),
        lambda record: {target: scores["picked"] for target, scores in record.scores.items()},
        "as the row says",
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


def highest(curve: Curve) -> int | None:
    """The place of the highest value, the latest of equals."""
    known = [(value, place) for place, value in enumerate(curve) if value is not None]
    return max(known)[1] if known else None


def _noted(record: Record, name: str) -> Curve:
    """What was noted once a round: for the whole run, or for the target alone."""
    curves = list(record.notes.get(name, {}).values())
    return curves[0] if len(curves) == 1 else [None] * len(record.rounds)


def _mean_curve(curves: Sequence[Curve], length: int) -> list[float | None]:
    """Round by round, the mean over those that have a value."""
    found: list[float | None] = []
    for place in range(length):
        values = [value for curve in curves if place < len(curve) and (value := curve[place]) is not None]
        # As runs add up themselves: another sum could break ties of rounds in another way.
        found.append(sum(values) / len(values) if values else None)
    return found


def _product(a: float | None, b: float | None) -> float | None:
    return None if a is None or b is None else a * b


def _leaves_one_out(other: Record, record: Record) -> bool:
    """Whether `other` is the run of `record`, with one of its sources for the target and the target nowhere."""
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
