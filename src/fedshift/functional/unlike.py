"""Whether many inputs together are unlike what several sites have: Kolmogorov's two-sample test in coarse parts.

One input says little of where it comes from; a hundred say much. What is compared is a number of each input, such as
how sure a model is of it. Inputs are unlike if they differ from every site by itself and from all of them together.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

LEVEL = 0.005
"""How often inputs of one of the sites are called unlike by chance, at most, for each number that is compared."""


@dataclass(frozen=True)
class Spread:
    """The share of `samples` of a site that is below each of some edges, in ascending order."""

    samples: int
    below: tuple[float, ...]


def spread_of_counts(counts: Tensor, ends: Sequence[int]) -> Spread:
    """Of how many samples `(bins,)` are in which part, those up to the parts `ends`."""
    total = counts.cumsum(0)
    samples = int(total[-1]) if len(total) else 0
    return Spread(samples, tuple(round(int(total[end]) / max(samples, 1), 4) for end in ends))


def spread_of(values: Tensor, edges: Sequence[float]) -> Spread:
    """The same of values `(n,)`."""
    ordered = values.double().sort().values
    at = torch.searchsorted(ordered, torch.tensor(edges, dtype=torch.float64))
    return Spread(len(values), tuple((at.double() / max(len(values), 1)).tolist()))


def even_edges(counts: Tensor, parts: int) -> list[int]:
    """The last of the parts below which 1, 2, ... of `parts` equal shares of all samples lie, each once."""
    total = counts.cumsum(0).double()
    wanted = [int((total >= share * total[-1] / parts).nonzero()[0]) for share in range(1, parts)]
    return sorted(set(wanted))


def apart(one: Spread, other: Spread) -> float:
    """The largest difference of the shares below an edge, in [0, 1]."""
    return max((abs(a - b) for a, b in zip(one.below, other.below, strict=True)), default=0.0)


def by_chance(one: int, other: int, level: float = LEVEL) -> float:
    """What `apart` exceeds in at most this share of cases for two draws from one distribution (asymptotically)."""
    return math.sqrt(-math.log(level / 2) / 2 * (1 / max(one, 1) + 1 / max(other, 1)))


def is_unlike(found: Spread, sites: Sequence[Spread]) -> bool:
    """Whether `found` differs from each of the sites, and from all together, by more than chance."""
    known = [site for site in sites if site.samples]
    if not known or not found.samples:
        return False
    count = sum(site.samples for site in known)
    shares = zip(*(site.below for site in known), strict=True)
    below = tuple(sum(s * site.samples for s, site in zip(row, known, strict=True)) / count for row in shares)
    return all(apart(found, one) > by_chance(found.samples, one.samples) for one in [*known, Spread(count, below)])
