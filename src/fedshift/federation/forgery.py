"""What a site sends if its code is hostile, for studies (`--attack`). Forgeries are made after the site's policy and
look like answers: right names, shapes and types, finite numbers, no variance below 0."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping
from typing import Any, TypeVar

import torch
from torch import Tensor

from fedshift.data.attacks import FORGED, Attack
from fedshift.federation.releases import Release, kinds
from fedshift.functional.averaging import update_norm
from fedshift.functional.robust import with_variances_from_zero
from fedshift.rng import Rng

R = TypeVar("R", bound=Release)


def forged(release: R, received: Mapping[str, Any], attacks: Iterable[Attack], rng: Rng) -> R:
    """The release with its weights and counts as the attacks want them. Updates are those to what came under the same
    name in the step's payload `received`."""
    changed: dict[str, Any] = {}
    for attack in attacks:
        if attack.kind not in FORGED:
            continue
        for field, kind in kinds(type(release)).items():
            value = changed.get(field, getattr(release, field))
            if kind.name == "count" and attack.kind == "forged-count":
                changed[field] = int(attack.amount)
            elif kind.name == "weights" and attack.kind == "forged-confidence":
                head = {name: t for name, t in value.items() if field == "head" or name.startswith("head.")}
                changed[field] = {**value, **oversure(head, attack.amount)}
            elif kind.name == "weights" and attack.kind != "forged-count":
                before = received.get(field) or {name: torch.zeros_like(tensor) for name, tensor in value.items()}
                changed[field] = forged_model(value, before, attack, rng.child("forgery", field))
    return dataclasses.replace(release, **changed) if changed else release


def forged_model(
    model: Mapping[str, Tensor], before: Mapping[str, Tensor], attack: Attack, rng: Rng
) -> dict[str, Tensor]:
    floating = {name: value for name, value in model.items() if value.is_floating_point()}
    found = {name: value.clone() for name, value in model.items()}
    if attack.kind == "constant":
        found |= {name: torch.ones_like(value) for name, value in floating.items()}
    elif attack.kind in ("sign-flip", "boost"):
        factor = attack.amount if attack.kind == "boost" else -attack.amount
        found |= {name: before[name] + factor * (value - before[name]) for name, value in floating.items()}
    elif attack.kind == "free-rider":
        generator = rng.torch()
        found |= {name: _nearly(before[name], generator) for name in floating}
    else:
        generator = rng.torch()
        drawn = {name: torch.randn(value.shape, generator=generator) for name, value in floating.items()}
        length = torch.cat([values.flatten() for values in drawn.values()]).norm()
        factor = attack.amount * update_norm(model, before) / float(length)
        found |= {name: (before[name] + factor * drawn[name]).to(value.dtype) for name, value in floating.items()}
    return dict(with_variances_from_zero(found))


_DISGUISE = 1e-3
"""A free-rider's noise, as a share of the typical size of a tensor's numbers."""


def _nearly(value: Tensor, generator: torch.Generator) -> Tensor:
    size = value.double().square().mean().sqrt()
    noise = torch.randn(value.shape, generator=generator, dtype=torch.float64)
    return (value.double() + _DISGUISE * size * noise).to(value.dtype)


def oversure(head: Mapping[str, Tensor], factor: float) -> dict[str, Tensor]:
    """The classifier's last layer, `factor` times as sure, with what speaks for a class speaking for the next one."""
    last = next(reversed(list(head)), "").rpartition(".")[0]
    return {name: factor * value.roll(1, 0) for name, value in head.items() if name.rpartition(".")[0] == last}
