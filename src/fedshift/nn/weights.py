"""Weights in and out. Networks read safetensors only; other checkpoints are converted once, by known checksum."""

from __future__ import annotations

import hashlib
import io
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save
from torch import Tensor

from fedshift.errors import InputError
from fedshift.files import write_atomically
from fedshift.nn.network import Network

WRAPPERS = ("state_dict", "model_state_dict", "model")
"""Under which name common training scripts keep the state dict in a checkpoint."""


@dataclass(frozen=True)
class LoadReport:
    """What a weights file gave to a network."""

    path: Path
    tensors: int
    """How many tensors were copied into the network."""
    head_loaded: bool
    note: str
    """One sentence for the user on where the head's weights come from."""
    ignored: tuple[str, ...] = ()
    """Keys of the file that the network has no place for, and is known to leave out."""


def load_weights(network: Network, path: Path) -> LoadReport:
    """Fill `network` from a safetensors file.

    The file holds a whole network (`backbone.*`, `head.*`), a backbone alone, or a published net under its own
    layer names. The backbone must fit exactly. The head is loaded where it fits and stays as it was otherwise,
    since a published net has other classes.
    """
    backbone, head, ignored = _split(network, _read(path))
    _fill_missing_counters(network.backbone.state_dict(), backbone)
    _check_fit(network, backbone, path)
    network.backbone.load_state_dict(backbone)
    head_loaded = bool(head) and _shapes(head) == _shapes(network.head.state_dict())
    if head_loaded:
        network.head.load_state_dict(head)
    return LoadReport(
        path=path,
        tensors=len(backbone) + (len(head) if head_loaded else 0),
        head_loaded=head_loaded,
        note=_head_note(path, bool(head), head_loaded),
        ignored=tuple(ignored),
    )


def convert_checkpoint(source: Path, sha256: str, out: Path, rename: Callable[[str], str] | None = None) -> None:
    """Turn a PyTorch checkpoint whose SHA-256 is known into a safetensors file with the same layer names.

    Never unpickles a file that is not the expected one: `weights_only` alone has been broken before.
    """
    if not source.is_file():
        raise InputError("weights-missing", f"There is no checkpoint {source}: check the path.")
    content = source.read_bytes()  # hashed and parsed from the same bytes, so that nobody can swap the file between
    found = hashlib.sha256(content).hexdigest()
    if found != sha256.strip().lower():
        raise InputError(
            "data-checksum",
            f"{source} has SHA-256 {found}, but {sha256} was expected: it was not opened. "
            "Download it again, or give the checksum its publisher states.",
        )
    try:
        checkpoint = torch.load(io.BytesIO(content), map_location="cpu", weights_only=True)
    except Exception as error:  # a damaged or hostile file fails in many ways; each means the same to the user
        raise InputError(
            "weights-mismatch",
            f"{source} is not a plain PyTorch state dict (it was not loaded): save one with "
            "torch.save(model.state_dict(), ...).",
        ) from error
    # Copies, because safetensors refuses tensors that share memory.
    tensors = {
        rename(key) if rename else key: value.detach().contiguous().clone()
        for key, value in _flatten(checkpoint, source).items()
    }
    write_atomically(out, save(tensors))


def _read(path: Path) -> dict[str, Tensor]:
    if not path.is_file():
        raise InputError("weights-missing", f"There is no weights file {path}: check the path.")
    try:
        tensors: dict[str, Tensor] = load_file(path)
    except SafetensorError as error:
        raise InputError(
            "weights-mismatch",
            f"{path} is not a safetensors file. Turn a PyTorch checkpoint into one with "
            f"`fedshift weights convert {path.name} --sha256 ...`.",
        ) from error
    return tensors


def _split(network: Network, tensors: dict[str, Tensor]) -> tuple[dict[str, Tensor], dict[str, Tensor], list[str]]:
    """Tensors for the backbone, tensors for the head, and keys that are knowingly left out."""
    if any(key.startswith("backbone.") for key in tensors):
        backbone = {key: value for key, value in tensors.items() if not key.startswith("head.")}
        head = _below("head.", tensors)
        return {key.removeprefix("backbone."): value for key, value in backbone.items()}, head, []
    unused = network.backbone.unused_keys
    ignored = [key for key in tensors if unused and key.startswith(unused)]
    classifier = network.backbone.classifier_key + "."
    head = _below(classifier, tensors)
    taken = {*ignored, *(classifier + key for key in head)}
    return {key: value for key, value in tensors.items() if key not in taken}, head, ignored


def _below(prefix: str, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {key.removeprefix(prefix): value for key, value in tensors.items() if key.startswith(prefix)}


def _fill_missing_counters(own: Mapping[str, Tensor], backbone: dict[str, Tensor]) -> None:
    """Checkpoints from before PyTorch 0.4.1 do not count batches: the network's own counters stand in."""
    for key, value in own.items():
        if key.endswith("num_batches_tracked"):
            backbone.setdefault(key, value)


def _check_fit(network: Network, backbone: Mapping[str, Tensor], path: Path) -> None:
    wanted, given = _shapes(network.backbone.state_dict()), _shapes(backbone)
    complaints = [f"{key} is missing" for key in wanted if key not in given]
    complaints += [f"{key} is not known" for key in given if key not in wanted]
    complaints += [
        f"{key} has shape {given[key]} instead of {wanted[key]}"
        for key in wanted
        if key in given and given[key] != wanted[key]
    ]
    if complaints:
        more = f" and {len(complaints) - 3} more" if len(complaints) > 3 else ""
        raise InputError(
            "weights-mismatch",
            f"{path} does not fit architecture {network.arch!r}: {'; '.join(complaints[:3])}{more}. "
            "Choose the architecture (and image size) that the file was made for.",
        )


def _shapes(tensors: Mapping[str, Tensor]) -> dict[str, tuple[int, ...]]:
    return {key: tuple(value.shape) for key, value in tensors.items()}


def _head_note(path: Path, has_head: bool, loaded: bool) -> str:
    if loaded:
        return f"Backbone and head come from {path.name}."
    why = "its head is for other classes" if has_head else "it has no head"
    return f"The backbone comes from {path.name}; {why}, so the head starts fresh."


def _flatten(checkpoint: object, source: Path) -> dict[str, Tensor]:
    """The state dict inside a checkpoint, without the `module.` that data-parallel training puts before names."""
    while isinstance(checkpoint, dict):
        inner = [name for name in WRAPPERS if isinstance(checkpoint.get(name), dict)]
        if not inner:
            break
        checkpoint = checkpoint[inner[0]]
    if not isinstance(checkpoint, dict) or not checkpoint:
        raise InputError("weights-mismatch", f"{source} holds no state dict: save one with model.state_dict().")
    for key, value in checkpoint.items():
        if not isinstance(value, Tensor):
            raise InputError("weights-mismatch", f"{source} holds {key!r}, which is not a tensor.")
    prefix = "module." if all(str(key).startswith("module.") for key in checkpoint) else ""
    return {str(key).removeprefix(prefix): value for key, value in checkpoint.items()}
