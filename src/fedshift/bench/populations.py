"""CSAC, Fig. 4: distances between models trained on the same and on different domains, and t-SNE of their layers."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from numpy.typing import NDArray
from torch import Tensor

from fedshift.audit.parameters import Population, Starts, train_population
from fedshift.bench import recipes
from fedshift.bench.figures import new_figure, saved
from fedshift.bench.functions import only_seed, options_of, timed
from fedshift.bench.places import Place, given_place, named_place
from fedshift.bench.recipes import Recipe
from fedshift.bench.sheets import Sheet, Value
from fedshift.bench.suite import Found, Order
from fedshift.files import write_atomically
from fedshift.runs.config import apply_settings

STARTS: tuple[Starts, ...] = ("same", "random")
COLUMNS = ("intra-domain L2", "inter-domain L2", "inter / intra", "nearest is of its domain", "by chance")

_ACQUIRED: Mapping[str, Any] = {
    **recipes.RESNET_18,
    "lr": 0.01,
    "momentum": 0.5,
    "batch_size": 64,
    "local_epochs": 30.0,
}
PAPER = tuple(Recipe(name, _ACQUIRED) for name in ("digits-dg", "vlcs"))
"""The paper says 50 models of ResNet-18 a domain; they train as CSAC's sites do before they collaborate."""

MINI = recipes.DIGITS.but(local_epochs=5.0, train_per_site=200, schedule="constant")


@dataclass(frozen=True)
class Options:
    """`--set parameters.KEY=VALUE`: models a domain."""

    models: int


MODELS = {"mini": Options(10), "paper": Options(50)}

TRAINING = (
    "arch",
    "weights",
    "freeze_norm",
    "image_size",
    "train_per_site",
    "batch_size",
    "lr",
    "backbone_lr_factor",
    "momentum",
    "weight_decay",
    "local_epochs",
    "schedule",
)
"""What a recipe says about a single training."""


def fig4(order: Order) -> Found:
    """DIFFERS: the paper does not say how its models differ. Pretrained, they would start alike: `same`. Models that
    start at random weights are shown beside them."""
    sheets: list[Sheet] = []
    files: list[Path] = []
    notes: list[str] = []
    seed = only_seed(order, "csac/fig4", "parameters.models")
    for place in _places(order):
        values = {**{k: v for k, v in place.recipe.settings.items() if k in TRAINING}, **place.data}
        options, keys = options_of("parameters", MODELS[order.scale], apply_settings(values, order.settings))
        for starts in STARTS if not keys.get("weights") else STARTS[:1]:
            told = timed(order.tell)
            found = train_population(options.models, starts, seed=seed, work=order.work, tell=told, **keys)
            sheets.append(sheet(found))
            files += write_population(found, order.out)
        notes += [*place.notes, f"{place.title}: {options.models} models a domain, seed {seed}."]
    return Found(sheets=tuple(sheets), files=tuple(files), notes=tuple(notes))


def _places(order: Order) -> list[Place]:
    if order.scale == "paper":
        return [named_place(recipe, order.data_dir) for recipe in PAPER]
    if order.data_dir is None:
        return [named_place(MINI, None)]
    return [given_place(MINI, order.data_dir, [recipe.dataset for recipe in PAPER])]


def sheet(found: Population) -> Sheet:
    rows: dict[str, list[Value]] = {
        layer: [own.within, own.between, own.between / own.within, own.nearest, found.chance]
        for layer, own in found.separations().items()
    }
    return Sheet(f"{found.dataset}, {found.arch}, {found.starts} start: distances of parameters", COLUMNS, rows)


def write_population(found: Population, out: Path) -> list[Path]:
    """A picture: distances by layer, then each layer's models; and the numbers as JSON. Returns the picture."""
    separations = found.separations()
    figure, axes = new_figure(1 + len(separations))
    figure.set_size_inches(4 * len(axes), 4)
    for name, values in (
        ("intra-domain", [own.within for own in separations.values()]),
        ("inter-domain", [own.between for own in separations.values()]),
    ):
        axes[0].plot(range(len(values)), values, marker="o", label=name)
    axes[0].set_xticks(range(len(separations)), list(separations))
    axes[0].set_ylabel("mean L2 distance")
    axes[0].legend(fontsize="small")
    for axis, (layer, distances) in zip(axes[1:], found.distances.items(), strict=True):
        points = placed_by_distance(distances)
        for group, domain in enumerate(found.domains):
            own = points[(found.groups == group).numpy()]
            axis.scatter(own[:, 0], own[:, 1], s=14, label=domain)
        axis.set_title(layer)
        axis.set_xticks([])
        axis.set_yticks([])
    axes[1].legend(fontsize="x-small")
    stem = f"parameters-{found.dataset}-{found.starts}"
    numbers = {
        "dataset": found.dataset,
        "arch": found.arch,
        "starts": found.starts,
        "domains": list(found.domains),
        "models": len(found.groups),
        "chance": found.chance,
        "layers": {layer: asdict(own) for layer, own in separations.items()},
    }
    write_atomically(out / f"{stem}.json", (json.dumps(numbers, indent=2) + "\n").encode())
    return [saved(figure, out / f"{stem}.png")]


def placed_by_distance(distances: Tensor) -> NDArray[Any]:
    """t-SNE of points `(n, 2)` of which only the distances are known: they may have millions of dimensions."""
    from sklearn.manifold import TSNE

    perplexity = min(30.0, (len(distances) - 1) / 3)
    tsne = TSNE(perplexity=perplexity, init="random", metric="precomputed", random_state=0)
    found: NDArray[Any] = tsne.fit_transform(distances.numpy())
    return found
