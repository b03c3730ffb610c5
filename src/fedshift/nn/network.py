"""A network is a backbone, which computes features, and a head, which computes scores. Several can form an ensemble."""

from __future__ import annotations

import copy
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Literal, cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fedshift.errors import InputError
from fedshift.functional.agreement import equal_shares, mean_probability, mean_score
from fedshift.functional.norms import standardised


class Backbone(nn.Module):
    """What every backbone declares. Names are dotted paths of submodules, from shallow to deep."""

    out_features: int
    """Length of a feature vector, or channels of a feature map: the input of the head."""
    stages: tuple[str, ...]
    """Submodules whose outputs may be tapped."""
    taps: tuple[str, ...]
    """The stages that cross-layer alignment compares by default."""
    classifier_key: str = ""
    """Name of the final linear layer in published checkpoints of this network; empty: there are none."""
    unused_keys: tuple[str, ...] = ()
    """Prefixes of layers in published checkpoints that this backbone does not have."""


class Network(nn.Module):
    """Raw inputs to scores.

    Inputs are images `(B, 3, H, W)` with values in [0, 1], or table rows `(B, D)` with NaN for missing.
    Scores are logits: `(B, classes)`, or `(B, classes, H, W)` if the head returns a map.
    Normalisation happens inside and is not part of the state dict, whose keys are `backbone.*` and `head.*`.
    """

    mean: Tensor
    std: Tensor
    by_image: bool = False
    """Whether images are normalised by the mean and deviation of their own channels instead."""

    def __init__(
        self, backbone: Backbone, head: nn.Module, mean: Sequence[float], std: Sequence[float], arch: str
    ) -> None:
        super().__init__()
        self.arch = arch
        self.backbone = backbone
        self.head = head
        shape = (1, len(mean), 1, 1) if len(mean) == 3 else (1, len(mean))
        self.register_buffer("mean", torch.tensor(mean).reshape(shape), persistent=False)
        self.register_buffer("std", torch.tensor(std).reshape(shape), persistent=False)

    def features(self, x: Tensor) -> Tensor:
        """The input of the head: `(B, out_features)`, or `(B, out_features, h, w)` for segmentation."""
        features: Tensor = self.backbone(standardised(x) if self.by_image else (x - self.mean) / self.std)
        return features

    def forward(self, x: Tensor) -> Tensor:
        return self.scores(self.features(x), x.shape[-2:])

    def scores(self, features: Tensor, size: Sequence[int], head: nn.Module | None = None) -> Tensor:
        """Scores from features, by `head` if given, otherwise by the network's. A map is enlarged to `size` = (H, W) of
        the input."""
        scores: Tensor = (head or self.head)(features)
        if scores.ndim == 4:
            scores = F.interpolate(scores, size=tuple(size), mode="bilinear", align_corners=False)
        return scores


class WholeNet(Backbone):
    """A user's network as a backbone."""

    def __init__(self, body: nn.Module, out_features: int) -> None:
        super().__init__()
        self.body = body
        self.out_features = out_features
        self.stages = tuple(
            f"body.{name}" for name, part in body.named_children() if any(True for _ in part.parameters())
        )
        self.taps = self.stages[-3:]

    def forward(self, x: Tensor) -> Tensor:
        features: Tensor = self.body(x)
        return features


def split_network(net: nn.Module, input_shape: tuple[int, ...], classes: int, name: str) -> Network:
    """A user's network as backbone and head. The head is its last linear or convolutional layer with one output per
    class, if the network really ends there; otherwise the backbone is the whole network and the head does nothing."""
    was_training = net.training
    net.eval()
    x = torch.rand(2, *input_shape, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        try:
            scores = net(x)
        except Exception as error:
            raise InputError(
                "method-needs", f"network {name!r} does not take inputs of shape {(2, *input_shape)}: {error}"
            ) from error
        if not isinstance(scores, Tensor) or scores.ndim not in (2, 4) or scores.shape[:2] != (2, classes):
            shape = tuple(scores.shape) if isinstance(scores, Tensor) else type(scores).__name__
            raise InputError(
                "method-needs",
                f"network {name!r} gives {shape} for inputs of shape {(2, *input_shape)}; it must give scores of shape"
                f" (2, {classes}), or (2, {classes}, h, w) for segmentation",
            )
        body, head, features = net, nn.Identity(), classes
        for path, layer in reversed(list(net.named_modules())):
            width = _widths(layer)
            if width is None or width[1] != classes:
                continue
            parent, _, last = path.rpartition(".")
            setattr(net.get_submodule(parent), last, nn.Identity())
            found = net(x)
            if found.shape[1] == width[0] and torch.equal(layer(found), scores):
                head, features = layer, width[0]
            else:
                setattr(net.get_submodule(parent), last, layer)
            break
    flat = len(input_shape) == 1
    body.train(was_training)
    return Network(WholeNet(body, features), head, (0.0,) if flat else (0.0,) * 3, (1.0,) if flat else (1.0,) * 3, name)


def _widths(layer: nn.Module) -> tuple[int, int] | None:
    """Inputs and outputs of a layer that could be a head."""
    if isinstance(layer, nn.Linear):
        return layer.in_features, layer.out_features
    return (layer.in_channels, layer.out_channels) if isinstance(layer, nn.Conv2d) else None


@contextmanager
def seeded_init(seed: int) -> Iterator[None]:
    """Layers built inside draw their weights from `seed`; the global generator is left as it was.

    Seeds the CPU generator only: `torch.manual_seed` would also reset the generators of every GPU.
    """
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed)
        yield


