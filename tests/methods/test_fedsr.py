"""FedSR: its regularisers against closed forms and sampling, its variants, and what is random and what is not."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from fedshift.errors import InputError
from fedshift.federation import codec
from fedshift.federation.plan import Plan
from fedshift.functional.losses import cross_entropy
from fedshift.methods.fedsr import FedSR, Hyper, Representation, build, gaussian_kl, l2_regulariser, local_loss
from fedshift.nn.archs import build_network
from fedshift.runs import planning
from fedshift.runs.config import make_config

SHAPE, CLASSES = (3, 16, 16), 3


def plan_of(data: Path, method: str = "fedsr", **changes: Any) -> Plan:
    values = {"method": method, "target": "dim", "data_dir": data, "arch": "digits-copa"}
    return planning.prepare(make_config(values | changes)).plan


@pytest.fixture
def net(tiny_data: Path) -> Representation:
    base = build_network("digits-copa", SHAPE, CLASSES, 0)
    return build(plan_of(tiny_data), Hyper(), base, seed=1)


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def batch() -> tuple[Tensor, Tensor]:
    return torch.rand(6, *SHAPE, generator=generator()), torch.tensor([0, 1, 0, 1, 1, 0])


def test_l2_regulariser_is_the_mean_squared_length() -> None:
    assert l2_regulariser(torch.tensor([[3.0, 4.0], [0.0, 0.0]])).item() == 12.5


def test_divergence_of_gaussians_by_hand() -> None:
    """Against N(0, 1): shifted by 1 it is 1/2; twice as wide (4 - 1)/2 - ln 2; coordinates add up."""
    mean, scale = torch.tensor([[0.0, 0.0], [1.0, 0.0], [1.0, 0.0]]), torch.tensor([[1.0, 1.0], [1.0, 1.0], [1.0, 2.0]])
    found = gaussian_kl(mean, scale, torch.zeros(3, 2), torch.ones(3, 2))
    torch.testing.assert_close(found, torch.tensor([0.0, 0.5, 0.5 + 1.5 - math.log(2)]))


def gaussians() -> tuple[Tensor, Tensor, Tensor, Tensor]:
    mean, to_mean = torch.randn(2, 4, 3, generator=generator(1), dtype=torch.float64)
    scale, to_scale = torch.rand(2, 4, 3, generator=generator(2), dtype=torch.float64) + 0.5
    return mean, scale, to_mean, to_scale


def test_divergence_matches_the_library() -> None:
    mean, scale, to_mean, to_scale = gaussians()
    p, r = torch.distributions.Normal(mean, scale), torch.distributions.Normal(to_mean, to_scale)
    expected = torch.distributions.kl_divergence(p, r).sum(dim=1)
    torch.testing.assert_close(gaussian_kl(mean, scale, to_mean, to_scale), expected)


def test_divergence_matches_sampling() -> None:
    mean, scale, to_mean, to_scale = gaussians()
    z = mean + scale * torch.randn(100_000, 4, 3, generator=generator(3), dtype=torch.float64)
    p, r = torch.distributions.Normal(mean, scale), torch.distributions.Normal(to_mean, to_scale)
    sampled = (p.log_prob(z) - r.log_prob(z)).sum(dim=2).mean(dim=0)
    torch.testing.assert_close(gaussian_kl(mean, scale, to_mean, to_scale), sampled, rtol=0.02, atol=0.02)


def test_local_loss_is_cross_entropy_and_both_regularisers_of_one_draw(net: Representation) -> None:
    net.eval()
    x, y = batch()
    found = local_loss(net, x, y, Hyper(l2r=0.3, cmi=0.7), generator(5))
    mean, scale = net.encode(x)
    assert scale is not None and scale.min() > 0
    z = mean + scale * torch.randn(mean.shape, generator=generator(5))
    # Before training every r(z|y) is N(0, softplus(1)^2).
    width = math.log1p(math.e)
    bound = gaussian_kl(mean, scale, torch.zeros_like(mean), torch.full_like(mean, width)).mean()
    lengths = (z**2).sum() / 6
    torch.testing.assert_close(found, cross_entropy(net.network.head(z), y) + 0.3 * lengths + 0.7 * bound)
    other = local_loss(net, x, y, Hyper(l2r=0.3, cmi=0.7), generator(6))
    assert other != found


def test_references_learn_from_cmi_alone_and_only_for_classes_present(net: Representation) -> None:
    x, y = batch()
    local_loss(net, x, y, Hyper(l2r=1.0, cmi=0.0), generator()).backward()
    assert net.reference_mean.grad is not None and not net.reference_mean.grad.any()
    local_loss(net, x, y, Hyper(l2r=0.0, cmi=1.0), generator()).backward()
    moved = net.reference_mean.grad.abs().sum(dim=1) > 0
    assert moved.tolist() == [True, True, False]
    assert net.reference_scale.grad is not None and net.reference_scale.grad[:2].abs().min() > 0


def test_a_step_on_cmi_brings_p_and_r_together(net: Representation) -> None:
    x, y = batch()
    hyper = Hyper(l2r=0.0, cmi=1.0)
    net.eval()

    def bound() -> float:
        mean, scale = net.encode(x)
        assert scale is not None
        return gaussian_kl(mean, scale, *net.reference(y)).mean().item()

    before = bound()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.01)
    for _ in range(5):
        optimizer.zero_grad()
        local_loss(net, x, y, hyper, generator()).backward()
        optimizer.step()
    assert bound() < 0.8 * before


def test_prediction_is_the_mean_representations_and_draws_nothing(net: Representation) -> None:
    net.eval()
    x, _ = batch()
    state = torch.get_rng_state()
    scores = net(x)
    assert torch.equal(torch.get_rng_state(), state) and torch.equal(net(x), scores)
    torch.testing.assert_close(scores, net.network.head(net.encode(x)[0]))


def test_fedl2r_is_deterministic_and_fedcmi_has_no_length_term(tiny_data: Path) -> None:
    plain, random = FedSR.network(plan_of(tiny_data, "fedl2r")), FedSR.network(plan_of(tiny_data, "fedcmi"))
    features = plain.network.backbone.out_features
    assert plain.encoder.out_features == features and random.encoder.out_features == 2 * features
    assert not [key for key in plain.state_dict() if key.startswith("reference")]
    hyper = codec.restore(Hyper, dict(plan_of(tiny_data, "fedl2r").hyper))
    assert (hyper.l2r, hyper.cmi, hyper.stochastic) == (0.01, 0.0, False)
    x, y = batch()
    plain.eval()
    mean = plain.encode(x)[0]
    expected = cross_entropy(plain(x), y) + 0.01 * l2_regulariser(mean)
    torch.testing.assert_close(local_loss(plain, x, y, hyper, generator()), expected)
    hyper = codec.restore(Hyper, dict(plan_of(tiny_data, "fedcmi").hyper))
    assert (hyper.l2r, hyper.cmi, hyper.stochastic) == (0.0, 0.001, True)


def test_the_length_of_z_is_a_key(tiny_data: Path) -> None:
    net = FedSR.network(plan_of(tiny_data, fedsr={"z": 5}))
    assert net.encoder.out_features == 10 and net.reference_mean.shape == (CLASSES, 5)
    assert net.eval()(batch()[0]).shape == (6, CLASSES)


def test_one_round_keeps_the_base_and_averages_the_references(tiny_data: Path, tmp_path: Path) -> None:
    values = {"method": "fedsr", "target": "dim", "data_dir": tiny_data, "arch": "digits-copa", "workers": 0}
    prepared = planning.prepare(make_config(values | {"rounds": 1, "train_per_site": 12, "lr": 0.02}))
    fed = planning.open_federation(prepared, tmp_path)
    method, (base, _) = FedSR(Hyper()), planning.base_network(prepared)
    weights = {f"network.{key}": value.clone() for key, value in base.state_dict().items()}
    start = method.init(base, fed)
    assert all(torch.equal(start.model[key], value) for key, value in weights.items())
    assert torch.equal(start.model["encoder.weight"], method.init(base, fed).model["encoder.weight"])
    fed.begin(1)
    after = method.round(start, fed).model
    assert set(after) == set(FedSR.network(prepared.plan).state_dict())
    assert not start.model["reference_mean"].any() and after["reference_mean"].any()


@pytest.mark.parametrize(
    ("keys", "said"),
    [
        ({"l2r": -1.0}, "must not be negative"),
        ({"stochastic": False}, "cmi compares distributions"),
        ({"z": -1}, "z must"),
    ],
)
def test_values_that_make_no_sense_are_refused(keys: dict[str, Any], said: str) -> None:
    with pytest.raises(InputError, match=said):
        make_config({"method": "fedsr", "fedsr": keys})
