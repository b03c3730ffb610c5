"""How much noise a budget of differential privacy takes: `fedshift privacy METHOD --epsilon 8 --rounds 40`."""

from __future__ import annotations

import math
from dataclasses import dataclass

from fedshift.audit.cost import cost
from fedshift.errors import InputError
from fedshift.federation.policy import Level
from fedshift.functional.accountant import Mechanism, noise_for
from fedshift.methods import find_about, find_method
from fedshift.methods.private import sampling
from fedshift.runs.privacy import exposed_fields

_UP = 1e-6
"""Written to six digits, a noise must not be below what is needed."""


@dataclass(frozen=True)
class Proposal:
    """`noise` in multiples of the sensitivity. `answers` with noise are given in the whole run; on level `record`, each
    takes `steps` steps on batches in which a sample is with chance `rate`. `settings` are keys of the policy."""

    level: Level
    epsilon: float
    delta: float
    rounds: int
    answers: int
    noise: float
    rate: float
    steps: int
    settings: dict[str, float]

    def sites_needed(self, numbers: int) -> int:
        """How many sites make the noise on the mean of their updates, of that many numbers each, no longer than the
        longest update: the noise on one number falls like 1 / sqrt(sites)."""
        return math.ceil((2 * self.noise) ** 2 * numbers)


def propose(
    method: str,
    epsilon: float,
    rounds: int,
    *,
    delta: float = 1e-5,
    level: Level = "site",
    clip: float = 1.0,
    samples: int = 800,
    batch_size: int = 64,
    local_epochs: float = 1.0,
) -> Proposal:
    """The least noise with which `rounds` rounds of a method stay within epsilon at delta. `samples`, `batch_size` and
    `local_epochs` matter on level `record` only."""
    wrong = min(epsilon, clip, samples, batch_size, local_epochs) <= 0 or not 0 < delta < 1
    if wrong or rounds < 1 or not math.isfinite(epsilon):
        raise InputError("config-value", "epsilon, rounds, clip and sizes must be above 0, and delta between 0 and 1")
    about, steps = find_about(method), find_method(method).steps
    for step in steps:
        if unhidden := exposed_fields(step.release, about):
            raise InputError(
                "method-needs",
                f"{method} lets {', '.join(unhidden)} leave, which no noise hides: there is no noise to propose",
            )
    if level == "record" and not all(step.by_sample or step.scores_only for step in steps):
        raise InputError(
            "method-needs",
            f"{method} does not train by DP-SGD, which --level record takes; fedavg, fedlooks and copa do",
        )
    rate, taken = sampling(samples, batch_size, local_epochs) if level == "record" else (1.0, 1)
    answers = _answers(method, rounds)
    noise = noise_for(epsilon, delta, Mechanism(1.0, rate, taken * answers))
    noise = math.ceil(noise * (1 + _UP) * 1e5) / 1e5
    key = {"site": "epsilon", "record": "record_epsilon"}[level]
    settings = {key: epsilon, "delta": delta}
    # Two updates of at most `clip` are at most twice that apart.
    site = {"clip_norm": clip, "noise": 2 * clip * noise}
    settings |= site if level == "site" else {"dp_clip": clip, "dp_noise": noise}
    return Proposal(level, epsilon, delta, rounds, answers, noise, rate, taken, settings)


def _answers(method: str, rounds: int) -> int:
    """How many answers a site gives, counted in two rounds on random data."""
    found = cost(method)
    return round(found.first_round.times + (rounds - 1) * found.round.times)
