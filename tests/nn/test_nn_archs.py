"""Every architecture: sizes, shapes, names of layers, and weights that depend on the seed alone."""

from __future__ import annotations

import copy
import itertools

import pytest
import torch

from fedshift.errors import InputError
from fedshift.nn import ARCHS, build_network, find_arch
from fedshift.nn.network import blank_copy

DIGITS = tuple(name for name in ARCHS if name.startswith("digits-"))
PHOTOS = ("resnet18", "resnet18-csac", "resnet50", "resnet101", "alexnet", "mobilenet_v2", "efficientnet_lite0")
SEGMENTERS = tuple(name for name, arch in ARCHS.items() if arch.kind == "segmentation")


def parameters(module: torch.nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())


def meta_network(name: str, size: int = 64, classes: int = 1000):
    """Shapes without numbers: even the largest net is built in no time."""
    with torch.device("meta"):
        return build_network(name, (13,) if ARCHS[name].kind == "table" else (3, size, size), classes, 0)


def images(count: int, size: int) -> torch.Tensor:
    return torch.rand(count, 3, size, size, generator=torch.Generator().manual_seed(1))


def test_table_names_each_arch_by_its_own_name() -> None:
    assert all(name == arch.name for name, arch in ARCHS.items())
    assert {*DIGITS, *PHOTOS, *SEGMENTERS, "mlp"} == set(ARCHS)


@pytest.mark.parametrize(
    ("name", "count"),
    [
        ("resnet18", 11_689_512),
        ("resnet50", 25_557_032),
        ("resnet101", 44_549_160),
        ("alexnet", 61_100_840),
        ("mobilenet_v2", 3_504_872),
        ("efficientnet_lite0", 4_652_008),
    ],
)
def test_parameter_counts_of_published_nets(name: str, count: int) -> None:
    assert parameters(meta_network(name)) == count


def test_the_bottleneck_of_csacs_authors_by_hand() -> None:
    backbone = 11_689_512 - (512 * 1000 + 1000)  # the published ResNet-18 without its classifier
    bottleneck = (512 * 256 + 256) + 2 * 256  # with bias, and the scale and shift of its norm
    network = meta_network("resnet18-csac", classes=7)
    assert parameters(network) == backbone + bottleneck + (256 * 7 + 7) == 11_310_151
    assert [type(layer).__name__ for layer in network.head.bottleneck] == ["Linear", "BatchNorm1d", "ReLU"]
    assert network.backbone.taps == ("layer2", "layer3", "layer4")


def test_parameter_counts_of_digit_nets_by_hand() -> None:
    # Convolutions with bias, norms with two numbers per channel; 32 pixels, 10 classes.
    copa = (27 * 64 + 64 + 128) + 3 * (9 * 64 * 64 + 64 + 128) + (4 * 64 * 10 + 10)
    kd3a_convs = (75 * 64 + 64 + 128) + (25 * 64 * 64 + 64 + 128) + (25 * 64 * 128 + 128 + 256)
    kd3a = kd3a_convs + 8192 * 10 + 10
    large = kd3a_convs + (8192 * 3072 + 3 * 3072) + (3072 * 2048 + 3 * 2048) + 2048 * 10 + 10
    csac = (75 * 32 + 32) + (25 * 32 * 64 + 64) + (64 * 64 * 128 + 128) + 128 * 10 + 10
    found = {name: parameters(meta_network(name, 32, 10)) for name in DIGITS}
    assert found["digits-copa"] == copa
    assert found["digits-kd3a"] == kd3a
    assert found["digits-kd3a-large"] == large == 31_805_898
    assert found["digits-csac"] == csac


def test_dualadapts_large_net_has_the_numbers_of_its_table_4() -> None:
    """Printed: |G| + |F| = 493 K (Fed-DAN), |G| + 2|F| = 510 K (Fed-MCD), |F| = 17 K (Table 5)."""
    net = meta_network("digits-dualadapt-large", 28, 10)
    widths = (3, 16, 32, 64, 256)
    by_hand = sum(25 * a * b + 3 * b for a, b in itertools.pairwise(widths))
    extractor, classifier = parameters(net.backbone), parameters(net.head)
    assert extractor == by_hand == 475_904 and classifier == 256 * 64 + 64 + 64 * 10 + 10 == 17_098
    rounded = [round(count / 1000) for count in (extractor + classifier, extractor + 2 * classifier, classifier)]
    assert rounded == [493, 510, 17]


