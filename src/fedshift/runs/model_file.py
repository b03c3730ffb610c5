"""A trained model as one safetensors file that says what it is: weights, classes, architecture, method."""

from __future__ import annotations

import json
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import safetensors.torch
import torch
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
    """A method's models by site, and under `SHARED` the one for everyone else."""

    plan: Plan
    models: Mapping[str, Weights]

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
        raise InputError(
            "unknown-name",
            f"this run has a model for each of {', '.join(sorted(self.models))} and none to share: name one",
        )


def save_model(path: Path, saved: SavedModel) -> str:
    """Writes the file and returns its SHA-256. Shared weights keep their names; a site's are under `sites/<site>/`."""
    tensors: dict[str, Tensor] = {}
    for site, weights in saved.models.items():
        prefix = "" if site == SHARED else f"sites/{site}/"
        tensors |= {prefix + key: value.contiguous().clone() for key, value in weights.items()}
    header = json.dumps({"plan": codec.plain(saved.plan), "sites": sorted(saved.models)}, separators=(",", ":"))
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
    return SavedModel(codec.restore(Plan, header["plan"]), models)


@torch.inference_mode()
def probabilities(net: nn.Module, inputs: Tensor, batch: int = 256) -> Tensor:
    """Class probabilities `(n, classes)` (or `(n, classes, h, w)`) of inputs as the network takes them."""
    return torch.cat([net(part).softmax(1) for part in inputs.split(batch)])
