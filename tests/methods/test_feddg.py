"""FedDG: what is lent, how images are moved, and the episodic objective against hand-made numbers."""

from __future__ import annotations

import dataclasses
import json
import math
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from fedshift.errors import InputError, SiteError
from fedshift.federation import codec
from fedshift.federation.federation import Federation
from fedshift.federation.releases import kinds
from fedshift.federation.store import read_state
from fedshift.functional.losses import cross_entropy
from fedshift.functional.spectrum import interpolate_low_amplitudes, low_amplitudes
from fedshift.methods.feddg import AMPLITUDES, FedDG, Hyper, Lent, State, episode_loss, lend_spectra, other_looks
from fedshift.nn.archs import build_network
from fedshift.runs import planning
from fedshift.runs.config import make_config

BANK = 5


def federation(data: Path, folder: Path, **changes: Any) -> tuple[FedDG, State, Federation]:
    """The method, its first state, and a federation of amber, blue and coral in round 1."""
    values = {"method": "feddg", "target": "dim", "data_dir": data, "arch": "digits-copa", "workers": 0}
    values |= {
        "rounds": 3,
        "batch_size": 16,
        "lr": 0.02,
        "train_per_site": 12,
        "policy": {"min_samples": 2},
        "feddg": {"bank": BANK, "alpha": 0.15},
    }
    prepared = planning.prepare(make_config(values | changes))
    fed = planning.open_federation(prepared, folder)
    fed.begin(1)
    method = FedDG(codec.restore(Hyper, dict(prepared.plan.hyper)))
    return method, method.init(planning.base_network(prepared)[0], fed), fed


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def linear(weight: list[list[float]]) -> nn.Linear:
    layer = nn.Linear(len(weight[0]), len(weight), bias=False, dtype=torch.float64)
    with torch.no_grad():
        layer.weight.copy_(torch.tensor(weight))
    return layer


def test_episode_loss_by_hand() -> None:
    """One input of 1, weights (0, 0), label 0: the gradient is (-1/2, 1/2), and a step of 2 leads to (1, -1)."""
    net = linear([[0.0], [0.0]])
    own, moved = torch.ones(1, 1, dtype=torch.float64), torch.full((1, 1), 3.0, dtype=torch.float64)
    loss = episode_loss(net, own, moved, torch.tensor([0]), 2.0, first_order=True)
    assert loss.item() == pytest.approx(math.log(2) + math.log(1 + math.exp(-6)))


def test_without_an_inner_step_it_is_the_sum_of_both_losses() -> None:
    net = build_network("segnet-small", (3, 16, 16), 3, 0).train()
    x, moved = torch.rand(2, 3, 16, 16, generator=generator()), torch.rand(2, 3, 16, 16, generator=generator(1))
    pixels = torch.randint(3, (2, 16, 16), generator=generator(2))
    found = episode_loss(net, x, moved, pixels, 0.0, first_order=False)
    torch.testing.assert_close(found, cross_entropy(net(x), pixels) + cross_entropy(net(moved), pixels))


def problem() -> tuple[nn.Module, Tensor, Tensor, Tensor]:
    net = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)).double()
    with torch.no_grad():
        for weight in net.parameters():
            weight.copy_(torch.randn(weight.shape, generator=generator(weight.numel())))
    own, moved = torch.randn(2, 6, 3, generator=generator(3), dtype=torch.float64)
    return net, own, moved, torch.tensor([0, 1, 0, 1, 1, 0])


def test_the_full_gradient_matches_finite_differences() -> None:
    net, own, moved, labels = problem()
    episode_loss(net, own, moved, labels, 0.3, first_order=False).backward()
    for weight in net.parameters():
        flat = weight.data.view(-1)
        for place in range(len(flat)):
            values = []
            for shift in (1e-5, -2e-5):
                flat[place] += shift
                values.append(episode_loss(net, own, moved, labels, 0.3, first_order=False).item())
            flat[place] += 1e-5
            assert weight.grad is not None
            assert weight.grad.view(-1)[place].item() == pytest.approx((values[0] - values[1]) / 2e-5, abs=1e-7)


