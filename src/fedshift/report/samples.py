"""What the report shows of a run's data: samples with predictions, and features before and after training.

Both need the data of all sites and the trained model on this machine. They are made once and kept in the run directory.
"""

from __future__ import annotations

import base64
import colorsys
import io
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Annotated, Any

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image
from pydantic import AliasChoices, BaseModel, Field, ValidationError
from torch import Tensor, nn

from fedshift.audit.counting import flop_counter
from fedshift.data.domain import VOID, Dataset, Split
from fedshift.data.tiling import middles
from fedshift.errors import FedshiftError
from fedshift.files import read_json, write_atomically
from fedshift.runs.config import make_config, read_config
from fedshift.runs.directory import RunDirectory
from fedshift.runs.features import Ints, NetworkOutputs, feature_points, flatten, neighbours_agree, network_outputs
from fedshift.runs.files.model import SavedModel, load_model
from fedshift.runs.planning import Prepared, base_network, prepare
from fedshift.runs.record import RunRecord

FILE = "gallery.json"
POINTS = 400
"""Points on a map of features, over all domains."""
_FORMAT = 1
_RANDOM_TARGET, _RANDOM_SOURCE = 12, 6
"""Images per domain that are shown at random."""
_MASKS_TARGET, _MASKS_SOURCE = 3, 1
"""Segmented images per domain that are shown."""
_MAX_DOMAINS = 8
"""Domains of which samples are shown."""
_SEGMENTED = 24
"""Images per domain that give features in segmentation: one point per class in each."""
_BUDGET = 400_000_000_000
"""Floating-point operations for looking at samples: about ten seconds on one core. Large networks see fewer samples."""
_FEWEST = 12
"""Samples per domain, whatever the network costs."""
_LONGEST_SIDE = 160
"""Larger images are reduced to this many pixels."""
_JPEG_QUALITY = 88
_MASK_OPACITY = 0.68

Images = NDArray[np.uint8]
PlanePoints = list[tuple[float, float]]
UntrainedMaps = dict[str, tuple[NDArray[np.float32], NDArray[np.float32]]]
"""Features and maps of untrained networks. Runs that start from the same network share them."""
Jpeg = Annotated[str, Field(pattern=r"^[A-Za-z0-9+/]+={0,2}$")]
"""A JPEG file in base64. The pattern allows nothing that could end an HTML attribute."""


class PredictedImage(BaseModel):
    """An image, its predicted class, and its true class if that is known."""

    image: Jpeg
    prediction: str
    confidence: float
    truth: str | None = None

    @property
    def is_right(self) -> bool | None:
        return None if self.truth is None else self.truth == self.prediction


class PredictedMask(BaseModel):
    """An image, and the same with the predicted and true classes of its pixels as colours. `score` is the share of
    labelled pixels that are right."""

    image: Jpeg
    prediction: Jpeg
    truth: Jpeg | None = None
    score: float | None = None


class DomainSamples(BaseModel):
    """Samples of one domain: `random` ones, the `mistakes` with the highest confidence among `looked_at` samples, and
    those that the model is least sure of. In segmentation there are `scenes` instead."""

    domain: str
    is_target: bool
    looked_at: int
    random: list[PredictedImage] = []
    mistakes: list[PredictedImage] = []
    unsure: list[PredictedImage] = []
    scenes: list[PredictedMask] = []


class FeaturePoints(BaseModel):
    """Points before and after training. `domain` and `label` are indices into `domains` and `classes`; label -1 is
    unknown. `agreement`, before and after: the share of the targets' points whose nearest source point has their
    class."""

    domains: list[str]
    targets: list[str]
    classes: list[str]
    domain: list[int]
    label: list[int]
    before: PlanePoints
    after: PlanePoints
    agreement: tuple[float | None, float | None] = (None, None)


class DataView(BaseModel):
    """What the report shows of a run's data. `notes` say what is missing and why. `key` names what it was made from.
    Files of fedshift 0.1 have the names `cloud` and `strips`."""

    key: str = ""
    features: FeaturePoints | None = Field(default=None, validation_alias=AliasChoices("features", "cloud"))
    samples: list[DomainSamples] = Field(default=[], validation_alias=AliasChoices("samples", "strips"))
    notes: list[str] = []


def data_view(
    record: RunRecord,
    *,
    make: bool,
    points: int = POINTS,
    shared: UntrainedMaps | None = None,
    say: Callable[[str], None] = lambda text: None,
) -> DataView:
    """The kept view of the run, or a new one if `make` is set, or an empty one with a note that says why."""
    if record.results is None:
        return DataView(notes=["Maps of features and samples appear when the run is finished."])
    sha256 = record.results.model_sha256
    key = f"{_FORMAT}:{points}:{sha256}"
    path = record.path / FILE
    kept = None
    with suppress(FedshiftError, ValidationError):  # A damaged one is made again.
        kept = DataView.model_validate(read_json(path))
    if kept and (kept.key == key or (not make and kept.key.endswith(f":{sha256}"))):
        return kept
    if not make:
        return DataView(
            notes=["Maps of features and samples are not made yet: fedshift report RUN --features makes them."]
        )
    say(f"looking at samples and features of {record.path}")
    try:
        made = _make(record, points, {} if shared is None else shared).model_copy(update={"key": key})
    except FedshiftError as error:
        reason = f"The run's data or model cannot be opened on this machine ({error.message.rstrip('.')})"
        return DataView(notes=[f"{reason}: no maps of features, no samples."])
    with suppress(OSError, FedshiftError):  # A run directory that is not writable is still shown.
        write_atomically(path, made.model_dump_json().encode())
    return made


