"""KD3A: its keys, mixup, and what the target does in a round."""

from __future__ import annotations

import dataclasses
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from kd3a_case import listen, opened, same, teachers_of

from fedshift.functional.moments import anchors, recorded_moments
from fedshift.methods.kd3a.keys import PRESETS, Choices, Hyper
from fedshift.methods.kd3a.target import Lesson, align, distil, mixed
from fedshift.methods.local import plain_network
from fedshift.nn.taps import norm_layers
from fedshift.runs import planning
from fedshift.runs.config import make_config

# --- Keys -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "keys",
    [
        {"gate": 0.0},
        {"gate": 1.0},
        {"gate_end": 1.0},
        {"gate_end": -0.1},
        {"mixup": -1.0},
        {"doubt": math.nan},
        {"smoothing": 1.0},
        {"shapley_samples": 0},
        {"mmd_rate": 0.0},
        {"mmd_clip": -1.0},
    ],
)
def test_keys_out_of_range_are_refused(keys: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=next(iter(keys))):
        Hyper(**keys)


def test_the_gate_rises_evenly() -> None:
    hyper = Hyper(gate=0.8, gate_end=0.95)
    assert [hyper.gate_at(round, 4) for round in (1, 2, 3, 4)] == pytest.approx([0.8, 0.85, 0.9, 0.95])
    assert hyper.gate_at(1, 1) == 0.8


def test_presets_differ_in_everything_and_each_difference_can_be_set_by_itself() -> None:
    paper, reference = Hyper().choices(), Hyper(preset="reference").choices()
    assert (paper, reference) == (PRESETS["paper"], PRESETS["reference"])
    for field in dataclasses.fields(Choices):
        theirs = getattr(reference, field.name)
        assert getattr(paper, field.name) != theirs
        assert Hyper(**{field.name: theirs}).choices() == dataclasses.replace(paper, **{field.name: theirs})


def test_defaults_are_those_of_digit_5(tiny_data: Path) -> None:
    plan = planning.prepare(
        make_config({"method": "kd3a", "data_dir": tiny_data, "target": "dim", "arch": "digits-kd3a"})
    )
    how = plan.plan.training
    assert (how.lr, how.lr_min, how.momentum, how.weight_decay) == (0.05, 0.001, 0.9, 5e-4)
    assert (how.batch_size, how.rounds, how.local_epochs, how.schedule) == (100, 40, 1.0, "cosine")
    assert how.lr_at(1) == 0.05 and 0.001 < how.lr_at(40) < 0.0011
    # Where the first rate is below the last one of the paper, it stays: a rate never rises.
    assert {dataclasses.replace(how, lr=0.0005).lr_at(round) for round in range(1, 41)} == {0.0005}


# --- Mixup ------------------------------------------------------------------------------------------------------------


def generator() -> torch.Generator:
    return torch.Generator().manual_seed(3)


def test_joint_mixup_has_the_gradient_of_both_weighted_losses() -> None:
    """x carries each sample's number and p is one-hot, so that lambda and the partner can be read off the result."""
    count = 6
    x = torch.eye(count).reshape(count, count, 1, 1).repeat(1, 1, 2, 2)
    p = torch.rand(count, 3, generator=generator()).softmax(1)
    weights = torch.tensor([3.0, 0.001, 1.0, 2.0, 0.001, 4.0])
    new, label, weight = mixed(x, p, weights, Choices(mixup=1.0), generator())
    scores = torch.randn(count, 3, generator=generator(), requires_grad=True)
    log_q = scores.log_softmax(1)
    ours = -(weight * (label * log_q).sum(1)).sum()
    parts = new[:, :, 0, 0]  # (sample, whose part): lambda and 1 - lambda
    theirs = -torch.einsum("bs,s,sc,bc->", parts, weights, p, log_q)
    (a,), (b,) = torch.autograd.grad(ours, scores, retain_graph=True), torch.autograd.grad(theirs, scores)
    assert torch.allclose(a, b, atol=1e-6)
    assert torch.allclose(weight, parts @ weights) and torch.allclose(label.sum(1), torch.ones(count))
    assert bool((parts.amax(1) < 1).any())