def test_the_first_order_gradient_takes_the_inner_step_as_constant() -> None:
    net, own, moved, labels = problem()
    weights = list(net.parameters())
    at_own = torch.autograd.grad(cross_entropy(net(own), labels), weights)
    stepped, *_ = problem()
    with torch.no_grad():
        for weight, gradient in zip(stepped.parameters(), at_own, strict=True):
            weight -= 0.3 * gradient
    at_moved = torch.autograd.grad(cross_entropy(stepped(moved), labels), list(stepped.parameters()))
    episode_loss(net, own, moved, labels, 0.3, first_order=True).backward()
    for weight, first, second in zip(weights, at_own, at_moved, strict=True):
        torch.testing.assert_close(weight.grad, first + second)


def test_other_looks_draws_one_spectrum_and_one_ratio_for_each_image() -> None:
    images, bank = torch.rand(4, 3, 8, 8, generator=generator()), torch.rand(9, 3, 3, 3, generator=generator(1)) * 60
    found = other_looks(images, bank, generator(2))
    replay = generator(2)
    chosen, ratio = torch.randint(9, (4,), generator=replay), torch.rand(4, generator=replay)
    assert len(set(chosen.tolist())) > 1 and len(set(ratio.tolist())) == 4
    torch.testing.assert_close(found, interpolate_low_amplitudes(images, bank[chosen], ratio).clamp(0, 1))
    assert found.min() >= 0 and found.max() <= 1
    assert torch.equal(other_looks(images, bank, generator(2)), found)


def test_an_empty_bank_changes_nothing() -> None:
    images = torch.rand(2, 3, 8, 8, generator=generator())
    assert torch.equal(other_looks(images, torch.zeros(0, 3, 3, 3), generator()), images)


def test_only_the_window_of_a_few_images_leaves_a_site(tiny_data: Path, tmp_path: Path) -> None:
    """A share of 0.15 of 16 pixels is a radius of 2: 5x5 of 16x16 amplitudes, of 5 of 12 images."""
    _, _, fed = federation(tiny_data, tmp_path)
    lent = dict(fed.ask(fed.labelled, lend_spectra))
    assert sorted(lent) == ["amber", "blue", "coral"]
    assert kinds(Lent)["spectra"].name == "spectra"
    for release in lent.values():
        assert list(release.spectra) == [AMPLITUDES]
        assert release.spectra[AMPLITUDES].shape == (BANK, 3, 5, 5)
    rows = [json.loads(line) for line in (tmp_path / "blue" / "ledger.jsonl").read_text().splitlines()]
    assert [(row["kind"], row["values"]) for row in rows if row["event"] == "left"] == [("spectra", BANK * 3 * 25)]


def test_a_site_with_few_images_repeats_them(tiny_data: Path, tmp_path: Path) -> None:
    _, _, fed = federation(tiny_data, tmp_path, train_per_site=3, policy={"min_samples": 2})
    for _, release in fed.ask(fed.labelled, lend_spectra):
        bank = release.spectra[AMPLITUDES]
        assert torch.equal(bank[:2], bank[3:])
        assert len(torch.unique(bank, dim=0)) == 3


def test_spectra_are_exchanged_once_and_kept_at_the_sites(tiny_data: Path, tmp_path: Path) -> None:
    method, state, fed = federation(tiny_data, tmp_path)
    down = []
    for number in (1, 2):
        fed.begin(number)
        before = fed.learning.down
        state = method.round(state, fed)
        down.append(fed.learning.down - before)
    rows = [json.loads(line) for line in (tmp_path / "blue" / "ledger.jsonl").read_text().splitlines()]
    steps = [row["step"] for row in rows if row["event"] == "asked"]
    assert steps.count("feddg.lend_spectra") == 1 and steps[0] == "feddg.lend_spectra"
    assert down[0] > down[1] + 3 * 2 * BANK * 75 * 4
    [kept] = (tmp_path / "blue" / "state").glob("spectra@*.safetensors")
    assert kept.stem == "spectra@1"
    others = read_state(kept)[AMPLITUDES]
    assert torch.equal(others, torch.cat([state.spectra["amber"], state.spectra["coral"]]))


