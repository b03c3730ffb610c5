"""What a method costs a site: operations per sample, numbers and bytes per round, counted and by closed formulas."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from fedshift.audit.counting import (
    BATCH,
    ROUNDS,
    Exchange,
    MessageSize,
    Work,
    count_rounds,
    flop_counter,
    random_dataset,
)
from fedshift.data.domain import Task
from fedshift.errors import InputError
from fedshift.federation.plan import Setting
from fedshift.functional.mixtures import as_rows
from fedshift.methods import find_about
from fedshift.methods.cost import Formula, Terms
from fedshift.methods.transfer import ROWS
from fedshift.nn.archs import Arch, build_network, find_arch
from fedshift.nn.backbones.segmentation import with_light_head
from fedshift.nn.normalisation import statistics_of
from fedshift.runs.config import make_config

TOLERANCE = 0.02
"""A count agrees with its formula if they differ by no more than this share. What formulas leave out (projections of
features onto a mixture's axes, the few numbers of a converted norm) is less."""

TABLE_COLUMNS = 16
"""Columns of random table rows."""
LARGE_IMAGE = 256
"""Side in pixels of random images for networks that take any size."""


@dataclass(frozen=True)
class Part:
    """A part of the network: operations of one sample's forward pass and of the gradient of its inputs, trained
    parameters, numbers in its message, and how many of these are BatchNorm statistics."""

    forward_flops: int
    input_gradient_flops: int
    parameters: int
    numbers: int
    statistics: int


@dataclass(frozen=True)
class Sent:
    """What goes in one direction, per site and round. `fields` has the numbers of each message field."""

    numbers: float
    bytes: float
    fields: Mapping[str, float]


@dataclass(frozen=True)
class SiteCost:
    """The cost of a step, or of a whole round, for a site that takes part. `flops_per_sample` counts each time that a
    sample is in a training batch, `other_flops` all work outside training batches. `times` is how often the site is
    asked."""

    flops_per_sample: float
    other_flops: float
    times: float
    upload: Sent
    broadcast: Sent


@dataclass(frozen=True)
class Comparison:
    """A counted number beside its formula."""

    quantity: str
    counted: float
    formula: str
    value: float
    agrees: bool


@dataclass(frozen=True)
class Cost:
    """`round` is any round after the first; if sites take part in the first round only, it equals `first_round`.
    `steps` are the steps of `round`. `home_flops` is what the coordinator computes in the last round, with as many
    samples as a site has. `published` is the paper's formula for a client's operations, and its value here."""

    method: str
    setting: Setting
    arch: str
    classes: int
    sites: int
    input_shape: tuple[int, ...]
    batch: int
    samples: int
    network: Mapping[str, Part]
    round: SiteCost
    first_round: SiteCost
    steps: Mapping[str, SiteCost]
    home_flops: int
    comparisons: tuple[Comparison, ...]
    published: tuple[str, float] | None
    note: str


def cost(
    method: str,
    arch: str = "digits-copa",
    classes: int = 10,
    *,
    sites: int = 3,
    image_size: int | None = None,
    batch: int = BATCH,
    samples: int | None = None,
) -> Cost:
    """Counts two rounds of `method` with `sites` sites (and a home or target if its setting has one), each with
    `samples` random samples, by default one batch."""
    _check(classes=(classes, 2), sites=(sites, 1), batch=(batch, 2))
    about, found = find_about(method), find_arch(arch)
    count = batch if samples is None else samples
    _check(samples=(count, batch))
    shape = _input_shape(found, image_size)
    task: Task = "segmentation" if found.kind == "segmentation" else "classification"
    names = [f"site{number}" for number in range(1, sites + 1)]
    dataset = random_dataset(task, [str(number) for number in range(classes)], [*names, "other"], shape, count)
    role = "home" if about.settings[0] == "multi-adapt" else "target"
    config = make_config({"method": about.name, "setting": about.settings[0], "arch": arch, role: "other"})
    counts = count_rounds(config, dataset, batch)
    formula = about.cost
    network = network_parts(arch, shape, classes, formula.discriminator if formula else None, batch)
    usual = site_cost(counts.usual)
    return Cost(
        method=about.name,
        setting=counts.plan.setting,
        arch=arch,
        classes=classes,
        sites=sites,
        input_shape=shape,
        batch=batch,
        samples=count,
        network=network,
        round=usual,
        first_round=site_cost(counts.of_round(1)),
        steps={
            step: site_cost(exchange for exchange in counts.usual if exchange.step == step)
            for step in dict.fromkeys(exchange.step for exchange in counts.usual)
        },
        home_flops=counts.home[ROUNDS].training + counts.home[ROUNDS].other,
        comparisons=compare(usual, formula, network, sites) if formula else (),
        published=_published(formula, network, sites) if formula else None,
        note=formula.note if formula else "There is no closed formula for this method.",
    )


def site_cost(exchanges: Iterable[Exchange]) -> SiteCost:
    """The mean over the sites that were asked."""
    asked = list(exchanges)
    sites = max(1, len({exchange.site for exchange in asked}))
    work = sum((exchange.work for exchange in asked), Work())
    return SiteCost(
        flops_per_sample=work.per_sample,
        other_flops=work.other / sites,
        times=len(asked) / sites,
        upload=_sent([exchange.up for exchange in asked], sites),
        broadcast=_sent([exchange.down for exchange in asked], sites),
    )


def network_parts(
    arch: str,
    input_shape: tuple[int, ...],
    classes: int,
    discriminator: Callable[[int], nn.Module] | None = None,
    batch: int = 1,
) -> dict[str, Part]:
    """G and F of an architecture, and D if a method has one. DeepLab's pyramid belongs to G, as in the methods that
    split networks. D sees as many pixels of a feature map per sample as it does in batches of `batch`."""
    net = with_light_head(build_network(arch, input_shape, classes, generator_seed=0)).eval()
    image = torch.rand(1, *input_shape)
    with torch.no_grad():
        features = net.features(image)
    parts = {"G": _part(net.backbone, net.features, image), "F": _part(net.head, net.head, features)}
    if discriminator:
        judge, rows = discriminator(net.backbone.out_features), as_rows(features)[: max(1, ROWS // batch)]
        parts["D"] = _part(judge, judge, rows)
    return parts


def compare(counted: SiteCost, formula: Formula, network: Mapping[str, Part], sites: int) -> tuple[Comparison, ...]:
    """Compares every formula of the method with what was counted."""
    up, down = (sent.fields.get(name, 0.0) for sent, name in zip(_both(counted), formula.mixture, strict=True))
    held = {"G": network["G"].numbers, "F": network["F"].numbers, "KF": sites * network["F"].numbers}
    held["S"] = network["G"].statistics
    rows: tuple[tuple[str, float, Terms | None, str, Mapping[str, float]], ...] = (
        ("FLOPs per sample", counted.flops_per_sample, formula.flops, "||", _flops_of(network, sites)),
        ("numbers uploaded", counted.upload.numbers, formula.upload, "|", held | {"W": up}),
        ("numbers broadcast", counted.broadcast.numbers, formula.broadcast, "|", held | {"W": down}),
    )
    return tuple(
        Comparison(name, number, written(terms, bar), value, abs(number - value) <= TOLERANCE * value)
        for name, number, terms, bar, symbols in rows
        if terms is not None
        for value in (evaluated(terms, symbols),)
    )


def evaluated(terms: Terms, symbols: Mapping[str, float]) -> float:
    """The sum of the terms, with the values of `symbols`."""
    return sum(times * symbols[symbol] for symbol, times in terms.items())


def written(terms: Terms, bar: str) -> str:
    """`3||G|| + 3||F|| - ||dG||`, with `bar` on both sides of each symbol."""
    text = ""
    for symbol, times in terms.items():
        sign = " - " if times < 0 else " + " if text else ""
        many, part = ("K", symbol[1:]) if symbol.startswith("K") else ("", symbol)
        text += f"{sign}{'' if abs(times) == 1 else f'{abs(times):g}'}{many}{bar}{part}{bar}"
    return text


def _flops_of(network: Mapping[str, Part], sites: int) -> dict[str, float]:
    extractor, classifier = network["G"], network["F"]
    judge: dict[str, float] = {"D": network["D"].forward_flops} if "D" in network else {}
    return judge | {
        "G": extractor.forward_flops,
        "F": classifier.forward_flops,
        "KF": sites * classifier.forward_flops,
        "dG": extractor.input_gradient_flops,
        "dF": classifier.input_gradient_flops,
    }


def _published(formula: Formula, network: Mapping[str, Part], sites: int) -> tuple[str, float] | None:
    terms = formula.published
    return (written(terms, "||"), evaluated(terms, _flops_of(network, sites))) if terms is not None else None


def _both(counted: SiteCost) -> tuple[Sent, Sent]:
    return counted.upload, counted.broadcast


def _sent(messages: list[MessageSize], sites: int) -> Sent:
    names = dict.fromkeys(name for message in messages for name in message.fields)
    fields = {name: sum(message.fields.get(name, 0) for message in messages) / sites for name in names}
    return Sent(sum(fields.values()), sum(message.bytes for message in messages) / sites, fields)


def _part(module: nn.Module, run: Callable[[Tensor], Tensor], example: Tensor) -> Part:
    def flops(*, backward: bool, needs_input_gradient: bool = False) -> int:
        example.requires_grad_(needs_input_gradient)
        with flop_counter() as counter:
            out = run(example)
            if backward:
                out.sum().backward()
        return int(counter.get_total_flops())

    return Part(
        forward_flops=flops(backward=False),
        input_gradient_flops=flops(backward=True, needs_input_gradient=True) - flops(backward=True),
        parameters=sum(parameter.numel() for parameter in module.parameters()),
        numbers=sum(tensor.numel() for tensor in module.state_dict().values()),
        statistics=sum(tensor.numel() for tensor in statistics_of(module).values()),
    )


def _input_shape(arch: Arch, image_size: int | None) -> tuple[int, ...]:
    if arch.kind == "table":
        if image_size is not None:
            raise InputError("config-value", f"image size: architecture {arch.name!r} takes table rows, not images")
        return (TABLE_COLUMNS,)
    side = image_size or arch.input_size or LARGE_IMAGE
    return (3, side, side)


def _check(**given: tuple[int, int]) -> None:
    for name, (value, least) in given.items():
        if value < least:
            raise InputError("config-value", f"{name} is {value}; it must be {least} or more")
