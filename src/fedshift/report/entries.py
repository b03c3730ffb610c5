"""The rows of a comparison: runs of one method in one configuration, over targets and seeds."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from fedshift.report.charts import colour
from fedshift.report.reading import Record

BOUND_WORDS = {
    "pooled": "all labelled data in one place",
    "target-copies": "the clients' data at the home",
    "target-labels": "trained with the target's labels",
}

# Keys in which runs of one method may differ and still be the same experiment on another target or seed.
_SAME_EXPERIMENT = (
    *("method", "setting", "seed", "dataset", "home", "target", "targets", "sources"),
    *("engine", "workers", "deadline"),
)


_NONE: tuple[Any, ...] = (None, "", [], {})


@dataclass(frozen=True)
class Entry:
    """A row: one method in one configuration, with all its runs."""

    method: str
    variant: str
    style: str
    bound: str
    runs: tuple[tuple[int, Record], ...]

    @property
    def label(self) -> str:
        return f"{self.method} ({self.variant})" if self.variant else self.method

    @property
    def records(self) -> list[Record]:
        return [record for _, record in self.runs]

    @property
    def counted(self) -> list[Record]:
        """The runs that numbers are made from: the finished ones, or all while none is."""
        return [record for record in self.records if record.results] or self.records

    @property
    def bound_words(self) -> str:
        return BOUND_WORDS.get(self.bound, self.bound)

    @property
    def moved(self) -> str:
        return self.records[0].moved

    @property
    def unfinished(self) -> str:
        """`not finished: round 3 of 20` for a row with a run that is still going, was stopped or failed."""
        open_runs = [record for record in self.records if record.results is None]
        if not open_runs:
            return ""
        failed = sum(bool(record.failure) for record in open_runs)
        if len(self.runs) > 1:
            return f"{len(open_runs)} of {len(self.runs)} runs not finished" + (f", {failed} failed" if failed else "")
        return f"{'failed' if failed else 'not finished'}: round {open_runs[0].round} of {open_runs[0].rounds}"


def entries_of(runs: list[tuple[int, Record]]) -> list[Entry]:
    """Rows in the order of the runs, bounds below all others."""
    variants = _variants([record for _, record in runs])
    grouped: dict[tuple[str, str, str], list[tuple[int, Record]]] = {}
    for (number, record), variant in zip(runs, variants, strict=True):
        grouped.setdefault((record.bound, record.method, variant), []).append((number, record))
    ordered = sorted(grouped, key=lambda key: key[0] != "")
    return [
        Entry(method, variant, colour(index) + (" dashed" if bound else ""), bound, tuple(grouped[key]))
        for index, key in enumerate(ordered)
        for bound, method, variant in [key]
    ]


def _variants(records: Sequence[Record]) -> list[str]:
    """For each run, the settings in which runs of its method differ, where it has any: `lr 0.1, rounds 40`."""
    settings = [_settings(record) for record in records]
    domains = [_domains(record) for record in records]
    labels = []
    for number, record in enumerate(records):
        peers = [other for other, peer in enumerate(records) if peer.method == record.method]
        keys = sorted({key for peer in peers for key in settings[peer]})
        differing = [key for key in keys if len({str(settings[peer].get(key)) for peer in peers}) > 1]
        own = [(key, settings[number].get(key)) for key in differing]
        words = [f"{key.removeprefix(f'{record.method}.')} {_value(value)}" for key, value in own if value not in _NONE]
        # Leaving out each domain in turn is one experiment; leaving out other domains altogether is another.
        missing = sorted(set().union(*(domains[peer] for peer in peers)) - domains[number])
        labels.append(", ".join(words + ([f"without {', '.join(missing)}"] if missing else [])))
    return labels


def _value(value: Any) -> str:
    return ", ".join(str(item) for item in value) if isinstance(value, list | tuple) else str(value)


def _settings(record: Record) -> dict[str, Any]:
    """The configuration as flat `a.b` keys, without what names the data, the target or the seed."""
    flat: dict[str, Any] = {}
    for key, value in record.config.items():
        if isinstance(value, Mapping):
            flat |= {f"{key}.{inner}": item for inner, item in value.items()}
        elif key not in _SAME_EXPERIMENT:
            flat[key] = value
    return flat


def _domains(record: Record) -> set[str]:
    """All that the run trains or tests on."""
    named = [*(record.config.get("sources") or ()), *(record.config.get("targets") or ()), record.target]
    return {str(name) for name in named if name}
