"""What needs the run's data and models: features before and after training, samples with predictions.

It is made once, where the data of all sites can be opened on this machine, and kept in the run directory.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from contextlib import suppress

import numpy as np
import torch
from numpy.typing import NDArray
from pydantic import BaseModel, ValidationError
from torch import nn

from fedshift.data.domain import Dataset, Split
from fedshift.errors import FedshiftError
from fedshift.files import write_atomically
from fedshift.report.pictures import Strip, scenes, shots
from fedshift.report.reading import Record
from fedshift.runs.config import make_config, read_config
from fedshift.runs.directory import RunDirectory
from fedshift.runs.features import Ints, Seen, flatten, look, neighbours_agree, vectors
from fedshift.runs.flops import flop_counter
from fedshift.runs.model_file import SavedModel, load_model
from fedshift.runs.planning import Prepared, base_network, prepare

FILE = "gallery.json"
POINTS = 400
"""Points on a map of features, all domains together."""
_FORMAT = 1
_SCENES_A_DOMAIN = 24
"""Pictures of which segmentation takes features: each gives a point a class."""
_RANDOM, _RANDOM_SOURCE, _SCENES, _MAX_STRIPS = 12, 6, 3, 8
_BUDGET = 400_000_000_000
"""Floating-point operations to spend on looking at samples: some ten seconds on one core. Large networks see fewer."""
_FEWEST = 12

Flat = list[tuple[float, float]]


class Cloud(BaseModel):
    """Points before and after training. `domain` and `label` are numbers of names; a label of -1 is unknown."""

    domains: list[str]
    targets: list[str]
    classes: list[str]
    domain: list[int]
    label: list[int]
    before: Flat
    after: Flat
    agreement: tuple[float | None, float | None] = (None, None)
    """Targets' points whose nearest source point has their class: before, after."""


class Gallery(BaseModel):
    """`notes` say what is missing and why. `key` names all that it was made from."""

    key: str = ""
    cloud: Cloud | None = None
    strips: list[Strip] = []
    notes: list[str] = []


Flattened = dict[str, tuple[NDArray[np.float32], NDArray[np.float32]]]
"""Maps of untrained networks: runs that start alike share them."""


def gallery_of(
    record: Record,
    *,
    make: bool,
    points: int = POINTS,
    shared: Flattened | None = None,
    say: Callable[[str], None] = lambda text: None,
) -> Gallery:
    """The run's gallery: as kept, or made now, or empty with a note that says why."""
    if record.results is None:
        return Gallery(notes=["Maps of features and samples appear when the run is finished."])
    key = f"{_FORMAT}:{points}:{record.results.model_sha256}"
    path = record.path / FILE
    kept = None
    with suppress(OSError, ValueError, ValidationError):
        kept = Gallery.model_validate(json.loads(path.read_text()))
    if kept and (kept.key == key or (not make and kept.key.endswith(f":{record.results.model_sha256}"))):
        return kept
    if not make:
        return Gallery(
            notes=["Maps of features and samples are not made yet: fedshift report RUN --features makes them."]
        )
    say(f"looking at samples and features of {record.path}")
    try:
        made = _make(record, points, {} if shared is None else shared).model_copy(update={"key": key})
    except FedshiftError as error:
        why = f"The run's data or model cannot be opened on this machine ({error.message.rstrip('.')})"
        return Gallery(notes=[f"{why}: no maps of features, no samples."])
    with suppress(OSError, FedshiftError):  # A run that may not be written to is still shown.
        write_atomically(path, made.model_dump_json().encode())
    return made


def _make(record: Record, points: int, shared: Flattened) -> Gallery:
    directory = RunDirectory(record.path)
    saved = load_model(directory.model)
    prepared = prepare(make_config(read_config(directory.config)))
    model, dataset = saved.plan.model, prepared.dataset
    if (model.classes, model.input_shape, model.task) != (dataset.classes, dataset.input_shape, dataset.task):
        return Gallery(notes=["The data has changed since the run (other classes or shapes): no maps, no samples."])
    targets = list(prepared.roles.tested)
    everyone = dict.fromkeys(name for person in prepared.roles.everyone for name in person.domains)
    names = sorted(everyone, key=lambda name: (name in targets, name))
    start, _ = base_network(prepared)
    start.eval()
    affordable = _BUDGET // _flops(start, model.input_shape) // len(names)
    wanted = points // len(names) if model.task == "classification" else _SCENES_A_DOMAIN
    a_domain = max(_FEWEST, min(wanted, affordable))
    notes: list[str] = []
    nets, splits = {}, {}
    for name in names:
        net, split = _network(saved, name), _some(dataset, name, a_domain)
        if net is None:
            notes.append(f"{name} is left out: the run has no model for it.")
        elif len(split):
            nets[name], splits[name] = net, split
    seen = {name: look(nets[name], _inputs(split)) for name, split in splits.items()}
    finite = all(bool(torch.isfinite(found.features).all()) for found in seen.values())
    if not finite:
        notes.append("The model's features are not finite: there is no map of them.")
    origin = _origin(prepared, points)
    cloud = _cloud(splits, seen, start, targets, dataset.classes, points, shared, origin) if finite else None
    pictured = sorted(splits, key=lambda name: name not in targets) if len(dataset.input_shape) == 3 else []
    strips = [_strip(name, splits[name], seen[name], dataset, name in targets) for name in pictured[:_MAX_STRIPS]]
    if len(pictured) > _MAX_STRIPS:
        notes.append(f"Samples of {len(pictured) - _MAX_STRIPS} more domains are not shown.")
    return Gallery(cloud=cloud, strips=strips, notes=notes)


