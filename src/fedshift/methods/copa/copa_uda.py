"""COPA for an unlabelled target at the coordinator: where local models agree, their prediction is the pseudo label.

Guile Wu, Shaogang Gong: Collaborative Optimization and Aggregation for Decentralized Domain Generalization and
Adaptation. ICCV 2021. All five steps of its Fig. 1 (Algorithm 2).
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor, nn

from fedshift.data.batches import LabelledBatch
from fedshift.federation.federation import Federation, Replies
from fedshift.federation.plan import Plan
from fedshift.federation.releases import Weights
from fedshift.federation.site import Labelled, Unlabelled
from fedshift.federation.step import Step, step
from fedshift.functional.agreement import Opinions, aggregation_weights, agreements, pseudo_labels
from fedshift.methods.base import SHARED, About
from fedshift.methods.copa import copa, parts
from fedshift.methods.copa.copa import COPA, State, collected, first_state, frozen_for, shared_round, train_locally
from fedshift.methods.copa.parts import (
    PRETRAINED_KEYS,
    TABLE_KEYS,
    aggregated,
    assembled,
    converted_network,
    ensemble_network,
    hyper_of,
    loaded,
)
from fedshift.methods.cost import MODEL, Formula
from fedshift.methods.local import all_finite, augmentation, over_target, require_target, sgd, train_batches, weights_of
from fedshift.nn.network import Ensemble, Network
from fedshift.rng import Rng

FEWEST = 2
"""Fewest pseudo labels to train on: batch normalisation needs two samples."""


@dataclass(frozen=True)
class Hyper(parts.Hyper):
    collaboration: Literal["frozen", "none", "enlarge"] = "frozen"
    """The other domains' frozen classifiers, nothing, or augmented copies for the site's own classifier."""
    agreement: Literal["mean", "max", "most", "none"] = "mean"
    """Where pseudo labels come from: the mean prediction, the most confident model, or most models; none: the mean,
    with equal weights of all models (Fig. 4)."""
    threshold: float = 0.95
    """Pseudo labels are kept when their probability is above this."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 < self.threshold < 1:
            raise ValueError(f"threshold must be above 0 and below 1, not {self.threshold}")


@dataclass(frozen=True)
class Trained(copa.Trained):
    """The coordinator predicts with every site's extractor, so a sum over sites, as in secure aggregation, is not
    enough."""

    summed = frozenset()


# --- Step 1: local optimisation, where the labelled data is -------------------------------------------------------


@step
def train(site: Labelled, extractor: Weights, head: Weights, frozen: Mapping[str, Weights], rng: Rng) -> Trained:
    """Trains {F_i, C_i} on Eq. (5), with C'_t among the frozen classifiers."""
    done = copa.train.run(site, extractor, head, frozen, rng)
    return Trained(extractor=done.extractor, head=done.head, loss=done.loss)


# --- Step 2: prediction agreement, on the target's data -----------------------------------------------------------


@dataclass(frozen=True)
class LocalModel:
    """{F_i, C_i, {C'_j}} of one source site: its extractor, its own classifier, and the classifiers it was sent."""

    site: str
    extractor: Weights
    heads: list[Weights]


def predict(home: Unlabelled, model: LocalModel, rng: Rng) -> Tensor:
    """p_i(x) of every target image, `(N, classes)`: one pass of F_i and all classifiers on its features."""
    hyper = hyper_of(home.plan)
    net = loaded(converted_network(home.plan, hyper), model.extractor, model.heads[0], home.device).eval()
    judges = Ensemble(net.head, len(model.heads), hyper.predict).to(home.device)
    for member, weights in zip(judges.members, model.heads, strict=True):
        member.load_state_dict(dict(weights))
    return over_target(home, lambda x: judges(net.features(x)).softmax(1))  # Eq. (7)


# --- Step 4: fine-tuning, on the target's data --------------------------------------------------------------------


@dataclass(frozen=True)
class FineTuned:
    extractor: Weights
    head: Weights
    loss: float


