"""How sure a model may be: what the labelled sites count on their validation splits, and what the coordinator makes of
it. Only counts leave a site: how many samples have which confidence, right or wrong."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor

from fedshift.errors import SiteError
from fedshift.federation.checks import CountsOf
from fedshift.federation.federation import Federation
from fedshift.federation.releases import Counts, Release, Weights
from fedshift.federation.site import Evaluated
from fedshift.federation.step import step
from fedshift.functional.calibration import (
    BINS,
    TEMPERATURES,
    area_interval,
    area_under_curve,
    best_temperature,
    calibration_error,
    confidence_counts,
    quantile_of_counts,
    share_counts,
)
from fedshift.functional.metrics import wilson_interval
from fedshift.functional.unlike import Spread, even_edges, is_unlike, spread_of, spread_of_counts
from fedshift.methods.evaluation import SplitName, by_models
from fedshift.methods.local import with_weights
from fedshift.nn.distance import (
    DISTANCE_BINS,
    can_tell_distance,
    distance_counts,
    end_of_bin,
    total_distance,
    watching_distances,
)

SHARE_BINS = 200
FEWEST_OF_SITE = 20
FEWEST = 50
"""With fewer validation samples over all sites, a temperature would be fitted to noise: it stays 1."""
_USUAL = 0.99
"""The share of the sources' validation samples that count as near to what was seen."""
_BATCH = 256


@dataclass(frozen=True)
class Sureness(Release):
    """`confidence` by temperature, part and whether right; `shares` of the second of two classes; `distances`."""

    confidence: Counts
    shares: Counts
    distances: Counts


@step(numbered_by=("split",))
def sureness(site: Evaluated, models: tuple[Weights, ...], split: str) -> Sureness:
    """How sure models are on a held-back split of this site, how right, and how far its samples are: of several models,
    the sum."""
    from fedshift.methods import find_method

    if split not in ("val", "test"):
        raise SiteError("step-unknown", f"{split!r} is not a split for scoring")
    is_two = len(site.plan.model.classes) == 2
    confidence = torch.zeros(len(TEMPERATURES), BINS, 2, dtype=torch.int64)
    shares = torch.zeros(SHARE_BINS if is_two else 0, 2, dtype=torch.int64)
    distances = torch.zeros(DISTANCE_BINS, dtype=torch.int64)
    nets = [with_weights(find_method(site.plan.method).network(site.plan), m, site.device).eval() for m in models]
    with torch.inference_mode():
        for part in site.split(cast(SplitName, split)):
            for batch in part.in_order(_BATCH):
                for net in nets:
                    with watching_distances(net) as found:
                        scores = net(batch.x)
                    confidence += confidence_counts(scores, batch.y).cpu()
                    if is_two:
                        shares += share_counts(scores, batch.y, SHARE_BINS).cpu()
                    if can_tell_distance(net):
                        distances += distance_counts(total_distance(found)).cpu()
    return Sureness(confidence=confidence, shares=shares, distances=distances)


def ask_sureness(
    fed: Federation, models: Mapping[str, Weights], sites: tuple[str, ...], split: SplitName
) -> dict[str, Sureness]:
    """Site -> its counts, by the model that it is scored with. Sites whose answer was refused are left out."""
    two = SHARE_BINS if len(fed.plan.model.classes) == 2 else 0
    found: dict[str, Sureness] = {}
    for names, testers in by_models(models, sites).items():
        asked = tuple(models[name] for name in names)
        expect = {
            "confidence": CountsOf((len(TEMPERATURES), BINS, 2), split, len(asked), slices=len(TEMPERATURES)),
            "shares": CountsOf((two, 2), split, len(asked)),
            "distances": CountsOf((DISTANCE_BINS,), split, len(asked), or_none=True),
        }
        replies = fed.ask(testers, sureness, expect=expect, any_answer=True, models=asked, split=split)
        found |= dict(replies)
    return found


@dataclass(frozen=True)
class Usual:
    """What is usual at the sources, by site without names, on validation: how `sure` a model is, by parts of the range
    of probability, and how far samples are (`near`), by `edges`."""

    sure: tuple[Spread, ...]
    near: tuple[Spread, ...]
    edges: tuple[float, ...]

    def is_unlike(self, confidence: Tensor, distances: Tensor | None) -> bool:
        """Whether inputs with these numbers `(n,)` are together unlike every source's."""
        steps = [(part + 1) / BINS for part in range(BINS - 1)]
        if is_unlike(spread_of(confidence, steps), self.sure):
            return True
        return distances is not None and is_unlike(spread_of(distances, self.edges), self.near)

    @property
    def confidence(self) -> tuple[float, float]:
        """The lowest and the highest mean of a source."""
        means = [1 - (sum(site.below) + 0.5) / BINS for site in self.sure]
        return min(means), max(means)


