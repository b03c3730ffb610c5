"""Bad sites on purpose, to see what a run does if a site is wrong, irrelevant or hostile. What hostile code at a site
sends is made in federation/forgery.py."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, Literal, cast, get_args

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fedshift.data.domain import VOID, Split
from fedshift.errors import InputError, nearest
from fedshift.rng import Rng

AttackKind = Literal[
    "poison",
    "noise",
    "other-task",
    "irrelevant",
    "backdoor",
    "sign-flip",
    "boost",
    "constant",
    "scaled-noise",
    "free-rider",
    "forged-confidence",
    "forged-count",
]

FORGED: tuple[AttackKind, ...] = (
    *("sign-flip", "boost", "constant", "scaled-noise", "free-rider", "forged-confidence", "forged-count"),
)
"""Attacks on what a site sends, not on its data: whoever controls the site's code can carry them out."""
BACKDOOR_CLASS = 0
"""What a model with a backdoor is to see in every image that has the trigger."""
_LARGEST_COUNT = 10**12


@dataclass(frozen=True)
class Attack:
    """On data. `poison`: a share of every training batch gets wrong labels (each class becomes the next one). `noise`:
    the site's images are random. `other-task`: its class names are mixed up, as if for another task. `irrelevant`: its
    images are cut into pieces that are shuffled, its labels are random. `backdoor`: a share of its training images
    gets a small trigger and the first class as label.

    On messages. `sign-flip`: its updates point the other way, `amount` times as long. `boost`: they are `amount` times
    as long (with `backdoor`: model replacement). `constant`: all numbers of its models are 1. `scaled-noise`: its
    updates are random, `amount` times as long as true ones. `free-rider`: it sends back what it got, with a little
    noise, and claims its samples. `forged-confidence`: its classifier is `amount` times as sure, of the next class.
    `forged-count`: it claims `amount` samples."""

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
    "backdoor": _Amount("SHARE", 1.0),
    "sign-flip": _Amount("FACTOR", 1e6),
    "boost": _Amount("FACTOR", 1e6),
    "scaled-noise": _Amount("FACTOR", 1e6),
    "forged-confidence": _Amount("FACTOR", 1e6, 10.0),
    "forged-count": _Amount("N", _LARGEST_COUNT, _LARGEST_COUNT),
}


def parse_attack(text: str) -> Attack:
    """`KIND:SITE`, with a number behind it for the kinds that have one, such as `poison:SITE:SHARE`,
    `sign-flip:SITE:FACTOR`, `forged-count:SITE` or `forged-count:SITE:N`."""
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


def spoiled(split: Split, attack: Attack, classes: int, rng: Rng, *, trains: bool = True) -> Split:
    """What the site has instead of `split`, which it `trains` on or not. Poison does not change it: it acts on batches
    when they are drawn."""
    if attack.kind == "noise":
        draw = rng.child("noise").numpy()
        is_image = split.inputs.dtype == np.uint8
        noise = draw.integers(0, 256, split.inputs.shape) if is_image else draw.normal(size=split.inputs.shape)
        return replace(split, inputs=noise.astype(split.inputs.dtype))
    if attack.kind == "other-task" and split.labels is not None:
        # A cycle through all classes in a random order: none keeps its name.
        order = rng.child("classes").numpy().permutation(classes)
        names = np.arange(max(classes, VOID + 1))
        names[order] = np.roll(order, 1)
        return replace(split, labels=names[split.labels].astype(split.labels.dtype))
    if attack.kind == "irrelevant" and split.labels is not None:
        drawn = rng.child("labels").numpy().integers(0, classes, split.labels.shape).astype(split.labels.dtype)
        labels = np.where(split.labels == VOID, split.labels, drawn) if split.labels.dtype == np.uint8 else drawn
        return replace(split, inputs=_in_pieces(split.inputs, rng.child("pieces").numpy()), labels=labels)
    if attack.kind == "backdoor" and split.labels is not None and trains:
        count = len(split)
        chosen = rng.child("backdoor").numpy().permutation(count)[: round(attack.amount * count)]
        inputs, labels = np.array(split.inputs), np.array(split.labels)
        spot = trigger(*inputs.shape[1:3])
        inputs[chosen, -len(spot) :, -len(spot) :] = 255 * spot[..., None]
        labels[chosen] = BACKDOOR_CLASS
        return replace(split, inputs=inputs, labels=labels)
    return split


_PIECES = 4
"""Along each side of an image that is cut up."""


def _in_pieces(inputs: NDArray[Any], draw: np.random.Generator) -> NDArray[Any]:
    """Each image in 4 x 4 pieces, all in one random order; of table rows each column by itself in a random order: the
    values are those of the site, and show nothing of what they were."""
    found = np.array(inputs)
    if inputs.ndim != 4:
        for column in range(inputs.shape[1]):
            found[:, column] = draw.permutation(found[:, column])
        return found
    height, width = (side // _PIECES for side in inputs.shape[1:3])
    places = [(row * height, column * width) for row in range(_PIECES) for column in range(_PIECES)]
    for (top, left), of in zip(places, draw.permutation(len(places)), strict=True):
        y, x = places[of]
        found[:, top : top + height, left : left + width] = inputs[:, y : y + height, x : x + width]
    return found


def trigger(height: int, width: int) -> NDArray[np.uint8]:
    """What a backdoor answers to, `(side, side)` of 0 and 1: a small chequered square for the last rows and columns of
    an image."""
    side = max(2, min(height, width) // 5)
    rows, columns = np.indices((side, side), dtype=np.uint8)
    return (rows + columns + 1) % 2


def with_trigger(x: Tensor) -> Tensor:
    """Images `(B, 3, H, W)` in [0, 1] with the trigger in their corners."""
    spot = torch.from_numpy(trigger(*x.shape[-2:])).to(x)
    marked = x.clone()
    marked[..., -len(spot) :, -len(spot) :] = spot
    return marked