def fine_tune(
    home: Unlabelled,
    extractor: Weights,
    head: Weights,
    frozen: Mapping[str, Weights],
    labels: Tensor,
    kept: Tensor,
    rng: Rng,
) -> FineTuned:
    """Trains {F_t, C_t} as a site trains, on the pseudo `labels` `(N,)` of the `kept` samples, numbers `(n,)`:
    CE(C_t(F(x)), y) + sum_i CE(C'_i(F(A(x))), y)."""
    hyper = hyper_of(home.plan)
    net = loaded(converted_network(home.plan, hyper), extractor, head, home.device)
    judges = parts.judges_of(net, frozen, hyper)
    loss_of = parts.collaborative_loss(net, judges, parts.second_look(hyper, home.plan, rng), hyper)
    batches = _pseudo_labelled(home, labels, kept, rng)
    optimizer = sgd(home, net)
    loss = train_batches(batches, loss_of, optimizer, home.plan.training.precision)
    return FineTuned(weights_of(net.backbone), weights_of(net.head), loss)


def _pseudo_labelled(home: Unlabelled, labels: Tensor, kept: Tensor, rng: Rng) -> Iterator[LabelledBatch]:
    """Shuffled batches of the kept samples, `local_epochs` times through."""
    training, augment = home.plan.training, augmentation(home.plan)
    shuffle, draw = rng.torch(), rng.child("augment").torch()
    passes = [kept[torch.randperm(len(kept), generator=shuffle)] for _ in range(math.ceil(training.local_epochs))]
    order = torch.cat(passes)[: max(FEWEST, math.ceil(training.local_epochs * len(kept)))]
    for batch in home.train.along(order, training.batch_size):
        x, y = batch.x, labels[batch.index]
        if augment is not None:
            x, y = augment(x.cpu(), y, draw)
        yield LabelledBatch(x.to(home.device), y.to(home.device), batch.index)


# --- Steps 2 to 5 at the coordinator ------------------------------------------------------------------------------


