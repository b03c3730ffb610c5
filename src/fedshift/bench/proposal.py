"""What to train on data that nobody has configured yet: setting, method, network and image size, each with its reason.

The time that a network takes is measured on this machine, with one small batch.
"""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from fedshift.bench.api import cores
from fedshift.bench.auto import CANDIDATES, MOST_ROUNDS
from fedshift.data.check import DataReport, DomainReport
from fedshift.data.tiling import AUTO_FROM, AUTO_SIDE
from fedshift.errors import InputError
from fedshift.files import write_atomically
from fedshift.functional.losses import cross_entropy
from fedshift.methods import find_about
from fedshift.nn.archs import build_network
from fedshift.nn.weights import imagenet_weights
from fedshift.yamlfiles import dump_yaml

Line = tuple[str, Any, str]
"""A key, its value, and why."""

_SMALL = 40
_PHOTO_NETS = ("efficientnet_lite0", "mobilenet_v2")
_SIZES = (224, 192, 160, 128, 96, 64)
_BATCH = 8
_SHARE_OF_FINAL = 0.35
"""Of the minutes: what one training on all sources may take. The rest is for choosing the method."""


@dataclass(frozen=True)
class Proposal:
    lines: tuple[Line, ...]
    notes: tuple[str, ...]


def propose(report: DataReport, folder: Path, label_column: str | None, minutes: float) -> Proposal:
    """A configuration for the data that was checked, to be trained within about so many minutes."""
    labelled = [domain for domain in report.domains if domain.classes and domain.splits["train"]]
    unlabelled = [domain for domain in report.domains if not domain.classes]
    if not labelled:
        raise InputError("data-labels", f"no site of {folder} has labels to learn from")
    lines: list[Line] = [("data_dir", str(folder), f"{len(report.domains)} sites, {len(labelled)} of them with labels")]
    if label_column:
        lines.append(("label_column", label_column, "as you said"))
    roles, notes = _roles(labelled, unlabelled)
    lines += roles
    values = {key: value for key, value, _ in lines}
    sources = [d for d in labelled if d.name not in (values.get("target"), values.get("home"))] or labelled
    learning = sum(domain.splits["train"] for domain in sources)
    network, seconds = _network(report, learning, minutes)
    lines += network
    values |= {key: value for key, value, _ in network}
    lines += _method(values, report, len(sources), seconds, minutes)
    notes += _imbalance(labelled)
    return Proposal(tuple(lines), tuple(notes))


def write_proposal(found: Proposal, out: Path) -> None:
    parts = [
        "# Written by `fedshift init`. Every key: `docs/configuration.md`; `fedshift train` takes options over it.\n"
    ]
    for key, value, reason in found.lines:
        # A short word, number or list is written on one line.
        parts.append(f"\n# {reason}\n{dump_yaml({key: value})}")
    parts += [f"\n# note: {note}\n" for note in found.notes]
    write_atomically(out, "".join(parts).encode())


def _roles(labelled: Sequence[DomainReport], unlabelled: Sequence[DomainReport]) -> tuple[list[Line], list[str]]:
    """The setting and who is the target."""
    notes: list[str] = []
    if len(labelled) == 1:
        home = labelled[0].name
        if not unlabelled:
            raise InputError("config-roles", f"there is only one site, {home}: fedshift needs two or more")
        return [
            ("setting", "multi-adapt", f"only {home} has labels: every other site gets a model adapted to it"),
            ("home", home, "the only site with labels"),
        ], notes
    if unlabelled:
        largest = max(unlabelled, key=lambda domain: sum(domain.splits.values()))
        others = [domain.name for domain in unlabelled if domain is not largest]
        if others:
            notes.append(
                f"{', '.join(others)} {'has' if len(others) == 1 else 'have'} no labels either: a run adapts to one"
                f" target; for each other one, run again with --target {others[0]}"
            )
        return [
            (
                "setting",
                "adapt",
                f"{largest.name} has no labels, and methods that look at its data serve it better",
            ),
            ("target", largest.name, "used without labels; it cannot be scored, so look at the held-out sites instead"),
            ("sources", [domain.name for domain in labelled], "the sites with labels"),
        ], notes
    complete = [
        domain for domain in labelled if domain.classes and all(sum(c.values()) for c in domain.classes.values())
    ]
    held = min(complete or labelled, key=lambda domain: sum(domain.splits.values()))
    if len(labelled) == 2:
        notes.append("with two sites, one trains and one tests: more sites make the shift between them learnable")
    return [
        ("setting", "generalize", "all sites have labels: learn from all but one, for places that nobody has seen"),
        (
            "target",
            held.name,
            "held out to see how good the model is at a new place; delete this line to train on all sites",
        ),
    ], notes


