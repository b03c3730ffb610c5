"""What several teachers agree on for samples without labels, and how much each teacher adds to the agreement.

H. Feng et al.: KD3A: Unsupervised Multi-Source Decentralized Domain Adaptation via Knowledge Distillation. ICML 2021,
sec. 3.2 and 3.3.

`teachers` are finite class probabilities `(K, N, C)` of K teachers for N samples. They are rounded to multiples of
2^-40 first. Float64 sums of them are then exact: a vote does not depend on the order of teachers, and a vote without
one teacher follows exactly by subtraction. Samples are processed in chunks, so that memory beyond the input and the
result does not grow with N.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

Ballot = Literal["vector", "top"]

_GRID = 2.0**40
_MOST_TEACHERS = 2**13
"""Sums below 2^13 in steps of 2^-40 fit into the 53 bits of a float64."""
_CHUNK_NUMBERS = 2**18
"""Size of a `(K, n, C)` chunk: 2 MB, which fits into a processor's cache."""

MOST_FOR_ALL_SUBSETS = 12
"""With more teachers, the 2^K votes of an exact Shapley value take too long."""


@dataclass(frozen=True)
class Rule:
    """How votes are counted. A teacher votes on a sample if its highest probability is above `gate`. It adds all its
    probabilities (`vector`), or only the highest one (`top`). `doubt` is the weight of a sample whose consensus no
    teacher supports."""

    gate: float
    ballot: Ballot = "vector"
    doubt: float = 0.001


@dataclass(frozen=True)
class Consensus:
    """For each sample: p `(N, C)` float32, the consensus class `(N,)` int64, and the number of teachers that support it
    `(N,)` int64. With 0 supporters, p is the mean of all teachers."""

    probabilities: Tensor
    classes: Tensor
    supporters: Tensor

    def quality(self, doubt: float) -> Tensor:
        """n_p max p of each sample, `(N,)`: the terms of Eq. (7), with n_p = `doubt` where there are no supporters."""
        return self.probabilities.amax(1) * torch.where(self.supporters > 0, self.supporters.float(), doubt)


def knowledge_vote(teachers: Tensor, rule: Rule) -> Consensus:
    """Confidence gate, consensus class, and the mean of its supporters (sec. 3.2).

    Equal sums go to the class with the lower number. A consensus has no supporters if no teacher passes the gate, or if
    the highest sum is that of a class that is no teacher's first choice.
    """
    parts = [_count(ballots) for ballots in _chunks(teachers, rule)]
    if not parts:
        none = torch.zeros(0, dtype=torch.int64)
        return Consensus(torch.zeros(0, teachers.shape[2]), none, none)
    probabilities, classes, supporters = zip(*parts, strict=True)
    return Consensus(torch.cat(probabilities), torch.cat(classes), torch.cat(supporters))


def sample_quality(teachers: Tensor, rule: Rule) -> Tensor:
    """n_p max p of each sample, `(N,)` float64: the terms of Eq. (7)."""
    parts = [ballots.quality(ballots.sums(), len(teachers)) for ballots in _chunks(teachers, rule)]
    return torch.cat(parts) if parts else torch.zeros(0, dtype=torch.float64)


def consensus_focus(teachers: Tensor, rule: Rule) -> Tensor:
    """CF_k = Q(all) - Q(all without k), `(K,)` float64 (Eq. 8), in time linear in K. Q of no teachers is 0."""
    focus = torch.zeros(len(teachers), dtype=torch.float64)
    for ballots in _chunks(teachers, rule):
        sums = ballots.sums()
        focus += (ballots.quality(sums, len(teachers)) - _quality_without_each(ballots, sums)).sum(1)
    return focus


