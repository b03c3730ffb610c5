"""KD3A's weights of the sources and the target in the average (sec. 3.3, and the alternatives of Table 2).

The paper is named in kd3a.py.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from fedshift.federation.federation import Federation
from fedshift.functional.consensus import (
    Consensus,
    Rule,
    consensus_focus,
    sampled_shapley_values,
    shapley_values,
    shares,
)
from fedshift.methods.kd3a.keys import Hyper
from fedshift.methods.kd3a.target import Heard


def round_weights(
    heard: Heard, votes: Consensus, rule: Rule, sizes: Mapping[str, float], hyper: Hyper, fed: Federation
) -> dict[str, float]:
    """alpha of one round, summing to 1, for the sources in `heard`, of `sizes` N_k, and for the target."""
    choices, target = hyper.choices(), fed.home
    counts = [sizes[site] for site in heard.sites]
    scores = _scores(heard, rule, hyper, fed)
    by_size = {"samples": True, "equal": False}.get(choices.weighting, choices.by_size)
    found = shares(scores, counts if by_size else None)
    if found.even_handed:
        fed.count("kd3a.nobody-useful")  # No score is above 0: all count as equal.
    if choices.target_share == "samples":
        used = len(votes.supporters)  # As sites do, the target counts the samples of this round.
        own = used / (sum(counts) + used)
    else:
        own = float((votes.supporters > 0).double().mean()) / (len(counts) + 1)
    weights = {target.name: own}
    for site, score, share in zip(heard.sites, scores.tolist(), found.values.tolist(), strict=True):
        fed.note("score", score, site)
        weights[site] = (1 - own) * share  # Eq. (9)
    return weights


def _scores(heard: Heard, rule: Rule, hyper: Hyper, fed: Federation) -> Tensor:
    """The score that each source is weighted by, `(K,)`."""
    q, how = heard.probabilities, hyper.choices().weighting
    if how == "focus":
        return consensus_focus(q, rule)  # Eq. (8)
    if how == "shapley":
        return shapley_values(q, rule)
    if how == "shapley-sampled":
        return sampled_shapley_values(q, rule, hyper.shapley_samples, fed.rng("shapley").torch())
    if how in ("h-divergence", "info-gain"):
        return torch.exp(-torch.tensor(heard.distances, dtype=torch.float64))  # Eq. (6)
    return torch.ones(len(heard.sites), dtype=torch.float64)


def smoothed(weights: Mapping[str, float], before: Mapping[str, float], keep: float) -> dict[str, float]:
    """`keep` times the weights before plus 1 - `keep` times the new `weights`, for the names in `weights`, summing to
    1. A name without a weight before starts with the new one."""
    return normalised({name: keep * before.get(name, new) + (1 - keep) * new for name, new in weights.items()})


def normalised(weights: Mapping[str, float]) -> dict[str, float]:
    total = sum(weights.values())
    return {name: weight / total for name, weight in weights.items()}
