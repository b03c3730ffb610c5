"""FedDG-GA, FedOMG and the guided head: their formulas against numbers worked out by hand, and one round of each."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import Opener

from fedshift.functional.averaging import weighted_mean
from fedshift.functional.losses import cross_entropy
from fedshift.methods.averaging import train as fedavg_train
from fedshift.methods.feddg_ga import FedDGGA, State, adjusted
from fedshift.methods.feddg_ga import train as ga_train
from fedshift.methods.fedomg import FedOMG, matched
from fedshift.methods.guided_head import GuidedHead, train
from fedshift.runs import planning
from fedshift.runs.config import make_config


def ready(data: Path, method: str, **changes: Any) -> planning.Prepared:
    values = {"method": method, "target": "dim", "data_dir": data, "arch": "digits-copa", "workers": 0, "batch_size": 8}
    return planning.prepare(make_config(values | {"rounds": 4, "policy": {"min_samples": 2}} | changes))


# --- FedDG-GA -------------------------------------------------------------------------------------------------------


def test_the_weight_of_the_site_with_the_largest_gap_moves_by_the_step() -> None:
    """1/2 + 0.1 and 1/2 - 0.05, divided by 1.05."""
    found = adjusted({"a": 0.5, "b": 0.5}, {"a": 0.4, "b": -0.2}, step=0.1)
    assert found == pytest.approx({"a": 0.6 / 1.05, "b": 0.45 / 1.05})


def test_weights_stay_between_0_and_1_and_sum_to_1() -> None:
    assert adjusted({"a": 0.9, "b": 0.1}, {"a": 1.0, "b": -1.0}, step=0.3) == {"a": 1.0, "b": 0.0}


def test_weights_without_gaps_stay() -> None:
    assert adjusted({"a": 0.7, "b": 0.3}, {}, step=0.2) == {"a": 0.7, "b": 0.3}
    assert adjusted({"a": 0.7, "b": 0.3}, {"a": 0.0, "b": 0.0}, step=0.2) == {"a": 0.7, "b": 0.3}
    # One site has no gap: it keeps 0.3 before the division by 0.9 + 0.3.
    assert adjusted({"a": 0.7, "b": 0.3}, {"a": 2.0}, step=0.2) == pytest.approx({"a": 0.75, "b": 0.25})


def test_the_average_uses_the_moved_weights(tiny_data: Path, open_method: Opener) -> None:
    """In round 2 of 4 the step is 3/4 of its first value, over three sites."""
    prepared = ready(tiny_data, "feddg-ga", **{"feddg-ga": {"step": 0.6}})
    method, base, fed = open_method(FedDGGA, prepared, round=2)
    first = method.init(base, fed)
    state = method.round(State(first.model, first.shares, dict.fromkeys(fed.labelled, -10.0)), fed)
    weights = {note.site: note.value for note in fed.notes if note.name == "weight"}
    fed.begin(2)
    merged = {site: reply.merged_loss for site, reply in fed.ask(fed.labelled, ga_train, model=first.model)}
    gaps = {site: loss + 10 for site, loss in merged.items()}
    assert state.shares == pytest.approx(adjusted(first.shares, gaps, 0.6 * 0.75 / 3))
    assert weights == pytest.approx(state.shares)
    assert all(0 < loss < 20 for loss in state.own_losses.values())


@pytest.mark.parametrize(("least", "split"), [(2, "val"), (20, "train")])
def test_the_loss_on_held_back_data_is_a_mean_over_samples(
    tiny_data: Path, open_method: Opener, least: int, split: str
) -> None:
    """Too few to be told of: on the training data."""
    prepared = ready(tiny_data, "feddg-ga", policy={"min_samples": least})
    method, base, fed = open_method(FedDGGA, prepared)
    reply = fed.ask(("amber",), ga_train, model=method.init(base, fed).model)["amber"]
    data = getattr(prepared.dataset.load("amber"), split)
    x, y = torch.tensor(data.inputs).permute(0, 3, 1, 2) / 255, torch.tensor(data.labels)
    with torch.no_grad():
        assert reply.merged_loss == pytest.approx(float(cross_entropy(base.eval()(x), y)), rel=1e-4)


# --- FedOMG ---------------------------------------------------------------------------------------------------------


def test_without_reach_the_merged_update_is_the_mean() -> None:
    updates = torch.tensor([[1.0, 0.0], [0.0, 2.0], [3.0, 1.0]])
    torch.testing.assert_close(matched(updates @ updates.T, c=0.0), torch.full((3,), 1 / 3, dtype=torch.float64))


def test_equal_updates_are_only_lengthened() -> None:
    """All weights suit equally: (1 + c) / (1 + c^2) of the mean, 1.2 for c = 1/2."""
    updates = torch.ones(4, 5)
    found = matched(updates @ updates.T, c=0.5)
    torch.testing.assert_close(found, torch.full((4,), 0.3, dtype=torch.float64), rtol=1e-3, atol=0)


def test_the_opposed_site_gets_more() -> None:
    """Two sites agree and the third is orthogonal to them. The best w is where w'G 1/K + c |g| sqrt(w'Gw) is least,
    found here by trying all w on a grid."""
    updates = torch.tensor([[1.0, 0.0], [1.0, 0.0], [0.0, 1.0]], dtype=torch.float64)
    gram = updates @ updates.T
    c, length = 0.5, math.sqrt(5) / 3
    grid = [(a / 100, b / 100, 1 - a / 100 - b / 100) for a in range(101) for b in range(101 - a)]
    points = torch.tensor(grid, dtype=torch.float64)
    objective = points @ gram.mean(1) + c * length * torch.einsum("nk,kl,nl->n", points, gram, points).sqrt()
    best = points[objective.argmin()]
    expected = (updates.mean(0) + c * length * (best @ updates) / (best @ updates).norm()) / 1.25
    torch.testing.assert_close(matched(gram, c) @ updates, expected, rtol=0.03, atol=0.01)
    assert (expected[1] / expected[0]) > 0.5  # what the mean has


def test_fedomg_without_reach_is_the_plain_mean_of_models(tiny_data: Path, open_method: Opener) -> None:
    """At rate 2 parameters move twice as far; running statistics are the mean all the same."""
    for rate in (1.0, 2.0):
        prepared = ready(tiny_data, "fedomg", fedomg={"c": 0.0, "rate": rate})
        method, base, fed = open_method(FedOMG, prepared)
        first = method.init(base, fed)
        mean = weighted_mean((reply.model, 1.0) for _, reply in fed.ask(fed.labelled, fedavg_train, model=first.model))
        fed.begin(1)
        found = method.round(first, fed).model
        assert found.keys() == mean.keys()
        for key, value in found.items():
            far = 1.0 if "running_" in key else rate
            expected = (
                first.model[key] + far * (mean[key] - first.model[key]) if value.is_floating_point() else mean[key]
            )
            torch.testing.assert_close(value, expected, rtol=1e-4, atol=1e-5)


# --- The guided head ------------------------------------------------------------------------------------------------


def test_the_shared_head_guides_features_and_does_not_move(tiny_data: Path, open_method: Opener) -> None:
    """At the start both heads are one: the loss is 1 + weight times the cross-entropy, the gradient of the own head is
    that of its own term alone."""
    losses, models = {}, {}
    for weight in (0.0, 0.5):
        prepared = ready(tiny_data, "guided-head", batch_size=1000, momentum=0.0, **{"guided-head": {"weight": weight}})
        method, base, fed = open_method(GuidedHead, prepared)
        replies = fed.ask(("amber",), train, model=method.init(base, fed).model)
        losses[weight], models[weight] = replies["amber"].loss, replies["amber"].model
    assert losses[0.5] == pytest.approx(1.5 * losses[0.0], rel=1e-5)
    torch.testing.assert_close(models[0.0]["head.weight"], models[0.5]["head.weight"])
    assert not torch.equal(models[0.0]["backbone.block1.conv.weight"], models[0.5]["backbone.block1.conv.weight"])


@pytest.mark.parametrize(
    ("method", "key", "value"), [("feddg-ga", "step", 1.5), ("fedomg", "c", 1.0), ("guided-head", "weight", -1)]
)
def test_impossible_values_are_refused(tiny_data: Path, method: str, key: str, value: float) -> None:
    from fedshift.errors import InputError

    with pytest.raises(InputError, match=key):
        ready(tiny_data, method, **{method: {key: value}})
