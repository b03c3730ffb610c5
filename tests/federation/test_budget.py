"""A site's budget of differential privacy: what leaves under it, what it costs, and that it is kept."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from fedshift.errors import InputError, SiteError
from fedshift.federation.budget import Budget, Guard, Public, RecordPrivacy, rounded_to
from fedshift.federation.policy import Policy, Promise
from fedshift.federation.releases import Features, Release
from fedshift.functional.accountant import Mechanism, epsilon_of
from fedshift.methods.averaging import Trained
from fedshift.methods.evaluation import Scored

SITE = Policy(epsilon=4.0, clip_norm=1.0, noise=4.0)
ONE = epsilon_of([Mechanism(2.0)], 1e-5)
"""What one answer costs there: two updates are at most 2 apart, and the noise is 4."""
OLD = {"w": torch.zeros(20_000), "bn.running_var": torch.zeros(3), "n": torch.tensor(3)}
SIZES = Public(training=800, scored=100)


def guard(folder: Path, policy: Policy = SITE, question: str = "q", run: str = "run", data: str = "d") -> Guard:
    return Guard(policy, folder / "secret", folder / run, question, data)


def trained(value: float, count: int = 20) -> Trained:
    model = {"w": torch.full((20_000,), value), "bn.running_var": torch.ones(3), "n": torch.tensor(9)}
    return Trained(model, count, 0.7)


def answered(folder: Path, release: Trained | None = None, **how: Any) -> tuple[Trained, float]:
    found, epsilon = guard(folder, **how).protect(release or trained(0.5), {"model": OLD}, SIZES, is_score=False)
    assert isinstance(found, Trained)
    return found, epsilon


def test_what_leaves_is_a_clipped_update_with_noise_and_what_is_public(tmp_path: Path) -> None:
    found, epsilon = answered(tmp_path)
    other, _ = answered(tmp_path / "other", trained(-3.0, 500))
    assert epsilon == pytest.approx(ONE)
    for one in (found, other):
        assert abs(float(one.model["w"].std()) - 4.0) < 0.1, "the noise; the clipped update is 1 long"
        assert int(one.model["n"]) == 3, "buffers that are no numbers to train leave as they came"
        assert float(one.model["bn.running_var"].min()) >= 0
        assert (one.samples, one.loss) == (800, 0.0), "what no noise could hide is the same for all data"


def test_the_mean_of_many_answers_is_the_clipped_update(tmp_path: Path) -> None:
    policy = Policy(epsilon=1e5, clip_norm=1.0, noise=0.05)
    total = sum(answered(tmp_path, policy=policy, question=str(n))[0].model["w"].double() for n in range(40)) / 40
    length = float(torch.as_tensor(total).sum()) / 20_000**0.5  # along the update
    assert length == pytest.approx(1.0, abs=0.05)


def test_the_same_answer_again_is_paid_once_and_another_one_again(tmp_path: Path) -> None:
    policy = Policy(epsilon=10.0, clip_norm=1.0, noise=4.0)
    first, epsilon = answered(tmp_path, policy=policy)
    again, still = answered(tmp_path, policy=policy)
    assert torch.equal(first.model["w"], again.model["w"]) and still == epsilon
    spent = epsilon
    for how in ({"question": "other"}, {"run": "other"}, {"data": "other"}, {"release": trained(0.6)}):
        release = how.pop("release", None)
        found, now = answered(tmp_path, release, policy=policy, **how)  # type: ignore[arg-type]
        assert not torch.allclose(found.model["w"], first.model["w"], atol=0.1) and now > spent
        spent = now
    assert spent == pytest.approx(epsilon_of([Mechanism(2.0, times=5)], 1e-5))


def test_equal_updates_of_two_questions_do_not_show_that_they_are_equal(tmp_path: Path) -> None:
    """Noise from the content alone would be equal here, and different if the data made the updates differ."""
    one, two = (answered(tmp_path, question=question)[0].model["w"] for question in ("round 1", "round 2"))
    assert float(torch.corrcoef(torch.stack([one, two]))[0, 1]) < 0.05


def test_an_answer_beyond_the_budget_does_not_leave_in_any_run(tmp_path: Path) -> None:
    count = 0
    with pytest.raises(SiteError, match=r"policy\.epsilon is 4") as caught:
        for count in range(100):
            answered(tmp_path, question=str(count), run=f"run{count % 3}")
    assert caught.value.code == "privacy-budget"
    assert epsilon_of([Mechanism(2.0, times=count)], 1e-5) <= 4.0 < epsilon_of([Mechanism(2.0, times=count + 1)], 1e-5)
    answered(tmp_path, question="0", run="run0")  # paid for already


def test_a_budget_file_that_is_damaged_lets_nothing_out(tmp_path: Path) -> None:
    answered(tmp_path)
    file = tmp_path / "privacy-budget.json"
    for text in ("{", json.dumps({"format": 1, "spent": [{"noise": -1.0, "rate": 1.0, "times": 1}]})):
        file.write_text(text)
        with pytest.raises(SiteError, match="damaged"):
            answered(tmp_path, question="next")


def test_an_update_that_is_not_finite_leaves_as_none(tmp_path: Path) -> None:
    for number, value in enumerate((float("nan"), float("inf"))):
        found, _ = answered(tmp_path, trained(value), question=str(number))
        assert bool(torch.isfinite(found.model["w"]).all())


def test_large_weights_of_the_coordinator_do_not_swallow_the_noise(tmp_path: Path) -> None:
    huge = {key: torch.full_like(value, 1e12) if value.is_floating_point() else value for key, value in OLD.items()}
    near = {key: value + 1 if value.is_floating_point() else value for key, value in huge.items()}
    release, _ = guard(tmp_path).protect(Trained(near, 20, 0.1), {"model": huge}, SIZES, is_score=False)
    assert bool(torch.isfinite(release.model["w"]).all())  # type: ignore[attr-defined]


def test_other_kinds_stay(tmp_path: Path) -> None:
    @dataclass(frozen=True)
    class Told(Release):
        features: Features

    with pytest.raises(SiteError, match="'features' cannot leave"):
        guard(tmp_path).protect(Told({"x": torch.zeros(2)}), {}, SIZES, is_score=False)


def test_scores_are_refused_exact_or_noised_to_the_public_total(tmp_path: Path) -> None:
    table = torch.diag(torch.tensor([50, 50]))
    with pytest.raises(SiteError, match=r"policy\.scores"):
        guard(tmp_path).protect(Scored(table), {}, SIZES, is_score=True)
    exact = Policy(epsilon=4.0, clip_norm=1.0, noise=4.0, scores="exact")
    release, epsilon = guard(tmp_path, exact).protect(Scored(table), {}, SIZES, is_score=True)
    assert torch.equal(release.confusion, table) and epsilon == 0  # type: ignore[attr-defined]
    noised = Policy(record_epsilon=4.0, dp_noise=2.0, scores="noise")
    drawn = []
    for number in range(12):
        release, epsilon = guard(tmp_path / str(number), noised).protect(Scored(table), {}, SIZES, is_score=True)
        found = release.confusion  # type: ignore[attr-defined]
        assert int(found.sum()) == 100 and int(found.min()) >= 0 and abs(int(found.diag().sum()) - 100) < 30
        assert epsilon == pytest.approx(ONE)
        drawn.append(found)
    assert not all(torch.equal(found, table) for found in drawn)  # Noise of one draw may round to nothing.


def test_rounding_keeps_the_total() -> None:
    assert rounded_to(torch.tensor([-3.0, 1.4, 1.4, 7.2]), 10).tolist() == [0, 2, 1, 7]
    assert rounded_to(torch.tensor([-3.0, -1.0]), 3).tolist() == [2, 1]


def test_single_samples_take_a_step_that_trains_by_them(tmp_path: Path) -> None:
    policy = Policy(record_epsilon=8.0, dp_noise=1.5)
    with pytest.raises(SiteError, match="does not train by DP-SGD"):
        answered(tmp_path, policy=policy)
    kept = guard(tmp_path, policy)
    assert isinstance(kept.record, RecordPrivacy)
    kept.record.rate, kept.record.steps = 0.1, 13
    release, epsilon = kept.protect(trained(0.5), {"model": OLD}, SIZES, is_score=False)
    assert epsilon == pytest.approx(epsilon_of([Mechanism(1.5, 0.1, 13)], 1e-5))
    assert torch.equal(release.model["w"], torch.full((20_000,), 0.5))  # type: ignore[attr-defined]


def test_what_runs_spend_at_the_same_time_is_added_up(tmp_path: Path) -> None:
    promise = Promise("site", 100.0, 1e-5, 2.0)
    one, two = (Budget(tmp_path / "secret", tmp_path / run, promise) for run in "ab")
    one.charge(Mechanism(2.0), "x")
    assert two.charge(Mechanism(2.0), "x") == one.epsilon == pytest.approx(epsilon_of([Mechanism(2.0, times=2)], 1e-5))


@pytest.mark.parametrize(
    ("keys", "words"),
    [
        ({"epsilon": 8.0}, "takes policy.clip_norm and policy.noise"),
        ({"epsilon": 0}, "a number above 0"),
        ({"epsilon": 8.0, "clip_norm": 1.0, "noise": 1.0, "delta": 1}, "below 1"),
        ({"record_epsilon": 8.0}, "takes policy.dp_noise"),
        ({"record_epsilon": 8.0, "dp_noise": 1.0, "noise": 1.0}, "leave out"),
        ({"record_epsilon": 8.0, "dp_noise": 1.0, "epsilon": 8.0}, "one of them"),
        ({"scores": "sometimes"}, "refuse, noise or exact"),
    ],
)
def test_a_budget_that_is_not_understood_is_an_error(keys: dict[str, Any], words: str) -> None:
    with pytest.raises(InputError, match=words):
        Policy(**keys)
