"""Bad sites on purpose, to see what a run does if a site is wrong, irrelevant or hostile. What hostile code at a site
sends is made in federation/forgery.py."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, cast, get_args

import numpy as np
from torch import Tensor

from fedshift.data.domain import VOID, Split
from fedshift.errors import InputError, nearest
from fedshift.rng import Rng

AttackKind = Literal["poison", "noise", "other-task", "sign-flip", "constant", "scaled-noise", "forged-count"]

FORGED: tuple[AttackKind, ...] = ("sign-flip", "constant", "scaled-noise", "forged-count")
"""Attacks on what a site sends, not on its data: whoever controls the site's code can carry them out."""
_LARGEST_COUNT = 10**12


@dataclass(frozen=True)
class Attack:
    """`poison`: a share of every training batch gets wrong labels (each class becomes the next one). `noise`: the
    site's images are random. `other-task`: its class names are mixed up, as if for another task. `sign-flip`: its
    updates point the other way, `amount` times as long. `constant`: all numbers of its models are 1. `scaled-noise`:
    its updates are random, `amount` times as long as true ones. `forged-count`: it claims `amount` samples."""

    kind: AttackKind
    domain: str
    amount: float = 1.0

    def __str__(self) -> str:
        return f"{self.kind}:{self.domain}" + (f":{self.amount:g}" if self.kind in _AMOUNTS else "")


@dataclass(frozen=True)
class _Amount:
    """The number behind a site's name: what it is called, from where to where it may be, and what it is if left out."""

    name: str
    most: float
    usual: float | None = None


_AMOUNTS = {
    "poison": _Amount("SHARE", 1.0),
    "sign-flip": _Amount("FACTOR", 1e6),
    "scaled-noise": _Amount("FACTOR", 1e6),
    "forged-count": _Amount("N", _LARGEST_COUNT, _LARGEST_COUNT),
}


def parse_attack(text: str) -> Attack:
    """`KIND:SITE`, with a number behind it for the kinds that have one: `poison:SITE:SHARE`, `sign-flip:SITE:FACTOR`,
    `scaled-noise:SITE:FACTOR`, `forged-count:SITE` or `forged-count:SITE:N`."""
    word, _, rest = text.partition(":")
    if word not in get_args(AttackKind):
        raise InputError(
            "config-value", f"attack {text!r}: there is no attack {word!r}. {nearest(word, get_args(AttackKind))}"
        )
    kind = cast(AttackKind, word)
    amount = _AMOUNTS.get(kind)
    if amount is None:
        if not rest:
            raise InputError("config-value", f"attack {text!r}: name the site, as in {kind}:SITE")
        return Attack(kind, rest)
    domain, colon, number = rest.rpartition(":")
    if not colon and amount.usual is not None and rest:
        return Attack(kind, rest, amount.usual)
    try:
        value = float(number)
    except ValueError:
        value = -1.0
    if not domain or not 0 < value <= amount.most:
        wanted = f"{kind}:SITE:{amount.name} with a {amount.name.lower()} above 0, at most {amount.most:g}"
        raise InputError("config-value", f"attack {text!r}: write it as {wanted}")
    return Attack(kind, domain, value)


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
