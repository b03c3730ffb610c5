"""Scoring of models on held-back labelled data: the sources' validation splits and a target's test split."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from itertools import product
from typing import Any, Literal, cast

import torch
from torch import Tensor, nn

from fedshift.data.attacks import with_trigger
from fedshift.data.decoding import MAX_PIXELS
from fedshift.errors import SiteError
from fedshift.federation.checks import Confusion
from fedshift.federation.federation import Federation
from fedshift.federation.plan import Plan
from fedshift.federation.releases import Counts, Release, Weights
from fedshift.federation.site import Evaluated, Unlabelled
from fedshift.federation.step import Step, step
from fedshift.functional.metrics import accuracy, confusion_matrix, mean_iou
from fedshift.functional.tiles import stitched_classes
from fedshift.methods.base import SHARED
from fedshift.methods.local import weights_follow, with_weights
from fedshift.rng import Rng

SCORED_AT_ONCE = 256

SplitName = Literal["val", "test"]


@dataclass(frozen=True)
class Scored(Release):
    confusion: Counts


@step(numbered_by=("split",))
def score(site: Evaluated, models: tuple[Weights, ...], split: str) -> Scored:
    """The confusion matrix of models on a held-back split of this site: of several, the sum."""
    return _scored(site, models, split, lambda x: x)


@step(numbered_by=("split",))
def score_triggered(site: Evaluated, models: tuple[Weights, ...], split: str) -> Scored:
    """The same where every image has a backdoor's trigger. No site on another machine takes part in this study."""
    return _scored(site, models, split, with_trigger)


def _scored(site: Evaluated, models: tuple[Weights, ...], split: str, change: Callable[[Tensor], Tensor]) -> Scored:
    from fedshift.methods import find_method

    if split not in ("val", "test"):
        raise SiteError("step-unknown", f"{split!r} is not a split for scoring")
    classes = len(site.plan.model.classes)
    total = torch.zeros(classes, classes, dtype=torch.int64, device=site.device)
    build = find_method(site.plan.method).network
    with weights_follow():
        nets = [with_weights(build(site.plan), model, site.device).eval() for model in models]
    with torch.inference_mode():
        for part in site.split(cast(SplitName, split)):
            pictures = part.pictures()
            if pictures is not None:
                for (picture, mask), net in product(pictures, nets):
                    found = stitched_classes(_on(net, change, site.device), picture, part.side)
                    total += confusion_matrix(found.long(), mask.long(), classes).to(site.device)
                continue
            for batch in part.in_order(SCORED_AT_ONCE):
                x = change(batch.x)
                for net in nets:
                    total += confusion_matrix(net(x).argmax(1), batch.y, classes)
    return Scored(confusion=total.cpu())


def _on(net: nn.Module, change: Callable[[Tensor], Tensor], device: torch.device) -> Callable[[Tensor], Tensor]:
    return lambda tiles: cast(Tensor, net(change(tiles.to(device))))


def score_models(
    fed: Federation,
    models: Mapping[str, Weights],
    sites: tuple[str, ...],
    split: SplitName,
    by: Step[Scored] = score,
) -> dict[str, Tensor]:
    """Site -> its confusion matrix, by the site's own model if it has one, otherwise by the shared model.

    If there is neither (every site trains alone, or this one was skipped), every model is scored and the matrices are
    added up: the accuracy is then the mean over models. Sites without labels in that split are left out, and so are
    those whose answer was refused: a score is not worth the run.
    """
    found: dict[str, Tensor] = {}
    for names, testers in by_models(models, sites).items():
        scored = tuple(models[name] for name in names)
        expect = {"confusion": _confusion(fed.plan, split, len(scored))}
        replies = fed.ask(testers, by, expect=expect, any_answer=True, models=scored, split=split)
        found |= {site: reply.confusion for site, reply in replies}
    return found


def _confusion(plan: Plan, split: str, models: int) -> Confusion:
    """What a site's scores must be like: for each model it counts every sample of the split, or every pixel that has a
    label."""
    model = plan.model
    if model.task == "classification":
        return Confusion(len(model.classes), split, each=models)
    if model.tiled:  # The sizes of pictures do not leave a site.
        return Confusion(len(model.classes), split, each=models * MAX_PIXELS, some_void=True)
    _, height, width = model.input_shape
    return Confusion(len(model.classes), split, each=models * height * width, some_void=True)


@dataclass(frozen=True)
class Certainty:
    """How certain a model is on inputs without labels, in nats: the mean `entropy` of its predictions, and
    `information`, the entropy of the mean prediction minus that. Information is high when predictions are confident and
    all classes occur."""

    entropy: float
    information: float


@torch.inference_mode()
def certainty(home: Unlabelled, model: Weights, rng: Rng) -> Certainty:
    """The certainty of `model` on the unlabelled data of a target at the coordinator. No label is used."""
    from fedshift.methods import find_method

    with weights_follow():
        net = with_weights(find_method(home.plan.method).network(home.plan), model, home.device).eval()
    count, spread = 0, torch.zeros((), dtype=torch.float64)
    total = torch.zeros(len(home.plan.model.classes), dtype=torch.float64)
    for batch in home.train.in_order(SCORED_AT_ONCE):
        log_p = net(batch.x).double().log_softmax(1).cpu().transpose(0, 1).flatten(1)  # (classes, predictions)
        p = log_p.exp()
        spread -= (p * log_p).sum()
        total += p.sum(1)
        count += p.shape[1]
    mean = total / max(count, 1)
    entropy = float(spread / max(count, 1))
    return Certainty(entropy, float(-torch.special.xlogy(mean, mean).sum()) - entropy)


def headline(confusion: Tensor, task: str) -> float:
    """The reported number: accuracy for classification, mean IoU for segmentation."""
    return accuracy(confusion) if task == "classification" else mean_iou(confusion)


def by_models(models: Mapping[str, Any], sites: tuple[str, ...]) -> dict[tuple[str, ...], list[str]]:
    """Names of models -> sites that are scored with them, so that sites with the same models are asked together."""
    groups: dict[tuple[str, ...], list[str]] = {}
    for site in sites:
        names = (site,) if site in models else (SHARED,) if SHARED in models else tuple(sorted(models))
        groups.setdefault(names, []).append(site)
    return groups
