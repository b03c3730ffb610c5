"""What a run says of the budgets of differential privacy that its sites keep: before it starts, in its results and in
the model card."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from fedshift.errors import InputError
from fedshift.federation import codec
from fedshift.federation.budget import BUDGET, LEAVING, Budget
from fedshift.federation.handshake import Described
from fedshift.federation.ledger import round_up
from fedshift.federation.plan import Plan
from fedshift.federation.policy import Policy, Promise
from fedshift.federation.releases import Release, kinds
from fedshift.functional.accountant import Mechanism, times_within
from fedshift.methods import find_about, find_method
from fedshift.methods.base import About
from fedshift.methods.private import mixing_layers, sampling
from fedshift.runs.config import Norm
from fedshift.runs.record import Promised

LEVELS = {
    "site": "whatever a site's data are (any two data sets of the same sizes)",
    "record": "whether any one training sample takes part",
}
"""What a promise protects, by level."""


def require_possible(policy: Policy, plan: Plan, norm: Norm) -> None:
    """Refuses a method that cannot keep the sites' budget, before anything is begun."""
    promise = policy.promise
    if promise is None:
        return
    key = "policy.epsilon" if promise.level == "site" else "policy.record_epsilon"
    method, about = plan.method, find_about(plan.method)
    for step in find_method(method).steps:
        unhidden = exposed_fields(step.release, about)
        if unhidden:
            raise InputError(
                "method-needs",
                f"{key}: {method} lets {', '.join(unhidden)} leave, which no noise hides. Choose another method, such"
                " as fedavg or copa",
            )
        if promise.level == "record" and not (step.by_sample or step.scores_only):
            raise InputError(
                "method-needs",
                f"{key}: {method} does not train by DP-SGD. fedavg, fedlooks and copa do; or keep a budget for whole"
                " sites (policy.epsilon)",
            )
    if norm == "own" and plan.setting == "multi-adapt":
        raise InputError("method-needs", f"{key}: with norm=own clients send statistics, which no noise hides")
    if promise.level == "record" and mixing_layers(find_method(plan.method).network(plan).train()):
        raise InputError(
            "method-needs",
            f"{key}: {plan.model.arch} normalises by batches, which allows no DP-SGD: take a network without BatchNorm,"
            " such as digits-csac or your own with GroupNorm, or keep the statistics of given weights (norm=frozen)",
        )


def exposed_fields(release: type[Release], about: About) -> list[str]:
    """What a release has that cannot leave under a budget."""
    found = {field: kind.name for field, kind in kinds(release).items() if field not in about.unsent}
    return [f"{field} ({kind})" for field, kind in found.items() if kind not in LEAVING]


def answer_of(promise: Promise, plan: Plan, samples: int) -> Mechanism:
    """What one answer of a site with so many training samples costs."""
    if promise.level == "site":
        return promise.answer()
    return promise.answer(*sampling(samples, plan.training.batch_size, plan.training.local_epochs))


def tell_budgets(described: Mapping[str, Described], plan: Plan, learning: tuple[str, ...]) -> list[str]:
    """Lines to show before round 1. A budget that cannot last for the run is an error."""
    lines: dict[str, list[str]] = {}
    for site, found in described.items():
        promise = found.privacy
        if promise is None:
            continue
        text = (
            f"differential privacy: epsilon {promise.epsilon:g} at delta {promise.delta:g} for {LEVELS[promise.level]},"
            " towards whoever sees a site's answers, in all runs together"
        )
        if site in learning and found.sizes["train"]:
            answer = answer_of(promise, plan, found.sizes["train"])
            possible = times_within(promise.epsilon, promise.delta, answer)
            if possible < plan.training.rounds:
                raise InputError(
                    "privacy-budget",
                    f"the budget of {site} lasts for {possible} rounds of training and this run has"
                    f" {plan.training.rounds}: use more noise (`fedshift privacy {plan.method} --epsilon"
                    f" {promise.epsilon:g} --rounds {plan.training.rounds}` says how much) or fewer rounds",
                )
        lines.setdefault(text, []).append(site)
    told = [f"{', '.join(sites)}: {text}" for text, sites in lines.items()]
    refused = [site for site, found in described.items() if found.privacy and not {"val", "test"} & set(found.labelled)]
    if refused:
        told.append(
            f"{', '.join(refused)}: not scored under the budget. policy.scores=exact scores as ever, outside of the"
            " promise; policy.scores=noise within it"
        )
    return told


def privacy_results(described: Mapping[str, Described], sites: Path) -> dict[str, Any]:
    """For `results.json`: each site's promise and, where the sites are on this machine, what it has spent."""
    found: dict[str, Any] = {}
    for site, told in described.items():
        if (promise := told.privacy) is not None:
            folder = sites / site
            is_here = (folder / BUDGET).exists()
            spent = round_up(Budget(folder / "secret", folder, promise).epsilon) if is_here else None
            found[site] = codec.plain(promise) | {"spent": spent}
    return found


def read_promised(results: Mapping[str, Any]) -> dict[str, Promised]:
    return {site: Promised(**one) for site, one in results.get("privacy", {}).items()}


def privacy_lines(promised: Mapping[str, Promised]) -> list[str]:
    """For people: one line for all sites with the same promise."""
    groups: dict[str, list[str]] = {}
    for site, one in promised.items():
        spent = "" if one.spent is None else f", of which {one.spent:g} is spent"
        text = (
            f"epsilon {one.epsilon:g} at delta {one.delta:g} for {LEVELS[one.level]}{spent}."
            f" Noise is {one.noise:.4g} times the sensitivity"
        )
        groups.setdefault(text, []).append(site)
    return [f"{', '.join(sites)}: {text}." for text, sites in groups.items()]


OUTSIDE = (
    "Outside of it: sizes of splits, names of classes, the data's shape, whether and when a site answers; scores where"
    " policy.scores is exact. Runs on one machine play the sites: there it is a measurement, not a protection."
)
"""What no promise covers."""
