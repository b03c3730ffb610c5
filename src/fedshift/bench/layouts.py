"""The columns of a table: which domain is the target, which value is tried. Columns of one name are averaged."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from fedshift.bench.jobs import Column


@dataclass(frozen=True)
class Scene:
    """The domains of a data set, those that take turns as the target, and the one with the labels in multi-adapt."""

    domains: tuple[str, ...]
    targets: tuple[str, ...]
    home: str

    def others(self, *names: str) -> list[str]:
        return [domain for domain in self.domains if domain not in names]


Layout = Callable[[Scene], Sequence[Column]]


def each_target(scene: Scene) -> list[Column]:
    """Leave one domain out, each in turn."""
    return [Column(target, {"target": target}) for target in scene.targets]


def each_home(scene: Scene) -> list[Column]:
    """One labelled domain to all others, each in turn; a run's score is the mean over its clients."""
    return [Column(home, {"home": home, "setting": "multi-adapt"}) for home in scene.targets]


def one_home(scene: Scene) -> list[Column]:
    """One labelled domain to all others."""
    return [Column(scene.home, {"home": scene.home, "setting": "multi-adapt"})]


def shares_of_clients(*shares: float) -> Layout:
    def layout(scene: Scene) -> list[Column]:
        return [
            Column(f"{share:.0%}", {"home": scene.home, "setting": "multi-adapt", "client_fraction": share})
            for share in shares
        ]

    return layout


def values_of(section: str, key: str, *values: Any) -> Layout:
    """A method's key, with every value on every target."""

    def layout(scene: Scene) -> list[Column]:
        return [
            Column(f"{key} {value}", {"target": target, section: {key: value}})
            for value in values
            for target in scene.targets
        ]

    return layout


def more_sources(order: Sequence[str], target: str) -> Layout:
    """One source, two, and so on in `order`, as far as the data have them."""

    def layout(scene: Scene) -> list[Column]:
        held_out = target if target in scene.domains else scene.targets[0]
        known = [name for name in order if name in scene.domains]
        sources = known if len(known) == len(scene.domains) - 1 else scene.others(held_out)
        return [
            Column(f"{count} source{'s' * (count > 1)}", {"target": held_out, "sources": sources[:count]})
            for count in range(1, len(sources) + 1)
        ]

    return layout


def bad_sites(irrelevant: str, poisoned: str, shares: Sequence[float]) -> Layout:
    """An irrelevant source, then one with wrong labels. Where the data have no domain called `irrelevant`, one shows
    noise instead. The bad one is never the target; rows may call it `{bad}`."""

    def layout(scene: Scene) -> list[Column]:
        bad = poisoned if poisoned in scene.domains else scene.domains[-1]
        odd = irrelevant if irrelevant in scene.domains else bad
        noise: dict[str, Any] = {} if odd == irrelevant else {"attack": [f"noise:{odd}"]}
        targets = [target for target in scene.targets if target not in (bad, odd)]
        also = [bad] if odd == irrelevant and bad in scene.targets else []
        columns = [Column("irrelevant", {"target": t, **noise}, {"bad": odd}) for t in [*targets, *also]]
        return columns + [
            Column(f"{share:.0%} wrong", {"target": t, "attack": [f"poison:{bad}:{share}"]}, {"bad": bad})
            for share in shares
            for t in targets
        ]

    return layout


def rounds_an_epoch(epochs: int, batches: int, *rates: float) -> Layout:
    """KD3A's r: `epochs` in all, cut into r rounds each. Sites of FADA meet after the batches (of `batches` an epoch)
    that r leaves them."""

    def layout(scene: Scene) -> list[Column]:
        columns = []
        for rate in rates:
            rounds = max(1, round(epochs * rate))
            between = {"sync": max(1, round(batches / rate)), "epochs": 1 / min(rate, 1), "rounds": min(epochs, rounds)}
            for target in scene.targets:
                settings = {"target": target, "rounds": rounds, "local_epochs": 1 / rate}
                settings["evaluate_every"] = max(1, rounds // 5)
                columns.append(Column(f"r {rate:g}", settings, between))
        return columns

    return layout
