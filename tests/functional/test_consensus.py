"""Votes and their worth, against hand-made cases and a slow twin that counts sample by sample in exact fractions."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from fractions import Fraction

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from fedshift.functional import consensus
from fedshift.functional.consensus import (
    Rule,
    consensus_focus,
    knowledge_vote,
    sample_quality,
    sampled_shapley_values,
    shapley_values,
    shares,
)


def teachers(*opinions: Sequence[float]) -> Tensor:
    """What K teachers say of one sample, `(K, 1, C)`."""
    return torch.tensor(opinions)[:, None]


# --- The slow twin --------------------------------------------------------------------------------------------------


def on_grid(value: float) -> Fraction:
    return Fraction(round(value * 2**40), 2**40)


def first_highest(values: Sequence[Fraction]) -> int:
    return values.index(max(values))


def slow_vote(opinions: list[list[Fraction]], rule: Rule) -> tuple[list[Fraction], int, int, Fraction]:
    """p, consensus class, supporters and n_p max p of one sample, from the text of the paper."""
    classes = range(len(opinions[0]))
    confident = [q for q in opinions if max(q) > Fraction(rule.gate)]
    everyone = [sum((q[c] for q in opinions), Fraction()) for c in classes]
    supporters: list[list[Fraction]] = []
    elected = 0
    if confident:
        ballots = confident
        if rule.ballot == "top":
            ballots = [[q[c] if c == first_highest(q) else Fraction() for c in classes] for q in confident]
        elected = first_highest([sum((b[c] for b in ballots), Fraction()) for c in classes])
        supporters = [q for q in confident if first_highest(q) == elected]
    if supporters:
        p = [sum((q[c] for q in supporters), Fraction()) / len(supporters) for c in classes]
        return p, elected, len(supporters), len(supporters) * max(p)
    p = [total / len(opinions) for total in everyone]
    if rule.ballot == "top":
        everyone = [sum((q[c] for q in opinions if first_highest(q) == c), Fraction()) for c in classes]
    return p, first_highest(everyone), 0, Fraction(rule.doubt) * max(p)


def slow_quality(q: Tensor, members: Sequence[int], rule: Rule) -> Fraction:
    """Q of Eq. (7) for some of the teachers."""
    if not members:
        return Fraction()
    rows = [[[on_grid(v) for v in q[k, x].tolist()] for k in members] for x in range(q.shape[1])]
    return sum((slow_vote(row, rule)[3] for row in rows), Fraction())


@st.composite
def opinions(draw: st.DrawFn, most: int = 4) -> Tensor:
    """A few teachers with coarse probabilities, so that ties, gates that are just met and contradictions are common."""
    count, samples, classes = draw(st.integers(1, most)), draw(st.integers(1, 5)), draw(st.integers(1, 4))
    total = count * samples * classes
    parts = draw(st.lists(st.integers(0, 8), min_size=total, max_size=total))
    numbers = torch.tensor(parts, dtype=torch.float32).reshape(count, samples, classes) + 1e-3
    return numbers / numbers.sum(2, keepdim=True)


rules = st.builds(
    Rule,
    gate=st.sampled_from([0.2, 0.4, 0.5, 0.6, 0.9]),
    ballot=st.sampled_from(["vector", "top"]),
    doubt=st.sampled_from([0.001, 0.0, 0.5]),
)


@settings(max_examples=150, deadline=None)
@given(q=opinions(), rule=rules)
def test_the_vote_is_what_the_paper_says_sample_by_sample(q: Tensor, rule: Rule) -> None:
    votes = knowledge_vote(q, rule)
    for x in range(q.shape[1]):
        p, elected, supporters, quality = slow_vote([[on_grid(v) for v in row] for row in q[:, x].tolist()], rule)
        assert int(votes.supporters[x]) == supporters
        assert int(votes.classes[x]) == elected
        assert votes.probabilities[x].tolist() == pytest.approx([float(v) for v in p], rel=1e-6)
        assert float(sample_quality(q, rule)[x]) == pytest.approx(float(quality), rel=1e-12)


@settings(max_examples=150, deadline=None)
@given(q=opinions(), rule=rules)
def test_focus_is_the_difference_that_a_vote_without_the_teacher_makes(q: Tensor, rule: Rule) -> None:
    everyone = range(len(q))
    whole = slow_quality(q, everyone, rule)
    slow = [float(whole - slow_quality(q, [j for j in everyone if j != k], rule)) for k in everyone]
    assert consensus_focus(q, rule).tolist() == pytest.approx(slow, rel=1e-12, abs=1e-12)


@settings(max_examples=100, deadline=None)
@given(q=opinions(), rule=rules, data=st.data())
def test_the_order_of_teachers_changes_no_bit(q: Tensor, rule: Rule, data: st.DataObject) -> None:
    order = data.draw(st.permutations(range(len(q))))
    votes, turned = knowledge_vote(q, rule), knowledge_vote(q[order], rule)
    for name in ("probabilities", "classes", "supporters"):
        assert torch.equal(getattr(votes, name), getattr(turned, name))
    assert torch.equal(consensus_focus(q, rule)[order], consensus_focus(q[order], rule))


# --- Votes by hand ----------------------------------------------------------------------------------------------------


def test_a_unanimous_vote_is_the_mean_of_all() -> None:
    votes = knowledge_vote(teachers([0.95, 0.05, 0.0], [0.93, 0.0, 0.07], [0.97, 0.02, 0.01]), Rule(0.9))
    assert votes.probabilities.tolist()[0] == pytest.approx([0.95, 0.07 / 3, 0.08 / 3])
    assert (votes.classes.tolist(), votes.supporters.tolist()) == ([0], [3])


def test_a_single_confident_teacher_decides_alone() -> None:
    q = teachers([0.5, 0.5], [0.04, 0.96], [0.9, 0.1])  # 0.9 is not above the gate
    votes = knowledge_vote(q, Rule(0.9))
    assert votes.probabilities.tolist()[0] == pytest.approx([0.04, 0.96])
    assert votes.supporters.tolist() == [1]
    assert float(sample_quality(q, Rule(0.9))) == pytest.approx(0.96)


def test_those_who_contradict_the_consensus_are_dropped() -> None:
    q = teachers([0.92, 0.08], [0.94, 0.06], [0.01, 0.99])
    votes = knowledge_vote(q, Rule(0.9))
    assert votes.probabilities.tolist()[0] == pytest.approx([0.93, 0.07])
    assert votes.supporters.tolist() == [2]
    assert float(sample_quality(q, Rule(0.9))) == pytest.approx(2 * 0.93)


def test_where_nobody_is_confident_the_mean_of_all_counts_next_to_nothing() -> None:
    q = teachers([0.8, 0.2], [0.3, 0.7])
    votes = knowledge_vote(q, Rule(0.9))
    assert votes.probabilities.tolist()[0] == pytest.approx([0.55, 0.45])
    assert (votes.classes.tolist(), votes.supporters.tolist()) == ([0], [0])
    assert float(sample_quality(q, Rule(0.9))) == pytest.approx(0.001 * 0.55)
    assert float(sample_quality(q, Rule(0.9, doubt=0.0))) == 0


def test_equal_sums_go_to_the_lower_class_in_any_order() -> None:
    for q in (teachers([0.05, 0.95], [0.95, 0.05]), teachers([0.95, 0.05], [0.05, 0.95])):
        votes = knowledge_vote(q, Rule(0.9))
        assert (votes.classes.tolist(), votes.supporters.tolist()) == ([0], [1])
        assert votes.probabilities.tolist()[0] == pytest.approx([0.95, 0.05])


def test_a_class_that_is_nobodys_first_choice_has_no_supporters() -> None:
    """Two teachers, both sure enough, and both with the same second choice: their sum favours it."""
    q = teachers([0.51, 0.49, 0.0], [0.0, 0.49, 0.51])
    votes = knowledge_vote(q, Rule(0.5))
    assert (votes.classes.tolist(), votes.supporters.tolist()) == ([1], [0])
    assert votes.probabilities.tolist()[0] == pytest.approx([0.255, 0.49, 0.255])
    # Ballots for the first choice alone cannot do that.
    votes = knowledge_vote(q, Rule(0.5, "top"))
    assert (votes.classes.tolist(), votes.supporters.tolist()) == ([0], [1])


def test_ballots_for_the_first_choice_leave_the_rest_out_of_the_count() -> None:
    q = teachers([0.6, 0.4], [0.3, 0.7], [0.55, 0.45])  # sums 1.45 to 1.55, first choices 1.15 to 0.7
    assert knowledge_vote(q, Rule(0.5)).classes.tolist() == [1]
    assert knowledge_vote(q, Rule(0.5, "top")).classes.tolist() == [0]


def test_one_teacher_votes_alone() -> None:
    votes = knowledge_vote(torch.tensor([[[0.95, 0.05], [0.4, 0.6]]]), Rule(0.9))
    assert votes.supporters.tolist() == [1, 0]
    assert votes.probabilities.flatten().tolist() == pytest.approx([0.95, 0.05, 0.4, 0.6])


def test_chunks_do_not_show(monkeypatch: pytest.MonkeyPatch) -> None:
    q = (4 * torch.randn(4, 50, 3, generator=torch.Generator().manual_seed(0))).softmax(2)
    rule = Rule(0.9)
    whole = knowledge_vote(q, rule), consensus_focus(q, rule), shapley_values(q, rule)
    monkeypatch.setattr(consensus, "_CHUNK_NUMBERS", 40)
    parts = knowledge_vote(q, rule), consensus_focus(q, rule), shapley_values(q, rule)
    assert torch.equal(whole[0].probabilities, parts[0].probabilities)
    assert torch.equal(whole[0].supporters, parts[0].supporters)
    assert torch.allclose(whole[1], parts[1], rtol=1e-12) and torch.allclose(whole[2], parts[2], rtol=1e-12)


def test_no_samples_and_no_teachers() -> None:
    empty = torch.zeros(2, 0, 3)
    assert knowledge_vote(empty, Rule(0.9)).probabilities.shape == (0, 3)
    assert consensus_focus(empty, Rule(0.9)).tolist() == [0, 0]
    with pytest.raises(ValueError, match="1 to 8191 teachers, not 0"):
        knowledge_vote(torch.zeros(0, 2, 3), Rule(0.9))


# --- Focus by hand ----------------------------------------------------------------------------------------------------


def test_a_copy_of_a_good_teacher_adds_as_much_as_the_original() -> None:
    good = [0.95, 0.05]
    focus = consensus_focus(teachers(good, good, [0.97, 0.03]), Rule(0.9))
    # Without one of three, two are left: n_p max p falls by that one's confidence.
    assert focus.tolist() == pytest.approx([0.95, 0.95, 0.97])


def test_a_teacher_that_knows_nothing_adds_nothing() -> None:
    focus = consensus_focus(teachers([0.95, 0.05], [0.5, 0.5], [0.96, 0.04]), Rule(0.9))
    assert focus.tolist()[1] == 0
    assert focus.tolist()[::2] == pytest.approx([0.95, 0.96])


def test_a_confident_teacher_that_stands_alone_adds_nothing() -> None:
    focus = consensus_focus(teachers([0.95, 0.05], [0.02, 0.98], [0.96, 0.04]), Rule(0.9))
    # Without the first, 0.98 against 0.96: the contrarian wins and Q falls from 1.91 to 0.98.
    assert focus.tolist() == pytest.approx([1.91 - 0.98, 0.0, 1.91 - 0.98])


def test_a_teacher_that_turns_the_consensus_away_from_more_supporters_is_worse_than_none() -> None:
    pair = [0.51, 0.49]
    focus = consensus_focus(teachers(pair, pair, [0.4, 0.6]), Rule(0.5))
    assert focus.tolist()[2] == pytest.approx(0.6 - 1.02)


def test_a_tie_that_only_a_leaving_teacher_leaves_goes_to_the_lower_class() -> None:
    """All: class 1 by 1.625 to 0.875, Q = 1.375. Without the first: 0.875 each, class 0, Q = 0.75."""
    focus = consensus_focus(teachers([0.0, 0.75, 0.25], [0.75, 0.25, 0.0], [0.125, 0.625, 0.25]), Rule(0.5))
    assert float(focus[0]) == 1.375 - 0.75


def test_random_teachers_are_worth_less_than_good_ones() -> None:
    generator = torch.Generator().manual_seed(0)
    truth = torch.nn.functional.one_hot(torch.randint(10, (400,), generator=generator), 10)
    good = (8.0 * truth + torch.randn(3, 400, 10, generator=generator)).softmax(2)
    random = (8.0 * torch.randn(1, 400, 10, generator=generator)).softmax(2)  # often confident, by chance right
    focus = consensus_focus(torch.cat([good, random]), Rule(0.9))
    assert float(focus[3]) < 0.2 * float(focus[:3].min())


def test_one_teacher_has_all_of_the_quality() -> None:
    q = torch.tensor([[[0.95, 0.05], [0.4, 0.6]]])
    assert consensus_focus(q, Rule(0.9)).tolist() == pytest.approx([0.95 + 0.001 * 0.6])


# --- Shapley values ---------------------------------------------------------------------------------------------------


def shapley_by_permutations(q: Tensor, rule: Rule) -> list[float]:
    """As the authors' code has it."""
    count = len(q)
    values = [Fraction()] * count
    for order in itertools.permutations(range(count)):
        for place, k in enumerate(order):
            values[k] += slow_quality(q, order[: place + 1], rule) - slow_quality(q, order[:place], rule)
    return [float(value / math.factorial(count)) for value in values]


