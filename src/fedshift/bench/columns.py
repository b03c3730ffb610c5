"""Layouts: the columns of a table, such as one per target domain or one per tried value. Columns with equal labels are
averaged."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from fedshift.bench.jobs import Column


@dataclass(frozen=True)
class DomainRoles:
    """The domains of a data set, those that are the target in turn, and the labelled one in multi-adapt (`home`)."""

    domains: tuple[str, ...]
    targets: tuple[str, ...]
    home: str

    def others(self, *names: str) -> list[str]:
        return [domain for domain in self.domains if domain not in names]


Layout = Callable[[DomainRoles], Sequence[Column]]
"""Makes the columns for the domains of a data set."""


def each_target(roles: DomainRoles) -> list[Column]:
    """Each target in turn is left out."""
    return [Column(target, {"target": target}) for target in roles.targets]


def each_home(roles: DomainRoles) -> list[Column]:
    """Each domain in turn is the labelled one and all others are clients. A run's score is the mean over clients."""
    return [Column(home, {"home": home, "setting": "multi-adapt"}) for home in roles.targets]


def one_home(roles: DomainRoles) -> list[Column]:
    """One domain is labelled, all others are clients."""
    return [Column(roles.home, {"home": roles.home, "setting": "multi-adapt"})]


def shares_of_clients(*shares: float) -> Layout:
    """Clients use only a share of their data."""

    def layout(roles: DomainRoles) -> list[Column]:
        return [
            Column(f"{share:.0%}", {"home": roles.home, "setting": "multi-adapt", "client_fraction": share})
            for share in shares
        ]

    return layout


def values_of(section: str, key: str, *values: Any) -> Layout:
    """Each value of a method's key, on every target."""

    def layout(roles: DomainRoles) -> list[Column]:
        return [
            Column(f"{key} {value}", {"target": target, section: {key: value}})
            for value in values
            for target in roles.targets
        ]

    return layout


def more_sources(order: Sequence[str], target: str) -> Layout:
    """One source, two sources and so on, in this order, as far as the data have them."""

    def layout(roles: DomainRoles) -> list[Column]:
        held_out = target if target in roles.domains else roles.targets[0]
        known = [name for name in order if name in roles.domains]
        sources = known if len(known) == len(roles.domains) - 1 else roles.others(held_out)
        return [
            Column(f"{count} source{'s' * (count > 1)}", {"target": held_out, "sources": sources[:count]})
            for count in range(1, len(sources) + 1)
        ]

    return layout


def bad_sites(irrelevant: str, poisoned: str, shares: Sequence[float]) -> Layout:
    """An irrelevant source, then a source with wrong labels. If no domain is called `irrelevant`, the images of one
    domain are replaced by noise. The bad source is never the target; rows may refer to it as `{bad}`."""

    def layout(roles: DomainRoles) -> list[Column]:
        bad = poisoned if poisoned in roles.domains else roles.domains[-1]
        odd = irrelevant if irrelevant in roles.domains else bad
        noise: dict[str, Any] = {} if odd == irrelevant else {"attack": [f"noise:{odd}"]}
        targets = [target for target in roles.targets if target not in (bad, odd)]
        also = [bad] if odd == irrelevant and bad in roles.targets else []
        columns = [Column("irrelevant", {"target": t, **noise}, {"bad": odd}) for t in [*targets, *also]]
        return columns + [
            Column(f"{share:.0%} wrong", {"target": t, "attack": [f"poison:{bad}:{share}"]}, {"bad": bad})
            for share in shares
            for t in targets
        ]

    return layout


def rounds_per_epoch(epochs: int, batches: int, *rates: float) -> Layout:
    """KD3A's r: `epochs` epochs in total, r rounds in each. FADA's sites exchange after every `batches` / r batches,
    where `batches` is the number per epoch."""

    def layout(roles: DomainRoles) -> list[Column]:
        columns = []
        for rate in rates:
            rounds = max(1, round(epochs * rate))
            names = {"sync": max(1, round(batches / rate)), "epochs": 1 / min(rate, 1), "rounds": min(epochs, rounds)}
            for target in roles.targets:
                settings = {"target": target, "rounds": rounds, "local_epochs": 1 / rate}
                settings["evaluate_every"] = max(1, rounds // 5)
                columns.append(Column(f"r {rate:g}", settings, names))
        return columns

    return layout