@pytest.mark.parametrize("name", [name for name in DIGITS if name != "digits-kd3a-large"])
@pytest.mark.parametrize("size", [28, 32, 64, 96])
def test_digit_nets_take_any_small_size(name: str, size: int) -> None:
    network = build_network(name, (3, size, size), 10, 0).eval()
    x = images(2, size)
    features = network.features(x)
    assert features.shape == (2, network.backbone.out_features)
    assert torch.equal(network(x), network.head(features))
    assert network(x).shape == (2, 10)


def test_digit_nets_take_oblong_images() -> None:
    network = build_network("digits-kd3a", (3, 32, 64), 10, 0).eval()
    x = torch.rand(2, 3, 32, 64, generator=torch.Generator().manual_seed(1))
    assert network.features(x).shape == (2, 128 * 8 * 8)


@pytest.mark.parametrize("size", [28, 32])
def test_the_large_digit_net_has_the_authors_widths(size: int) -> None:
    network = meta_network("digits-kd3a-large", size, 10)
    side = size // 4
    assert network.backbone.dense1.fc.weight.shape == (3072, 128 * side * side)
    assert network.backbone.dense2.fc.weight.shape == (2048, 3072)
    assert network(torch.rand(2, 3, size, size, device="meta")).shape == (2, 10)


def test_the_large_digit_net_drops_between_its_dense_layers_and_nowhere_else() -> None:
    backbone = build_network("digits-kd3a-large", (3, 16, 16), 10, 0).backbone.train()
    seen: list[torch.Tensor] = []
    backbone.shrink.register_forward_hook(lambda _, inputs, out: seen.append(out.flatten(1)))
    for dense in (backbone.dense1, backbone.dense2):
        dense.register_forward_hook(lambda _, inputs, out: seen.extend((inputs[0], out)))
    features = backbone(torch.rand(4, 3, 16, 16, generator=torch.Generator().manual_seed(1)))
    flat, to_first, first, to_second, second = seen
    assert torch.equal(to_first, flat) and torch.equal(features, second)
    kept = to_second != 0
    assert torch.equal(to_second[kept], 2 * first[kept]) and bool((first[~kept] > 0).any())


@pytest.mark.parametrize("name", PHOTOS)
def test_photo_nets_give_features_and_scores_at_any_size(name: str) -> None:
    network = meta_network(name, classes=7)
    for size in (96, 128):
        x = torch.rand(2, 3, size, size, device="meta")
        assert network.features(x).shape == (2, network.backbone.out_features)
        assert network(x).shape == (2, 7)