def shapley_values(teachers: Tensor, rule: Rule) -> Tensor:
    """Each teacher's Shapley value in Q, `(K,)` float64, from the votes of all 2^K subsets. Their sum is Q(all)."""
    count = len(teachers)
    if count > MOST_FOR_ALL_SUBSETS:
        raise ValueError(
            f"exact Shapley values of {count} teachers take 2^{count} votes; at most {MOST_FOR_ALL_SUBSETS} are allowed"
        )
    quality = torch.zeros(2**count, dtype=torch.float64)
    for ballots in _chunks(teachers, rule):
        sums, members = ballots.no_sums(), 0
        for step in range(1, 2**count):
            # In Gray code order, one teacher joins or leaves at a time.
            changed = (step & -step).bit_length() - 1
            members ^= 1 << changed
            ballots.add(sums, changed, 1.0 if members >> changed & 1 else -1.0)
            quality[members] += ballots.quality(sums, members.bit_count()).sum()
    subsets = torch.arange(2**count)
    sizes = sum((subsets >> k & 1 for k in range(count)), torch.zeros_like(subsets))
    orders = torch.tensor([1 / (count * math.comb(count - 1, size)) for size in range(count)], dtype=torch.float64)
    values = torch.zeros(count, dtype=torch.float64)
    for k in range(count):
        others = subsets[(subsets >> k & 1) == 0]
        values[k] = (orders[sizes[others]] * (quality[others | 1 << k] - quality[others])).sum()
    return values


def sampled_shapley_values(teachers: Tensor, rule: Rule, samples: int, generator: torch.Generator) -> Tensor:
    """Shapley values estimated from `samples` random orders in which teachers join, `(K,)` float64. Their sum is Q(all)
    for any number of orders."""
    count = len(teachers)
    orders = [torch.randperm(count, generator=generator).tolist() for _ in range(samples)]
    values = torch.zeros(count, dtype=torch.float64)
    for ballots in _chunks(teachers, rule):
        for order in orders:
            sums, before = ballots.no_sums(), torch.zeros((), dtype=torch.float64)
            for size, joining in enumerate(order, start=1):
                ballots.add(sums, joining, 1.0)
                after = ballots.quality(sums, size)
                values[joining] += (after - before).sum() / samples
                before = after
    return values


@dataclass(frozen=True)
class Shares:
    """`values` `(K,)` float64 sum to 1. `even_handed`: no score was above 0, so that all scores counted as equal."""

    values: Tensor
    even_handed: bool


def shares(scores: Tensor, samples: Sequence[float] | None = None) -> Shares:
    """Shares in proportion to score times number of samples (Eq. 9), or to the score alone, for finite scores `(K,)`.

    A score below 0 counts as 0. If no score is above 0, all count as equal.
    """
    useful = scores.to(torch.float64).clamp(min=0)
    useful = useful / useful.max().clamp(min=torch.finfo(torch.float64).tiny)
    counts = torch.ones_like(useful) if samples is None else torch.tensor(samples, dtype=torch.float64)
    counts = counts if bool(counts.sum() > 0) else torch.ones_like(counts)
    weighted = useful * counts
    even_handed = not bool(weighted.sum() > 0)
    weighted = counts if even_handed else weighted
    return Shares(weighted / weighted.sum(), even_handed)


@dataclass(frozen=True)
class _Sums:
    """Sums over some of the teachers, `(n, C)` each: of ballots and of probabilities; and, over those that pass the
    gate, by first choice, their number (`heads`) and the sum of their highest probabilities (`confidence`)."""

    ballots: Tensor
    probabilities: Tensor
    heads: Tensor
    confidence: Tensor


@dataclass(frozen=True)
class _Ballots:
    """The votes of K teachers on n samples: probabilities and ballots `(K, n, C)`; first choices, their probabilities
    (`confidence`) and whether they pass the gate `(K, n)`. Without passing, ballots and confidence are 0."""

    rule: Rule
    probabilities: Tensor
    ballots: Tensor
    choices: Tensor
    confidence: Tensor
    passes: Tensor

    def sums(self) -> _Sums:
        """The sums over all teachers."""
        nothing = torch.zeros_like(self.probabilities[0])
        heads = nothing.scatter_add(1, self.choices.T, self.passes.T.double())
        confidence = nothing.scatter_add(1, self.choices.T, self.confidence.T)
        return _Sums(self.ballots.sum(0), self.probabilities.sum(0), heads, confidence)

    def no_sums(self) -> _Sums:
        """Sums over no teacher, to be filled by `add`."""
        return _Sums(*(torch.zeros_like(self.probabilities[0]) for _ in range(4)))

    def add(self, sums: _Sums, teacher: int, sign: float) -> None:
        """Adds a teacher (sign 1) or removes it (sign -1)."""
        choice = self.choices[teacher][:, None]
        sums.ballots.add_(self.ballots[teacher], alpha=sign)
        sums.probabilities.add_(self.probabilities[teacher], alpha=sign)
        sums.heads.scatter_add_(1, choice, sign * self.passes[teacher].double()[:, None])
        sums.confidence.scatter_add_(1, choice, sign * self.confidence[teacher][:, None])

    def quality(self, sums: _Sums, size: int) -> Tensor:
        """n_p max p for `size` teachers and their sums, `(n,)`. The mean of the supporters is highest at their common
        first choice, so that n_p max p is the sum of their highest probabilities."""
        if size == 0:
            return torch.zeros(len(sums.heads), dtype=torch.float64)
        elected = sums.ballots.argmax(1, keepdim=True)
        doubtful = sums.probabilities.amax(1) / size * self.rule.doubt
        supported = sums.heads.gather(1, elected).squeeze(1) > 0
        return torch.where(supported, sums.confidence.gather(1, elected).squeeze(1), doubtful)


