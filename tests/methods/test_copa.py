"""COPA at the sites: the loss and its gradients; runs of every ablation."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from fedshift.errors import InputError
from fedshift.methods.base import SHARED
from fedshift.methods.copa import parts
from fedshift.methods.copa.copa import Copa, train
from fedshift.methods.copa.parts import Hyper, sum_of_losses
from fedshift.nn.network import Network
from fedshift.nn.normalisation import HybridNorm
from fedshift.runs import planning
from fedshift.runs.config import apply_settings, make_config, read_config
from fedshift.runs.execute import run


def prepared(data: Path, **keys: Any) -> planning.Prepared:
    common = {
        "method": "copa",
        "data_dir": data,
        "target": "dim",
        "arch": "digits-copa",
        "batch_size": 999,
        "rounds": 2,
    }
    return planning.prepare(make_config(common | keys))


@pytest.fixture
def open_federation(tiny_data: Path, open_method: Any) -> Any:
    return lambda **keys: open_method(Copa, prepared(tiny_data, **keys))


def classifiers(net: Network, count: int) -> list[dict[str, Tensor]]:
    drawn = torch.Generator().manual_seed(5)
    shapes = {key: value.shape for key, value in net.head.state_dict().items()}
    return [{key: torch.randn(shape, generator=drawn) for key, shape in shapes.items()} for _ in range(count)]


def log_loss(features: np.ndarray, head: dict[str, Tensor], labels: np.ndarray) -> float:
    """Mean cross-entropy of a linear classifier, sample by sample."""
    total = 0.0
    for row, label in zip(features, labels, strict=True):
        scores = head["weight"].double().numpy() @ row + head["bias"].double().numpy()
        total += np.log(np.exp(scores - scores.max()).sum()) + scores.max() - scores[label]
    return total / len(labels)


# --- Eq. (5) --------------------------------------------------------------------------------------------------------


def training_data(fed: Any, site: str) -> tuple[Tensor, Tensor]:
    split = fed.engine._hosts[site].domain.train
    images = torch.from_numpy(np.array(split.inputs)).permute(0, 3, 1, 2).float() / 255
    return images, torch.from_numpy(np.array(split.labels))


def darker(x: Tensor, generator: torch.Generator, ops: int, magnitude: float, draw: str) -> Tensor:
    return x * 0.3


@pytest.mark.parametrize(
    ("keys", "own_terms", "others_see"),
    [
        ({}, 1, "augmented"),
        ({"augment": False}, 1, "plain"),
        ({"judges": "mean"}, 1, "augmented"),
        ({"judges": "mean", "augment": False}, 1, "plain"),
        ({"collaboration": "none"}, 1, None),
        ({"collaboration": "enlarge"}, 2, None),
    ],
    ids=["frozen", "frozen-without-randaugment", "mean", "mean-without-randaugment", "none", "enlarge"],
)
def test_the_loss_is_equation_5(
    keys: dict[str, Any], own_terms: int, others_see: str | None, open_federation: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One batch with a tiny step: the released loss is that of the weights that were sent."""
    monkeypatch.setattr(parts, "rand_augment", darker)
    method, base, fed = open_federation(copa=keys, lr=1e-12)
    state = method.init(base, fed)
    own, *others = classifiers(base, 3)
    frozen = {"blue": others[0], "coral": others[1]} if others_see else {}
    each = {"amber": {"head": own, "frozen": frozen}}
    reply = fed.ask(("amber",), train, extractor=state.extractor, each=each)["amber"]

    net = parts.converted_network(fed.plan, method.hyper).train()
    net.backbone.load_state_dict(dict(state.extractor))
    images, labels = training_data(fed, "amber")
    with torch.no_grad():
        plain, augmented = net.features(images).double().numpy(), net.features(images * 0.3).double().numpy()
    expected = log_loss(plain, own, labels.numpy())
    if own_terms == 2:
        expected += log_loss(augmented, own, labels.numpy())
    share = 1 / len(frozen) if "judges" in keys else 1
    for other in frozen.values():
        expected += share * log_loss(augmented if others_see == "augmented" else plain, other, labels.numpy())
    assert reply.loss == pytest.approx(expected, rel=1e-4)


