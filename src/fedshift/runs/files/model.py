"""A trained model as one safetensors file that says what it is.

The metadata under `fedshift` is a small header of its own, not the plan or the configuration of the run: it holds what
prediction needs and nothing else, so that a file still opens when fedshift gets more keys. Weights of the shared model
keep their names; those of a site's own model are under `sites/<site>/`.
"""

from __future__ import annotations

import dataclasses
import math
import warnings
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from fedshift._version import __version__
from fedshift.data.domain import Task
from fedshift.data.formats.base import printable
from fedshift.errors import FedshiftError, InputError
from fedshift.federation import codec
from fedshift.federation.plan import ModelSpec, Plan, Setting, Training
from fedshift.federation.releases import Weights
from fedshift.federation.sealed import read_tensor_file
from fedshift.files import write_atomically
from fedshift.functional.calibration import BINS
from fedshift.methods import find_method
from fedshift.methods.base import SHARED
from fedshift.methods.calibration import Usual
from fedshift.methods.local import SharedModelMethod, plain_network
from fedshift.nn.archs import find_arch
from fedshift.nn.distance import total_distance, watching_distances
from fedshift.nn.network import Network

FORMAT = 2
"""1, of fedshift 0.1.0, held the whole plan of the run."""


@dataclass(frozen=True)
class ModelHeader:
    """What a model is and what it takes. Keys that a reader does not know are ignored, missing ones get the defaults.

    `mean` and `std` normalise inputs per channel; empty: those of the architecture. `mask_ids` has the id of each class
    in the masks that were learned from; it is empty where there were no mask files. `hyper` are the method's own keys,
    `sources` the labelled sites: some methods build their network from them. A `plain` network is the architecture as
    it is: then the method's code is not needed."""

    arch: str
    task: Task
    classes: tuple[str, ...]
    input_shape: tuple[int, ...]
    columns: tuple[str, ...] = ()
    mean: tuple[float, ...] = ()
    std: tuple[float, ...] = ()
    freeze_norm: bool = False
    mask_ids: tuple[int, ...] = ()
    method: str = "fedavg"
    setting: Setting = "generalize"
    sources: tuple[str, ...] = ()
    hyper: Mapping[str, Any] = field(default_factory=dict)
    plain: bool = False
    temperature: float = 1.0
    """What scores are divided by before they become probabilities, so that a confidence of 80 % is right in 80 of 100
    cases of the sources' validation. 1: not calibrated."""
    far: float | None = None
    """From which distance on (`fedshift.nn.distance`) an input is unlike what the sources have; None: not known."""
    usual: Usual | None = None
    """What is usual at the sources, for many inputs together; None: not known."""
    written_by: str = "0.1.0"
    tiled: bool = False
    """Whether pictures are not resized to `input_shape`, but seen in squares of that shape, as in training."""
    scaled_to: int | None = None
    """With `tiled`: how long the shorter side of a picture is made first; None: pictures keep their size."""

    @classmethod
    def of(cls, plan: Plan, mask_ids: tuple[int, ...] = ()) -> ModelHeader:
        spec = plan.model
        net = next(part for part in find_method(plan.method).network(plan).modules() if isinstance(part, Network))
        return cls(
            spec.arch,
            spec.task,
            spec.classes,
            spec.input_shape,
            spec.columns,
            tuple(net.mean.flatten().tolist()),
            tuple(net.std.flatten().tolist()),
            spec.freeze_norm,
            mask_ids,
            plan.method,
            plan.setting,
            plan.sources,
            plan.hyper,
            find_method(plan.method).network is SharedModelMethod.network,
            written_by=__version__,
            tiled=spec.tiled,
            scaled_to=spec.scaled_to,
        )

    @property
    def spec(self) -> ModelSpec:
        """What the network was built from."""
        shapes = self.classes, self.input_shape, self.columns
        return ModelSpec(self.arch, self.task, *shapes, self.freeze_norm, self.tiled, self.scaled_to)

    def network(self) -> nn.Module:
        """The module that predicts, with weights still to be loaded."""
        plan = Plan(__version__, self.method, self.setting, self.sources, 0, 1, self.spec, _NO_TRAINING, self.hyper)
        try:
            find_arch(self.arch)
            method = None if self.plain else find_method(self.method)
        except InputError as error:
            if error.code != "unknown-name":
                raise
            raise InputError(
                "unknown-name",
                f"this model needs code that does not come with fedshift ({error.message}): import the module that"
                " registers it first (fedshift --import MODULE), or call"
                f" fedshift.extend.register_net(net, {self.arch!r})",
            ) from error
        if method is None:
            net: nn.Module = plain_network(plan)
        else:
            hyper = codec.completed(method.hyper_type, dict(self.hyper))
            net = method.network(dataclasses.replace(plan, hyper=hyper))
        for part in net.modules():
            if isinstance(part, Network) and self.mean:
                part.mean.copy_(torch.tensor(self.mean, device=part.mean.device).reshape(part.mean.shape))
                part.std.copy_(torch.tensor(self.std, device=part.std.device).reshape(part.std.shape))
        return net

    def require_fitting(self, weights: Weights) -> None:
        """An error unless the network has just these weights. It is built without memory for them first: what a file
        declares may be larger than any machine."""
        try:
            with warnings.catch_warnings(), torch.device("meta"):
                warnings.simplefilter("ignore")  # A copy to such a network copies nothing.
                wanted = {name: value.shape for name, value in self.network().state_dict().items()}
        except FedshiftError:
            raise
        except Exception as error:
            raise InputError(
                "run-corrupt", f"the model's file declares a network {self.arch!r} that cannot be built"
            ) from error
        found = {name: value.shape for name, value in weights.items()}
        if wrong := next((name for name in sorted({*wanted, *found}) if wanted.get(name) != found.get(name)), None):
            raise InputError(
                "run-corrupt", f"the model's weights are not those of the network that its file declares: {wrong}"
            )

    def check(self) -> None:
        """`message-invalid` for what fedshift writes into no model: it may not reach a terminal or an image reader."""
        names = (*self.classes, *self.columns, *self.sources, self.arch, self.method, self.written_by)
        if not all(name.isprintable() for name in names):
            raise FedshiftError("message-invalid", "a name in it is no printable text")
        if not self.input_shape or len(self.input_shape) not in (1, 3) or not all(n > 0 for n in self.input_shape):
            raise FedshiftError("message-invalid", "its input is neither rows nor pictures")
        if len(self.input_shape) == 3 and max(self.input_shape) > _LARGEST_SIDE:
            raise FedshiftError("message-invalid", f"its pictures have more than {_LARGEST_SIDE} pixels along a side")
        if self.columns and (len(self.columns),) != self.input_shape:
            raise FedshiftError("message-invalid", "it has another number of columns than it takes")
        if not 0.01 <= self.temperature <= 100 or not math.isfinite(self.far or 0.0):
            raise FedshiftError("message-invalid", "its calibration makes no sense")
        is_square = len(self.input_shape) == 3 and self.input_shape[1] == self.input_shape[2]
        if self.tiled and not (self.task == "segmentation" and is_square):
            raise FedshiftError("message-invalid", "its pictures cannot be cut as it says")
        if self.scaled_to is not None and not 0 < self.scaled_to <= _LARGEST_SIDE:
            raise FedshiftError("message-invalid", f"its pictures are scaled to {self.scaled_to} pixels")
        if self.usual and not _makes_sense(self.usual):
            raise FedshiftError("message-invalid", "what is usual at its sources makes no sense")
        channels = {0, 1 if len(self.input_shape) == 1 else 3}
        scales = (*self.mean, *self.std)
        if len(self.mean) not in channels or len(self.std) != len(self.mean) or not all(map(math.isfinite, scales)):
            raise FedshiftError("message-invalid", "mean and std are not finite numbers, one per channel")
        if self.mask_ids and (len(self.mask_ids) != len(self.classes) or not set(self.mask_ids) <= set(range(256))):
            raise FedshiftError("message-invalid", "its classes have no ids from 0 to 255 each")


