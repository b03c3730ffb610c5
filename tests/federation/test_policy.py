from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch

from fedshift.errors import SiteError
from fedshift.federation.policy import Policy
from fedshift.federation.releases import Count, MixtureTerms, Release, Weights


def secret() -> bytes:
    return b"s" * 32


OLD = {"w": torch.zeros(4), "n": torch.tensor(3)}


@dataclass(frozen=True)
class Learned(Release):
    model: Weights
    samples: Count


def learned(*values: float) -> Learned:
    return Learned({"w": torch.tensor(values, dtype=torch.float32), "n": torch.tensor(4)}, 20)


def test_by_default_a_release_leaves_unchanged() -> None:
    release, clipped = Policy().apply(learned(3, 4, 0, 0), {"model": OLD}, secret)
    assert clipped == 0 and torch.equal(release.model["w"], torch.tensor([3.0, 4.0, 0.0, 0.0]))  # type: ignore[attr-defined]


def test_an_update_of_norm_5_is_clipped_to_1_and_counted() -> None:
    release, clipped = Policy(clip_norm=1.0).apply(learned(3, 4, 0, 0), {"model": OLD}, secret)
    assert clipped == 1
    assert torch.allclose(release.model["w"], torch.tensor([0.6, 0.8, 0.0, 0.0]))  # type: ignore[attr-defined]
    assert int(release.model["n"]) == 4  # type: ignore[attr-defined]


def noisy(policy: Policy, *values: float, key: bytes = b"s" * 32) -> torch.Tensor:
    return policy.apply(learned(*values), {"model": OLD}, lambda: key)[0].model["w"]  # type: ignore[attr-defined, no-any-return]


def test_equal_weights_get_equal_noise_so_that_asking_again_averages_nothing_out() -> None:
    policy = Policy(noise=1.0)
    first = noisy(policy, 0, 0, 0, 0)
    torch.manual_seed(1)
    assert torch.equal(first, noisy(policy, 0, 0, 0, 0)) and float(first.abs().max()) > 0
    other, elsewhere = noisy(policy, 0, 0, 0, 1e-6), noisy(policy, 0, 0, 0, 0, key=b"t" * 32)
    assert not torch.allclose(first, other, atol=0.01) and not torch.allclose(first, elsewhere, atol=0.01)


def test_noise_is_that_of_a_normal_distribution_and_no_seed_of_torch_gives_it() -> None:
    many = {"w": torch.zeros(100_001)}
    sent = Policy(noise=0.5).apply(Learned(many, 20), {"model": many}, secret)[0].model["w"]  # type: ignore[attr-defined]
    assert abs(float(sent.mean())) < 0.01 and abs(float(sent.std()) - 0.5) < 0.01
    share = float((sent.abs() < 0.5).double().mean())
    assert abs(share - 0.6827) < 0.01, "within one standard deviation"
    assert abs(float(torch.corrcoef(torch.stack([sent[:50_000], sent[50_000:100_000]]))[0, 1])) < 0.02


def test_noise_never_makes_a_running_variance_negative() -> None:
    variance = {"bn.running_var": torch.full((1000,), 0.01)}
    noisy = Policy(noise=1.0).apply(Learned(variance, 20), {"model": variance}, secret)[0].model["bn.running_var"]  # type: ignore[attr-defined]
    assert float(noisy.min()) == 0 and float(noisy.max()) > 0.5


def test_a_kind_that_is_not_allowed_fails_closed() -> None:
    with pytest.raises(SiteError, match="does not allow 'weights'") as caught:
        Policy(allow=("count",)).apply(learned(1, 1, 1, 1), {"model": OLD}, secret)
    assert caught.value.code == "site-policy"


def test_too_few_samples_release_nothing() -> None:
    Policy(min_samples=10).check_samples(10)
    with pytest.raises(SiteError, match="9 training samples"):
        Policy(min_samples=10).check_samples(9)


@dataclass(frozen=True)
class Described(Release):
    mixture: MixtureTerms


@pytest.mark.parametrize(
    "mixture",
    [
        {"means": torch.zeros(3, 2), "counts": torch.tensor([12, 9, 40])},
        {"means": torch.zeros(3, 2), "counts": torch.tensor([12, 40])},
        {"means": torch.zeros(3, 2)},
        {"weights": torch.ones(3)},
    ],
    ids=["a component of 9", "one is not counted", "none is counted", "no telling"],
)
def test_a_mixture_with_a_component_of_few_samples_fails_closed(mixture: dict[str, torch.Tensor]) -> None:
    with pytest.raises(SiteError, match="fewer than 10 samples") as caught:
        Policy(min_samples=10).apply(Described(mixture), {}, secret)
    assert caught.value.code == "site-policy"


def test_a_mixture_of_large_components_may_leave_and_so_may_none() -> None:
    for mixture in ({"means": torch.zeros(2, 2), "counts": torch.tensor([10, 11])}, {}):
        release = Described(mixture)
        assert Policy(min_samples=10).apply(release, {}, secret) == (release, 0)