def _make(record: RunRecord, points: int, shared: UntrainedMaps) -> DataView:
    directory = RunDirectory(record.path)
    saved = load_model(directory.model, record.results.model_sha256 if record.results else "")
    prepared = prepare(make_config(read_config(directory.config)))
    model, dataset = saved.header, prepared.dataset
    if (model.classes, model.input_shape, model.task) != (dataset.classes, dataset.input_shape, dataset.task):
        return DataView(notes=["The data has changed since the run (other classes or shapes): no maps, no samples."])
    targets = list(prepared.roles.tested)
    everyone = dict.fromkeys(name for person in prepared.roles.everyone for name in person.domains)
    names = sorted(everyone, key=lambda name: (name in targets, name))
    start, _ = base_network(prepared)
    start.eval()
    affordable = _BUDGET // _flops(start, model.input_shape) // len(names)
    wanted = points // len(names) if model.task == "classification" else _SEGMENTED
    per_domain = max(_FEWEST, min(wanted, affordable))
    notes: list[str] = []
    nets, splits = {}, {}
    for name in names:
        net, split = _network(saved, name), _random_samples(dataset, name, per_domain)
        if net is None:
            notes.append(f"{name} is left out: the run has no model for it.")
        elif len(split):
            nets[name], splits[name] = net, split
    outputs = {name: network_outputs(nets[name], _inputs(split)) for name, split in splits.items()}
    finite = all(bool(torch.isfinite(found.features).all()) for found in outputs.values())
    if not finite:
        notes.append("The model's features are not finite: there is no map of them.")
    origin = _origin(prepared, points)
    features = _features(splits, outputs, start, targets, dataset.classes, points, shared, origin) if finite else None
    pictured = sorted(splits, key=lambda name: name not in targets) if len(dataset.input_shape) == 3 else []
    samples = [
        _domain_samples(name, splits[name], outputs[name], dataset, name in targets) for name in pictured[:_MAX_DOMAINS]
    ]
    if dataset.tile is not None:
        notes.append(
            f"Of each picture, the {dataset.tile} x {dataset.tile} pixels in its middle are shown, not shrunk."
        )
    if len(pictured) > _MAX_DOMAINS:
        notes.append(f"Samples of {len(pictured) - _MAX_DOMAINS} more domains are not shown.")
    return DataView(features=features, samples=samples, notes=notes)


def _flops(net: nn.Module, input_shape: tuple[int, ...]) -> int:
    """Floating-point operations of one sample's forward pass."""
    with flop_counter() as counter, torch.inference_mode():
        net(torch.zeros(1, *input_shape))
    return max(1, int(counter.get_total_flops()))


def _network(saved: SavedModel, domain: str) -> nn.Module | None:
    try:
        return saved.network(domain)
    except FedshiftError:  # Every site trained its own model, and this domain has none.
        return None


def _random_samples(dataset: Dataset, name: str, count: int) -> Split:
    """Up to `count` samples in random order: of the test split, or if that is empty of val, then train."""
    domain = dataset.load(name)
    split = next((part for part in (domain.test, domain.val, domain.train) if len(part)), domain.train)
    chosen = split.take(np.random.default_rng(0).permutation(len(split))[:count])
    return chosen if chosen.tiles is None else middles(chosen, count)


def _inputs(split: Split) -> torch.Tensor:
    rows = torch.from_numpy(np.array(split.inputs))
    return rows.permute(0, 3, 1, 2).float() / 255 if rows.ndim == 4 else rows


def _origin(prepared: Prepared, points: int) -> str:
    """Everything that the map of the untrained network depends on."""
    config = prepared.config
    roles = sorted({name for person in prepared.roles.everyone for name in person.domains})
    data = (config.dataset, config.data_dir, config.image_size, config.label_column, config.tile)
    return repr((data, roles, config.arch, config.seed, config.weights, points))