def _makes_sense(usual: Usual) -> bool:
    spreads = [(site, BINS - 1) for site in usual.sure] + [(site, len(usual.edges)) for site in usual.near]
    return all(map(math.isfinite, usual.edges)) and all(
        len(site.below) == length and site.samples >= 0 and all(0 <= share <= 1 for share in site.below)
        for site, length in spreads
    )


_LARGEST_SIDE = 8192
_NO_TRAINING = Training(1, 1, 0.0, 0.0, 0.0, 0.0, 1.0, "constant", "float32", ())
"""A model that is only used needs a plan to be built from, but none of its training."""


@dataclass(frozen=True)
class SavedModel:
    """A method's models by site, and under `SHARED` the one for everyone else. `is_checked`: a checksum says that they
    are as they were saved."""

    header: ModelHeader
    models: Mapping[str, Weights]
    is_checked: bool = True

    def network(self, site: str | None = None) -> nn.Module:
        """The module that predicts for `site`, in evaluation mode, with calibrated scores."""
        net = self.uncalibrated(site)
        if self.header.temperature != 1.0:
            net.register_forward_hook(lambda module, inputs, scores: scores / self.header.temperature)
        return net

    def uncalibrated(self, site: str | None = None) -> nn.Module:
        """The same with the scores that it was trained with."""
        weights = self.models[self.choose(site)]
        self.header.require_fitting(weights)
        net = self.header.network()
        net.load_state_dict(dict(weights))
        return net.eval()

    def choose(self, site: str | None) -> str:
        """The model that `site` gets: its own, the shared one, or the only one there is."""
        if site is not None and site in self.models:
            return site
        if SHARED in self.models:
            return SHARED
        if len(self.models) == 1:
            return next(iter(self.models))
        missing = "" if site is None else f"no model of {site!r}, only "
        raise InputError(
            "unknown-name",
            f"this run has {missing}a model for each of {', '.join(self.own)} and none to share: name one with --site",
        )

    @property
    def own(self) -> list[str]:
        """The sites that have a model of their own."""
        return sorted(site for site in self.models if site != SHARED)

    def to_ids(self, numbers: NDArray[Any]) -> NDArray[np.uint8]:
        """Class numbers as the ids of the user's own masks; unchanged where those are not known."""
        ids = np.array(self.header.mask_ids or range(len(self.header.classes)), dtype=np.uint8)
        return np.asarray(ids[numbers])


