"""The work that most methods do at a site or at the target: load weights, train with SGD, give weights back."""

from __future__ import annotations

import copy
import functools
import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, ClassVar, TypeVar, cast

import torch
from torch import Tensor, nn

from fedshift.data.augment import PairAugment, build_augment, build_pair_augment
from fedshift.errors import InputError
from fedshift.federation.federation import Federation
from fedshift.federation.plan import Plan
from fedshift.federation.releases import Weights
from fedshift.federation.site import Labelled, Site, Unlabelled
from fedshift.methods.base import SHARED
from fedshift.nn.archs import Arch, build_network, find_arch
from fedshift.nn.network import Backbone, Network, blank_copy, seeded_init
from fedshift.nn.normalisation import freeze_norms
from fedshift.rng import Rng

B = TypeVar("B")

_BATCH = 256
"""Samples in a batch of a forward pass without gradients."""


def plain_network(plan: Plan) -> Network:
    """The plan's architecture, unchanged. Its initial weights do not matter: sites load the weights they are sent."""
    net = _blank(plan) if _weights_follow.get() else None
    spec = plan.model
    return net or _built(find_arch(spec.arch), spec.input_shape, len(spec.classes), spec.freeze_norm)


def _blank(plan: Plan) -> Network | None:
    """The architecture with zeros as weights, in the layout of `with_weights`; None if only its code can make it."""
    spec = plan.model
    arch = find_arch(spec.arch)
    if arch.whole is not None:
        return None
    template = _template(arch, spec.input_shape, len(spec.classes), spec.freeze_norm)
    return None if template is None else cast(Network, blank_copy(template))


_weights_follow: ContextVar[bool] = ContextVar("weights_follow", default=False)
"""Of one thread: a server's threads build networks at the same time."""


@contextmanager
def weights_follow() -> Iterator[None]:
    """Networks that are built inside have zeros as weights, because others are loaded at once. To draw first weights
    takes longer than some sites train."""
    before = _weights_follow.set(True)
    try:
        yield
    finally:
        _weights_follow.reset(before)


def network_with(plan: Plan, weights: Weights, device: torch.device) -> Network:
    """The plan's architecture on `device`, holding `weights`."""
    net = _blank(plan)
    if net is not None and device.type == "cpu" and _fill(net, weights):
        return net
    return cast(Network, with_weights(net or plain_network(plan), weights, device))


@torch.no_grad()
def _fill(net: Network, weights: Weights) -> bool:
    """Copies weights into a blank network; False where `with_weights` is to say what does not fit."""
    own = net.state_dict()
    if own.keys() != weights.keys() or any(own[key].shape != value.shape for key, value in weights.items()):
        return False
    for key, value in weights.items():
        own[key].copy_(value)
    return True


def _built(arch: Arch, input_shape: tuple[int, ...], classes: int, freeze_norm: bool) -> Network:
    net = build_network(arch.name, input_shape, classes, generator_seed=0)
    if freeze_norm:
        freeze_norms(net)
    return net


@functools.lru_cache(maxsize=4)
def _template(arch: Arch, input_shape: tuple[int, ...], classes: int, freeze_norm: bool) -> nn.Module | None:
    """The network without memory for weights, to be copied."""
    with torch.device("cpu"):  # Whoever asks first may be looking at shapes only; the template is for all.
        net = _built(arch, input_shape, classes, freeze_norm)
    return blank_copy(net, "meta")


def weights_of(module: nn.Module) -> dict[str, Tensor]:
    """A copy of all parameters and buffers."""
    return {key: value.detach().cpu().clone() for key, value in module.state_dict().items()}


def random_like(head: nn.Module, rng: Rng) -> dict[str, Tensor]:
    """Weights for `head` as a new layer has them, drawn from `rng`."""
    twin = copy.deepcopy(head).cpu()
    with seeded_init(rng.seed()):
        for layer in twin.modules():
            if isinstance(layer, nn.Linear | nn.Conv2d):
                layer.reset_parameters()
    return weights_of(twin)


def with_weights(module: nn.Module, weights: Weights, device: torch.device) -> nn.Module:
    """`module` on `device`, holding `weights`."""
    module.load_state_dict(dict(weights))
    # Up to 1.7 times as fast on a CPU as the default layout, and batches have this layout too.
    return module.to(device, memory_format=torch.channels_last)  # type: ignore[call-overload, no-any-return]


@dataclass(frozen=True)
class NoKeys:
    """Hyper-parameters of a method that has none beyond the common keys."""


@dataclass(frozen=True)
class SharedModel:
    """The state of a method that has one model and nothing else."""

    model: Weights