def test_lent_spectra_are_those_of_the_sites_own_images(tiny_data: Path, tmp_path: Path) -> None:
    _, _, fed = federation(tiny_data, tmp_path)
    with np.load(tiny_data / "blue.npz") as file:
        images = torch.from_numpy(file["train_images"]).permute(0, 3, 1, 2).float() / 255
    [(_, release)] = fed.ask(["blue"], lend_spectra)
    gaps = (release.spectra[AMPLITUDES][:, None] - low_amplitudes(images, 2)[None]).abs().amax((2, 3, 4))
    assert gaps.shape == (BANK, len(images)) and gaps.min(dim=1).values.max() < 1e-4 < gaps.median()


def test_a_site_that_lost_its_spectra_is_sent_them_again(tiny_data: Path, tmp_path: Path) -> None:
    method, state, fed = federation(tiny_data, tmp_path)
    state = method.round(state, fed)
    shutil.rmtree(tmp_path / "blue" / "state")
    fed.begin(2)
    state = method.round(state, fed)
    assert sorted(state.delivered) == ["amber", "coral"] and fed.counters["failed.site-failed"] == 1
    fed.begin(3)
    state = method.round(state, fed)
    assert state.delivered == {"amber": 3, "blue": 3, "coral": 3}
    assert (tmp_path / "blue" / "state" / "spectra@3.safetensors").exists()


def test_a_policy_that_forbids_spectra_is_obeyed(tiny_data: Path, tmp_path: Path) -> None:
    policy = {"min_samples": 2, "allow": ["weights", "count", "metric"]}
    method, state, fed = federation(tiny_data, tmp_path, policy=policy)
    with pytest.raises(SiteError, match=r"step feddg\.lend_spectra: 0 of 3 sites"):
        method.round(state, fed)
    rows = [json.loads(line) for line in (tmp_path / "blue" / "ledger.jsonl").read_text().splitlines()]
    assert [(row["event"], row.get("code")) for row in rows] == [("asked", None), ("answered", "site-policy")]


def test_table_rows_are_refused(tiny_data: Path, tmp_path: Path) -> None:
    method, _, fed = federation(tiny_data, tmp_path)
    table = dataclasses.replace(fed.plan, model=dataclasses.replace(fed.plan.model, input_shape=(4,)))
    stand_in: Any = SimpleNamespace(plan=table)
    with pytest.raises(InputError, match="spectra of images"):
        method.init(build_network("mlp", (4,), 2, 0), stand_in)


@pytest.mark.parametrize(
    ("key", "value", "said"),
    [("bank", 1, "bank must be at least 2"), ("alpha", 0.5, "below 0.5"), ("meta_step", -1.0, "must not be negative")],
)
def test_values_out_of_range_are_refused(key: str, value: float, said: str) -> None:
    with pytest.raises(InputError, match=said):
        make_config({"method": "feddg", "feddg": {key: value}})


@pytest.mark.parametrize(("alpha", "side"), [(0.0, 1), (0.01, 3), (0.2, 7)])
def test_small_images_lend_more_than_their_mean_unless_told_otherwise(
    tiny_data: Path, tmp_path: Path, alpha: float, side: int
) -> None:
    _, _, fed = federation(tiny_data, tmp_path, feddg={"bank": 2, "alpha": alpha})
    [(_, release)] = fed.ask(["blue"], lend_spectra)
    assert release.spectra[AMPLITUDES].shape == (2, 3, side, side)