def blank_copy(module: nn.Module, device: str = "cpu") -> nn.Module | None:
    """A module of the same structure, for weights to be loaded into: parameters and buffers of the state dict are 0 on
    `device`, other buffers are as they were. It is ready in a fraction of the time that drawing first weights takes.
    None if a layer holds something that only its own constructor can make."""
    return _blank(module, device, {})


_OF_EVERY_MODULE = frozenset(vars(nn.Module()))
_HOOKS = tuple(name for name in _OF_EVERY_MODULE if name.endswith("_hooks"))


def _blank(module: nn.Module, device: str, made: dict[int, Any]) -> nn.Module | None:
    if id(module) in made:
        return cast(nn.Module, made[id(module)])
    held = vars(module)
    if any(held[name] for name in _HOOKS):
        return None
    values = {name: value for name, value in held.items() if name not in _OF_EVERY_MODULE}
    if not all(_is_plain(value) for value in values.values()):
        return None
    new = made[id(module)] = type(module).__new__(type(module))
    nn.Module.__init__(new)
    vars(new).update(values, training=module.training)
    for name, parameter in held["_parameters"].items():
        if parameter is not None and id(parameter) not in made:
            made[id(parameter)] = nn.Parameter(_zeros(parameter, device), parameter.requires_grad)
        new._parameters[name] = None if parameter is None else made[id(parameter)]
    outside = held["_non_persistent_buffers_set"]
    for name, buffer in held["_buffers"].items():
        new._buffers[name] = None if buffer is None else buffer.clone() if name in outside else _zeros(buffer, device)
    new._non_persistent_buffers_set.update(outside)
    for name, part in held["_modules"].items():
        copied = None if part is None else _blank(part, device, made)
        if copied is None and part is not None:
            return None
        new._modules[name] = copied
    return new


def _zeros(like: Tensor, device: str) -> Tensor:
    # Convolutions are fastest in this layout, and weights would be brought into it anyway.
    layout = torch.channels_last if like.ndim == 4 else torch.contiguous_format
    return torch.empty(like.shape, dtype=like.dtype, device=device, memory_format=layout).zero_()


def _is_plain(value: object) -> bool:
    """Whether two modules can share a value, because nobody can change it."""
    return type(value) in (int, float, bool, str, type(None)) or (
        type(value) is tuple and all(_is_plain(item) for item in value)
    )


class DenseBlock(nn.Sequential):
    """Linear layer, normalisation, ReLU."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__(OrderedDict(fc=nn.Linear(inputs, outputs), norm=nn.BatchNorm1d(outputs), relu=nn.ReLU()))


def he_init(module: nn.Module) -> None:
    """He et al. (2015), fan-out, for convolutions followed by a normalisation or ReLU; biases start at 0."""
    for layer in module.modules():
        if isinstance(layer, nn.Conv2d):
            nn.init.kaiming_normal_(layer.weight, mode="fan_out", nonlinearity="relu")
            if layer.bias is not None:
                nn.init.zeros_(layer.bias)


def linear_head(features: int, classes: int) -> nn.Module:
    """`(B, features)` to `(B, classes)`."""
    return nn.Linear(features, classes)


Rule = Literal["probabilities", "logits"]


class Ensemble(nn.Module):
    """`members` copies of `template`, to be filled with different weights: an input of `template` to the mean of the
    members' outputs, `(B, classes)` or `(B, classes, H, W)`.

    The mean is that of probabilities, returned as logarithms, or of logits; in both cases its softmax is the
    prediction. `shares` are the members' weights in the mean.
    """

    shares: Tensor

    def __init__(self, template: nn.Module, members: int, rule: Rule) -> None:
        super().__init__()
        self.members = nn.ModuleList(copy.deepcopy(template) for _ in range(members))
        self.rule = rule
        self.register_buffer("shares", equal_shares([True] * members))

    def forward(self, x: Tensor) -> Tensor:
        scores = torch.stack([member(x) for member in self.members])
        mean = mean_probability if self.rule == "probabilities" else mean_score
        return mean(scores, self.shares)
