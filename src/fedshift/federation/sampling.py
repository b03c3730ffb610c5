"""Which sites take part in a round where not all do (`sites_per_round`), and what each then counts in an average."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np

from fedshift.rng import Rng


@dataclass(frozen=True)
class TakingPart:
    """The sites of a round. `weights` is empty where every site takes part."""

    sites: tuple[str, ...]
    weights: Mapping[str, float] = field(default_factory=dict)

    def weight(self, site: str, usual: float) -> float:
        """What the site counts in a mean: the usual, such as its number of samples, where nothing was drawn."""
        return self.weights.get(site, usual)


def wanted_sites(sites_per_round: float, count: int) -> int:
    """How many of `count` sites a number or a share (below 1) asks for: one at least."""
    wanted = sites_per_round if sites_per_round >= 1 else round(sites_per_round * count)
    return min(count, max(1, int(wanted)))


def draw_sites(sizes: Mapping[str, float], count: int, rng: Rng) -> TakingPart:
    """`count` different sites with weights, so that a weighted mean over them is, on average over draws, the mean over
    all sites weighted by their sizes.

    A site's chance is proportional to its size. One that is so large that its chance would be above 1 always takes
    part. The weights are size / chance and add up to 1. Systematic sampling from a random order (Madow, 1949)."""
    rest = {site: float(size) for site, size in sorted(sizes.items()) if size > 0}
    count, total = min(count, len(rest)), sum(rest.values())
    weights: dict[str, float] = {}
    while rest:
        left, rest_total = count - len(weights), sum(rest.values())
        certain = {site: size for site, size in rest.items() if left * size >= rest_total}
        if not certain:
            break
        weights |= {site: size / total for site, size in certain.items()}
        rest = {site: size for site, size in rest.items() if site not in certain}
    left = count - len(weights)
    if left:
        generator, names = rng.numpy(), list(rest)
        order = generator.permutation(len(names))
        chances = left * np.array([rest[name] for name in names])[order] / sum(rest.values())
        points = generator.random() + np.arange(left)
        chosen = np.searchsorted(np.cumsum(chances), points, side="right").clip(max=len(names) - 1)
        weights |= {names[order[place]]: sum(rest.values()) / (total * left) for place in chosen}
    return TakingPart(tuple(sorted(weights)), weights)