def _flops(net: nn.Module, input_shape: tuple[int, ...]) -> int:
    """Of one sample on its way through."""
    with flop_counter() as counter, torch.inference_mode():
        net(torch.zeros(1, *input_shape))
    return max(1, int(counter.get_total_flops()))


def _network(saved: SavedModel, domain: str) -> nn.Module | None:
    try:
        return saved.network(domain)
    except FedshiftError:  # Every site has trained a model of its own, and this one none.
        return None


def _some(dataset: Dataset, name: str, count: int) -> Split:
    """Up to `count` samples in random order, of the test split where there is one."""
    domain = dataset.load(name)
    split = next((part for part in (domain.test, domain.val, domain.train) if len(part)), domain.train)
    return split.take(np.random.default_rng(0).permutation(len(split))[:count])


def _inputs(split: Split) -> torch.Tensor:
    rows = torch.from_numpy(np.array(split.inputs))
    return rows.permute(0, 3, 1, 2).float() / 255 if rows.ndim == 4 else rows


def _origin(prepared: Prepared, points: int) -> str:
    """All that the map of the untrained network depends on."""
    config = prepared.config
    roles = sorted({name for person in prepared.roles.everyone for name in person.domains})
    data = (config.dataset, config.data_dir, config.image_size, config.label_column)
    return repr((data, roles, config.arch, config.seed, config.weights, points))


def _cloud(
    splits: Mapping[str, Split],
    seen: Mapping[str, Seen],
    start: nn.Module,
    targets: list[str],
    classes: tuple[str, ...],
    points: int,
    shared: Flattened,
    origin: str,
) -> Cloud | None:
    found = [vectors(seen[name].features, splits[name].labels) for name in splits]
    # Methods whose networks differ by site have features of different lengths: there is no map of them all.
    if not found or len({part.shape[1] for part, _ in found}) > 1:
        return None
    owner = np.concatenate([np.full(len(part), number) for number, (part, _) in enumerate(found)])
    label: Ints = np.concatenate([classes_of for _, classes_of in found])
    after = np.concatenate([part for part, _ in found])
    kept = np.sort(np.random.default_rng(0).permutation(len(after))[:points])
    origin += repr(tuple(splits))
    if origin not in shared:
        first = [vectors(look(start, _inputs(split)).features, split.labels)[0] for split in splits.values()]
        untrained = np.concatenate(first)[kept]
        shared[origin] = (untrained, flatten(untrained))
    untrained, before = shared[origin]
    names = list(splits)
    is_target = np.isin(owner[kept], [names.index(name) for name in targets if name in names])
    return Cloud(
        domains=names,
        targets=[name for name in targets if name in names],
        classes=list(classes),
        domain=owner[kept].tolist(),
        label=label[kept].tolist(),
        before=_pairs(before),
        after=_pairs(flatten(after[kept])),
        agreement=(
            neighbours_agree(untrained, label[kept], is_target),
            neighbours_agree(after[kept], label[kept], is_target),
        ),
    )


def _pairs(flat: NDArray[np.float32]) -> Flat:
    return [(round(float(x), 4), round(float(y), 4)) for x, y in flat]


def _strip(name: str, split: Split, seen: Seen, dataset: Dataset, is_target: bool) -> Strip:
    strip = Strip(domain=name, is_target=is_target, looked_at=len(split))
    if dataset.task == "segmentation":
        strip.scenes = scenes(split, seen.probabilities, len(dataset.classes), _SCENES if is_target else 1)
    else:
        count = _RANDOM if is_target else _RANDOM_SOURCE
        strip.random, mistakes = shots(split, seen.probabilities, dataset.classes, count)
        strip.mistakes = mistakes if is_target else []
    return strip