def save_model(path: Path, saved: SavedModel) -> str:
    """Writes the file and returns its SHA-256. Weights that are no finite numbers are an error."""
    for site, weights in saved.models.items():
        if wrong := _not_finite(weights):
            whose = "the shared model" if site == SHARED else f"the model of {site}"
            raise InputError(
                "model-diverged",
                f"training diverged: {wrong} in {whose} has values that are no finite numbers. Nothing was saved as"
                " a model; train with a lower lr in another folder",
            )
    tensors: dict[str, Tensor] = {}
    for site, weights in saved.models.items():
        prefix = "" if site == SHARED else f"sites/{site}/"
        tensors |= {prefix + key: value for key, value in weights.items()}
    header = {"format": FORMAT, **codec.plain(saved.header), "sites": sorted(saved.models)}
    data = codec.seal(tensors, header)
    write_atomically(path, data)
    return codec.sha256(data)


def load_model(path: Path, sha256: str = "") -> SavedModel:
    """The models in a file, which must be whole and have finite weights. `sha256` is the file's, where it is known."""
    if not path.exists():
        raise InputError("run-missing", f"there is no trained model at {path}: is the run finished?")
    try:
        data = read_tensor_file(path)
        if sha256 and codec.sha256(data) != sha256:
            raise FedshiftError("run-corrupt", "it is not the model that the run saved, its SHA-256 is another")
        tensors, metadata = codec.read_safetensors(data)
        header = codec.read_header(metadata)
        found = header.get("format", 1)
        if found == FORMAT:
            codec.verify_seal(tensors, header)
        elif found == 1:
            header = _of_format_1(header)
        sites = codec.restore(tuple[str, ...], header["sites"], "sites")
    except (FedshiftError, KeyError, TypeError) as error:
        why = f": {error.message}" if isinstance(error, FedshiftError) else ""
        raise InputError("run-corrupt", f"{path} is not a fedshift model file, or is damaged{why}") from error
    try:
        if found not in (1, FORMAT):
            raise FedshiftError("run-corrupt", f"it has format {found}, and this version reads up to {FORMAT}")
        about = codec.restore(ModelHeader, codec.completed(ModelHeader, header), "header")
        about.check()
        if not all(site.isprintable() for site in sites):
            raise FedshiftError("message-invalid", "a site's name is no printable text")
    except FedshiftError as error:
        raise InputError(
            "run-corrupt",
            f"{path} was written by fedshift {printable(header.get('written_by', '(unknown)'))[:40]} and cannot be read"
            f" by {__version__}: {error.message}",
        ) from error
    if wrong := _not_finite(tensors):
        raise InputError(
            "run-corrupt", f"{path}: {wrong} has values that are no finite numbers, so the model cannot predict"
        )
    models: dict[str, dict[str, Tensor]] = {site: {} for site in sites}
    for key, value in tensors.items():
        owner = next((s for s in models if s != SHARED and key.startswith(f"sites/{s}/")), SHARED)
        models.setdefault(owner, {})[key if owner == SHARED else key.removeprefix(f"sites/{owner}/")] = value
    return SavedModel(about, models, is_checked=bool(sha256) or found == FORMAT)


