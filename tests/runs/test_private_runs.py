"""Runs whose sites keep a budget of differential privacy."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import fedshift
from fedshift.audit.ledger import audit_ledger
from fedshift.audit.privacy import propose
from fedshift.errors import FedshiftError
from fedshift.functional.accountant import Mechanism, epsilon_of, noise_for


def group_net(input_shape: tuple[int, ...], classes: int) -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(3, 8, 3, 2),
        nn.GroupNorm(2, 8),
        nn.ReLU(),
        nn.AdaptiveAvgPool2d(2),
        nn.Flatten(),
        nn.Linear(32, classes),
    )


def fit(data: Path, out: Path, policy: dict[str, Any], **keys: Any) -> dict[str, Any]:
    given = {"method": "fedavg", "target": "dim", "rounds": 2, "batch_size": 8, "workers": 0, "net": group_net, **keys}
    fedshift.fit(data=data, out=out, policy=policy, **given)
    found: dict[str, Any] = json.loads((out / "results.json").read_text())
    return found


def test_a_run_under_site_budgets_says_so_everywhere(tiny_data: Path, tmp_path: Path) -> None:
    policy = {"epsilon": 8.0, "clip_norm": 1.0, "noise": 4.0, "min_samples": 2}
    found = fit(tiny_data, tmp_path / "run", policy)
    spent = epsilon_of([Mechanism(2.0, times=2)], 1e-5)
    source = found["sources"][0]
    assert found["privacy"][source]["spent"] == pytest.approx(spent, abs=1e-3)
    assert found["privacy"]["dim"]["spent"] is None and not found["per_target"], "it is not scored under its budget"
    assert found["seconds"]["sites"] == 0.0, "how long a site worked is not told"
    ledger = audit_ledger(tmp_path / "run" / "sites" / source / "ledger.jsonl")
    assert ledger.epsilon == pytest.approx(spent, abs=1e-3)
    card = (tmp_path / "run" / "MODEL_CARD.md").read_text()
    assert "## Differential privacy" in card and "epsilon 8 at delta 1e-05" in card


@pytest.mark.slow
def test_a_run_by_dp_sgd_is_scored_exactly_where_asked(tiny_data: Path, tmp_path: Path) -> None:
    policy = {"record_epsilon": 50.0, "dp_noise": 1.0, "min_samples": 2, "scores": "exact"}
    found = fit(tiny_data, tmp_path / "run", policy)
    assert found["per_target"]["dim"]
    assert 0 < found["privacy"][found["sources"][0]]["spent"] <= 50.0


@pytest.mark.parametrize(
    ("keys", "policy", "code", "words"),
    [
        ({"rounds": 30}, {"epsilon": 8.0, "clip_norm": 1.0, "noise": 4.0}, "privacy-budget", "lasts for"),
        ({"method": "feddg", "net": None}, {"epsilon": 8.0, "clip_norm": 1.0, "noise": 4.0}, "method-needs", "spectra"),
        ({"method": "csac", "net": None}, {"record_epsilon": 8.0, "dp_noise": 1.0}, "method-needs", "DP-SGD"),
        ({"method": "copa"}, {"record_epsilon": 8.0, "dp_noise": 1.0}, "method-needs", "normalises by batches"),
        ({"net": "digits-copa"}, {"record_epsilon": 8.0, "dp_noise": 1.0}, "method-needs", "normalises by batches"),
    ],
)
def test_what_cannot_keep_the_budget_does_not_begin(
    keys: dict[str, Any], policy: dict[str, Any], code: str, words: str, tiny_data: Path, tmp_path: Path
) -> None:
    with pytest.raises(FedshiftError, match=words) as caught:
        fit(tiny_data, tmp_path / "run", {**policy, "min_samples": 2}, **keys)
    assert caught.value.code == code


@pytest.mark.slow
def test_a_proposal_is_the_least_noise_that_lasts() -> None:
    found = propose("fedavg", 8.0, 40, clip=0.5)
    assert found.answers == 40 and found.settings["noise"] == pytest.approx(found.noise)
    assert found.noise == pytest.approx(noise_for(8.0, 1e-5, Mechanism(1.0, times=40)), rel=1e-4)
    assert epsilon_of([Mechanism(found.noise, times=40)], 1e-5) <= 8.0
    # With so many sites, the noise on the mean is as long as the longest update.
    sites, numbers = found.sites_needed(1000), 1000
    noise = torch.randn(200, numbers) * found.settings["noise"] / sites**0.5
    assert float(noise.norm(dim=1).mean()) == pytest.approx(0.5, rel=0.05)