def test_the_authors_mixup_has_one_lambda_and_the_first_samples_weight() -> None:
    x = torch.eye(5).reshape(5, 5, 1, 1).repeat(1, 1, 2, 2)
    weights = torch.tensor([1.0, 0.0, 1.0, 1.0, 0.0])
    new, label, weight = mixed(x, torch.eye(5), weights, PRESETS["reference"], generator())
    assert torch.equal(weight, weights)
    assert torch.allclose(label, new[:, :, 0, 0], atol=1e-6)
    own = label.diagonal()
    assert len({round(float(v), 5) for v in own if v < 0.999}) == 1


def test_without_mixup_nothing_changes() -> None:
    x, p, weights = torch.rand(3, 3, 4, 4), torch.rand(3, 2), torch.rand(3)
    assert all(
        a is b for a, b in zip((x, p, weights), mixed(x, p, weights, Choices(mixup=0.0), generator()), strict=True)
    )


def test_a_value_that_one_row_lacks_is_the_others() -> None:
    x = torch.tensor([[1.0, math.nan, math.nan], [3.0, 5.0, math.nan]])
    choices = Choices(mixup=1.0, mixup_weight="first")
    for seed in range(20):
        new, label, _ = mixed(x, torch.eye(2), torch.ones(2), choices, torch.Generator().manual_seed(seed))
        if float(label[0, 0]) < 1:
            break
    lam = float(label[0, 0])
    assert 0 < lam < 1
    assert float(new[0, 0]) == pytest.approx(lam * 1 + (1 - lam) * 3, rel=1e-5)
    assert float(new[0, 1]) == pytest.approx(5.0) and math.isnan(new[0, 2])


# --- The target's part ------------------------------------------------------------------------------------------------


def test_teachers_say_what_their_models_predict(tiny_data: Path, tmp_path: Path) -> None:
    _, _, fed = opened(tiny_data, tmp_path)
    models = teachers_of(fed, 0, 1)
    heard = listen(fed, models)
    assert heard.sites == ("amber", "blue") and heard.probabilities.shape == (2, 20, 3) and not heard.statistics
    (batch,) = fed.home.train.along(torch.arange(20), 20)  # type: ignore[union-attr]
    for said, model in zip(heard.probabilities, models.values(), strict=True):
        net = plain_network(fed.plan).eval()
        net.load_state_dict(model)
        assert torch.allclose(said, net(batch.x).softmax(1), atol=1e-5)


def test_teachers_in_train_mode_use_and_remember_the_targets_statistics(tiny_data: Path, tmp_path: Path) -> None:
    _, _, fed = opened(tiny_data, tmp_path, batch_size=20)
    models = teachers_of(fed, 0)
    heard = listen(fed, models, mode="train")
    (batch,) = fed.home.train.along(torch.arange(20), 20)  # type: ignore[union-attr]
    net = plain_network(fed.plan).train()
    net.load_state_dict(models["amber"])
    assert torch.allclose(heard.probabilities[0], net(batch.x).softmax(1), atol=1e-5)
    touched = heard.statistics["amber"]
    assert "backbone.block1.norm.running_mean" in touched and not any("weight" in key for key in touched)
    assert same(touched, {key: net.state_dict()[key] for key in touched}, atol=1e-5)
    assert not torch.equal(listen(fed, models).probabilities, heard.probabilities)


def test_by_default_teachers_use_the_targets_statistics_and_forget_them(tiny_data: Path, tmp_path: Path) -> None:
    _, _, fed = opened(tiny_data, tmp_path, batch_size=20)
    models = teachers_of(fed, 0)
    assert Hyper().choices().teachers == "batch"
    heard = listen(fed, models, mode="batch")
    assert torch.equal(heard.probabilities, listen(fed, models, mode="train").probabilities), "no dropout in this net"
    assert not heard.statistics


