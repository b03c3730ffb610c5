"""KD3A: rounds and whole runs on tiny data."""

from __future__ import annotations

import dataclasses
import itertools
import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from kd3a_case import SITES, Edit, listen, notes, opened, overhear, same, settings, teachers_of
from tinydata import shapes, write_domain
from torch import Tensor

from fedshift.errors import InputError
from fedshift.federation.federation import Federation, Rules
from fedshift.functional.consensus import knowledge_vote
from fedshift.methods.base import SHARED
from fedshift.methods.kd3a import kd3a
from fedshift.methods.kd3a.kd3a import KD3A, State, Trained
from fedshift.methods.kd3a.target import distil, first_visits, hear, passes_of
from fedshift.methods.kd3a.weights import smoothed
from fedshift.methods.local import plain_network
from fedshift.rng import Rng
from fedshift.runs.config import make_config
from fedshift.runs.execute import run

# --- Rounds -----------------------------------------------------------------------------------------------------------


def test_a_round_averages_teachers_and_student_by_their_weights(tiny_data: Path, tmp_path: Path) -> None:
    method, state, fed = opened(tiny_data, tmp_path, {"mmd": False, "gate": 0.4, "gate_end": 0.4})
    answers = overhear(fed)
    students: list[dict[str, Tensor]] = []
    home_work = fed.at_home

    def spy(work: Any, **given: Any) -> Any:
        result = home_work(work, **given)
        if work is distil:
            students.append(result[0])
        return result

    fed.at_home = spy  # type: ignore[method-assign, assignment]
    new = method.round(state, fed)
    weights, scores = notes(fed, "weight"), notes(fed, "score")
    assert set(weights) == {*SITES, "dim"} and sum(weights.values()) == pytest.approx(1)
    sizes = {site: answer.samples for site, answer in answers[0].items()}
    own = len(fed.home.train)
    assert weights["dim"] == pytest.approx(own / (sum(sizes.values()) + own))
    useful = {site: sizes[site] * max(0.0, scores[site]) for site in SITES}
    assert sum(useful.values()) > 0
    for site in SITES:
        assert weights[site] == pytest.approx((1 - weights["dim"]) * useful[site] / sum(useful.values()))
    models = {**{site: answer.model for site, answer in answers[0].items()}, "dim": students[0]}
    mean = {
        key: sum(weights[name] * model[key].double() for name, model in models.items())
        for key in state.model
        if state.model[key].is_floating_point()
    }
    assert same({key: new.model[key] for key in mean}, mean, atol=1e-6)
    assert notes(fed, "voted_samples")[""] == own and 0 <= notes(fed, "unsupported_samples")[""] <= own
    assert method.models(new) == {SHARED: new.model}


def test_smoothing_keeps_a_part_of_the_weights() -> None:
    before = {"a": 0.5, "b": 0.3, "dim": 0.2}
    assert smoothed({"a": 0.1, "b": 0.7, "dim": 0.2}, before, 0.9) == pytest.approx({"a": 0.46, "b": 0.34, "dim": 0.2})
    # b is missing, c is new: 0.9 * 0.5 + 0.1 * 0.4 = 0.49, 0.4, 0.2, made to sum to 1.
    found = smoothed({"a": 0.4, "c": 0.4, "dim": 0.2}, before, 0.9)
    assert found == pytest.approx({"a": 0.49 / 1.09, "c": 0.4 / 1.09, "dim": 0.2 / 1.09})


def test_the_authors_way_keeps_heads_at_home_and_momentum_alive(tiny_data: Path, tmp_path: Path) -> None:
    method, state, fed = opened(tiny_data, tmp_path, {"preset": "reference"})
    start = [state.model, *state.heads.values()]
    assert not any(torch.equal(a["head.weight"], b["head.weight"]) for a, b in itertools.combinations(start, 2))
    sent: list[dict[str, Any]] = []
    ask = fed.ask

    def spy(sites: Any, step: Any, **payload: Any) -> Any:
        sent.append(payload)
        return ask(sites, step, **payload)

    fed.ask = spy  # type: ignore[method-assign, assignment]
    answers = overhear(fed)
    first = method.round(state, fed)
    for site in SITES:
        assert torch.equal(first.heads[site]["head.weight"], answers[0][site].model["head.weight"])
    others = [first.heads[site]["head.weight"] for site in SITES]
    assert not any(torch.equal(first.model["head.weight"], other) for other in others)
    supported = notes(fed, "voted_samples")[""] - notes(fed, "unsupported_samples")[""]
    assert notes(fed, "weight")["dim"] == pytest.approx(supported / len(fed.home.train) / 4)
    assert "mmd_loss" not in {note.name for note in fed.notes}
    stored = fed.home.store.load("momentum")
    assert set(stored) == set(dict(plain_network(fed.plan).named_parameters()))
    fed.begin(2)
    method.round(first, fed)
    for site in SITES:
        model = sent[1]["each"][site]["model"]
        assert torch.equal(model["head.weight"], first.heads[site]["head.weight"])
        assert torch.equal(model["backbone.block1.conv.weight"], first.model["backbone.block1.conv.weight"])
    assert not same(fed.home.store.load("momentum"), stored)