def _count(ballots: _Ballots) -> tuple[Tensor, Tensor, Tensor]:
    """p, consensus classes and numbers of supporters for a chunk."""
    sums = ballots.sums()
    elected = sums.ballots.argmax(1)
    supports = ballots.passes & (ballots.choices == elected)
    supporters = supports.sum(0)
    supported = (supporters > 0)[:, None]
    agreed = (ballots.probabilities * supports[..., None]).sum(0) / supporters.clamp(min=1)[:, None]
    probabilities = torch.where(supported, agreed, sums.probabilities / len(ballots.choices))
    # Without supporters, the class is the one with the highest sum over all teachers.
    everyone = sums.probabilities
    if ballots.rule.ballot == "top":
        tops = ballots.probabilities.amax(2)
        everyone = torch.zeros_like(everyone).scatter_add_(1, ballots.choices.T, tops.T)
    classes = torch.where(supported[:, 0], elected, everyone.argmax(1))
    return probabilities.float(), classes, supporters


def _quality_without_each(ballots: _Ballots, sums: _Sums) -> Tensor:
    """n_p max p of each sample in the vote without teacher k, `(K, n)`, from the sums over all teachers."""
    count, samples = ballots.choices.shape
    if count == 1:
        return torch.zeros(1, samples, dtype=torch.float64)
    best, elected = sums.ballots.max(1)
    runner_up = sums.ballots.scatter(1, elected[:, None], -1.0).amax(1)
    own = ballots.ballots.gather(2, elected.expand(count, -1)[..., None]).squeeze(2)
    # Without k no sum grows, so the elected class stays if its remaining sum is above the runner-up's full sum.
    # Otherwise all classes are compared again.
    teacher, sample = (best - own <= runner_up).logical_and_(ballots.passes).nonzero(as_tuple=True)
    classes = elected.repeat(count, 1)
    classes[teacher, sample] = (sums.ballots[sample] - ballots.ballots[teacher, sample]).argmax(1)
    leaves = ballots.passes & (ballots.choices == classes)
    heads = sums.heads.gather(1, classes.T).T - leaves.double()
    quality = sums.confidence.gather(1, classes.T).T - ballots.confidence * leaves
    teacher, sample = (heads == 0).nonzero(as_tuple=True)
    rest = (sums.probabilities[sample] - ballots.probabilities[teacher, sample]).amax(1)
    quality[teacher, sample] = rest / (count - 1) * ballots.rule.doubt
    return quality


def _chunks(teachers: Tensor, rule: Rule) -> Iterator[_Ballots]:
    count, _, classes = teachers.shape
    if not 0 < count < _MOST_TEACHERS:
        raise ValueError(f"a vote takes 1 to {_MOST_TEACHERS - 1} teachers, not {count}")
    for part in teachers.detach().split(max(1, _CHUNK_NUMBERS // (count * classes)), dim=1):
        if part.shape[1]:
            yield _ballots(part, rule)


def _ballots(teachers: Tensor, rule: Rule) -> _Ballots:
    probabilities = teachers.to(torch.float64).mul(_GRID).round_().div_(_GRID)
    highest, choices = probabilities.max(2)
    passes = highest > rule.gate
    confidence = highest * passes
    if rule.ballot == "vector":
        ballots = probabilities * passes[..., None]
    else:
        ballots = torch.zeros_like(probabilities).scatter_(2, choices[..., None], confidence[..., None])
    return _Ballots(rule, probabilities, ballots, choices, confidence, passes)