@pytest.mark.parametrize("name", SEGMENTERS)
@pytest.mark.parametrize(("height", "width"), [(64, 64), (90, 120)])
def test_segmentation_scores_every_pixel(name: str, height: int, width: int) -> None:
    network = build_network(name, (3, height, width), 6, 0).eval()
    stride = {"segnet-small": 4, "unet-small": 1}.get(name, 16)
    x = torch.rand(2, 3, height, width, generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        assert network.features(x).shape == (
            2,
            network.backbone.out_features,
            -(-height // stride),
            -(-width // stride),
        )
        assert network(x).shape == (2, 6, height, width)


def test_half_width_deeplab_has_half_the_channels() -> None:
    assert meta_network("deeplab_mobilenet_v2").backbone.out_features == 320
    assert meta_network("deeplab_mobilenet_v2_half").backbone.out_features == 160


def test_dilation_keeps_the_map_that_a_stride_would_have_halved() -> None:
    """Up to where the strides part, the map form computes what the plain net does."""
    plain = build_network("mobilenet_v2", (3, 64, 64), 5, 0).backbone.eval()
    dilated = build_network("deeplab_mobilenet_v2", (3, 64, 64), 5, 0).backbone.eval()
    dilated.load_state_dict({k: v for k, v in plain.state_dict().items() if not k.startswith("features.18.")})
    x = images(1, 64)
    with torch.no_grad():
        assert torch.equal(plain.features[:14](x), dilated.features[:14](x))
        strided, full = plain.features[:15](x), dilated.features[:15](x)
    assert full.shape[2:] == (4, 4)
    # The layer that lost its stride gives the same values at every second place.
    assert torch.allclose(full[:, :, ::2, ::2], strided, atol=1e-5)


def test_tables_give_scores() -> None:
    network = build_network("mlp", (13,), 2, 0).eval()
    x = torch.randn(4, 13, generator=torch.Generator().manual_seed(1))
    x[0, 3] = float("nan")
    assert network(x).shape == (4, 2)
    assert network(x).isfinite().all()


@pytest.mark.parametrize(
    ("name", "keys"),
    [
        (
            "resnet18",
            "conv1.weight bn1.running_mean layer1.0.conv2.weight layer1.1.bn2.bias layer2.0.downsample.0.weight "
            "layer2.0.downsample.1.num_batches_tracked layer4.1.bn2.running_var",
        ),
        ("resnet50", "layer1.0.conv3.weight layer1.0.downsample.1.weight layer3.5.bn3.bias layer4.2.conv1.weight"),
        ("resnet101", "layer3.22.conv3.weight layer3.22.bn1.running_var"),
        ("alexnet", "features.0.weight features.10.bias classifier.1.weight classifier.4.bias"),
        (
            "mobilenet_v2",
            "features.0.0.weight features.0.1.bias features.1.conv.0.0.weight features.1.conv.1.weight "
            "features.1.conv.2.bias features.2.conv.0.1.running_mean features.2.conv.1.0.weight "
            "features.2.conv.2.weight features.17.conv.3.weight features.18.0.weight features.18.1.bias",
        ),
        (
            "efficientnet_lite0",
            "_conv_stem.weight _bn0.bias _blocks.0._depthwise_conv.weight _blocks.0._bn1.weight "
            "_blocks.1._expand_conv.weight _blocks.1._bn0.running_var _blocks.15._project_conv.weight "
            "_blocks.15._bn2.bias _conv_head.weight _bn1.running_mean",
        ),
    ],
)
def test_layers_have_their_published_names(name: str, keys: str) -> None:
    own = set(meta_network(name).backbone.state_dict())
    assert set(keys.split()) <= own
    assert len(own) == {"resnet18": 120, "resnet50": 318, "resnet101": 624, "alexnet": 14}.get(name, len(own))


@pytest.mark.parametrize("name", ARCHS)
def test_state_dicts_hold_backbone_and_head_only(name: str) -> None:
    assert {key.split(".")[0] for key in meta_network(name).state_dict()} == {"backbone", "head"}


@pytest.mark.parametrize("name", ["digits-copa", "digits-csac", "mlp", "segnet-small", "efficientnet_lite0"])
def test_weights_depend_on_the_seed_and_on_nothing_else(name: str) -> None:
    shape = (5,) if name == "mlp" else (3, 32, 32)
    torch.manual_seed(123)
    before = torch.get_rng_state()
    first = build_network(name, shape, 3, generator_seed=7).state_dict()
    assert torch.equal(torch.get_rng_state(), before)
    torch.rand(5)
    again = build_network(name, shape, 3, generator_seed=7).state_dict()
    other = build_network(name, shape, 3, generator_seed=8).state_dict()
    assert all(torch.equal(first[key], again[key]) for key in first)
    assert any(not torch.equal(first[key], other[key]) for key in first)


def test_inputs_are_normalised_inside() -> None:
    network = build_network("resnet18", (3, 32, 32), 3, 0).eval()
    mean, std = torch.tensor([0.485, 0.456, 0.406]), torch.tensor([0.229, 0.224, 0.225])
    x = images(2, 32)
    by_hand = network.backbone((x - mean[:, None, None]) / std[:, None, None])
    assert torch.allclose(network.features(x), by_hand, atol=1e-6)


@pytest.mark.parametrize("name", [name for name in ARCHS if name not in {"resnet50", "resnet101", "alexnet"}])
def test_gradients_reach_every_parameter(name: str) -> None:
    if ARCHS[name].kind == "table":
        network, x = build_network(name, (5,), 3, 0), torch.randn(4, 5)
    else:
        network, x = build_network(name, (3, 32, 32), 3, 0), images(2, 32)
    network.train()
    scores = network(x)
    weights = torch.arange(scores.numel(), dtype=torch.float32).reshape(scores.shape)
    (scores.log_softmax(1) * weights).sum().backward()
    silent = [key for key, value in network.named_parameters() if value.grad is None or not value.grad.isfinite().all()]
    assert silent == []
    first = next(network.backbone.parameters())
    assert first.grad is not None and first.grad.abs().sum() > 0


def test_an_unknown_arch_names_the_nearest() -> None:
    with pytest.raises(InputError, match="resnet18") as caught:
        find_arch("resnet81")
    assert caught.value.code == "unknown-name"


@pytest.mark.parametrize(
    ("name", "shape", "says"),
    [
        ("digits-copa", (13,), "takes images"),
        ("mlp", (3, 32, 32), "takes table rows"),
        ("digits-copa", (3, 8, 8), "at least 16 pixels"),
        ("alexnet", (3, 32, 32), "at least 63 pixels"),
        ("resnet18", (1, 32, 32), "takes images"),
    ],
)
def test_data_that_does_not_fit_is_refused(name: str, shape: tuple[int, ...], says: str) -> None:
    with pytest.raises(InputError, match=says) as caught:
        build_network(name, shape, 3, 0)
    assert caught.value.code == "method-needs"


@pytest.mark.parametrize("name", [*DIGITS, "resnet18", "alexnet", "mobilenet_v2", "efficientnet_lite0", *SEGMENTERS])
def test_the_smallest_size_of_an_arch_is_enough(name: str) -> None:
    side = ARCHS[name].smallest
    network = meta_network(name, side, 3)
    assert network(torch.rand(2, 3, side, side, device="meta")).shape[:2] == (2, 3)


@pytest.mark.parametrize("name", ["mlp", "digits-copa", "mobilenet_v2"])
def test_a_blank_copy_computes_the_same_once_weights_are_loaded(name: str) -> None:
    shape = (5,) if name == "mlp" else (3, 32, 32)
    net = build_network(name, shape, 3, 1).eval().to(memory_format=torch.channels_last)
    empty = blank_copy(net, "meta")
    assert empty is not None and all(value.device.type == "meta" for value in empty.state_dict().values())
    copied = blank_copy(empty)
    assert copied is not None and str(copied) == str(net)
    assert not any(value.any() for value in copied.state_dict().values())
    copied.load_state_dict(net.state_dict())
    x = torch.rand(2, *shape, generator=torch.Generator().manual_seed(2))
    assert torch.equal(copied(x), net(x))
    with torch.no_grad():
        next(copied.parameters()).zero_()
    assert next(net.parameters()).any()


def test_a_blank_copy_keeps_what_layers_share_and_refuses_what_it_does_not_know() -> None:
    first = torch.nn.Linear(3, 3)
    second = torch.nn.Linear(3, 3)
    second.weight = first.weight
    second.bias.requires_grad_(False)
    net = torch.nn.Sequential(first, second, first)
    copied = blank_copy(net)
    assert copied is not None
    assert copied[0].weight is copied[1].weight and copied[0] is copied[2] and not copied[1].bias.requires_grad
    second.notes = ["a list that both would share"]
    assert blank_copy(net) is None
    del second.notes
    first.register_forward_hook(lambda *_: None)
    assert blank_copy(net) is None


@pytest.mark.parametrize("name", ["digits-copa", "digits-csac", "digits-kd3a-large"])
def test_pooling_before_the_relu_changes_no_gradient(name: str) -> None:
    net = build_network(name, (3, 16, 16), 3, 1).eval()
    other = copy.deepcopy(net)
    for block in other.modules():
        if isinstance(block, torch.nn.Sequential) and {"pool", "relu"} <= block._modules.keys():
            block._modules["pool"] = block._modules.pop("pool")
    assert str(other) != str(net)
    found = []
    for each in (net, other):
        scores = each(torch.rand(4, 3, 16, 16, generator=torch.Generator().manual_seed(2)) * 2 - 1)
        scores.logsumexp(1).sum().backward()
        found.append([scores.detach(), *(parameter.grad for parameter in each.parameters())])
    assert all(torch.equal(one, two) for one, two in zip(*found, strict=True))
