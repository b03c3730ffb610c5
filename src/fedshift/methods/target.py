"""The unlabelled target that sits at the coordinator, for methods that adapt to it."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from fedshift.errors import InputError
from fedshift.federation.federation import Federation
from fedshift.federation.site import Labelled, Unlabelled

_BATCH = 256


def require_target(fed: Federation) -> None:
    """Refuses a target that has too little to adapt to: batch normalisation needs two samples."""
    count = len(fed.home.train)
    if count < 2:
        name, method = fed.home.name, fed.plan.method
        raise InputError("method-needs", f"target {name!r} has {count} training samples; {method} needs two: add some")


@torch.no_grad()
def over_target(home: Labelled | Unlabelled, function: Callable[[Tensor], Tensor]) -> Tensor:
    """`function` of all of the target's inputs in order, a batch at a time, as one float tensor `(N, ...)`."""
    return torch.cat([function(batch.x).float().cpu() for batch in home.train.in_order(_BATCH)])


def all_finite(weights: Mapping[str, Tensor]) -> bool:
    return all(bool(torch.isfinite(value).all()) for value in weights.values())
