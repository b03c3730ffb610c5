"""What most methods do at a site: load weights, train with SGD, give weights back."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import TypeVar

import torch
from torch import Tensor, nn

from fedshift.data.augment import PairAugment, build_augment, build_pair_augment
from fedshift.errors import InputError
from fedshift.federation.kinds import Weights
from fedshift.federation.plan import Plan
from fedshift.federation.site import Site
from fedshift.nn.archs import build_network
from fedshift.nn.network import Backbone, Network
from fedshift.nn.statistics import freeze_norms

B = TypeVar("B")


def plain_network(plan: Plan) -> Network:
    """The plan's architecture as it is. Its initial weights do not matter: sites load what they are sent."""
    net = build_network(plan.model.arch, plan.model.input_shape, len(plan.model.classes), generator_seed=0)
    if plan.model.freeze_norm:
        freeze_norms(net)
    return net


def weights_of(module: nn.Module) -> dict[str, Tensor]:
    """A copy of all parameters and buffers."""
    return {key: value.detach().cpu().clone() for key, value in module.state_dict().items()}


def with_weights(module: nn.Module, weights: Weights, device: torch.device) -> nn.Module:
    """`module` on `device`, holding `weights`."""
    module.load_state_dict(dict(weights))
    # Up to 1.7 times as fast as the default layout on a CPU, and the layout that batches come in.
    return module.to(device).to(memory_format=torch.channels_last)  # type: ignore[call-overload, no-any-return]


def augmentation(plan: Plan) -> PairAugment | None:
    """The configured augmentation of labelled batches: masks move with their images, classes stay as they are."""
    names = plan.training.augment
    if not names:
        return None
    if len(plan.model.input_shape) != 3:
        raise InputError("config-value", "augment: table rows cannot be augmented; leave it empty")
    if plan.model.task == "segmentation":
        return build_pair_augment(names)
    augment = build_augment(names)
    return lambda x, y, generator: (augment(x, generator), y)


def sgd(site: Site, *modules: nn.Module) -> torch.optim.Optimizer:
    """Fresh SGD at the round's learning rate, and at its share of it for backbones."""
    training = site.plan.training
    parts = [part for module in modules for part in module.modules() if isinstance(part, Backbone)]
    in_backbones = {parameter for part in parts for parameter in part.parameters()}
    parameters = [parameter for module in modules for parameter in module.parameters()]
    groups = [
        {"params": [p for p in parameters if p in in_backbones], "lr": site.lr * training.backbone_lr_factor},
        {"params": [p for p in parameters if p not in in_backbones], "lr": site.lr},
    ]
    return torch.optim.SGD(
        [group for group in groups if group["params"]],
        lr=site.lr,
        momentum=training.momentum,
        weight_decay=training.weight_decay,
        fused=True,
    )


def train_batches(
    batches: Iterable[B],
    loss_of: Callable[[B], Tensor],
    optimizer: torch.optim.Optimizer,
    precision: str = "float32",
) -> float:
    """One optimizer step a batch; returns the mean loss. A failure names the batch it happened in."""
    total, count = torch.zeros(()), 0
    for number, batch in enumerate(batches):
        with _naming_batch(number):
            optimizer.zero_grad(set_to_none=True)
            with torch.autocast("cpu", torch.bfloat16, enabled=precision == "bfloat16"):
                loss = loss_of(batch)
            loss.backward()
            optimizer.step()
        total += loss.detach().cpu()
        count += 1
    return float(total) / max(count, 1)


@contextmanager
def _naming_batch(number: int) -> Iterator[None]:
    try:
        yield
    except Exception as error:
        error.add_note(f"in batch {number} of this step's training")
        raise