def _network(report: DataReport, learning: int, minutes: float) -> tuple[list[Line], float]:
    """Network, weights and image size, and how long one pass through all sources takes, in seconds."""
    if len(report.input_shape) == 1:
        return [("arch", "mlp", "the data are tables")], 2.0
    classes = len(report.classes)
    if report.task == "segmentation" and (side := _usual_side(report)) > AUTO_FROM * AUTO_SIDE:
        pixels = sum(h * w * count for domain in report.domains for (h, w), count in domain.sizes.items())
        squares = learning * pixels / max(sum(sum(d.sizes.values()) for d in report.domains), 1) / AUTO_SIDE**2
        seconds = squares * _seconds_per_image("unet-small", (AUTO_SIDE, AUTO_SIDE), classes, is_map=True)
        why = f"pictures have about {side} pixels: seen in squares, so that thin structures do not vanish"
        return [
            ("arch", "unet-small", "masks: a small network that keeps fine detail"),
            ("tile", AUTO_SIDE, why),
        ], seconds
    if report.task == "segmentation":
        seconds = _seconds_per_image("segnet-small", report.input_shape[1:], classes, is_map=True)
        return [("arch", "segnet-small", "masks: a small network for scenes, from scratch")], seconds * learning
    side = _usual_side(report)
    if side <= _SMALL:
        seconds = _seconds_per_image("digits-copa", report.input_shape[1:], classes)
        return [
            ("arch", "digits-copa", f"small images ({side} pixels): a small network, from scratch")
        ], seconds * learning
    arch = next((name for name in _PHOTO_NETS if _has_weights(name)), None)
    if arch is None:
        lines = [
            (
                "arch",
                "resnet18",
                "photographs, but no ImageNet weights are installed (the extra `pretrained`): from scratch, which needs"
                " many more pictures",
            )
        ]
    else:
        lines = [
            ("arch", arch, "photographs: a network for small machines that knows ImageNet"),
            ("weights", "imagenet", "pre-trained: with few pictures this matters more than the method"),
        ]
    allowed = _SHARE_OF_FINAL * 60 * minutes * cores() / 10
    fitting = [size for size in _SIZES if size <= max(side, _SIZES[-1])] or [_SIZES[-1]]
    size, seconds = fitting[-1], 0.0
    for size in fitting:
        seconds = _seconds_per_image(arch or "resnet18", (size, size), classes) * learning
        if seconds <= allowed:
            break
    why = f"pictures have about {side} pixels; one pass through {learning:,} of them takes about {seconds:.0f} s here"
    return [*lines, ("image_size", size, why)], seconds


def _method(values: dict[str, Any], report: DataReport, sources: int, seconds: float, minutes: float) -> list[Line]:
    setting = values["setting"]
    if setting == "multi-adapt":
        method, why = "adabn", "each site's own statistics gave most of the gain where we measured, at no cost"
        if report.task == "classification" and len(report.input_shape) == 3 and not values.get("weights"):
            method, why = "fedlooks", "far ahead of all others where we measured, and a site sends only its statistics"
        rounds = _rounds(seconds * find_about(method).time_factor, minutes)
        return [
            ("method", method, why),
            ("rounds", rounds, f"about {minutes:g} minutes"),
        ]
    if sources < 2:
        return [
            ("method", "fedavg", "with one source there is nothing to choose a method by"),
            ("rounds", _rounds(seconds, minutes), f"about {minutes:g} minutes"),
        ]
    skipped = ("fedlooks",) if len(report.input_shape) == 1 else ()
    names = [n for n in CANDIDATES[setting] if report.task in find_about(n).tasks and n not in skipped]
    return [
        ("method", "auto", f"tries {', '.join(names)} with each labelled source held out in turn, as time allows"),
        ("budget", minutes, "minutes for choosing and training; the rounds follow from it"),
    ]


def _rounds(seconds: float, minutes: float) -> int:
    return max(3, min(MOST_ROUNDS, int(60 * minutes * cores() / max(seconds, 0.1))))


def _imbalance(labelled: Sequence[DomainReport]) -> list[str]:
    notes = []
    for domain in labelled:
        counts = {name: sum(split.values()) for name, split in (domain.classes or {}).items()}
        least, most = min(counts, key=lambda n: counts[n]), max(counts, key=lambda n: counts[n])
        if counts[most] >= 5 * max(counts[least], 1):
            notes.append(
                f"{domain.name} has {counts[most]} of {most} and {counts[least]} of {least}: mind each class,"
                " not only accuracy"
            )
    sizes = {domain.name: domain.splits["train"] for domain in labelled}
    small, large = min(sizes, key=lambda n: sizes[n]), max(sizes, key=lambda n: sizes[n])
    if sizes[large] >= 10 * max(sizes[small], 1):
        notes.append(
            f"{large} has {sizes[large] // max(sizes[small], 1)} times as many samples as {small}: it will dominate"
        )
    return notes


def _usual_side(report: DataReport) -> int:
    """The shorter side of the median picture."""
    sides: Counter[int] = Counter()
    for domain in report.domains:
        for (height, width), count in domain.sizes.items():
            sides[min(height, width)] += count
    if not sides:
        return min(report.input_shape[1:])
    half, seen = sum(sides.values()) / 2, 0
    for side in sorted(sides):
        seen += sides[side]
        if seen >= half:
            return side
    return max(sides)


def _has_weights(arch: str) -> bool:
    try:
        imagenet_weights(arch)
    except InputError:
        return False
    return True


def _seconds_per_image(arch: str, size: Sequence[int], classes: int, *, is_map: bool = False) -> float:
    """Forward and backward on this machine, of the second of two batches."""
    shape = (3, *(int(side) for side in size))
    net = build_network(arch, shape, classes, 0).train()
    generator = torch.Generator().manual_seed(0)
    x = torch.rand(_BATCH, *shape, generator=generator).to(memory_format=torch.channels_last)
    y = torch.zeros((_BATCH, *shape[1:]) if is_map else (_BATCH,), dtype=torch.int64)
    threads, taken = torch.get_num_threads(), math.inf
    torch.set_num_threads(1)
    try:
        for _ in range(2):
            started = time.perf_counter()
            cross_entropy(net(x), y).backward()
            taken = min(taken, time.perf_counter() - started)
    finally:
        torch.set_num_threads(threads)
    return taken / _BATCH