def test_momentum_goes_on_from_the_round_before(tiny_data: Path, tmp_path: Path) -> None:
    """Two rounds of one batch each without weight decay are two steps of one optimizer."""
    keys = {"keep_momentum": True, "mmd": False}
    _, state, fed = opened(tiny_data, tmp_path, keys, batch_size=200, weight_decay=0.0, schedule="constant")
    first = fed.ask(("amber",), kd3a.train, model=state.model)["amber"].model
    fed.begin(2)
    second = fed.ask(("amber",), kd3a.train, model=first)["amber"].model
    fresh_method, fresh_state, fresh = opened(
        tiny_data, tmp_path / "fresh", {"mmd": False}, batch_size=200, weight_decay=0.0, schedule="constant"
    )
    fresh.begin(2)
    again = fresh.ask(("amber",), kd3a.train, model=first)["amber"].model
    key = "head.bias"
    step, buffer = again[key] - first[key], first[key] - state.model[key]
    assert torch.allclose(second[key] - first[key], step + 0.9 * buffer, atol=1e-6)
    assert fresh_method.choices.keep_momentum is False and same(fresh_state.model, state.model)


def test_momentum_that_overflowed_is_forgotten(tiny_data: Path, tmp_path: Path) -> None:
    keys = {"keep_momentum": True, "mmd": False}
    _, state, fed = opened(tiny_data, tmp_path, keys, lr=1e30, schedule="constant")
    with pytest.raises(ValueError, match="Out of range float"):  # its loss is not a number and may not leave
        fed.ask(("amber",), kd3a.train, model=state.model)
    _, _, calm = opened(tiny_data, tmp_path, keys)
    calm.begin(2)
    trained = calm.ask(("amber",), kd3a.train, model=state.model)["amber"]
    assert math.isfinite(trained.loss)


def test_poor_choices_are_refused_before_anything_starts(tiny_data: Path, tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"'ambre' is no source\. Did you mean 'amber'"):
        opened(tiny_data, tmp_path, {"drop": ["ambre"]})
    with pytest.raises(InputError, match="no source is left"):
        opened(tiny_data, tmp_path, {"drop": list(SITES)})
    with pytest.raises(InputError, match="h-divergence reads BatchNorm statistics"):
        opened(tiny_data, tmp_path, {"weighting": "h-divergence"}, arch="digits-csac")


def test_too_many_sources_for_exact_shapley_values(tmp_path: Path) -> None:
    root = tmp_path / "many"
    root.mkdir()
    for number in range(14):
        write_domain(root, f"site{number:02d}", train=12, test=6)
    keys = {"weighting": "shapley"}
    with pytest.raises(InputError, match=r"2\^13 votes with 13 sources .* use focus or shapley-sampled"):
        opened(root, tmp_path / "run", keys, target="site00")


def test_a_dropped_source_is_not_asked_to_train(tiny_data: Path, tmp_path: Path) -> None:
    method, state, fed = opened(tiny_data, tmp_path, {"drop": ["blue"], "mmd": False})
    answers = overhear(fed)
    method.round(state, fed)
    assert sorted(answers[0]) == ["amber", "coral"] and set(notes(fed, "weight")) == {"amber", "coral", "dim"}


def huge(release: Trained) -> Trained:
    weight = release.model["head.weight"]
    return dataclasses.replace(release, model={**release.model, "head.weight": torch.full_like(weight, 3e38)})


