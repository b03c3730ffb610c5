"""A trained model as one safetensors file that says what it is: weights, classes, architecture, method."""

from __future__ import annotations

import json
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import safetensors.torch
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from fedshift.errors import InputError
from fedshift.federation import codec
from fedshift.federation.kinds import Weights
from fedshift.federation.plan import Plan
from fedshift.files import write_atomically
from fedshift.methods import find_method
from fedshift.methods.base import SHARED

_METADATA = "fedshift"


@dataclass(frozen=True)
class SavedModel:
    """A method's models by site, and under `SHARED` the one for everyone else. `mask_ids` has the id of each class in
    the masks that were learned from; it is empty where there were no mask files, and in files of older versions."""

    plan: Plan
    models: Mapping[str, Weights]
    mask_ids: tuple[int, ...] = ()

    def network(self, site: str | None = None) -> nn.Module:
        """The module that predicts for `site`, in evaluation mode."""
        net = find_method(self.plan.method).network(self.plan)
        net.load_state_dict(dict(self.models[self.choose(site)]))
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
        """Class numbers as the ids of the user's own masks; as they are where those are not known."""
        ids = np.array(self.mask_ids or range(len(self.plan.model.classes)), dtype=np.uint8)
        return np.asarray(ids[numbers])


def save_model(path: Path, saved: SavedModel) -> str:
    """Writes the file and returns its SHA-256. Shared weights keep their names; a site's are under `sites/<site>/`."""
    tensors: dict[str, Tensor] = {}
    for site, weights in saved.models.items():
        prefix = "" if site == SHARED else f"sites/{site}/"
        tensors |= {prefix + key: value.contiguous().clone() for key, value in weights.items()}
    about = {"plan": codec.plain(saved.plan), "sites": sorted(saved.models)}
    if saved.mask_ids:
        about["mask_ids"] = list(saved.mask_ids)
    header = json.dumps(about, separators=(",", ":"))
    data = bytes(safetensors.torch.save(tensors, metadata={_METADATA: header}))
    write_atomically(path, data)
    return codec.sha256(data)


def load_model(path: Path) -> SavedModel:
    if not path.is_file():
        raise InputError("run-missing", f"there is no trained model at {path}: is the run finished?")
    data = path.read_bytes()
    try:
        (length,) = struct.unpack("<Q", data[:8])
        header = json.loads(json.loads(data[8 : 8 + length])["__metadata__"][_METADATA])
        tensors = safetensors.torch.load(data)
    except (ValueError, KeyError, TypeError, struct.error, safetensors.SafetensorError) as error:
        raise InputError("run-corrupt", f"{path} is not a fedshift model file") from error
    models: dict[str, dict[str, Tensor]] = {site: {} for site in header["sites"]}
    for key, value in tensors.items():
        owner = next((s for s in models if s != SHARED and key.startswith(f"sites/{s}/")), SHARED)
        models[owner][key if owner == SHARED else key.removeprefix(f"sites/{owner}/")] = value
    mask_ids = codec.restore(tuple[int, ...], header.get("mask_ids", []), "mask_ids")
    return SavedModel(codec.restore(Plan, header["plan"]), models, mask_ids)


@torch.inference_mode()
def probabilities(net: nn.Module, inputs: Tensor, batch: int = 256) -> Tensor:
    """Class probabilities `(n, classes)` (or `(n, classes, h, w)`) of inputs as the network takes them."""
    return torch.cat([net(part).softmax(1) for part in inputs.split(batch)])
