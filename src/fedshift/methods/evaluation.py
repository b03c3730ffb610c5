"""Scoring a model where labelled data is held back: on the sources' validation splits, on a target's test split."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, cast

import torch
from torch import Tensor

from fedshift.errors import SiteError
from fedshift.federation.federation import Federation
from fedshift.federation.kinds import Counts, Release, Weights
from fedshift.federation.site import Evaluated, Unlabelled
from fedshift.federation.step import step
from fedshift.functional.metrics import accuracy, confusion_matrix, mean_iou
from fedshift.methods.base import SHARED
from fedshift.methods.local import with_weights
from fedshift.rng import Rng

_BATCH = 256

SplitName = Literal["val", "test"]


@dataclass(frozen=True)
class Scored(Release):
    confusion: Counts


@step
def score(site: Evaluated, model: Weights, split: str) -> Scored:
    """The confusion matrix of `model` on a held-back split of this site."""
    from fedshift.methods import find_method  # The table of methods imports this module.

    if split not in ("val", "test"):
        raise SiteError("step-unknown", f"{split!r} is not a split for scoring")
    net = with_weights(find_method(site.plan.method).network(site.plan), model, site.device).eval()
    classes = len(site.plan.model.classes)
    total = torch.zeros(classes, classes, dtype=torch.int64)
    with torch.inference_mode():
        for part in site.split(cast(SplitName, split)):
            for batch in part.in_order(_BATCH):
                total += confusion_matrix(net(batch.x).argmax(1), batch.y, classes).cpu()
    return Scored(confusion=total)


def score_models(
    fed: Federation, models: Mapping[str, Weights], sites: tuple[str, ...], split: SplitName
) -> dict[str, Tensor]:
    """Site -> its confusion matrix, with the site's own model where it has one, else the shared one.

    Where a site has neither (every site trains alone, or this one was skipped), every model is scored and the matrices
    are added up: the accuracy is then the mean over models. Sites without labels in that split are left out.
    """
    found: dict[str, Tensor] = {}
    for names, testers in _group(models, sites).items():
        for name in names:
            for site, scored in fed.ask(testers, score, model=models[name], split=split):
                found[site] = found.get(site, 0) + scored.confusion
    return found


@dataclass(frozen=True)
class Certainty:
    """Of a model's predictions on inputs without labels: their mean entropy, and the information they hold about the
    inputs, which is the entropy of the mean prediction minus that. It is high where predictions are sure and of every
    class. Both in nats."""

    entropy: float
    information: float


@torch.inference_mode()
def certainty(home: Unlabelled, model: Weights, rng: Rng) -> Certainty:
    """On the unlabelled data of a target that sits at the coordinator: nothing leaves it, and no label is seen."""
    from fedshift.methods import find_method  # The table of methods imports this module.

    net = with_weights(find_method(home.plan.method).network(home.plan), model, home.device).eval()
    count, spread = 0, torch.zeros((), dtype=torch.float64)
    total = torch.zeros(len(home.plan.model.classes), dtype=torch.float64)
    for batch in home.train.in_order(_BATCH):
        log_p = net(batch.x).double().log_softmax(1).cpu().transpose(0, 1).flatten(1)  # (classes, predictions)
        p = log_p.exp()
        spread -= (p * log_p).sum()
        total += p.sum(1)
        count += p.shape[1]
    mean = total / max(count, 1)
    entropy = float(spread / max(count, 1))
    return Certainty(entropy, float(-torch.special.xlogy(mean, mean).sum()) - entropy)


def headline(confusion: Tensor, task: str) -> float:
    """The number that is reported: accuracy for classification, mean IoU for segmentation."""
    return accuracy(confusion) if task == "classification" else mean_iou(confusion)


def _group(models: Mapping[str, Any], sites: tuple[str, ...]) -> dict[tuple[str, ...], list[str]]:
    """Sites by the models they are scored with, so that sites with the same model are asked at once."""
    groups: dict[tuple[str, ...], list[str]] = {}
    for site in sites:
        names = (site,) if site in models else (SHARED,) if SHARED in models else tuple(sorted(models))
        groups.setdefault(names, []).append(site)
    return groups
