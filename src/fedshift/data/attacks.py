"""Bad sites on purpose, to see what a run does if a site is wrong, irrelevant or hostile."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, cast, get_args

import numpy as np
from torch import Tensor

from fedshift.data.domain import VOID, Split
from fedshift.errors import InputError, nearest
from fedshift.rng import Rng

AttackKind = Literal["poison", "noise", "other-task"]


@dataclass(frozen=True)
class Attack:
    """`poison`: a share of every training batch gets wrong labels (each class becomes the next one). `noise`: the
    site's images are random. `other-task`: its class names are mixed up, as if for another task."""

    kind: AttackKind
    domain: str
    share: float = 1.0

    def __str__(self) -> str:
        return f"{self.kind}:{self.domain}" + (f":{self.share:g}" if self.kind == "poison" else "")


def parse_attack(text: str) -> Attack:
    """`poison:SITE:SHARE`, `noise:SITE` or `other-task:SITE`."""
    kind, _, rest = text.partition(":")
    if kind not in get_args(AttackKind):
        raise InputError(
            "config-value", f"attack {text!r}: there is no attack {kind!r}. {nearest(kind, get_args(AttackKind))}"
        )
    if kind != "poison":
        if not rest:
            raise InputError("config-value", f"attack {text!r}: name the site, as in {kind}:SITE")
        return Attack(cast(AttackKind, kind), rest)
    domain, _, number = rest.rpartition(":")
    try:
        share = float(number)
    except ValueError:
        share = -1.0
    if not domain or not 0 < share <= 1:
        raise InputError("config-value", f"attack {text!r}: write it as poison:SITE:SHARE with a share from 0 to 1")
    return Attack("poison", domain, share)


def with_wrong_labels(labels: Tensor, share: float, classes: int) -> Tensor:
    """The first `share` of a batch's labels (classes `(b,)` or masks `(b, h, w)`) plus one, modulo the classes."""
    count = round(share * len(labels))
    wrong = labels.clone()
    first = wrong[:count]
    wrong[:count] = (first + 1).remainder(classes).where(first != VOID, first)
    return wrong


def spoiled(split: Split, attack: Attack, classes: int, rng: Rng) -> Split:
    """What the site has instead of `split`. Poison does not change it: it acts on batches when they are drawn."""
    if attack.kind == "noise":
        draw = rng.child("noise").numpy()
        is_image = split.inputs.dtype == np.uint8
        noise = draw.integers(0, 256, split.inputs.shape) if is_image else draw.normal(size=split.inputs.shape)
        return Split(noise.astype(split.inputs.dtype), split.labels)
    if attack.kind == "other-task" and split.labels is not None:
        # A cycle through all classes in a random order: none keeps its name.
        order = rng.child("classes").numpy().permutation(classes)
        names = np.arange(max(classes, VOID + 1))
        names[order] = np.roll(order, 1)
        return Split(split.inputs, names[split.labels].astype(split.labels.dtype))
    return split