@settings(max_examples=40, deadline=None)
@given(q=opinions(), rule=rules)
def test_subsets_give_the_shapley_values_that_permutations_give(q: Tensor, rule: Rule) -> None:
    values = shapley_values(q, rule)
    assert values.tolist() == pytest.approx(shapley_by_permutations(q, rule), rel=1e-12, abs=1e-12)
    assert float(values.sum()) == pytest.approx(float(sample_quality(q, rule).sum()), abs=1e-12)


def test_two_teachers_by_hand() -> None:
    """Q({a}) = 0.95, Q({b}) = 0.97, Q({a, b}) = 1.92."""
    assert shapley_values(teachers([0.95, 0.05], [0.97, 0.03]), Rule(0.9)).tolist() == pytest.approx([0.95, 0.97])
    # Who contradicts: Q({a}) = 0.95, Q({b}) = 0.97 = Q({a, b}).
    values = shapley_values(teachers([0.95, 0.05], [0.03, 0.97]), Rule(0.9)).tolist()
    assert values == pytest.approx([0.95 / 2, 0.97 / 2 + 0.02 / 2])


def test_sampled_values_add_up_come_near_and_can_be_repeated() -> None:
    q = (4 * torch.randn(6, 30, 4, generator=torch.Generator().manual_seed(1))).softmax(2)
    rule = Rule(0.6)

    def sampled(samples: int, seed: int) -> Tensor:
        return sampled_shapley_values(q, rule, samples, torch.Generator().manual_seed(seed))

    exact, total = shapley_values(q, rule), float(sample_quality(q, rule).sum())
    assert float(sampled(1, 0).sum()) == pytest.approx(total)
    assert torch.equal(sampled(5, 0), sampled(5, 0)) and not torch.equal(sampled(5, 0), sampled(5, 1))
    few, many = (float((sampled(samples, 0) - exact).abs().max()) for samples in (4, 400))
    assert many < few / 3 and many < 0.03 * total