def test_a_teacher_that_gives_nan_is_not_heard(tiny_data: Path, tmp_path: Path) -> None:
    _, _, fed = opened(tiny_data, tmp_path)
    models = teachers_of(fed, 0, 1, 2)
    models["blue"]["head.weight"] = models["blue"]["head.weight"] * 3e38
    heard = listen(fed, models)
    assert heard.sites == ("amber", "coral") and heard.silent == ("blue",)
    assert torch.equal(heard.probabilities, listen(fed, {s: models[s] for s in ("amber", "coral")}).probabilities)


def test_distillation_minimises_the_weighted_divergence(tiny_data: Path, tmp_path: Path) -> None:
    """Eq. (5) by hand, for one batch and no mixup."""
    _, _, fed = opened(tiny_data, tmp_path, batch_size=8, lr=1e-9)
    model = teachers_of(fed, 0)["amber"]
    samples = torch.tensor([4, 1, 7, 9, 20, 2])
    p = torch.randn(6, 3, generator=generator()).softmax(1)
    weights = torch.tensor([2.0, 0.001, 3.0, 1.0, 1.0, 2.0])
    order = samples.flip(0)
    _, loss = fed.at_home(
        distil, model=model, order=order, lesson=Lesson(samples, p, weights), choices=Choices(mixup=0.0)
    )
    (batch,) = fed.home.train.along(samples, 8)  # type: ignore[union-attr]
    net = plain_network(fed.plan).train()
    net.load_state_dict(model)
    q = net(batch.x).softmax(1).tolist()
    by_hand = 0.0
    for n, own, other in zip(weights.tolist(), p.tolist(), q, strict=True):
        by_hand += n * sum(a * math.log(a / b) for a, b in zip(own, other, strict=True)) / 6
    assert loss == pytest.approx(by_hand, rel=1e-4)


@pytest.mark.parametrize("mode", ["train", "eval"])
def test_alignment_lowers_the_loss_and_touches_no_head(mode: str, tiny_data: Path, tmp_path: Path) -> None:
    _, _, fed = opened(tiny_data, tmp_path, batch_size=12)
    model = teachers_of(fed, 0)["amber"]
    layers = list(norm_layers(plain_network(fed.plan)))
    sources = anchors([(recorded_moments(model, layers), 1.0)])
    hyper = Hyper(mmd_mode=mode, mmd_rate=1.0)  # type: ignore[arg-type]
    losses = []
    for _ in range(8):
        model, loss = fed.at_home(align, model=model, samples=torch.arange(36), sources=sources, hyper=hyper)
        losses.append(loss)
    assert losses[-1] < 0.8 * losses[0]
    head = teachers_of(fed, 0)["amber"]
    assert all(torch.equal(model[key], head[key]) for key in model if key.startswith("head."))


def test_a_clipped_gradient_moves_the_model_by_no_more_than_its_length(tiny_data: Path, tmp_path: Path) -> None:
    _, _, fed = opened(tiny_data, tmp_path, batch_size=64, weight_decay=0.0)
    model = teachers_of(fed, 0)["amber"]
    sources = anchors([(recorded_moments(model, norm_layers(plain_network(fed.plan))), 1.0)])
    parameters = dict(plain_network(fed.plan).named_parameters())

    def moved(clip: float) -> float:
        new, _ = fed.at_home(
            align, model=model, samples=torch.arange(30), sources=sources, hyper=Hyper(mmd_rate=0.5, mmd_clip=clip)
        )
        return math.sqrt(sum(float((new[key] - model[key]).square().sum()) for key in parameters))

    assert moved(0.1) == pytest.approx(0.1 * 0.5 * 0.02, rel=1e-3)  # one batch, lr 0.02
    assert moved(0.0) > 100 * moved(0.1)
