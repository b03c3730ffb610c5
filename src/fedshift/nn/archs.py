"""Every architecture by name, and how to build one."""

from __future__ import annotations

import copy
import inspect
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from torch import nn

from fedshift.errors import InputError
from fedshift.nn.backbones import digits, resnet, segmentation
from fedshift.nn.backbones.alexnet import AlexNet
from fedshift.nn.backbones.efficientnet import EfficientNetLite0
from fedshift.nn.backbones.mobilenet import mobilenet_v2
from fedshift.nn.backbones.tables import TableNet
from fedshift.nn.network import Backbone, Network, linear_head, seeded_init, split_network
from fedshift.registry import Registry, allow_import

Kind = Literal["image", "table", "segmentation", "any"]

IMAGENET_MEAN, IMAGENET_STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
LITE_MEAN, LITE_STD = (127 / 255,) * 3, (128 / 255,) * 3


@dataclass(frozen=True)
class Arch:
    """A named net: what it is for, how inputs are normalised, how its two parts are built."""

    name: str
    description: str
    kind: Kind
    build: Callable[[tuple[int, ...]], Backbone]
    """From the shape of one input, (3, H, W) or (D,), to a backbone."""
    lr: float
    """A sensible SGD rate (momentum 0.9) to start from."""
    head: Callable[[int, int], nn.Module] = linear_head
    """From features and classes to a head."""
    input_size: int | None = None
    """The side in pixels the net is meant for; others work too."""
    smallest: int = 16
    """The smallest side in pixels at which every layer still has something to work on."""
    mean: tuple[float, ...] = (0.5, 0.5, 0.5)
    std: tuple[float, ...] = (0.5, 0.5, 0.5)
    imagenet: bool = False
    """Whether ImageNet weights install with the extra `pretrained`."""
    whole: Callable[[tuple[int, ...], int], nn.Module] | None = None
    """A user's own net, made in one piece from the shape of one input and the number of classes."""


def build_network(arch: str, input_shape: tuple[int, ...], classes: int, generator_seed: int) -> Network:
    """A freshly initialised net: the same weights for the same seed, whatever was drawn before."""
    found = find_arch(arch)
    check_input(found, input_shape)
    with seeded_init(generator_seed):
        if found.whole is not None:
            with torch.device("cpu"):  # Where only shapes are wanted, layers are made without memory; here one is run.
                net = found.whole(input_shape, classes)
                return net if isinstance(net, Network) else split_network(net, input_shape, classes, found.name)
        backbone = found.build(input_shape)
        head = found.head(backbone.out_features, classes)
    return Network(backbone, head, found.mean, found.std, found.name)


def find_arch(name: str) -> Arch:
    return ARCHS.find(name)


def register_net(net: Any, name: str | None = None) -> str:
    """Makes a network known by a name, and returns that. `net` is an `Arch`; a module, whose weights every run starts
    from; or a class or function that makes one from any of the arguments `input_shape` and `classes`.

    A module takes images `(B, 3, H, W)` with values in [0, 1], or table rows `(B, D)`, and gives scores `(B, classes)`,
    or `(B, classes, h, w)` for segmentation. Its last layer becomes the head, the rest the backbone. A function or
    class of a module that can be imported is known as `module:name`, so that other processes find it."""
    if name is None and isinstance(net, Arch):
        name = net.name
    if name is None:
        own = getattr(net, "__name__", type(net).__name__)
        module = getattr(net, "__module__", "__main__")
        is_found = getattr(sys.modules.get(module), own, None) is net and module != "__main__"
        name = f"{module}:{own}" if is_found else own
        if is_found:
            allow_import(module)
    ARCHS.register(name, net)
    return name


def _as_arch(name: str, net: Any) -> Arch:
    """What a user's code provides as an architecture of this name."""
    if isinstance(net, Arch):
        return replace(net, name=name)
    if not isinstance(net, nn.Module) and not callable(net):
        raise InputError("config-value", f"architecture {name!r}: {net!r} is no module and makes none")

    def whole(input_shape: tuple[int, ...], classes: int) -> nn.Module:
        if isinstance(net, nn.Module):
            return copy.deepcopy(net)
        given = {"input_shape": input_shape, "classes": classes}
        made = net(**{key: given[key] for key in inspect.signature(net).parameters if key in given})
        if not isinstance(made, nn.Module):
            raise InputError("config-value", f"architecture {name!r} made a {type(made).__name__}, no torch module")
        return made

    words = "" if isinstance(net, nn.Module) else (inspect.getdoc(net) or "").partition("\n")[0]
    return Arch(name, words or "a network of your own", "any", _no_build, lr=0.01, smallest=1, whole=whole)


def _no_build(input_shape: tuple[int, ...]) -> Backbone:
    raise AssertionError("a net that is made in one piece has no backbone to build")


def check_input(arch: Arch, input_shape: tuple[int, ...]) -> None:
    if arch.kind == "any":
        return
    wants = "table rows" if arch.kind == "table" else "images"
    fits = len(input_shape) == 1 if arch.kind == "table" else len(input_shape) == 3 and input_shape[0] == 3
    if not fits:
        raise InputError(
            "method-needs", f"Architecture {arch.name!r} takes {wants}, but the data has shape {input_shape}."
        )
    if arch.kind != "table" and min(input_shape[1:]) < arch.smallest:
        raise InputError(
            "method-needs",
            f"Architecture {arch.name!r} needs images of at least {arch.smallest} pixels per side, "
            f"but these are {input_shape[1]}x{input_shape[2]}: set a larger image size.",
        )