def test_missing_and_overflowing_teachers_are_left_out(tiny_data: Path, tmp_path: Path) -> None:
    edits: dict[str, Edit] = {"amber": lambda s, r: None, "blue": lambda s, r: huge(r), "coral": lambda s, r: r}
    method, state, fed = opened(tiny_data, tmp_path, {"weighting": "equal"})
    fed.rules = Rules(aggregation="mean")  # clipped, it would do no harm
    overhear(fed, lambda site, release: edits[site](site, release))
    new = method.round(state, fed)
    assert fed.counters["kd3a.teacher-not-finite"] == 1 and fed.counters["kd3a.one-teacher"] == 1
    assert set(notes(fed, "weight")) == {"coral", "dim"} and sum(notes(fed, "weight").values()) == pytest.approx(1)
    assert all(bool(torch.isfinite(value).all()) for value in new.model.values())


def test_without_any_usable_teacher_the_model_stays(tiny_data: Path, tmp_path: Path) -> None:
    method, state, fed = opened(tiny_data, tmp_path)
    overhear(fed, lambda site, release: huge(release))
    assert method.round(state, fed) is state
    assert fed.counters["kd3a.no-teacher"] == 1 and fed.counters["kd3a.teacher-not-finite"] == 3


def test_a_student_that_diverges_is_left_out(tiny_data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    method, state, fed = opened(tiny_data, tmp_path, {"mmd": False})

    def broken(home: Any, model: Any, rng: Rng, **given: Any) -> Any:
        return {key: torch.full_like(value, 1) * math.nan for key, value in model.items()}, math.inf

    monkeypatch.setattr(kd3a, "distil", broken)
    new = method.round(state, fed)
    weights = notes(fed, "weight")
    assert weights["dim"] == 0 and sum(weights.values()) == pytest.approx(1)
    assert fed.counters["kd3a.student-not-finite"] == 1 and "dim" not in notes(fed, "train_loss")
    assert all(bool(torch.isfinite(value).all()) for value in new.model.values())


def test_an_alignment_that_diverges_is_undone_and_counted(tiny_data: Path, tmp_path: Path) -> None:
    plain, state, fed = opened(tiny_data, tmp_path / "a", {"mmd": False})
    expected = plain.round(state, fed).model
    wild, state, fed = opened(tiny_data, tmp_path / "b", {"mmd_clip": 0, "mmd_rate": 1e6})
    assert same(wild.round(state, fed).model, expected)
    assert fed.counters["kd3a.mmd-not-finite"] == 1


def test_without_batchnorm_there_is_nothing_to_align(tiny_data: Path, tmp_path: Path) -> None:
    method, state, fed = opened(tiny_data, tmp_path, arch="digits-csac")
    method.round(state, fed)
    assert fed.counters["kd3a.no-batchnorm"] == 1


def test_when_nobody_is_useful_sizes_decide_and_it_is_said(tiny_data: Path, tmp_path: Path) -> None:
    """A gate that nobody passes, and no weight for doubt: all scores are 0."""
    keys = {"gate": 0.999999, "gate_end": 0.999999, "doubt": 0, "mmd": False}
    method, state, fed = opened(tiny_data, tmp_path, keys)
    answers = overhear(fed)
    method.round(state, fed)
    assert fed.counters["kd3a.nobody-useful"] == 1
    assert notes(fed, "unsupported_samples")[""] == len(fed.home.train)
    sizes = {site: answer.samples for site, answer in answers[0].items()}
    total = sum(sizes.values()) + len(fed.home.train)
    expected = {**{site: size / total for site, size in sizes.items()}, "dim": len(fed.home.train) / total}
    assert notes(fed, "weight") == pytest.approx(expected)


@pytest.mark.parametrize(
    "weighting", ["focus", "shapley", "shapley-sampled", "samples", "h-divergence", "info-gain", "equal"]
)
def test_every_weighting_gives_weights(weighting: str, tiny_data: Path, tmp_path: Path) -> None:
    method, state, fed = opened(tiny_data, tmp_path, {"weighting": weighting, "mmd": False})
    answers = overhear(fed)
    method.round(state, fed)
    weights = notes(fed, "weight")
    assert sum(weights.values()) == pytest.approx(1) and all(w >= 0 for w in weights.values())
    shares = {site: weights[site] / (1 - weights["dim"]) for site in SITES}
    sizes = {site: answer.samples for site, answer in answers[0].items()}
    if weighting == "equal":
        assert shares == pytest.approx(dict.fromkeys(SITES, 1 / 3))
    if weighting == "samples":
        assert shares == pytest.approx({site: size / sum(sizes.values()) for site, size in sizes.items()})
    if weighting in ("h-divergence", "info-gain"):
        scores = notes(fed, "score")
        assert all(math.exp(-2) <= scores[site] < 1 for site in SITES)
        assert shares["amber"] / shares["blue"] == pytest.approx(
            sizes["amber"] * scores["amber"] / (sizes["blue"] * scores["blue"])
        )


def test_h_divergence_tells_a_far_site_from_a_near_one(tiny_data: Path, tmp_path: Path) -> None:
    """What layers remember is moved by one and by three deviations from what they see here."""
    _, _, fed = opened(tiny_data, tmp_path)
    base = teachers_of(fed, 0)["amber"]
    touched = listen(fed, {"amber": base}, mode="train").statistics["amber"]
    models = {}
    for site, shift in zip(SITES, (0.0, 1.0, 3.0), strict=True):
        models[site] = {**base, **touched}
        for key in touched:
            if key.endswith("block1.norm.running_mean"):
                models[site][key] = touched[key] + shift * touched[key.replace("mean", "var")].sqrt()
    near, middle, far = listen(fed, models, distance="h-divergence").distances
    assert 0 <= near < middle < far <= 2


def test_info_gain_prefers_the_model_whose_classes_lie_together(tiny_data: Path, tmp_path: Path) -> None:
    """The same features, clustered by classes that follow them, or by classes that are drawn almost blindly."""
    _, _, fed = opened(tiny_data, tmp_path)
    base = teachers_of(fed, 0)["amber"]
    (batch,) = fed.home.train.along(torch.arange(20), 20)  # type: ignore[union-attr]
    net = plain_network(fed.plan).eval()
    net.load_state_dict(base)
    with torch.no_grad():
        features = net.features(batch.x)
    axis = torch.linalg.svd(features - features.mean(0), full_matrices=False).Vh
    models = {}
    for site, row in (("amber", 0), ("blue", 10)):
        weight = torch.stack([axis[row], -axis[row], torch.zeros_like(axis[row])])
        models[site] = {
            **base,
            "head.weight": weight,
            "head.bias": -(weight @ features.mean(0)) - torch.tensor([0, 0, 1e3]),
        }
    first, later = listen(fed, models, distance="info-gain").distances
    assert first < 0.9 < later <= 1


# --- Rounds per epoch -------------------------------------------------------------------------------------------------


def test_the_rounds_of_an_epoch_share_it(tiny_data: Path, tmp_path: Path) -> None:
    keys: dict[str, Any] = {"local_epochs": 0.25, "rounds": 8, "policy": {"min_samples": 2}}
    method, state, fed = opened(tiny_data, tmp_path, {"mmd": False}, **keys)
    size = len(fed.home.train)
    voted: list[list[int]] = []
    home_work = fed.at_home

    def spy(work: Any, **given: Any) -> Any:
        if work is hear:
            voted.append(given["samples"].tolist())
        return home_work(work, **given)

    fed.at_home = spy  # type: ignore[method-assign, assignment]
    for round in range(1, 5):
        fed.begin(round)
        state = method.round(state, fed)
        assert notes(fed, "voted_samples")[""] == len(voted[-1]) == pytest.approx(size / 4, abs=1)
    assert sorted(itertools.chain(*voted)) == list(range(size))  # r = 4: after four rounds, everything once


def test_several_epochs_a_round_vote_once_on_each_sample(tiny_data: Path, tmp_path: Path) -> None:
    method, state, fed = opened(tiny_data, tmp_path, {"mmd": False}, local_epochs=2)
    method.round(state, fed)
    assert notes(fed, "voted_samples")[""] == len(fed.home.train)
    order = fed.home.train.stretch(*passes_of(fed.home))  # type: ignore[union-attr, call-arg]
    assert len(order) == 2 * len(fed.home.train)
    assert first_visits(order).tolist() == order[: len(fed.home.train)].tolist()
    assert first_visits(torch.tensor([3, 1, 3, 0, 1])).tolist() == [3, 1, 0]


# --- Whole runs -------------------------------------------------------------------------------------------------------


def test_a_target_smaller_than_a_batch_and_one_source(tiny_data: Path, tmp_path: Path) -> None:
    config = make_config(settings(tiny_data, sources=["coral"], batch_size=128, train_per_site=12, rounds=1))
    results = run(config, tmp_path / "run")
    assert results["counters"]["kd3a.one-teacher"] == 1
    rows = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    weights = {row["site"]: row["value"] for row in rows if row["name"] == "weight"}
    assert weights == pytest.approx({"coral": 0.5, "dim": 0.5})


@pytest.mark.parametrize(
    ("count", "message"), [(0, "target 'dim' has no training data"), (1, "target 'dim' has 1 training")]
)
def test_a_target_without_images_is_named(count: int, message: str, tiny_data: Path, tmp_path: Path) -> None:
    root = tmp_path / "data"
    root.mkdir()
    for name in SITES:
        write_domain(root, name)
    images, labels = shapes(9, (0.5, 0.5, 0.5), 0.1, seed=0)
    parts = {
        "train_images": images[:count],
        "train_labels": labels[:count],
        "test_images": images,
        "test_labels": labels,
    }
    np.savez(root / "dim.npz", **parts)
    with pytest.raises(InputError, match=message):
        run(make_config(settings(root)), tmp_path / "run")


def test_the_authors_way_resumes_bit_for_bit(tiny_data: Path, tmp_path: Path) -> None:
    """Heads, weights and momentum are all remembered: a run of one round and one more is a run of two."""

    class Stop(Exception): ...

    config = make_config(settings(tiny_data, {"preset": "reference"}, rounds=2))
    whole = run(config, tmp_path / "whole")
    original = KD3A.round

    def once(self: KD3A, state: State, fed: Federation) -> State:
        if fed.round == 2:
            raise Stop
        return original(self, state, fed)

    with pytest.MonkeyPatch.context() as patch, pytest.raises(Stop):
        patch.setattr(KD3A, "round", once)
        run(config, tmp_path / "parts")
    parts = run(config, tmp_path / "parts", resume=True)
    assert parts["model_sha256"] == whole["model_sha256"]


def test_table_rows_with_missing_values(tmp_path: Path) -> None:
    root = tmp_path / "data"
    root.mkdir()
    for seed, (name, shift) in enumerate({"east": 0.0, "north": 0.2, "west": 0.1}.items()):
        draw = np.random.default_rng(seed)
        values = draw.normal(0, 1, (120, 3))
        lines = ["pressure,sugar,age,target"]
        for number, row in enumerate(values):
            cells = [f"{value + shift:.3f}" for value in row]
            cells[2] = "?" if number % 4 == 0 else cells[2]
            lines.append(",".join([*cells, str(int(row[0] + row[1] > 0))]))
        (root / f"{name}.csv").write_text("\n".join(lines) + "\n")
    config = make_config(
        settings(
            root, target="west", label_column="target", arch="mlp", rounds=4, local_epochs=3, lr=0.05, train_per_site=90
        )
    )
    results = run(config, tmp_path / "run")
    assert results["accuracy"]["last"] > 0.75
    assert not [name for name in results["counters"] if "finite" in name]


def test_votes_are_those_of_the_functional_vote(tiny_data: Path, tmp_path: Path) -> None:
    """The lesson that the student gets is p and n_p of the teachers' answers, at the round's gate."""
    method, state, fed = opened(tiny_data, tmp_path, {"mmd": False, "gate": 0.4, "gate_end": 0.5})
    fed.begin(2)
    seen: dict[str, Any] = {}
    home_work = fed.at_home

    def spy(work: Any, **given: Any) -> Any:
        result = home_work(work, **given)
        seen[work.__name__] = (given, result)
        return result

    fed.at_home = spy  # type: ignore[method-assign, assignment]
    method.round(state, fed)
    gate = notes(fed, "gate")[""]
    assert gate == pytest.approx(0.45)
    votes = knowledge_vote(seen["hear"][1].probabilities, kd3a.Rule(gate))
    lesson = seen["distil"][0]["lesson"]
    assert torch.equal(lesson.probabilities, votes.probabilities)
    expected = torch.where(votes.supporters > 0, votes.supporters.float(), 0.001)
    assert torch.equal(lesson.weights, expected) and len(set(expected.tolist())) > 1
