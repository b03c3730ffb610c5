"""How much privacy a sequence of noised answers costs: (epsilon, delta)-differential privacy, added up.

An answer is a number or vector that any change of the data moves by at most a known length, its sensitivity, plus
Gaussian noise. `noise` is the noise's standard deviation divided by the sensitivity.

- Answers that use all the data: k of them, each question chosen with the answers before in view, are together no more
  telling than one Gaussian of mu^2 = sum 1 / noise^2 (J. Dong, A. Roth, W. Su: Gaussian Differential Privacy. JRSS B
  2022, Corollary 3.3). Its (epsilon, delta) has a closed form (B. Balle, Y.-X. Wang: Improving the Gaussian Mechanism
  for Differential Privacy. ICML 2018, Theorem 8).
- Answers that use a Poisson sample, in which each record is with chance `rate` and independently of the others: the
  Renyi divergences of I. Mironov, K. Talwar, L. Zhang (Renyi Differential Privacy of the Sampled Gaussian Mechanism.
  2019, Section 3.3) add up, and become (epsilon, delta) by B. Balle, G. Barthe, M. Gaboardi, J. Hsu, T. Sato:
  Hypothesis Testing Interpretations and Renyi Differential Privacy. AISTATS 2020, Theorem 21.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.special import log_ndtr

ORDERS: tuple[float, ...] = (
    *(1.2, 1.35, 1.5, 1.75, 2.0, 2.25, 2.5, 2.75, 3.0, 3.25, 3.5, 3.75, 4.0, 4.5, 5.0, 5.5, 6.0, 7.0, 8.0, 9.0, 10.0),
    *(float(order) for order in (*range(11, 33), 36, 40, 48, 56, 64, 80, 96, 128, 192, 256, 384, 512, 1024)),
)
"""Of the Renyi divergences. Any set of them gives a true bound; a finer one gives a slightly smaller bound."""

MOST_EPSILON = 1e6
"""More than this is no privacy: solvers stop here."""


@dataclass(frozen=True)
class Mechanism:
    """`times` answers with Gaussian noise. Below a `rate` of 1 each uses a Poisson sample of the records."""

    noise: float
    rate: float = 1.0
    times: int = 1


def epsilon_of(answers: Iterable[Mechanism], delta: float) -> float:
    """The epsilon of all the answers together, for a given delta."""
    given = [answer for answer in answers if answer.times > 0]
    if not given:
        return 0.0
    if all(answer.rate >= 1 for answer in given):
        return gaussian_epsilon(math.sqrt(sum(answer.times / answer.noise**2 for answer in given)), delta)
    total = sum((answer.times * renyi(answer.noise, answer.rate) for answer in given), np.zeros(len(ORDERS)))
    return renyi_epsilon(ORDERS, total, delta)


def gaussian_delta(mu: float, epsilon: float) -> float:
    """The delta of one Gaussian with sensitivity mu and deviation 1: Phi(mu/2 - eps/mu) - e^eps Phi(-mu/2 - eps/mu)."""
    ends = torch.tensor([mu / 2 - epsilon / mu, -mu / 2 - epsilon / mu], dtype=torch.float64)
    first, second = log_ndtr(ends).tolist()
    return -math.exp(first) * math.expm1(min(0.0, epsilon + second - first))


def gaussian_epsilon(mu: float, delta: float) -> float:
    """The least epsilon for which `gaussian_delta` is at most delta."""
    return _least(lambda epsilon: gaussian_delta(mu, epsilon) <= delta, 0.0, MOST_EPSILON)


def renyi(noise: float, rate: float = 1.0, orders: Sequence[float] = ORDERS) -> NDArray[np.float64]:
    """The Renyi divergences of one answer, of each order above 1."""
    if rate >= 1:
        return np.array(orders) / (2 * noise**2)
    found = [_log_moment(noise, rate, order) / (order - 1) for order in orders]
    return np.array([value if math.isfinite(value) else math.inf for value in found])


def renyi_epsilon(orders: Sequence[float], divergences: NDArray[np.float64], delta: float) -> float:
    """min over orders a of D_a + log((a - 1) / a) - (log delta + log a) / (a - 1)."""
    a = np.array(orders)
    bounds = divergences + np.log1p(-1 / a) - (math.log(delta) + np.log(a)) / (a - 1)
    return max(0.0, float(np.min(bounds)))


def noise_for(epsilon: float, delta: float, answers: Mechanism) -> float:
    """The least noise with which that many answers at that rate cost at most epsilon."""
    return _least(lambda noise: epsilon_of([replace(answers, noise=noise)], delta) <= epsilon, 1e-3, 1e9)


def times_within(epsilon: float, delta: float, answer: Mechanism, spent: Sequence[Mechanism] = ()) -> int:
    """How often `answer` may still be given, after what was spent."""

    def fits(times: int) -> bool:
        return epsilon_of([*spent, replace(answer, times=answer.times * times)], delta) <= epsilon

    if not fits(1):
        return 0
    high = 2
    while fits(high) and high < 2**40:
        high *= 2
    low = high // 2
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low


def _log_moment(noise: float, rate: float, order: float) -> float:
    """log A of Mironov et al.: the log of the moment of this order of the likelihood ratio."""
    log_rate, log_rest = math.log(rate), math.log1p(-rate)
    if float(order).is_integer():
        i = torch.arange(int(order) + 1, dtype=torch.float64)
        terms = _log_binomials(order, i) + i * log_rate + (order - i) * log_rest + (i * i - i) / (2 * noise**2)
        return float(terms.logsumexp(0))
    # A series of two sums, which falls like i^(-order - 1). Beyond the order the sign changes from term to term.
    i = torch.arange(min(60_000, 32 + int(order) + int(math.exp(30 / (order + 1)))), dtype=torch.float64)
    j, logs = order - i, _log_binomials(order, i)
    middle = noise**2 * (log_rest - log_rate) + 0.5
    low = logs + i * log_rate + j * log_rest + (i * i - i) / (2 * noise**2) + log_ndtr((middle - i) / noise)
    high = logs + j * log_rate + i * log_rest + (j * j - j) / (2 * noise**2) + log_ndtr((j - middle) / noise)
    signs = 1 - 2 * ((i - math.floor(order) - 1).clamp_min(0) % 2)
    largest = torch.maximum(low.max(), high.max())
    total = float((signs * ((low - largest).exp() + (high - largest).exp())).sum())
    return float(largest) + math.log(total) if total > 0 else math.inf


def _log_binomials(order: float, i: Tensor) -> Tensor:
    """log |order choose i|."""
    whole = torch.tensor(order + 1, dtype=torch.float64)
    return torch.lgamma(whole) - torch.lgamma(i + 1) - torch.lgamma(whole - i)


def _least(is_enough: Callable[[float], bool], low: float, high: float) -> float:
    """The least number, from above and to seven digits, that is enough; if less is, more is."""
    if is_enough(low):
        return low
    if not is_enough(high):
        return math.inf
    top = max(2 * low, 1.0)
    while not is_enough(top):
        low, top = top, 2 * top
    while top - low > 1e-7 * top:
        middle = (low + top) / 2
        low, top = (low, middle) if is_enough(middle) else (middle, top)
    return top