def test_too_many_subsets_are_refused() -> None:
    with pytest.raises(ValueError, match=r"13 teachers take 2\^13 votes"):
        shapley_values(torch.full((13, 1, 2), 0.5), Rule(0.9))


# --- Shares -----------------------------------------------------------------------------------------------------------


def test_shares_by_hand() -> None:
    """Eq. (9) without the target: N_k CF_k / sum."""
    found = shares(torch.tensor([3.0, 1.0, -2.0]), [100, 300, 1000])
    assert found.values.tolist() == pytest.approx([0.5, 0.5, 0.0]) and not found.even_handed
    assert shares(torch.tensor([3.0, 1.0, -2.0])).values.tolist() == pytest.approx([0.75, 0.25, 0.0])


def test_without_a_useful_teacher_sizes_decide() -> None:
    found = shares(torch.tensor([0.0, -1.0]), [100, 300])
    assert found.values.tolist() == pytest.approx([0.25, 0.75]) and found.even_handed
    assert shares(torch.tensor([0.0, -1.0])).values.tolist() == [0.5, 0.5]
    assert shares(torch.tensor([1.0, 1.0]), [0, 0]).values.tolist() == [0.5, 0.5]


huge = st.floats(allow_nan=False, allow_infinity=False, width=32) | st.floats(-50, 50, width=32)