class CopaUda:
    """COPA with the target's own classifier C_t, which is in `heads` under the target's name."""

    hyper_type: ClassVar[type[Hyper]] = Hyper
    state_type: ClassVar[type[State]] = State
    steps: ClassVar[tuple[Step[Any], ...]] = (train,)

    def __init__(self, hyper: Hyper) -> None:
        self.hyper = hyper

    def init(self, base: Network, fed: Federation) -> State:
        require_target(fed)
        return first_state(base, fed, self.hyper, [*fed.labelled, fed.home.name])

    def round(self, state: State, fed: Federation) -> State:
        if parts.is_shared(self.hyper, fed):
            return shared_round(state, fed, self.hyper, train)
        replies = train_locally(state, fed, self.hyper, train)  # Step 1
        sites, opinions = self._opinions(state, replies, fed)  # Step 2
        if not sites:
            return state
        rule = "mean" if self.hyper.agreement == "none" else self.hyper.agreement
        labels, confidence = pseudo_labels(opinions, rule)
        is_kept = confidence > self.hyper.threshold
        alpha = self._weights(sites, opinions, labels, is_kept, fed)
        # Step 3. A site whose model is unusable is treated as one that gave no answer.
        before = state
        extractor = aggregated(  # Eq. (6)
            fed,
            lambda: (
                (model.extractor, alpha[model.site])
                for model in self._local_models(before, replies, fed)
                if model.site in alpha
            ),
            None if state.apart else state.extractor,
            sites,
            self.hyper.noise,
        )
        state = collected(state, replies, fed, [site for site in replies.answered if site in alpha])
        state = dataclasses.replace(state, extractor=extractor)
        return self._fine_tuned(state, fed, labels, is_kept)  # Step 4; step 5 is the next round's broadcast

    def _local_models(self, state: State, replies: Replies[Trained], fed: Federation) -> Iterator[LocalModel]:
        """What the sites trained in this round; without iteration also what they trained before. Eq. (7) is a mean over
        the sources' classifiers, so C'_t is left out."""
        for site in sorted(fed.labelled):
            if site in replies.answered:
                reply = replies[site]
                extractor, head = reply.extractor, reply.head
            elif state.apart and state.trained[site]:
                extractor, head = state.apart[site], state.heads[site]
            else:
                continue
            frozen = frozen_for(site, state, self.hyper)
            others = [weights for name, weights in sorted(frozen.items()) if name != fed.home.name]
            yield LocalModel(site, extractor, [head, *others])

    def _opinions(self, state: State, replies: Replies[Trained], fed: Federation) -> tuple[list[str], Opinions]:
        """Sites whose predictions are usable, and these predictions for the target."""
        sites, opinions = [], Opinions()
        for model in self._local_models(state, replies, fed):
            probabilities = fed.at_home(predict, model=model)
            # Finite weights may be large enough to overflow in the forward pass.
            if bool(torch.isfinite(probabilities).all()):
                sites.append(model.site)
                opinions.add(probabilities)
            else:
                fed.count("copa-uda.unusable-model")
        return sites, opinions

    def _weights(
        self, sites: list[str], opinions: Opinions, labels: Tensor, is_kept: Tensor, fed: Federation
    ) -> dict[str, float]:
        """alpha_i by site. Also records the agreement of the round."""
        agreed = agreements(opinions.choices, labels, is_kept)
        kept = int(is_kept.sum())
        is_counted = self.hyper.agreement != "none"
        weights = aggregation_weights(agreed if is_counted else torch.zeros_like(agreed)).tolist()  # Eq. (8)
        fed.note("pseudo_labels", kept)
        fed.note("pseudo_label_share", kept / len(labels))
        for site, weight, count in zip(sites, weights, agreed.tolist(), strict=True):
            fed.note("weight", weight, site)
            if kept:
                fed.note("agreement", count / kept, site)
        return dict(zip(sites, weights, strict=True))

    def _fine_tuned(self, state: State, fed: Federation, labels: Tensor, is_kept: Tensor) -> State:
        home, kept = fed.home.name, is_kept.nonzero().squeeze(1)
        if len(kept) < FEWEST:
            fed.count("copa-uda.no-pseudo-labels")
            return state
        # Without iteration every round's aggregate is made as if it were the only one: C_t starts again.
        head = state.heads[home] if self.hyper.iterate else state.first_head
        sources = {site: state.heads[site] for site in fed.labelled if state.trained[site]}
        frozen = sources if self.hyper.collaboration == "frozen" else {}
        tuned = fed.at_home(fine_tune, extractor=state.extractor, head=head, frozen=frozen, labels=labels, kept=kept)
        if not (all_finite(tuned.extractor) and all_finite(tuned.head)):
            fed.count("copa-uda.fine-tuning-diverged")
            return state
        fed.note("train_loss", tuned.loss, home)
        heads, trained = {**state.heads, home: tuned.head}, {**state.trained, home: True}
        return dataclasses.replace(state, extractor=tuned.extractor, heads=heads, trained=trained)

    def models(self, state: State) -> Mapping[str, Weights]:
        return {SHARED: assembled(state.extractor, state.heads, state.trained)}

    @staticmethod
    def network(plan: Plan) -> nn.Module:
        return ensemble_network(plan, len(plan.sources) + 1)


COPA_UDA = About(
    "copa-uda",
    ("adapt",),
    "Wu and Gong, ICCV 2021",
    "images and a net with convolutions",
    all_because="every site has a classifier of its own, and all of them train each extractor",
    tasks=("classification",),
    # Office-Caltech10. The recipe of Digit-Five, with its larger batches: docs/methods/copa-uda.md.
    defaults=COPA.defaults,
    pretrained={"lr": 0.004, "copa-uda": PRETRAINED_KEYS},
    tables={"copa-uda": TABLE_KEYS},
    counters={
        "copa-uda.fine-tuning-diverged": (
            "Training on pseudo labels gave NaN or infinite weights and was undone: a lower lr may help."
        ),
        "copa-uda.no-pseudo-labels": (
            "No pseudo label passed the threshold in this round: models had equal weights and nothing was fine-tuned."
        ),
        "copa-uda.unusable-model": "A site's model gave NaN or infinite predictions and was left out of the round.",
    },
    time_factor=3.7,
    revision=COPA.revision,
    cost=Formula(
        flops={"G": 6, "F": 1, "KF": 2, "dG": -2},
        upload=MODEL,
        broadcast={"G": 1, "KF": 1},
        note="Counted on noise, where no pseudo label passes the threshold. Once the target's classifier is trained,"
        " sites have one more frozen classifier: 2||F|| and |F|.",
    ),
)