def _not_finite(weights: Weights) -> str:
    """The name of a tensor with NaN or infinity in it; empty if there is none."""
    floating = ((key, value) for key, value in weights.items() if value.is_floating_point())
    return next((key for key, value in floating if not bool(value.isfinite().all())), "")


def _of_format_1(header: dict[str, Any]) -> dict[str, Any]:
    plan = header["plan"]
    kept = {key: plan[key] for key in ("method", "setting", "sources", "hyper")}
    return {
        **plan["model"],
        **kept,
        "mask_ids": header.get("mask_ids", []),
        "sites": header["sites"],
        "written_by": plan["version"],
    }


@torch.inference_mode()
def with_far(net: nn.Module, header: ModelHeader, inputs: Tensor) -> tuple[Tensor, Tensor]:
    """Probabilities, and which inputs are unlike what the sources have: `(n,)` booleans, none where it is not known."""
    found, distances = with_distances(net, header, inputs)
    return found, torch.zeros(len(inputs), dtype=torch.bool) if header.far is None else distances > header.far


@torch.inference_mode()
def with_distances(net: nn.Module, header: ModelHeader, inputs: Tensor) -> tuple[Tensor, Tensor]:
    """Probabilities, and how far each input is from what was seen; NaN where that is not known."""
    if header.far is None:
        return net(inputs).softmax(1), torch.full((len(inputs),), torch.nan)
    with watching_distances(net) as found:
        scores = net(inputs)
    return scores.softmax(1), total_distance(found)


@torch.inference_mode()
def probabilities(net: nn.Module, inputs: Tensor, batch: int = 256) -> Tensor:
    """Class probabilities `(n, classes)` (or `(n, classes, h, w)`) of inputs as the network takes them."""
    return torch.cat([net(part).softmax(1) for part in inputs.split(batch)])
