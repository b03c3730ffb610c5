"""Models as coded changes: what coding loses is bounded, and what must be exact is."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from fedshift.functional.compression import BLOCK, Coding, Form, decode, encode, form_of, largest, most_bytes

CODINGS: tuple[Coding, ...] = ("bf16", "int8", "int4", "topk")
BOUNDS = {"bf16": 2**-8, "int8": 1 / 16, "int4": 0.5}
"""Of each number, in the largest change of its block."""


def model(seed: int, scale: float = 1.0) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [
        scale * torch.randn(40, 30, generator=generator),
        scale * torch.randn(40, generator=generator).abs(),
        torch.tensor(seed),
        scale * torch.randn(8, 3, 3, 3, generator=generator),
        torch.tensor([True, False, seed > 1]),
        torch.randn(5, generator=generator, dtype=torch.float64),
        torch.zeros(0, 4),
    ]


def there_and_back(tensors: list[Tensor], base: list[Tensor] | None, coding: Coding) -> list[Tensor]:
    return decode(encode(tensors, base, coding), [form_of(one) for one in tensors], base, coding)


def test_numbers_that_can_be_recomputed() -> None:
    """Two blocks with steps 0.5 and 0: 3.5 is 7 steps of 0.5, 0.6 one, 0.2 none."""
    base, new = [torch.zeros(2, BLOCK)], [torch.zeros(2, BLOCK)]
    new[0][0, :3] = torch.tensor([-3.5, 0.6, 0.2])
    (found,) = there_and_back(new, base, "int4")
    assert found[0, :4].tolist() == [-3.5, 0.5, 0.0, 0.0] and not found[1].any()
    coded = encode(new, base, "int4")
    assert len(coded) == 2 * 4 + 2 * BLOCK // 2 == most_bytes([form_of(new[0])], "int4")


@pytest.mark.parametrize("coding", CODINGS)
def test_what_is_lost_is_bounded_and_counters_are_exact(coding: Coding) -> None:
    base = model(0)
    new = [old if old.dtype == torch.bool else old + 0.01 * add for old, add in zip(base, model(9), strict=True)]
    new[2], new[4] = torch.tensor(7), ~base[4]
    found = there_and_back(new, base, coding)
    assert [form_of(one) for one in found] == [form_of(one) for one in new]
    for place in (2, 4, 5):
        assert torch.equal(found[place], new[place]), "not a bit of what is not float32 is lost"
    assert float((found[1] - new[1]).abs().max()) <= 2**-7 * float((new[1] - base[1]).abs().max())
    for place in (0, 3):
        change, lost = new[place] - base[place], (found[place] - new[place]).abs()
        if coding == "topk":
            assert 0 < int((found[place] != base[place]).sum()) < 0.12 * change.numel()
            continue
        assert float(lost.max()) <= BOUNDS[coding] * float(change.abs().max()) + 1e-7
        assert float(lost.norm() / change.norm()) <= {"bf16": 0.004, "int8": 0.03, "int4": 0.3}[coding]


def test_a_whole_model_is_exact_but_for_the_last_bits_of_wide_tensors() -> None:
    new = model(3)
    found = there_and_back(new, None, "full")
    for place, tensor in enumerate(new):
        if form_of(tensor).group == "wide":
            assert torch.equal(found[place], tensor.to(torch.bfloat16).float())
        else:
            assert torch.equal(found[place], tensor)


@pytest.mark.parametrize("coding", CODINGS)
def test_what_did_not_change_stays_as_it_is_and_takes_no_bytes_that_differ(coding: Coding) -> None:
    base = model(1)
    coded = encode([one.clone() for one in base], base, coding)
    assert not coded.any()
    assert all(torch.equal(one, other) for one, other in zip(there_and_back(base, base, coding), base, strict=True))


@settings(max_examples=200, deadline=None)
@given(
    old=st.floats(0, 2.0**100, width=32),
    new=st.floats(0, 2.0**100, width=32),
    coding=st.sampled_from(CODINGS),
)
def test_a_variance_never_falls_below_zero(old: float, new: float, coding: Coding) -> None:
    (found,) = there_and_back([torch.tensor([new])], [torch.tensor([old])], coding)
    assert float(found) >= 0


@settings(max_examples=200, deadline=None)
@given(
    data=st.binary(max_size=3 * BLOCK),
    coding=st.sampled_from(("full", *CODINGS)),
    shapes=st.lists(st.lists(st.integers(0, 12), max_size=3), max_size=3),
)
def test_any_bytes_become_tensors_of_these_forms_or_an_error(
    data: bytes, coding: Coding, shapes: list[list[int]]
) -> None:
    forms = [Form(torch.float32, tuple(shape)) for shape in shapes] + [Form(torch.bool, (3,)), Form(torch.int64, ())]
    base = None if coding == "full" else [torch.zeros(form.shape, dtype=form.dtype) for form in forms]
    try:
        found = decode(torch.tensor(list(data), dtype=torch.uint8), forms, base, coding)
    except ValueError:
        return
    assert [form_of(one) for one in found] == forms and len(data) <= most_bytes(forms, coding)


@pytest.mark.parametrize("coding", CODINGS)
@pytest.mark.parametrize("odd", [math.nan, math.inf])
def test_what_is_not_finite_does_not_become_finite(coding: Coding, odd: float) -> None:
    base = model(1)
    new = [one.clone() for one in base]
    new[0][3, 4] = odd
    assert not torch.isfinite(there_and_back(new, base, coding)[0]).all()


@pytest.mark.parametrize(("coding", "rounds"), [("int4", 12), ("topk", 120)])
def test_sums_with_feedback_converge(coding: Coding, rounds: int) -> None:
    """The same change each round: with what was lost added to the next, sent changes add up to the true ones."""
    base, change = [torch.zeros(16, 64)], [torch.randn(16, 64, generator=torch.Generator().manual_seed(1))]
    total, lost = torch.zeros(16, 64), torch.zeros(16, 64)
    for _ in range(rounds):
        (sent,) = there_and_back([change[0] + lost], base, coding)
        lost = change[0] + lost - sent
        total += sent
    assert torch.allclose(total + lost, rounds * change[0], atol=1e-3)
    mean_error = (total / rounds - change[0]).norm() / change[0].norm()
    single = (there_and_back(change, base, coding)[0] - change[0]).norm() / change[0].norm()
    assert mean_error < 0.2 * single


def test_the_largest_are_chosen_by_magnitude() -> None:
    values = torch.tensor([0.0, -5.0, 1.0, 4.0, -0.5, 0.0, 0.0, 0.0])
    assert largest(values, 0.25).nonzero().flatten().tolist() == [1, 3]
    assert largest(values, 0.9).sum() == 4, "zeros are not worth sending"
    assert not largest(torch.zeros(3), 1.0).any() and len(largest(torch.zeros(0), 0.5)) == 0
