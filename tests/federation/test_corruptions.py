"""What `benchmarks/fuzz.py` does a hundred thousand times, here on fewer answers."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from typing import Any

import pytest

from fedshift.federation.checks import PLAIN_KINDS
from fedshift.federation.releases import kinds
from fedshift.methods import METHODS

FAST = ("fedavg", "feddg", "fada", "dualadapt")
"""Methods that send a kind of release that others do not."""


def _load() -> Any:
    file = Path(__file__).parents[2] / "benchmarks" / "fuzz.py"
    spec = importlib.util.spec_from_file_location("fuzz", file)
    assert spec is not None and spec.loader is not None
    module = sys.modules["fuzz"] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


fuzz = _load()


def check(methods: tuple[str, ...], corruptions: int) -> None:
    answers = fuzz.honest_answers(methods)
    for asked in answers:
        asked.shown(asked.data)
        unknown = [
            field
            for field, kind in kinds(asked.step.release).items()
            if kind.name not in PLAIN_KINDS and field not in asked.expected
        ]
        assert unknown == [], f"{asked.name}, {asked.step.name}: the gate does not know what {unknown} must be like"
    tally = fuzz.attack(answers, corruptions, seed=1)
    assert (tally.exceptions, tally.lies) == ([], [])
    assert tally.tried == corruptions > 10 * len(answers)
    # Not because everything is refused: some flipped bits change a weight a little.
    assert 0 < tally.admitted < corruptions / 4


@pytest.mark.timeout(300)
def test_no_corrupted_answer_raises_and_no_lie_is_admitted() -> None:
    check(FAST, 400)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_no_corrupted_answer_of_any_method_raises_and_no_lie_is_admitted() -> None:
    check(tuple(METHODS.builtin), 5000)


@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="measured as Linux does")
@pytest.mark.parametrize(
    "message", [pytest.param(m, marks=() if m == "lists" else pytest.mark.slow) for m in fuzz.MESSAGES]
)
@pytest.mark.timeout(120)
def test_the_gate_takes_less_than_three_times_the_memory_of_a_message(message: str) -> None:
    """14 MB of nested lists took 700 MB."""
    assert fuzz.memory_ratios([message])[message] < fuzz.MEMORY_BOUND
