"""`norm: own`: a target or client that uses the model normalises by its own data. The weights stay; the statistics of
BatchNorm layers are measured again, on inputs without labels.

Y. Li, N. Wang, J. Shi, J. Liu, X. Hou: Revisiting Batch Normalization for Practical Domain Adaptation. ICLR workshops
2017 (AdaBN).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from fedshift.federation.federation import Federation
from fedshift.federation.releases import Release, Statistics, Weights
from fedshift.federation.site import Unlabelled
from fedshift.federation.step import step
from fedshift.methods.base import SHARED
from fedshift.methods.local import weights_follow, with_weights
from fedshift.nn.normalisation import STATISTICS, remembering, statistics_of
from fedshift.rng import Rng


@dataclass(frozen=True)
class Measured(Release):
    statistics: Statistics


@step
def measure(site: Unlabelled, model: Weights) -> Measured:
    """Means and variances, over this site's training inputs, of what the normalising layers of `model` see."""
    return Measured(statistics=_statistics(site, model))


def normalised_here(home: Unlabelled, model: Weights, rng: Rng) -> Weights:
    """`model` with the statistics of the target at the coordinator."""
    return {**model, **_statistics(home, model)}


def with_own_statistics(fed: Federation, models: Mapping[str, Weights]) -> Mapping[str, Weights]:
    """The models as they are used. In `adapt` all of them get the target's statistics. In `multi-adapt` every client
    that answers gets a model of its own: the one it had, or the shared one, with the client's statistics."""
    if fed.plan.setting == "adapt":
        return {name: fed.at_home(normalised_here, model=model) for name, model in models.items()}
    theirs = {site: models.get(site, models.get(SHARED)) for site in fed.targets}
    each = {site: {"model": model} for site, model in theirs.items() if model is not None}
    like = {key: value for key, value in next(iter(models.values())).items() if key.endswith(STATISTICS)}
    own = dict(models)
    for site, reply in fed.ask(tuple(each), measure, each=each, expect={"statistics": like}):
        own[site] = {**each[site]["model"], **reply.statistics}
    return own


def _statistics(site: Unlabelled, model: Weights) -> dict[str, Tensor]:
    from fedshift.methods import find_method

    with weights_follow():
        net = with_weights(find_method(site.plan.method).network(site.plan), model, site.device).eval()
    if len(site.train) > 1:  # One sample has no variance.
        with torch.no_grad(), remembering(net):
            for batch in site.train.evenly(site.plan.training.batch_size):
                net(batch.x)
    return statistics_of(net)
