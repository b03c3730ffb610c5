"""The accountant, against closed forms, figures that others published, and opacus where it is installed."""

from __future__ import annotations

import math
import warnings

import numpy as np
import pytest
from scipy.stats import norm

from fedshift.functional.accountant import (
    ORDERS,
    Mechanism,
    epsilon_of,
    gaussian_delta,
    gaussian_epsilon,
    noise_for,
    renyi,
    renyi_epsilon,
    times_within,
)


def test_one_gaussian_has_the_delta_of_its_closed_form() -> None:
    for mu, epsilon in ((0.3, 0.5), (1.0, 1.0), (2.0, 3.0)):
        wanted = norm.cdf(mu / 2 - epsilon / mu) - math.exp(epsilon) * norm.cdf(-mu / 2 - epsilon / mu)
        assert gaussian_delta(mu, epsilon) == pytest.approx(wanted, rel=1e-9)


def test_the_noise_for_epsilon_1_at_delta_1e_5_is_the_known_one() -> None:
    assert noise_for(1.0, 1e-5, Mechanism(1.0)) == pytest.approx(3.73063, abs=1e-5)


def test_delta_at_that_epsilon_is_attained_by_a_threshold_and_by_no_other() -> None:
    """The best test between N(0, 1) and N(mu, 1): no set has more of P - e^eps Q, and one has as much."""
    mu, epsilon = 1.5, 2.0
    cuts = np.linspace(-4, 8, 4001)
    gains = norm.sf(cuts - mu) - math.exp(epsilon) * norm.sf(cuts)
    assert gains.max() == pytest.approx(gaussian_delta(mu, epsilon), rel=1e-4)
    assert gains.max() <= gaussian_delta(mu, epsilon) * (1 + 1e-9)


def test_nothing_said_costs_nothing_and_everything_adds_up() -> None:
    assert epsilon_of([], 1e-5) == epsilon_of([Mechanism(1.0, 0.1, 0)], 1e-5) == 0.0
    four = epsilon_of([Mechanism(2.0, times=4)], 1e-5)
    assert four == pytest.approx(epsilon_of([Mechanism(1.0)], 1e-5)), "4 answers with twice the noise are one"
    assert four == pytest.approx(epsilon_of([Mechanism(2.0), Mechanism(2.0, times=3)], 1e-5))
    mixed = epsilon_of([Mechanism(2.0, 0.1, 10), Mechanism(3.0)], 1e-5)
    assert mixed > max(epsilon_of([Mechanism(2.0, 0.1, 10)], 1e-5), epsilon_of([Mechanism(3.0)], 1e-5))


def test_the_renyi_bound_is_above_the_exact_epsilon_and_near_it() -> None:
    for noise, times in ((1.0, 1), (4.0, 40), (20.0, 100)):
        exact = gaussian_epsilon(math.sqrt(times) / noise, 1e-5)
        bound = renyi_epsilon(ORDERS, times * renyi(noise), 1e-5)
        assert exact < bound < 1.2 * exact


def test_the_divergence_of_a_poisson_sample_is_that_of_the_two_mixtures() -> None:
    """By integrating the definition: D_a of (1 - q) N(0, s^2) + q N(1, s^2) from N(0, s^2)."""
    x = np.linspace(-60, 60, 400_001)
    for noise, rate, order in ((1.0, 0.1, 3.0), (2.0, 0.3, 2.5), (1.5, 0.02, 8.0)):
        plain = norm.pdf(x, 0, noise)
        ratio = (1 - rate) + rate * np.exp((2 * x - 1) / (2 * noise**2))
        wanted = np.log(np.trapezoid(plain * ratio**order, x)) / (order - 1)
        assert renyi(noise, rate, [order])[0] == pytest.approx(wanted, rel=1e-5)


def test_sampling_fewer_costs_less_and_all_costs_the_whole() -> None:
    costs = [epsilon_of([Mechanism(1.5, rate, 100)], 1e-5) for rate in (0.01, 0.1, 0.5, 1.0)]
    assert costs == sorted(costs)


def test_noise_and_times_are_the_limits_that_they_say() -> None:
    answers = Mechanism(1.0, 0.1, 130)
    noise = noise_for(4.0, 1e-5, answers)
    assert epsilon_of([Mechanism(noise, 0.1, 130)], 1e-5) <= 4.0 < epsilon_of([Mechanism(0.99 * noise, 0.1, 130)], 1e-5)
    spent = [Mechanism(5.0, times=10)]
    times = times_within(8.0, 1e-5, Mechanism(4.0), spent)
    assert epsilon_of([*spent, Mechanism(4.0, times=times)], 1e-5) <= 8.0
    assert epsilon_of([*spent, Mechanism(4.0, times=times + 1)], 1e-5) > 8.0
    assert times_within(0.01, 1e-5, Mechanism(1.0)) == 0


def test_it_agrees_with_opacus() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        rdp = pytest.importorskip("opacus.accountants.analysis.rdp")
    for noise, rate in ((1.0, 0.01), (0.6, 0.1), (2.0, 0.3)):
        # Its series is cut where terms are below 1e-13.
        theirs = rdp.compute_rdp(q=rate, noise_multiplier=noise, steps=1, orders=ORDERS)
        assert renyi(noise, rate) == pytest.approx(theirs, rel=1e-7)
    orders = [1 + x / 10 for x in range(1, 100)] + list(range(12, 64))
    spent = rdp.compute_rdp(q=0.1, noise_multiplier=1.2, steps=500, orders=orders)
    epsilon, _ = rdp.get_privacy_spent(orders=orders, rdp=spent, delta=1e-5)
    ours = epsilon_of([Mechanism(1.2, 0.1, 500)], 1e-5)
    assert epsilon * (1 - 1e-6) <= ours < 1.02 * epsilon, "a coarser set of orders gives a slightly larger bound"
