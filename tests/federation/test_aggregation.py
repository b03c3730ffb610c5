"""The key `aggregation` at the coordinator: what rules make of honest and of forged models, and what is counted."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from fedshift.errors import SiteError
from fedshift.federation.aggregation import CLIP_MULTIPLE, COUNT_MULTIPLE, RULES
from fedshift.federation.federation import Federation, Rules
from fedshift.functional.averaging import weighted_mean

SITES = ("a", "b", "c", "d", "e")
BEFORE = {"w": torch.zeros(4), "bn.running_mean": torch.zeros(2), "bn.running_var": torch.ones(2)}


def federation(rule: str, bad_sites: int = 1) -> Federation:
    unused: Any = None
    return Federation(unused, unused, SITES, rules=Rules(aggregation=rule, bad_sites=bad_sites))


def honest() -> list[dict[str, Tensor]]:
    """Five updates of about the same direction and of lengths 2 to 2.8."""
    generator = torch.Generator().manual_seed(3)
    return [
        {
            "w": torch.full((4,), 1.0 + place / 10) + torch.rand(4, generator=generator) / 10,
            "bn.running_mean": torch.full((2,), 0.5) + torch.rand(2, generator=generator) / 10,
            "bn.running_var": torch.full((2,), 2.0) + torch.rand(2, generator=generator) / 10,
        }
        for place in range(5)
    ]


def flipped(factor: float) -> dict[str, Tensor]:
    return {"w": torch.full((4,), -factor), "bn.running_mean": torch.zeros(2), "bn.running_var": torch.zeros(2)}


def average(fed: Federation, models: list[dict[str, Tensor]], counts: list[int]) -> dict[str, Tensor]:
    return fed.average(lambda: zip(models, counts, strict=True), since=BEFORE, sites=SITES[: len(models)])


@pytest.mark.parametrize("rule", ["clipped", "aligned"])
@pytest.mark.parametrize("counts", [[10] * 5, [10, 20, 30, 40, 50]])
def test_honest_updates_are_averaged_to_the_byte_as_with_the_mean(counts: list[int], rule: str) -> None:
    fed = federation(rule)
    found = average(fed, honest(), counts)
    mean = weighted_mean(zip(honest(), counts, strict=True))
    assert all(torch.equal(found[name], value) for name, value in mean.items())
    assert fed.counters == {}


@pytest.mark.parametrize(
    ("rule", "told"),
    [
        ("clipped", "robust.clipped.c"),
        ("aligned", "robust.left-out.c"),
        ("median", ""),
        ("trimmed", ""),
        ("krum", "robust.left-out.c"),
    ],
)
@pytest.mark.parametrize("factor", [10.0, 1e5])
def test_one_long_flipped_update_does_not_turn_the_model_round(rule: str, told: str, factor: float) -> None:
    fed, models = federation(rule), honest()
    models[2] = flipped(factor)
    found = average(fed, models, [10] * 5)
    assert bool((found["w"] > 0.75).all()) and bool((found["bn.running_var"] > 1.5).all())
    assert fed.counters == ({told: 1} if told else {})
    assert bool((average(federation("mean"), models, [10] * 5)["w"] < 0).all())


def test_a_long_update_counts_as_its_length_says() -> None:
    models = [{"w": torch.tensor([value])} for value in (1.0, 1.0, 1.0, -30.0)]
    found = federation("clipped").average(
        lambda: ((model, 1.0) for model in models), since={"w": torch.zeros(1)}, sites=SITES[:4]
    )
    share = (CLIP_MULTIPLE / 30) ** 2
    assert found["w"].item() == pytest.approx((3 - 30 * share) / (3 + share))


def test_a_stated_number_of_samples_buys_a_limited_weight() -> None:
    models = [{"w": torch.tensor([value])} for value in (0.0, 0.0, 1.0)]
    since = {"w": torch.tensor([0.5])}
    counts = [100, 200, 10**12]
    fed = federation("clipped")
    found = fed.average(lambda: zip(models, counts, strict=True), since=since, sites=SITES[:3])
    assert found["w"].item() == pytest.approx(200 * COUNT_MULTIPLE / (300 + 200 * COUNT_MULTIPLE))
    assert fed.counters == {"robust.count.c": 1}
    own = fed.average(lambda: zip(models, [0.1, 0.1, 0.8], strict=True), since=since, sites=SITES[:3], stated=False)
    assert own["w"].item() == pytest.approx(0.8)


@pytest.mark.parametrize("rule", ["clipped", "aligned", "median", "trimmed", "krum"])
def test_one_negative_variance_does_not_reach_the_model(rule: str) -> None:
    fed, models = federation(rule), honest()
    models[4]["bn.running_var"] = torch.tensor([-1e6, 2.0])
    found = average(fed, models, [10] * 5)
    assert bool((found["bn.running_var"] > 1.0).all())
    assert fed.counters["robust.negative-variance.e"] == 1


@pytest.mark.parametrize(("rule", "bad_sites", "needed"), [("krum", 1, 5), ("krum", 2, 7), ("trimmed", 2, 5)])
def test_too_few_answers_are_an_error_and_no_guess(rule: str, bad_sites: int, needed: int) -> None:
    models = honest()[:4]
    with pytest.raises(SiteError, match=f"needs {needed} models and 4 came"):
        average(federation(rule, bad_sites), models, [10] * 4)


def test_without_what_sites_started_from_nothing_is_clipped_and_that_is_counted() -> None:
    models = [*honest()[:4], flipped(50.0)]
    fed = federation("clipped")
    found = fed.average((model, 1.0) for model in models)
    assert torch.equal(found["w"], weighted_mean((model, 1.0) for model in models)["w"])
    assert fed.counters == {"robust.unguarded": 1}


@pytest.mark.parametrize("rule", [name for name in RULES.builtin if name != "mean"])
def test_an_iterator_that_can_be_read_once_is_enough(rule: str) -> None:
    models = honest()
    once: Iterator[tuple[dict[str, Tensor], int]] = ((model, 10) for model in models)
    found = federation(rule).average(once, since=BEFORE, sites=SITES)
    again = average(federation(rule), models, [10] * 5)
    assert all(torch.equal(found[name], value) for name, value in again.items())


@pytest.mark.parametrize("rule", [name for name in RULES.builtin if name != "mean"])
def test_methods_with_rules_of_their_own_get_shortened_updates(rule: str) -> None:
    models = {**dict(zip(SITES, honest(), strict=True)), "c": flipped(3.0)}
    fed = federation(rule)
    model_of = fed.clipped(SITES, models.__getitem__, dict.fromkeys(SITES, BEFORE))
    assert all(model_of(site) is models[site] for site in SITES if site != "c")
    assert 0 < float(model_of("c")["w"].norm()) < CLIP_MULTIPLE * 2.8
    assert fed.counters == {"robust.clipped.c": 1}


def test_what_is_far_too_long_is_replaced_by_the_mean_of_the_others() -> None:
    models = {**dict(zip(SITES, honest(), strict=True)), "c": flipped(1000.0)}
    model_of = federation("clipped").clipped(SITES, models.__getitem__, dict.fromkeys(SITES, BEFORE))
    mean = weighted_mean((models[site], 1.0) for site in SITES if site != "c")
    assert all(torch.equal(model_of("c")[name], value) for name, value in mean.items())
    assert model_of("a") is models["a"]
    assert federation("mean").clipped(SITES, models.__getitem__, dict.fromkeys(SITES, BEFORE)) == models.__getitem__


def test_aligned_leaves_out_what_points_against_the_others_at_any_length() -> None:
    """Two of five, of just the length of the honest ones: as the mean of the three."""
    models = honest()
    for place in (1, 3):
        models[place] = {"w": -models[place]["w"], **{name: models[place][name] for name in BEFORE if name != "w"}}
    fed = federation("aligned")
    found = average(fed, models, [10, 20, 30, 40, 50])
    mean = weighted_mean((models[place], 10.0 * (place + 1)) for place in (0, 2, 4))
    assert all(torch.equal(found[name], value) for name, value in mean.items())
    assert fed.counters == {"robust.left-out.b": 1, "robust.left-out.d": 1}
    # Of two halves nobody can tell which one is right; and what was clipped is told by its own name.
    models[2] = {name: value * 3 if name == "w" else value for name, value in honest()[2].items()}
    fed = federation("aligned")
    average(fed, [models[0], models[1], models[2], *honest()[3:]], [10] * 5)
    assert fed.counters == {"robust.left-out.b": 1, "robust.clipped.c": 1}
    average(fed := federation("aligned"), models[:2], [10, 10])
    assert fed.counters == {}