class SharedModelMethod:
    """The parts that a method may leave out (`fedshift.methods.complete`): one shared model, no keys."""

    hyper_type: ClassVar[type[Any]] = NoKeys
    state_type: ClassVar[type[Any]] = SharedModel

    def __init__(self, hyper: Any = None) -> None:
        self.hyper = self.hyper_type() if hyper is None else hyper

    def init(self, base: Network, fed: Federation) -> SharedModel:
        return SharedModel(weights_of(base))

    def models(self, state: SharedModel) -> Mapping[str, Weights]:
        return {SHARED: state.model}

    @staticmethod
    def network(plan: Plan) -> nn.Module:
        return plain_network(plan)


def all_finite(weights: Mapping[str, Tensor]) -> bool:
    return all(bool(torch.isfinite(value).all()) for value in weights.values())


def augmentation(plan: Plan) -> PairAugment | None:
    """The configured augmentation of labelled batches. Masks are transformed with their images; classes stay."""
    names = plan.training.augment
    if not names:
        return None
    if len(plan.model.input_shape) != 3:
        raise InputError("config-value", "augment: table rows cannot be augmented; leave it empty")
    if plan.model.task == "segmentation":
        return build_pair_augment(names)
    augment = build_augment(names)
    return lambda x, y, generator: (augment(x, generator), y)


class _Sgd(torch.optim.SGD):
    """torch's own SGD without the doors to its compiler, which import that: longer than it takes to import torch."""

    add_param_group = inspect.unwrap(torch.optim.Optimizer.add_param_group)
    zero_grad = inspect.unwrap(torch.optim.Optimizer.zero_grad)

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        """One step along the gradients."""
        return _plain_step(self, closure)


_plain_step: Callable[..., Any] = inspect.unwrap(torch.optim.SGD.step)


def sgd(site: Site, *modules: nn.Module, lr: float | None = None) -> torch.optim.Optimizer:
    """New SGD at the rate `lr`, by default the round's; for backbones at `backbone_lr_factor` times that rate."""
    training = site.plan.training
    rate = site.lr if lr is None else lr
    parts = [part for module in modules for part in module.modules() if isinstance(part, Backbone)]
    in_backbones = {parameter for part in parts for parameter in part.parameters()}
    parameters = [parameter for module in modules for parameter in module.parameters()]
    groups = [
        {"params": [p for p in parameters if p in in_backbones], "lr": rate * training.backbone_lr_factor},
        {"params": [p for p in parameters if p not in in_backbones], "lr": rate},
    ]
    return _Sgd(
        [group for group in groups if group["params"]],
        lr=rate,
        momentum=training.momentum,
        weight_decay=training.weight_decay,
        fused=True,
    )


def autocast(device: torch.device, precision: str) -> torch.autocast:
    """A context for forward passes on `device` in `precision`, which is `float32` or `bfloat16`."""
    return torch.autocast(device.type, torch.bfloat16, enabled=precision == "bfloat16")


def train_batches(
    batches: Iterable[B],
    loss_of: Callable[[B], Tensor] | Sequence[Callable[[B], Tensor]],
    optimizer: torch.optim.Optimizer,
    precision: str = "float32",
) -> float:
    """One optimizer step per batch; returns the mean loss. A failure names the batch it happened in.

    A loss may be a sum of several functions: each one's gradient is taken before the next is computed, so that only one
    of them needs memory at a time.
    """
    terms = [loss_of] if callable(loss_of) else loss_of
    device = optimizer.param_groups[0]["params"][0].device
    total, count = torch.zeros((), device=device), 0
    for number, batch in enumerate(batches):
        loss = torch.zeros((), device=device)
        with naming_batch(number):
            optimizer.zero_grad(set_to_none=True)
            for term in terms:
                with autocast(device, precision):
                    value = term(batch)
                value.backward()
                loss += value.detach()
            optimizer.step()
        total += loss
        count += 1
    return float(total) / max(count, 1)


def descend(loss: Tensor, optimizer: torch.optim.Optimizer) -> None:
    """One optimizer step on the gradient of `loss` alone."""
    optimizer.zero_grad(set_to_none=True)
    loss.backward()
    optimizer.step()


@contextmanager
def naming_batch(number: int) -> Iterator[None]:
    """Adds the number of the batch to an error."""
    try:
        yield
    except Exception as error:
        error.add_note(f"in batch {number} of this step's training")
        raise


def require_target(fed: Federation) -> None:
    """Refuses a target at the coordinator that has too little to adapt to: batch normalisation needs two samples."""
    count = len(fed.home.train)
    if count < 2:
        name, method = fed.home.name, fed.plan.method
        raise InputError("method-needs", f"target {name!r} has {count} training samples; {method} needs two: add some")


@torch.no_grad()
def over_target(home: Labelled | Unlabelled, function: Callable[[Tensor], Tensor]) -> Tensor:
    """`function` of all inputs of the target at the coordinator, in order and batch by batch, as one float32 tensor
    `(N, ...)` on the CPU."""
    return torch.cat([function(batch.x).float().cpu() for batch in home.train.in_order(_BATCH)])