def _features(
    splits: Mapping[str, Split],
    outputs: Mapping[str, NetworkOutputs],
    start: nn.Module,
    targets: list[str],
    classes: tuple[str, ...],
    points: int,
    shared: UntrainedMaps,
    origin: str,
) -> FeaturePoints | None:
    found = [feature_points(outputs[name].features, splits[name].labels) for name in splits]
    # If networks differ by site, features have different lengths and there is no common map.
    if not found or len({part.shape[1] for part, _ in found}) > 1:
        return None
    owner = np.concatenate([np.full(len(part), number) for number, (part, _) in enumerate(found)])
    label: Ints = np.concatenate([classes_of for _, classes_of in found])
    after = np.concatenate([part for part, _ in found])
    kept = np.sort(np.random.default_rng(0).permutation(len(after))[:points])
    origin += repr(tuple(splits))
    if origin not in shared:
        first = [
            feature_points(network_outputs(start, _inputs(split)).features, split.labels)[0]
            for split in splits.values()
        ]
        untrained = np.concatenate(first)[kept]
        shared[origin] = (untrained, flatten(untrained))
    untrained, before = shared[origin]
    names = list(splits)
    is_target = np.isin(owner[kept], [names.index(name) for name in targets if name in names])
    return FeaturePoints(
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


def _pairs(points: NDArray[np.float32]) -> PlanePoints:
    return [(round(float(x), 4), round(float(y), 4)) for x, y in points]


def _domain_samples(
    name: str, split: Split, outputs: NetworkOutputs, dataset: Dataset, is_target: bool
) -> DomainSamples:
    found = DomainSamples(domain=name, is_target=is_target, looked_at=len(split))
    if dataset.task == "segmentation":
        count = _MASKS_TARGET if is_target else _MASKS_SOURCE
        found.scenes = predicted_masks(split, outputs.probabilities, len(dataset.classes), count)
    else:
        count = _RANDOM_TARGET if is_target else _RANDOM_SOURCE
        found.random, mistakes, unsure = predicted_images(split, outputs.probabilities, dataset.classes, count)
        found.mistakes, found.unsure = (mistakes, unsure) if is_target else ([], [])
    return found


def predicted_images(
    split: Split, probabilities: Tensor, classes: tuple[str, ...], count: int
) -> tuple[list[PredictedImage], list[PredictedImage], list[PredictedImage]]:
    """The first `count` samples, which are in random order, the `count` mistakes with the highest confidence, and half
    as many samples with the lowest."""
    sure, predicted = probabilities.max(1)
    guesses, confidences = predicted.tolist(), sure.tolist()

    def pictured(index: int) -> PredictedImage:
        return PredictedImage(
            image=encode(split.inputs[index]),
            prediction=classes[guesses[index]],
            confidence=confidences[index],
            truth=None if split.labels is None else classes[int(split.labels[index])],
        )

    wrong = [] if split.labels is None else [i for i in range(len(split)) if guesses[i] != int(split.labels[i])]
    surest = sorted(wrong, key=lambda index: -confidences[index])[:count]
    unsure = sorted(range(len(split)), key=lambda index: confidences[index])[: count // 2]
    first = range(min(count, len(split)))
    return [pictured(i) for i in first], [pictured(i) for i in surest], [pictured(i) for i in unsure]


def predicted_masks(split: Split, probabilities: Tensor, classes: int, count: int) -> list[PredictedMask]:
    """The first `count` images, with their predicted and true masks laid over them."""
    predicted = probabilities.argmax(1).numpy()
    found = []
    for index in range(min(count, len(split))):
        image, mask = split.inputs[index], predicted[index]
        truth = None if split.labels is None else split.labels[index]
        known = None if truth is None else truth != VOID
        score = None if known is None or not known.any() else float((mask == truth)[known].mean())
        found.append(
            PredictedMask(
                image=encode(image),
                prediction=encode(overlay(image, mask, classes)),
                truth=None if truth is None else encode(overlay(image, truth, classes)),
                score=score,
            )
        )
    return found


def overlay(image: Images, mask: NDArray[Any], classes: int) -> Images:
    """The image in grey under the colours of its classes. Pixels without a label stay grey."""
    grey = np.repeat(image.mean(2, keepdims=True), 3, axis=2)
    palette = np.array([class_colour(index, classes) for index in range(classes)], np.float32)
    labelled = (mask < classes)[..., None]
    colour = palette[np.where(mask < classes, mask, 0)]
    mixed = np.where(labelled, _MASK_OPACITY * colour + (1 - _MASK_OPACITY) * grey, grey)
    return mixed.round().astype(np.uint8)


def encode(image: Images) -> str:
    """The image as a JPEG file in base64, reduced if it is large."""
    picture = Image.fromarray(np.ascontiguousarray(image))
    picture.thumbnail((_LONGEST_SIDE, _LONGEST_SIDE))
    buffer = io.BytesIO()
    picture.save(buffer, format="JPEG", quality=_JPEG_QUALITY, subsampling=0)
    return base64.b64encode(buffer.getvalue()).decode()


def class_colour(index: int, count: int) -> tuple[int, int, int]:
    """Red, green and blue of a class in masks: its hue on charts, alternating in lightness."""
    lightness = 0.56 if index % 2 else 0.42
    red, green, blue = colorsys.hls_to_rgb(class_hue(index, count) / 360, lightness, 0.62)
    return round(255 * red), round(255 * green), round(255 * blue)


def class_hue(index: int, count: int) -> int:
    """The hue of a class in degrees. Hues are evenly spaced, as far apart as possible."""
    return round(360 * index / max(count, 1)) % 360