_BUILTIN = (
    Arch(
        name="digits-copa",
        description="COPA, Digits-DG: four 3x3 convolutions of 64 with norm and pooling",
        kind="image",
        build=digits.copa,
        lr=0.05,
        input_size=32,
    ),
    Arch(
        name="digits-copa5",
        description="COPA, Digit-Five: three 5x5 convolutions and two dense layers, all with norm",
        kind="image",
        build=digits.copa_five,
        lr=0.05,
        input_size=32,
    ),
    Arch(
        name="digits-kd3a",
        description="KD3A, Digit-5 (Table 4): three 5x5 convolutions with norm",
        kind="image",
        build=digits.kd3a,
        lr=0.05,
        input_size=32,
    ),
    Arch(
        name="digits-kd3a-large",
        description="the net KD3A's authors trained: digits-kd3a and dense layers of 3072 and 2048",
        kind="image",
        build=digits.kd3a_large,
        lr=0.05,
        input_size=32,
    ),
    Arch(
        name="digits-csac",
        description="CSAC, Rotated MNIST: two 5x5 convolutions and two dense layers, no norm",
        kind="image",
        build=digits.MnistNet,
        lr=0.01,
        input_size=28,
    ),
    Arch(
        name="digits-dualadapt",
        description="DualAdapt, Digit-Five: four 3x3 convolutions and a head of two dense layers",
        kind="image",
        build=digits.dualadapt,
        head=digits.two_layer_head,
        lr=0.05,
        input_size=32,
    ),
    Arch(
        name="digits-dualadapt-large",
        description="DualAdapt, Digit-Five at the size of its Table 4: four 5x5 convolutions, two dense layers",
        kind="image",
        build=digits.dualadapt_large,
        head=digits.narrow_two_layer_head,
        lr=0.05,
        input_size=28,
    ),
    Arch(
        name="resnet18",
        description="ResNet-18 (COPA, CSAC: PACS, VLCS, Office-Home)",
        kind="image",
        build=resnet.resnet18,
        lr=0.002,
        input_size=224,
        mean=IMAGENET_MEAN,
        std=IMAGENET_STD,
    ),
    Arch(
        name="resnet18-csac",
        description="the net CSAC's authors trained: ResNet-18 and a dense layer of 256 before the classifier",
        kind="image",
        build=resnet.resnet18,
        head=resnet.bottleneck_head,
        lr=0.002,
        input_size=224,
        mean=IMAGENET_MEAN,
        std=IMAGENET_STD,
    ),
    Arch(
        name="resnet50",
        description="ResNet-50",
        kind="image",
        build=resnet.resnet50,
        lr=0.002,
        input_size=224,
        mean=IMAGENET_MEAN,
        std=IMAGENET_STD,
    ),
    Arch(
        name="resnet101",
        description="ResNet-101 (KD3A, COPA: Office-Caltech10, DomainNet)",
        kind="image",
        build=resnet.resnet101,
        lr=0.005,
        input_size=224,
        mean=IMAGENET_MEAN,
        std=IMAGENET_STD,
    ),
    Arch(
        name="alexnet",
        description="AlexNet (CSAC: VLCS)",
        kind="image",
        build=AlexNet,
        lr=0.001,
        input_size=224,
        smallest=63,
        mean=IMAGENET_MEAN,
        std=IMAGENET_STD,
    ),
    Arch(
        name="mobilenet_v2",
        description="MobileNetV2",
        kind="image",
        build=mobilenet_v2,
        lr=0.005,
        input_size=224,
        mean=IMAGENET_MEAN,
        std=IMAGENET_STD,
        imagenet=True,
    ),
    Arch(
        name="efficientnet_lite0",
        description="EfficientNet-Lite0",
        kind="image",
        build=EfficientNetLite0,
        lr=0.01,
        input_size=224,
        mean=LITE_MEAN,
        std=LITE_STD,
        imagenet=True,
    ),
    Arch(
        name="mlp",
        description="two dense layers of 64 for table rows; missing values allowed",
        kind="table",
        build=TableNet,
        lr=0.01,
        mean=(0.0,),
        std=(1.0,),
    ),
    Arch(
        name="deeplab_mobilenet_v2",
        description="DeepLabv3 without decoder on MobileNetV2, output stride 16",
        kind="segmentation",
        build=segmentation.deeplab_mobilenet_v2,
        head=segmentation.pyramid_head,
        lr=0.01,
        mean=IMAGENET_MEAN,
        std=IMAGENET_STD,
        imagenet=True,
    ),
    Arch(
        name="deeplab_mobilenet_v2_half",
        description="DualAdapt, GTA5 to CrossCity: as deeplab_mobilenet_v2, half the width",
        kind="segmentation",
        build=segmentation.deeplab_mobilenet_v2_half,
        head=segmentation.pyramid_head,
        lr=0.01,
        mean=IMAGENET_MEAN,
        std=IMAGENET_STD,
    ),
    Arch(
        name="segnet-small",
        description="a small fully convolutional net for scenes of about 64 pixels",
        kind="segmentation",
        build=segmentation.SmallSegNet,
        head=segmentation.pixel_head,
        lr=0.05,
        input_size=64,
    ),
    Arch(
        name="unet-small",
        description="a small U-Net that keeps structures as thin as a pixel; for tiles",
        kind="segmentation",
        build=segmentation.SmallUNet,
        head=segmentation.pixel_head,
        lr=0.05,
        input_size=64,
    ),
)

ARCHS: Registry[Arch] = Registry("architecture", "nets", {arch.name: arch for arch in _BUILTIN}, _as_arch)
