"""Normalisation: running statistics of BatchNorm layers, and layers that can replace BatchNorm in a backbone (hybrid
batch-instance normalisation and related ones).

HBIN: Guile Wu and Shaogang Gong, "Collaborative Optimization and Aggregation for Decentralized Domain Generalization
and Adaptation", ICCV 2021, Eq. (2)-(4). SwitchNorm: Ping Luo et al., ICLR 2019. IBN: Xingang Pan et al., "Two at Once:
Enhancing Learning and Generalization Capacities via IBN-Net", ECCV 2018.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from itertools import pairwise
from typing import Any, Literal, Self

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from fedshift.errors import InputError
from fedshift.functional.norms import Moments, Part, mixed_norm
from fedshift.nn.backbones.efficientnet import MBConv
from fedshift.nn.backbones.mobilenet import InvertedResidual
from fedshift.nn.backbones.resnet import BasicBlock, Bottleneck
from fedshift.nn.backbones.tables import Standardise
from fedshift.nn.network import Backbone
from fedshift.nn.taps import norm_layers

STATISTICS = ("running_mean", "running_var")


def tracking_layers(module: nn.Module) -> dict[str, nn.Module]:
    """All layers that remember statistics of what they have seen, by dotted name: BatchNorm, layers that mix it with
    others, and the standardisation of table columns."""
    kinds = (_BatchNorm, HybridNorm, Standardise)
    return {name: layer for name, layer in module.named_modules() if isinstance(layer, kinds)}


def statistics_of(module: nn.Module) -> dict[str, Tensor]:
    """A copy of the running means and variances that a network remembers, by the names of the state dict."""
    state = module.state_dict()
    return {
        f"{layer}.{name}": state[f"{layer}.{name}"].cpu().clone()
        for layer in tracking_layers(module)
        for name in STATISTICS
    }


@contextmanager
def remembering(module: nn.Module) -> Iterator[None]:
    """Inside the block, layers that remember statistics normalise by batches. After it, their running statistics are
    the plain mean over these batches. Everything else stays as it was."""
    layers: list[Any] = list(tracking_layers(module).values())
    before = [(layer.training, layer.momentum) for layer in layers]
    for layer in layers:
        layer.reset_running_stats()
        layer.momentum = 0.0 if isinstance(layer, Standardise) else None  # a plain mean over batches
        layer.train()
    try:
        yield
    finally:
        for layer, (training, momentum) in zip(layers, before, strict=True):
            layer.momentum = momentum
            layer.train(training)


@contextmanager
def forgetting(module: nn.Module) -> Iterator[None]:
    """Inside the block, layers normalise as before, but forward passes change neither running statistics nor the count
    of batches, in BatchNorm layers and in what replaces them."""
    layers = [layer for layer in module.modules() if isinstance(layer, _BatchNorm | HybridNorm)]
    before = [layer.track_running_stats for layer in layers]
    for layer in layers:
        layer.track_running_stats = False
    try:
        yield
    finally:
        for layer, is_tracking in zip(layers, before, strict=True):
            layer.track_running_stats = is_tracking


class Frozen(nn.Module):
    """A norm that always normalises by its running statistics, in training too, and never changes them."""

    def train(self, mode: bool = True) -> Self:
        return super().train(False)


class FrozenBatchNorm1d(Frozen, nn.BatchNorm1d):
    """For vectors."""


class FrozenBatchNorm2d(Frozen, nn.BatchNorm2d):
    """For maps."""


def freeze_norms(module: nn.Module) -> None:
    """Makes BatchNorm layers normalise by their running statistics, in training too. Scale and shift still learn."""
    for name, layer in norm_layers(module).items():
        kind = FrozenBatchNorm2d if isinstance(layer, nn.BatchNorm2d) else FrozenBatchNorm1d
        frozen = kind(layer.num_features, layer.eps, layer.momentum).eval()
        frozen.load_state_dict(layer.state_dict())
        parent, _, own = name.rpartition(".")
        setattr(module.get_submodule(parent), own, frozen)


Variant = Literal["hbin", "bn", "in", "ibn-a", "ibn-b", "switch"]
Where = Literal["auto", "all", "first-stage", "first-block", "after-every-conv"]
Start = Literal["equal", "batch"]

BATCH_START = 3.0
"""The batch's logit where a hybrid layer starts as the batch norm it replaces; the others are 0. Its share is 0.95, and
the gradient of the softmax still moves it."""

_RESIDUAL = (BasicBlock, Bottleneck, InvertedResidual, MBConv)
_ENDS_LINEAR = (InvertedResidual, MBConv)


class HybridNorm(nn.Module):
    """A learned mixture of batch and instance statistics; with `with_layer` also of layer statistics, which is
    SwitchNorm. Maps `(B, E, H, W)` or vectors `(B, E)` to the same shape.

    `mean_logits` and `var_logits` are the paper's lambda and lambda', in the order batch, instance, layer. In
    evaluation the batch part uses running statistics, updated as in BatchNorm; the others are the sample's own.
    """

    running_mean: Tensor
    running_var: Tensor
    num_batches_tracked: Tensor

    def __init__(self, channels: int, eps: float = 1e-5, momentum: float = 0.1, with_layer: bool = False) -> None:
        super().__init__()
        self.eps, self.track_running_stats = eps, True
        self.momentum: float | None = momentum
        self.parts: tuple[Part, ...] = ("batch", "instance", "layer") if with_layer else ("batch", "instance")
        self.weight = nn.Parameter(torch.ones(channels))
        self.bias = nn.Parameter(torch.zeros(channels))
        self.mean_logits = nn.Parameter(torch.ones(len(self.parts)))
        self.var_logits = nn.Parameter(torch.ones(len(self.parts)))
        self.register_buffer("running_mean", torch.zeros(channels))
        self.register_buffer("running_var", torch.ones(channels))
        self.register_buffer("num_batches_tracked", torch.tensor(0, dtype=torch.long))

    def forward(self, x: Tensor) -> Tensor:
        maps = _as_maps(x)
        mean_ratios, var_ratios = self.mean_logits.softmax(0), self.var_logits.softmax(0)  # Eq. (4)
        running = None if self.training else (self.running_mean[None], self.running_var[None])
        out, batch = mixed_norm(
            maps, self.weight, self.bias, mean_ratios, var_ratios, self.parts, running, self.eps
        )  # Eq. (2), (3)
        if self.training and self.track_running_stats:
            self._track(batch, count=maps.shape[0] * maps.shape[2])
        return out.view(x.shape).to(x.dtype)

    def reset_running_stats(self) -> None:
        self.running_mean.zero_()
        self.running_var.fill_(1)
        self.num_batches_tracked.zero_()

    @torch.no_grad()
    def _track(self, batch: Moments, count: int) -> None:
        """Moves the running statistics towards those of a batch with `count` values per channel."""
        mean, var = batch
        self.num_batches_tracked += 1
        # As in BatchNorm: without a momentum, a plain mean over batches; the variance unbiased.
        rate = 1.0 / int(self.num_batches_tracked) if self.momentum is None else self.momentum
        self.running_mean.lerp_(mean[0], rate)
        self.running_var.lerp_(var[0] * (count / max(count - 1, 1)), rate)


class FrozenHybridNorm(Frozen, HybridNorm):
    """The batch part always uses running statistics."""


class InstanceNorm(nn.Module):
    """Normalises each channel of each sample by its own statistics, `(B, E, H, W)` to `(B, E, H, W)`.

    A map of one pixel becomes the bias (torch.nn.InstanceNorm2d refuses it).
    """

    def __init__(self, channels: int, eps: float = 1e-5) -> None:
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.ones(channels))
        self.bias = nn.Parameter(torch.zeros(channels))

    def forward(self, x: Tensor) -> Tensor:
        whole = torch.ones(1, device=x.device)
        out, _ = mixed_norm(_as_maps(x), self.weight, self.bias, whole, whole, ("instance",), eps=self.eps)
        return out.view(x.shape).to(x.dtype)


def _as_maps(x: Tensor) -> Tensor:
    """`(B, E, H, W)` or `(B, E)` as `(B, E, P)`, at least float32: statistics in bfloat16 would be too coarse."""
    return (x if x.dtype == torch.float64 else x.float()).reshape(*x.shape[:2], -1)


class HalfInstanceNorm(nn.Module):
    """IBN-a: instance normalisation for the first half of the channels, batch normalisation for the rest."""

    def __init__(
        self, channels: int, eps: float = 1e-5, momentum: float = 0.1, kind: type[nn.BatchNorm2d] = nn.BatchNorm2d
    ) -> None:
        super().__init__()
        self.first = channels // 2
        self.instance = InstanceNorm(self.first, eps)
        self.batch = kind(channels - self.first, eps, momentum)

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([self.instance(x[:, : self.first]), self.batch(x[:, self.first :])], dim=1)


def convert_norms(backbone: Backbone, variant: Variant, where: Where = "auto", start: Start = "equal") -> None:
    """Replaces the 2-D batch normalisation of `backbone` by `variant`, in place.

    `all` replaces every norm, `first-stage` the first norm and those of the first stage, `first-block` the first norm
    and those of the first residual block (of the first stage, where there are no residual blocks). `after-every-conv`
    first adds a norm to each convolution without one, then replaces all. `auto` is `all` if there are norms, else
    `after-every-conv`. Norms of vectors stay, because within one sample a single number cannot be normalised.

    New layers take over scale, shift, running statistics, eps and momentum; replacements of frozen norms are frozen.
    What the network computes changes all the same. How much, is up to `start`, for `hbin` and `switch`: with `equal`,
    batch and instance statistics have equal shares; with `batch`, the batch has 95 % (`switch`: 91 %), which
    leaves a pre-trained network much nearer to what it was. The other variants have no shares to choose.

    `ibn-a` leaves out the last stage and, in networks with residual blocks, every norm of a block except the first.
    `ibn-b` makes the first norm an instance norm and adds one after each of the first two stages (`first-stage` and
    `first-block`: after the first).
    """
    if where == "after-every-conv" or (where == "auto" and not _norms(backbone)):
        _insert_norms(backbone)
    if variant == "bn":
        return
    norms = _norms(backbone)
    if not norms:
        raise InputError(
            "method-needs",
            f"The network ({type(backbone).__name__}) has no 2-D batch normalisation that {variant!r} could replace: "
            "choose another architecture, norm_where=after-every-conv if it has convolutions, or norm=bn.",
        )
    stages = [stage for stage in backbone.stages if any(_is_inside(name, stage) for name in norms)]
    is_beginning = where in ("first-stage", "first-block")
    if is_beginning:
        first = next(iter(norms))
        beginning = _first_block(backbone) if where == "first-block" else backbone.stages[0]
        norms = {name: norm for name, norm in norms.items() if name == first or _is_inside(name, beginning)}
    if variant == "ibn-b":
        _convert_to_ibn_b(backbone, norms, stages[:1] if is_beginning else stages[:2])
    elif variant == "ibn-a":
        for name in _names_for_ibn_a(backbone, list(norms), stages):
            _replace(backbone, name, _half_of(norms[name]))
    else:
        for name, norm in norms.items():
            new = _instance_of(norm) if variant == "in" else _hybrid_of(norm, variant == "switch", start)
            _replace(backbone, name, new)


def _norms(module: nn.Module) -> dict[str, nn.BatchNorm2d]:
    """2-D BatchNorm layers by dotted name, in the order of a forward pass."""
    return {name: layer for name, layer in module.named_modules() if isinstance(layer, nn.BatchNorm2d)}


def _first_block(backbone: Backbone) -> str:
    """The first residual block by dotted name, or the first stage if there is none."""
    blocks = (name for name, module in backbone.named_modules() if isinstance(module, _RESIDUAL))
    return next(blocks, backbone.stages[0])


def _insert_norms(backbone: Backbone) -> None:
    """Adds batch normalisation after each convolution without one. In our networks it would be the next layer by
    name."""
    leaves = [(name, layer) for name, layer in backbone.named_modules() if not list(layer.children())]
    for (name, layer), (_, following) in pairwise([*leaves, ("", None)]):
        if isinstance(layer, nn.Conv2d) and not isinstance(following, nn.BatchNorm2d):
            norm = nn.BatchNorm2d(layer.out_channels)
            _replace(backbone, name, nn.Sequential(OrderedDict(conv=layer, norm=norm)))


def _names_for_ibn_a(backbone: Backbone, names: list[str], stages: list[str]) -> list[str]:
    """The `names` outside the last stage; of residual blocks only the first norm (Pan et al., sec. 3.2)."""
    if len(stages) > 1:
        end = max((place for place, name in enumerate(names) if _is_inside(name, stages[-2])), default=len(names) - 1)
        names = names[: end + 1]
    blocks = {name: block for name, block in backbone.named_modules() if isinstance(block, _RESIDUAL)}
    firsts = {f"{name}.{next(iter(_norms(block)))}" for name, block in blocks.items()}
    return [name for name in names if name in firsts] if blocks else names


def _convert_to_ibn_b(backbone: Backbone, norms: Mapping[str, nn.BatchNorm2d], stages: list[str]) -> None:
    # DIFFERS: the original normalises the sum inside a stage's last block, before its ReLU. Here the instance norm
    # follows the block, with another ReLU if the block ends in one.
    behind: dict[str, nn.Module] = {}
    for name in stages:
        stage = backbone.get_submodule(name)
        last = list(_norms(stage).values())[-1]
        layers: OrderedDict[str, nn.Module] = OrderedDict(stage=stage, norm=InstanceNorm(last.num_features, last.eps))
        if not isinstance(stage, _ENDS_LINEAR):
            layers["relu"] = nn.ReLU()
        behind[name] = nn.Sequential(layers)
    first, norm = next(iter(norms.items()))
    _replace(backbone, first, _instance_of(norm))  # before the stage that contains it is renamed
    for name, layer in behind.items():
        _replace(backbone, name, layer)


def _replace(backbone: Backbone, name: str, layer: nn.Module) -> None:
    parent, _, own = name.rpartition(".")
    setattr(backbone.get_submodule(parent), own, layer.train(backbone.training))


def _is_inside(name: str, module: str) -> bool:
    return name.startswith(f"{module}.")


def _hybrid_of(norm: nn.BatchNorm2d, with_layer: bool, start: Start) -> HybridNorm:
    kind = FrozenHybridNorm if isinstance(norm, Frozen) else HybridNorm
    new = kind(norm.num_features, norm.eps, _momentum(norm), with_layer)
    new.load_state_dict(norm.state_dict(), strict=False)  # everything except the logits, which start equal
    if start == "batch":
        for logits in (new.mean_logits, new.var_logits):
            logits.data = torch.tensor([BATCH_START, *[0.0] * (len(logits) - 1)])
    return new


def _instance_of(norm: nn.BatchNorm2d) -> InstanceNorm:
    new = InstanceNorm(norm.num_features, norm.eps)
    new.load_state_dict({"weight": norm.weight, "bias": norm.bias})
    return new


def _half_of(norm: nn.BatchNorm2d) -> HalfInstanceNorm:
    new = HalfInstanceNorm(norm.num_features, norm.eps, _momentum(norm), type(norm))
    state = norm.state_dict()
    new.instance.load_state_dict({key: state[key][: new.first] for key in ("weight", "bias")})
    new.batch.load_state_dict({key: value[new.first :] if value.ndim else value for key, value in state.items()})
    return new


def _momentum(norm: nn.BatchNorm2d) -> float:
    assert norm.momentum is not None, "a cumulative average is in none of our nets"
    return norm.momentum