@dataclass(frozen=True)
class Calibration:
    """What scores are divided by, and from which distance on an input is unlike what was seen; None: not known."""

    temperature: float = 1.0
    far: float | None = None
    usual: Usual | None = None


def calibrate(found: Mapping[str, Sureness]) -> Calibration:
    """From the validation splits of the sources; every sample counts the same."""
    if not found:
        return Calibration()
    confidence = torch.stack([one.confidence for one in found.values()]).sum(0)
    distances = torch.stack([one.distances for one in found.values()]).sum(0)
    enough = int(confidence[0].sum()) >= FEWEST
    far = end_of_bin(quantile_of_counts(distances, _USUAL)) if int(distances.sum()) >= FEWEST else None
    temperature = best_temperature(confidence) if enough else 1.0
    return Calibration(temperature, far, _usual(found, temperature, distances if far is not None else None))


def _usual(found: Mapping[str, Sureness], temperature: float, distances: Tensor | None) -> Usual | None:
    """Sites with so few samples that a share of them would tell of single ones are left out."""
    enough = [one for one in found.values() if int(one.confidence[0].sum()) >= FEWEST_OF_SITE]
    if not enough:
        return None
    here = TEMPERATURES.index(temperature)
    sure = tuple(spread_of_counts(one.confidence[here].sum(1), range(BINS - 1)) for one in enough)
    ends = [] if distances is None else even_edges(distances, BINS)
    near = tuple(spread_of_counts(one.distances, ends) for one in enough)
    return Usual(sure, near if ends else (), tuple(end_of_bin(end) for end in ends))


def tell(
    made: Calibration, validation: Mapping[str, Sureness], tests: Mapping[str, Sureness], classes: tuple[str, ...]
) -> dict[str, Any]:
    """For `results.json`: how well confidence says how often a prediction is right, before and after; how many inputs
    are far; and for two classes, how well they are told apart."""
    if not validation and not tests:
        return {}
    here = TEMPERATURES.index(made.temperature)
    plain = TEMPERATURES.index(1.0)
    pooled = torch.stack([one.confidence for one in validation.values()]).sum(0) if validation else None
    told: dict[str, Any] = {"temperature": round(made.temperature, 4), "far": made.far}
    if pooled is not None:
        told["samples"] = int(pooled[here].sum())
        told["validation"] = {"before": _reliability(pooled[plain]), "after": _reliability(pooled[here])}
    told["targets"] = {
        site: {"before": _reliability(one.confidence[plain]), "after": _reliability(one.confidence[here])}
        | ({"far": _share_far(one.distances, made.far)} if made.far is not None else {})
        for site, one in tests.items()
    }
    if len(classes) == 2:
        told["positive"] = classes[1]
        told["two_classes"] = {site: two_classes(one.shares) for site, one in tests.items()}
    return told


def _reliability(counts: Tensor) -> dict[str, Any]:
    """`parts`: wrong and right in each part of the range of confidence."""
    return {"error": round(calibration_error(counts), 6), "parts": counts.tolist()}


def _share_far(distances: Tensor, far: float) -> float:
    total = int(distances.sum())
    ends = torch.tensor([end_of_bin(number) for number in range(DISTANCE_BINS)])
    return round(int(distances[ends > far + 1e-6].sum()) / total, 6) if total else 0.0


def two_classes(shares: Tensor) -> dict[str, Any]:
    """Area under the curve, sensitivity and specificity with 95 % intervals. The second class is the positive one, and
    is predicted where its probability is a half or more."""
    negatives, positives = (int(count) for count in shares.sum(0))
    hits, passes = int(shares[SHARE_BINS // 2 :, 1].sum()), int(shares[: SHARE_BINS // 2, 0].sum())
    told: dict[str, Any] = {"positives": positives, "negatives": negatives}
    if positives and negatives:
        area = area_under_curve(shares)
        told["auc"] = [round(v, 6) for v in (area, *area_interval(area, negatives, positives))]
    for name, count, total in (("sensitivity", hits, positives), ("specificity", passes, negatives)):
        if total:
            told[name] = [round(v, 6) for v in (count / total, *wilson_interval(count / total, total))]
    return told