@settings(max_examples=100, deadline=None)
@given(data=st.data(), rule=rules)
def test_any_finite_logits_give_finite_shares_that_sum_to_one(data: st.DataObject, rule: Rule) -> None:
    count, samples, classes = (data.draw(st.integers(low, 4)) for low in (1, 1, 2))
    total = count * samples * classes
    logits = torch.tensor(data.draw(st.lists(huge, min_size=total, max_size=total)))
    q = logits.reshape(count, samples, classes).softmax(2)
    sizes = data.draw(st.lists(st.integers(0, 10**12), min_size=count, max_size=count))
    generator = torch.Generator().manual_seed(0)
    for scores in (consensus_focus(q, rule), shapley_values(q, rule), sampled_shapley_values(q, rule, 3, generator)):
        for given_sizes in (sizes, None):
            values = shares(scores, given_sizes).values
            assert bool(torch.isfinite(values).all()) and bool((values >= 0).all())
            assert float(values.sum()) == pytest.approx(1)
    assert bool(torch.isfinite(knowledge_vote(q, rule).probabilities).all())


def test_the_quality_of_a_consensus_is_that_of_its_samples() -> None:
    teachers = torch.randn(4, 50, 3, generator=torch.Generator().manual_seed(3)).mul(3).softmax(2)
    rule = Rule(gate=0.8)
    votes = knowledge_vote(teachers, rule)
    assert 0 < int((votes.supporters == 0).sum()) < 50, "both kinds have to be there"
    assert torch.allclose(votes.quality(rule.doubt).double(), sample_quality(teachers, rule), atol=1e-6)
