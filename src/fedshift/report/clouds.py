"""Maps of features as geometry: dots by class and by domain, before and after training."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from fedshift.report.gallery import Cloud, Flat
from fedshift.report.pictures import class_hue
from fedshift.report.words import percent

SIZE = 1000
_MARGIN = 30
_MAX_NAMED = 20
"""Classes beyond which a legend would be longer than the map."""
_COMPACT = 0.17
"""How far, in sides of the map, half of a class's points may be from their middle for its name to stand there."""


@dataclass(frozen=True)
class Dots:
    """Points of one colour as an SVG path. `hue` colours a class, `style` a domain."""

    path: str
    name: str
    style: str = ""
    hue: int | None = None
    is_target: bool = False


@dataclass(frozen=True)
class Name:
    """A class's name in the middle of its points, in percent of the map's sides."""

    text: str
    left: float
    top: float
    hue: int


@dataclass(frozen=True)
class Map:
    title: str
    note: str
    dots: tuple[Dots, ...]
    names: tuple[Name, ...] = ()
    size: int = SIZE


@dataclass(frozen=True)
class Maps:
    """`legend` names domains with their colours, `classes` classes with their hues; `agreement` is a sentence."""

    maps: tuple[Map, ...]
    legend: tuple[tuple[str, str, bool], ...]
    classes: tuple[tuple[str, int], ...]
    points: int
    agreement: str


def maps_of(cloud: Cloud, styles: Mapping[str, str]) -> Maps:
    has_labels = any(label >= 0 for label in cloud.label)
    maps = []
    for title, flat in (("Before", cloud.before), ("After", cloud.after)):
        if has_labels:
            maps.append(_by_class(title, flat, cloud))
        maps.append(_by_domain(title, flat, cloud, styles))
    legend = tuple((name, styles.get(name, "c0"), name in cloud.targets) for name in cloud.domains)
    count = len(cloud.classes)
    shown = cloud.classes if has_labels and count <= _MAX_NAMED else []
    classes = tuple((name, class_hue(index, count)) for index, name in enumerate(shown))
    return Maps(tuple(maps), legend, classes, len(cloud.after), _agreement(cloud))


def _agreement(cloud: Cloud) -> str:
    before, after = cloud.agreement
    if before is None or after is None:
        return ""
    whose = cloud.targets[0] if len(cloud.targets) == 1 else "the targets"
    return (
        f"Among the features themselves, the nearest source sample of a sample of {whose} has the same class in"
        f" {percent(before)} % of cases before training and in {percent(after)} % after."
    )


def _by_class(title: str, flat: Flat, cloud: Cloud) -> Map:
    count, targets = len(cloud.classes), [cloud.domains.index(name) for name in cloud.targets]
    groups: dict[tuple[bool, int], list[tuple[float, float]]] = {}
    for point, label, domain in zip(flat, cloud.label, cloud.domain, strict=True):
        groups.setdefault((domain in targets, label), []).append(point)
    dots = [
        Dots(_path(points), "no label", "c0", None, is_target)
        if label < 0
        else Dots(_path(points), cloud.classes[label], "", class_hue(label, count), is_target)
        for (is_target, label), points in sorted(groups.items())
    ]
    return Map(title, "by class", tuple(dots), tuple(_names(groups, cloud)))


def _names(groups: Mapping[tuple[bool, int], list[tuple[float, float]]], cloud: Cloud) -> list[Name]:
    """Names of the classes whose points lie together."""
    count, names = len(cloud.classes), []
    for label in sorted({label for _, label in groups if label >= 0}) if count <= _MAX_NAMED else []:
        points = [point for (_, own), some in groups.items() if own == label for point in some]
        middle = statistics.median(p[0] for p in points), statistics.median(p[1] for p in points)
        if len(points) > 2 and statistics.median(math.dist(point, middle) for point in points) <= _COMPACT:
            x, y = (round(place / SIZE * 100, 1) for place in _place(middle))
            names.append(Name(cloud.classes[label], x, y, class_hue(label, count)))
    return names


def _by_domain(title: str, flat: Flat, cloud: Cloud, styles: Mapping[str, str]) -> Map:
    dots = []
    for number, name in enumerate(cloud.domains):
        points = [point for point, domain in zip(flat, cloud.domain, strict=True) if domain == number]
        if points:
            dots.append(Dots(_path(points), name, styles.get(name, "c0"), None, name in cloud.targets))
    return Map(title, "by domain", tuple(dots))


def _place(point: tuple[float, float]) -> tuple[float, float]:
    inner = SIZE - 2 * _MARGIN
    return _MARGIN + inner * point[0], _MARGIN + inner * (1 - point[1])


def _path(points: Sequence[tuple[float, float]]) -> str:
    return "".join(f"M{x:.0f} {y:.0f}h0" for x, y in map(_place, points))
