"""Maps of features as geometry: dots by class and by domain, before and after training."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from fedshift.report.samples import FeaturePoints, PlanePoints, class_hue
from fedshift.report.text import percent

SIZE = 1000
_MARGIN = 30
_MAX_NAMED = 20
"""With more classes than this, neither maps nor legend name them."""
_COMPACT = 0.17
"""The name of a class is on the map if half of its points are this close to their median, in sides of the map."""


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
    """The name of a class at the median of its points, in percent of the map's sides."""

    text: str
    left: float
    top: float
    hue: int


@dataclass(frozen=True)
class FeatureMap:
    title: str
    note: str
    dots: tuple[Dots, ...]
    names: tuple[Name, ...] = ()
    size: int = SIZE


@dataclass(frozen=True)
class FeatureMaps:
    """`legend` has (domain, style, is a target), `classes` has (class, hue). `points` is their number. `agreement` is a
    sentence on nearest neighbours."""

    maps: tuple[FeatureMap, ...]
    legend: tuple[tuple[str, str, bool], ...]
    classes: tuple[tuple[str, int], ...]
    points: int
    agreement: str


def feature_maps(features: FeaturePoints, styles: Mapping[str, str]) -> FeatureMaps:
    has_labels = any(label >= 0 for label in features.label)
    maps = []
    for title, points in (("Before", features.before), ("After", features.after)):
        if has_labels:
            maps.append(_by_class(title, points, features))
        maps.append(_by_domain(title, points, features, styles))
    legend = tuple((name, styles.get(name, "c0"), name in features.targets) for name in features.domains)
    count = len(features.classes)
    shown = features.classes if has_labels and count <= _MAX_NAMED else []
    classes = tuple((name, class_hue(index, count)) for index, name in enumerate(shown))
    return FeatureMaps(tuple(maps), legend, classes, len(features.after), _agreement(features))


def _agreement(features: FeaturePoints) -> str:
    before, after = features.agreement
    if before is None or after is None:
        return ""
    whose = features.targets[0] if len(features.targets) == 1 else "the targets"
    return (
        f"Before training, the nearest source sample of a sample of {whose} has the same class in"
        f" {percent(before)} % of cases; after training in {percent(after)} % (measured on the features, not the map)."
    )


def _by_class(title: str, points: PlanePoints, features: FeaturePoints) -> FeatureMap:
    count, targets = len(features.classes), [features.domains.index(name) for name in features.targets]
    groups: dict[tuple[bool, int], list[tuple[float, float]]] = {}
    for point, label, domain in zip(points, features.label, features.domain, strict=True):
        groups.setdefault((domain in targets, label), []).append(point)
    dots = [
        Dots(_path(group), "no label", "c0", None, is_target)
        if label < 0
        else Dots(_path(group), features.classes[label], "", class_hue(label, count), is_target)
        for (is_target, label), group in sorted(groups.items())
    ]
    return FeatureMap(title, "by class", tuple(dots), tuple(_names(groups, features)))


def _names(groups: Mapping[tuple[bool, int], list[tuple[float, float]]], features: FeaturePoints) -> list[Name]:
    """Names of the classes whose points are close together."""
    count, names = len(features.classes), []
    for label in sorted({label for _, label in groups if label >= 0}) if count <= _MAX_NAMED else []:
        points = [point for (_, own), some in groups.items() if own == label for point in some]
        middle = statistics.median(p[0] for p in points), statistics.median(p[1] for p in points)
        if len(points) > 2 and statistics.median(math.dist(point, middle) for point in points) <= _COMPACT:
            x, y = (round(place / SIZE * 100, 1) for place in _place(middle))
            names.append(Name(features.classes[label], x, y, class_hue(label, count)))
    return names


def _by_domain(title: str, points: PlanePoints, features: FeaturePoints, styles: Mapping[str, str]) -> FeatureMap:
    dots = []
    for number, name in enumerate(features.domains):
        own = [point for point, domain in zip(points, features.domain, strict=True) if domain == number]
        if own:
            dots.append(Dots(_path(own), name, styles.get(name, "c0"), None, name in features.targets))
    return FeatureMap(title, "by domain", tuple(dots))


def _place(point: tuple[float, float]) -> tuple[float, float]:
    inner = SIZE - 2 * _MARGIN
    return _MARGIN + inner * point[0], _MARGIN + inner * (1 - point[1])


def _path(points: Sequence[tuple[float, float]]) -> str:
    return "".join(f"M{x:.0f} {y:.0f}h0" for x, y in map(_place, points))
