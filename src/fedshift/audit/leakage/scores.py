"""What an attack found, and whether that is more than luck: each find is compared with guesses without a message."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor

from fedshift.functional.inversion import psnr, ssim

Verdict = Literal["rebuilt", "recognised", "members told", "labels told", "nothing found"]
"""From worst to best: an image that a person would recognise; samples that can be picked from many others; samples of
which one can say that they took part; only which classes they have."""
VERDICTS: tuple[Verdict, ...] = ("rebuilt", "recognised", "members told", "labels told", "nothing found")

LIKE = 0.5
"""Structural similarity from which an image counts as rebuilt, if the best guess without a message is well below it."""
ABOVE = 0.15
LUCK = 1e-3
"""A find that luck would give more often than this is none."""


@dataclass(frozen=True)
class Finding:
    """The outcome of one attack: the `numbers`, and the best images beside their originals, `(k, 3, h, w)`."""

    attack: str
    what: str
    """The field of the message that it takes."""
    verdict: Verdict
    numbers: dict[str, float]
    originals: Tensor | None = field(default=None, repr=False)
    rebuilt: Tensor | None = field(default=None, repr=False)

    def plain(self) -> dict[str, Any]:
        numbers = {key: round(value, 4) for key, value in self.numbers.items()}
        return {"attack": self.attack, "field": self.what, "verdict": self.verdict, **numbers}


def images_found(attack: str, field: str, guesses: Tensor, originals: Tensor, others: Tensor) -> Finding:
    """Guessed images against the originals, each `(n, 3, h, w)`, paired for the least error. The baselines are as many
    guesses, paired in the same way: random images, plain grey, and other images of the same site."""
    pairs, places = paired(guesses, originals)
    own_psnr, own_ssim = psnr(pairs, originals[places]), ssim(pairs, originals[places])
    draw = torch.Generator().manual_seed(0)
    unknowing = {
        "random": torch.rand(guesses.shape, generator=draw),
        "grey": torch.full_like(guesses, 0.5),
        "others": others[torch.randperm(len(others), generator=draw)[: len(guesses)]],
    }
    numbers = {"psnr": float(own_psnr.mean()), "psnr_best": float(own_psnr.max())}
    numbers |= {"ssim": float(own_ssim.mean()), "ssim_best": float(own_ssim.max())}
    for name, images in unknowing.items():
        same, at = paired(images, originals)
        numbers[f"psnr_{name}"] = float(psnr(same, originals[at]).mean())
        numbers[f"ssim_{name}"] = float(ssim(same, originals[at]).max())
    found, picked = recognised(guesses.flatten(1), originals.flatten(1), others.flatten(1))
    numbers["recognised"] = found / len(originals)
    baseline = max(numbers[f"ssim_{name}"] for name in unknowing)
    verdict: Verdict = "nothing found"
    if numbers["ssim_best"] >= LIKE and numbers["ssim_best"] >= min(baseline + ABOVE, 0.9):
        verdict = "rebuilt"
    elif is_no_luck(found, picked, len(originals) / (len(originals) + len(others))):
        verdict = "recognised"
    best = own_ssim.argsort(descending=True)[:4]
    return Finding(attack, field, verdict, numbers, originals[places][best], pairs[best])


def features_found(attack: str, field: str, guesses: Tensor, originals: Tensor, others: Tensor) -> Finding:
    """Guessed features `(k, d)` against those of the site's samples `(n, d)` and of other samples: how many of the
    site's a guess is nearest to, and how alike they are (mean cosine), beside as many features of other samples."""
    found, picked = recognised(guesses, originals, others)
    draw = torch.randperm(len(others), generator=torch.Generator().manual_seed(0))[: len(guesses)]
    numbers = {
        "cosine": _best_cosine(guesses, originals),
        "cosine_others": _best_cosine(others[draw], originals),
        "recognised": found / len(originals),
    }
    luck = len(originals) / (len(originals) + len(others))
    return Finding(attack, field, "recognised" if is_no_luck(found, picked, luck) else "nothing found", numbers)


def members_found(attack: str, field: str, members: Tensor, others: Tensor) -> Finding:
    """Scores `(n,)` of samples that took part and `(m,)` of samples that did not: higher means "took part"."""
    order = others.sort().values
    numbers = {"members": float(len(members)), "non_members": float(len(others))}
    below = torch.searchsorted(order, members).float() + torch.searchsorted(order, members, right=True).float()
    numbers["auc"] = float(below.mean() / (2 * len(others)))
    tails = []
    for rate in (0.001, 0.01):
        allowed = int(rate * len(others))
        threshold = order[len(order) - 1 - allowed]
        told = int((members > threshold).sum())
        numbers[f"tpr_at_{100 * rate:g}%"] = told / len(members)
        tails.append(is_no_luck(told, len(members), max(rate, 1 / len(others))))
    # The area is normal under luck, with this deviation (Mann and Whitney).
    n, m = len(members), len(others)
    far = (numbers["auc"] - 0.5) / math.sqrt((n + m + 1) / (12 * n * m))
    return Finding(attack, field, "members told" if any(tails) or far > 3.3 else "nothing found", numbers)


def labels_found(field: str, guessed: Tensor, labels: Tensor, classes: int) -> Finding:
    """Guessed labels against the site's: the share that is right, beside that of even guesses."""
    own, truth = torch.bincount(guessed, minlength=classes), torch.bincount(labels, minlength=classes)
    right = int(torch.minimum(own, truth).sum()) / len(labels)
    draws = torch.randint(classes, (200, len(labels)), generator=torch.Generator().manual_seed(0))
    shares = [int(torch.minimum(torch.bincount(draw, minlength=classes), truth).sum()) / len(labels) for draw in draws]
    usual = torch.tensor(shares, dtype=torch.float64)
    is_told = right > float(usual.mean() + 2.5 * usual.std()) or (right == 1 and float(usual.mean()) < 0.5)
    numbers = {"labels_right": right, "labels_right_by_luck": float(usual.mean())}
    return Finding("labels from the head", field, "labels told" if is_told else "nothing found", numbers)


def paired(guesses: Tensor, originals: Tensor) -> tuple[Tensor, list[int]]:
    """The guesses and the places of their originals, one to one, for the least total error: a batch has no order."""
    from scipy.optimize import linear_sum_assignment

    rows, columns = linear_sum_assignment(torch.cdist(guesses.flatten(1), originals.flatten(1)).square().numpy())
    return guesses[torch.from_numpy(rows)], [int(column) for column in columns]


def recognised(guesses: Tensor, originals: Tensor, others: Tensor) -> tuple[int, int]:
    """How many originals are the nearest of all samples, the site's and others, to one of the guesses `(k, d)`; and how
    many samples are the nearest to one at all."""
    pool = torch.cat([originals, others]).double()
    nearest = torch.cdist(guesses.double(), pool).argmin(1)
    picked = {int(place) for place in nearest}
    return sum(place < len(originals) for place in picked), len(picked)


def is_no_luck(found: int, tries: int, chance: float) -> bool:
    """Whether `found` of `tries` is so much that luck gives it less often than `LUCK`."""
    tail = sum(math.comb(tries, k) * chance**k * (1 - chance) ** (tries - k) for k in range(found, tries + 1))
    return found > 0 and (tail < LUCK or (tries * chance < 0.01 and found == tries))


def _best_cosine(guesses: Tensor, originals: Tensor) -> float:
    table = torch.nn.functional.normalize(originals, dim=1) @ torch.nn.functional.normalize(guesses, dim=1).T
    return float(table.max(1).values.mean())