def test_one_step_follows_the_gradient_of_the_whole_of_equation_5(
    open_federation: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """F_i takes both terms, C_i the first only."""
    monkeypatch.setattr(parts, "rand_augment", darker)
    method, base, fed = open_federation(lr=0.1, momentum=0.0, weight_decay=0.0)
    state = method.init(base, fed)
    own, *others = classifiers(base, 3)
    each = {"amber": {"head": own, "frozen": {"blue": others[0], "coral": others[1]}}}
    reply = fed.ask(("amber",), train, extractor=state.extractor, each=each)["amber"]

    net = parts.converted_network(fed.plan, method.hyper).train()
    net.backbone.load_state_dict(dict(state.extractor))
    net.head.load_state_dict(own)
    images, labels = training_data(fed, "amber")
    plain, augmented = net.features(images), net.features(images * 0.3)
    loss = nn.functional.cross_entropy(net.head(plain), labels)
    for other in others:
        loss = loss + nn.functional.cross_entropy(augmented @ other["weight"].T + other["bias"], labels)
    loss.backward()
    for key, parameter in net.backbone.named_parameters():
        change = reply.extractor[key] - state.extractor[key]
        torch.testing.assert_close(change, -0.1 * parameter.grad, rtol=1e-2, atol=2e-5)
    torch.testing.assert_close(reply.head["bias"] - own["bias"], -0.1 * net.head.bias.grad, rtol=1e-3, atol=1e-6)


@pytest.mark.parametrize("collaboration", ["frozen", "enlarge", "consistency"])
@pytest.mark.parametrize("norm", ["hbin", "ibn-a", "bn"])
def test_running_statistics_are_those_of_plain_images(
    collaboration: str, norm: str, open_federation: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Unless asked for otherwise, augmented copies leave them as a pass of the plain batch alone does."""
    monkeypatch.setattr(parts, "rand_augment", darker)
    found = {}
    for moves in (False, True):
        keys = {"collaboration": collaboration, "norm": norm, "second_look_statistics": moves}
        method, base, fed = open_federation(copa=keys, lr=1e-12)
        state = method.init(base, fed)
        found[moves] = method.round(state, fed).extractor
    net = parts.converted_network(fed.plan, method.hyper).train()
    expected = []
    for site in fed.labelled:
        net.backbone.load_state_dict(dict(state.extractor))
        net.features(training_data(fed, site)[0])
        expected.append({key: value.clone().double() for key, value in net.backbone.named_buffers()})
    for key in expected[0]:
        if not key.endswith("num_batches_tracked"):
            mean = torch.stack([statistics[key] for statistics in expected]).mean(0).float()
            torch.testing.assert_close(found[False][key], mean, rtol=1e-4, atol=1e-5)
            assert not torch.allclose(found[True][key], mean, rtol=1e-3)


def test_frozen_classifiers_get_no_gradient_and_the_features_do() -> None:
    head = nn.Linear(4, 3)
    frozen = [parts.copy_of(head, nn.Linear(4, 3).state_dict()).requires_grad_(False) for _ in range(2)]
    features = torch.randn(5, 4, requires_grad=True)
    labels = torch.tensor([0, 1, 2, 1, 0])
    sum_of_losses(frozen, features, labels).backward()
    assert all(parameter.grad is None for other in frozen for parameter in other.parameters())
    truth = nn.functional.one_hot(labels, 3)
    by_hand = sum((other(features).softmax(1) - truth) / 5 @ other.weight for other in frozen)
    torch.testing.assert_close(features.grad, by_hand.detach())


def test_gradients_of_the_whole_local_loss_by_finite_differences() -> None:
    """Eq. (5) through a hybrid norm: extractor and own classifier learn, frozen ones do not."""
    torch.manual_seed(0)
    conv, norm = nn.Conv2d(1, 2, 2).double(), HybridNorm(2).double()
    own, other = nn.Linear(8, 3).double(), nn.Linear(8, 3).double().requires_grad_(False)
    x, again = torch.randn(2, 4, 1, 3, 3).double().unbind()
    labels = torch.tensor([0, 2, 1, 1])

    def loss() -> Tensor:
        first, second = (norm(conv(view)).relu().flatten(1) for view in (x, again))
        return sum_of_losses([own], first, labels) + sum_of_losses([other], second, labels)

    loss().backward()
    for parameter in [*conv.parameters(), *norm.parameters(), *own.parameters()]:
        assert parameter.grad is not None
        flat, step = parameter.data.view(-1), 1e-6
        for place in range(0, len(flat), 3):
            kept = float(flat[place])
            flat[place] = kept + step
            above = loss().item()
            flat[place] = kept - step
            below = loss().item()
            flat[place] = kept
            assert parameter.grad.view(-1)[place].item() == pytest.approx((above - below) / (2 * step), abs=1e-6)
    assert other.weight.grad is None


def test_frozen_classifiers_shape_the_extractor_but_only_the_own_one_is_released(open_federation: Any) -> None:
    method, base, fed = open_federation()
    state = method.init(base, fed)
    own, *others = classifiers(base, 3)
    replies = []
    for frozen in ({}, {"blue": others[0]}):
        fed.begin(1)
        each = {"amber": {"head": own, "frozen": frozen}}
        replies.append(fed.ask(("amber",), train, extractor=state.extractor, each=each)["amber"])
    assert not torch.equal(replies[0].extractor["block1.conv.weight"], replies[1].extractor["block1.conv.weight"])
    assert set(replies[1].head) == set(own) and not torch.equal(replies[1].head["weight"], own["weight"])


@pytest.mark.parametrize(("side", "key", "cut"), [(32, "auto", 0), (64, "auto", 1), (32, True, 1), (64, False, 0)])
def test_cutout_is_for_photographs(side: int, key: Any, cut: int, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[int] = []

    def record(x: Tensor, size: int, generator: torch.Generator) -> Tensor:
        seen.append(size)
        return x

    monkeypatch.setattr(parts, "cutout", record)
    plan: Any = SimpleNamespace(model=SimpleNamespace(input_shape=(3, side, side)))
    look = parts.second_look(Hyper(cutout=key), plan, parts.Rng.of("x"))
    assert look is not None
    x = torch.rand(8, 3, side, side)
    assert look(x).shape == x.shape and not torch.equal(look(x), x)
    assert seen == [side // 2] * 2 * cut


# --- Runs -----------------------------------------------------------------------------------------------------------

ABLATIONS: dict[str, dict[str, Any]] = {
    "without-hbin": {"norm": "bn"},
    "without-cofc": {"collaboration": "none"},
    "without-iteration": {"iterate": False},
    "without-all-three": {"norm": "bn", "collaboration": "none", "iterate": False},
    "cofc-without-randaugment": {"augment": False},
    "randaugment-without-cofc": {"collaboration": "enlarge"},
    "consistency": {"collaboration": "consistency"},
    "in": {"norm": "in"},
    "ibn-a": {"norm": "ibn-a"},
    "ibn-b": {"norm": "ibn-b"},
    "switch": {"norm": "switch"},
}


@pytest.mark.parametrize("keys", ABLATIONS.values(), ids=ABLATIONS.keys())
def test_every_ablation_trains_and_predicts(keys: dict[str, Any], open_federation: Any) -> None:
    method, base, fed = open_federation(copa=keys, batch_size=16, train_per_site=32)
    before = method.init(base, fed)
    after = method.round(before, fed)
    assert all(after.trained.values())
    assert not torch.equal(before.extractor["block3.conv.weight"], after.extractor["block3.conv.weight"])
    net = Copa.network(fed.plan)
    net.load_state_dict(dict(method.models(after)[SHARED]))
    with torch.no_grad():
        scores = net.eval()(torch.rand(4, 3, 16, 16))
    assert scores.shape == (4, 3) and bool(torch.isfinite(scores).all())


def test_a_single_source_trains_and_says_that_nobody_collaborates(tiny_data: Path, tmp_path: Path) -> None:
    keys = {"method": "copa", "data_dir": tiny_data, "sources": ["amber"], "target": "dim", "arch": "digits-copa"}
    results = run(make_config(keys | {"rounds": 2, "workers": 0, "batch_size": 16}), tmp_path / "run")
    assert results["counters"] == {"copa.no-other-classifiers": 2}


def test_a_net_without_norms_gets_hybrid_ones(open_federation: Any) -> None:
    method, base, fed = open_federation(arch="digits-csac", train_per_site=16)
    state = method.round(method.init(base, fed), fed)
    assert "conv1.conv.norm.mean_logits" in state.extractor and "conv2.conv.norm.running_var" in state.extractor


def test_tables_get_the_keys_that_they_need_unless_others_are_given(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    for name in ("a", "b", "c"):
        values = rng.normal(size=(40, 4))
        rows = [",".join(f"{v:.3f}" for v in row) + f",{int(row[0] > 0)}" for row in values]
        (tmp_path / f"{name}.csv").write_text("\n".join(["w,x,y,z,label", *rows]))
    keys = {"method": "copa", "data_dir": tmp_path, "label_column": "label", "target": "c", "rounds": 1, "workers": 0}
    with pytest.raises(InputError, match=r"copa\.augment=false and copa\.norm=bn") as caught:
        run(make_config(keys | {"copa": {"augment": True}}), tmp_path / "no")
    assert caught.value.code == "method-needs"
    with pytest.raises(InputError, match="norm=bn"):
        run(make_config(keys | {"copa": {"norm": "hbin"}}), tmp_path / "still-no")
    run(make_config(keys), tmp_path / "yes")
    chosen = read_config(tmp_path / "yes" / "config.yaml")["copa"]
    assert (chosen["augment"], chosen["norm"]) == (False, "bn")


@pytest.mark.parametrize(
    ("keys", "complaint"),
    [
        ({"magnitude": 11}, "magnitude"),
        ({"ops": 0}, "augment=false"),
        ({"noise": -1.0}, "noise"),
        ({"norm": "gn"}, "norm"),
        ({"shared_start": 1.5}, "shared_start"),
        ({"collaboration": "consistency", "iterate": False}, "iterate"),
        ({"collaboration": "enlarge", "augment": False}, "augment"),
    ],
)
def test_keys_that_make_no_sense_are_refused(keys: dict[str, Any], complaint: str) -> None:
    with pytest.raises(InputError, match=complaint):
        make_config({"method": "copa", "copa": keys})


def test_on_and_off_can_be_written_on_the_command_line() -> None:
    for text, value in (("on", True), ("off", False), ("auto", "auto")):
        config = make_config(apply_settings({"method": "copa"}, [f"copa.cutout={text}"]))
        assert config.hyper["cutout"] == value and config.hyper["cutout"] is not (not value)
