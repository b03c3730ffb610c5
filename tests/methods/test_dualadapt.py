from __future__ import annotations

import copy
import dataclasses
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tinydata import CLASSES, TINTS, shapes, write_domain
from torch import Tensor

import fedshift
from fedshift.data.domain import DataSource, Domain, Split
from fedshift.errors import InputError, SiteError
from fedshift.federation.checks import Refused
from fedshift.federation.federation import Federation, Replies
from fedshift.federation.plan import ModelSpec, Plan, Training
from fedshift.federation.policy import Policy
from fedshift.federation.site import Labelled, SiteSpec, Unlabelled
from fedshift.functional.losses import discrepancy
from fedshift.functional.mixtures import Axes, Mixture, typicality
from fedshift.methods import dualadapt
from fedshift.methods.base import SHARED
from fedshift.methods.clients import FrozenFeatures, split_network
from fedshift.methods.dualadapt import Adapted, DualAdapt, Hyper, State, adapt, client_loss, describe, mixup, optimise
from fedshift.methods.local import weights_of
from fedshift.nn.network import Network
from fedshift.rng import Rng
from fedshift.runs.config import make_config
from fedshift.runs.files.model import ModelHeader, SavedModel

NAMES = tuple(map(str, range(CLASSES)))
RNG = Rng.of("test")


def make_plan(hyper: Hyper, **training: Any) -> Plan:
    how: dict[str, Any] = {
        "rounds": 3,
        "batch_size": 12,
        "lr": 0.05,
        "lr_min": 0.0,
        "momentum": 0.9,
        "weight_decay": 0.0,
        "local_epochs": 1.0,
        "schedule": "constant",
        "precision": "float32",
        "augment": (),
    }
    model = ModelSpec("digits-dualadapt", "classification", NAMES, (3, 16, 16))
    keys = dataclasses.asdict(hyper)
    return Plan("", "dualadapt", "multi-adapt", ("a",), 0, 1, model, Training(**(how | training)), keys)


def make_client(
    folder: Path, hyper: Hyper, samples: int = 36, policy: int = 2, round: int = 1, **training: Any
) -> Unlabelled:
    """A client as a machine of its own has it: its pictures, no labels, and no data set in which a source could be."""
    images, _ = shapes(samples, (0.2, 0.4, 1.0), 0.1, seed=3)
    spec = SiteSpec("b", "unlabelled", DataSource(), ("b",), folder, Policy(min_samples=policy))
    split, none = Split(images, None), Split(images[:0], None)
    return Unlabelled(spec, make_plan(hyper, **training), Domain("b", split, none, none), NAMES, round)


def make_home(folder: Path, hyper: Hyper, samples: int = 36, **training: Any) -> Labelled:
    split = Split(*shapes(samples, (1.0, 0.7, 0.2), 0.1, seed=0))
    spec = SiteSpec("a", "labelled", DataSource(), ("a",), folder, Policy(min_samples=2))
    return Labelled(spec, make_plan(hyper, **training), Domain("a", split, split, split), NAMES, 1)


def start(plan: Plan) -> dict[str, dict[str, Tensor]]:
    net = split_network(plan)
    return {"extractor": weights_of(net.backbone), "classifier": weights_of(net.head)}


def state_of(now: dict[str, dict[str, Tensor]], own: dict[str, Tensor], **statistics: Tensor) -> State:
    return State(**now, local={"b": own}, statistics={"b": statistics}, mixtures={}, axes={}, pretrained=True)


def same(a: Any, b: Any) -> bool:
    return set(a) == set(b) and all(torch.equal(a[key], b[key]) for key in a)


# --- Equations ----------------------------------------------------------------------------------------------------


def test_eq_5_by_hand() -> None:
    local, shared = torch.tensor([[0.5, 0.5], [0.9, 0.1]]).log(), torch.tensor([[0.8, 0.2], [0.3, 0.7]]).log()
    # L_adv 0.6 and 1.2; pseudo labels 0 and 1; L_st -log 0.5 and -log 0.1; W_S 1 and 0.25.
    by_hand = (2 * 1 * -math.log(0.5) - 0.6 + 2 * 0.25 * -math.log(0.1) - 1.2) / 2
    assert float(client_loss(local, shared, torch.tensor([1.0, 0.25]), 2.0)) == pytest.approx(by_hand)


def test_eq_5_of_pixels_is_the_mean_over_them() -> None:
    local, shared, trust = torch.randn(2, 3, 4, 4), torch.randn(2, 3, 4, 4), torch.rand(2, 4, 4)
    rows = [part.movedim(1, -1).reshape(-1, 3) for part in (local, shared)]
    assert torch.allclose(client_loss(local, shared, trust, 0.7), client_loss(*rows, trust.flatten(), 0.7))


def test_mixup_is_the_mean_of_neighbours() -> None:
    x = torch.tensor([0.0, 1.0, 4.0]).reshape(3, 1, 1, 1)
    assert mixup(x).flatten().tolist() == [2.0, 0.5, 2.5]


@pytest.mark.parametrize("alignment", [2.0, 1.0, 0.1])
def test_eq_6_is_the_weighted_discrepancy_over_mixed_up_pictures(alignment: float, tmp_path: Path) -> None:
    home = make_home(tmp_path, Hyper(weigh_among="fitted", alignment=alignment), batch_size=36)
    now = start(home.plan)
    source = describe(home, **now, rng=RNG)
    local = {name: {k: v + scale for k, v in now["classifier"].items()} for name, scale in (("b", 0.1), ("c", -0.2))}
    local["c"]["fc2.weight"] = local["c"]["fc2.weight"].flip(0)
    # Mixed-up pictures are far from the home's own: the tables are moved to where the weights differ.
    lower = source.mixture.levels - 60 * torch.linspace(1, 0, len(source.mixture.levels))
    mixtures = {"b": dataclasses.replace(source.mixture, levels=lower)}
    mixtures["c"] = dataclasses.replace(source.mixture, levels=lower - 20)
    found = optimise(home, **now, local=local, mixtures=mixtures, axes=source.axes, rng=RNG)

    (batch,) = home.train.batches(36, RNG, 1)
    net = split_network(home.plan)
    net.backbone.load_state_dict(now["extractor"])
    net.head.load_state_dict(now["classifier"])
    mixed = (batch.x + batch.x[[35, *range(35)]]) / 2
    with torch.no_grad():
        as_at_clients, features = net.eval().features(mixed), net.train().features(mixed)
        by_hand = 0.0
        for name in ("b", "c"):
            head = copy.deepcopy(net.head)
            head.load_state_dict(local[name])
            weight = typicality(as_at_clients, source.axes, mixtures[name])
            assert 0.05 < float(weight.mean()) < 0.95
            by_hand += float((weight * discrepancy(net.head(features), head(features))).mean())
    by_hand *= alignment / 2  # the mean over two clients
    assert by_hand > 0.01 and found.align_loss == pytest.approx(by_hand, rel=1e-4)


def test_eq_6_moves_the_extractor_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    home = make_home(tmp_path, Hyper(mixtures=False))
    now = start(home.plan)
    local = {"b": {key: value + torch.randn_like(value) for key, value in now["classifier"].items()}}
    monkeypatch.setattr(dualadapt, "label_loss", lambda scores, y: scores.sum() * 0)
    found = optimise(home, **now, local=local, mixtures={}, axes=None, rng=RNG)
    assert same(found.classifier, now["classifier"])
    assert not torch.equal(found.extractor["block1.conv.weight"], now["extractor"]["block1.conv.weight"])


def test_without_clients_the_home_learns_from_labels_alone(tmp_path: Path) -> None:
    home = make_home(tmp_path, Hyper(server_epochs=4.0))
    now = start(home.plan)
    found = optimise(home, **now, local={}, mixtures={}, axes=None, rng=RNG)
    assert found.align_loss == 0 and 0 < found.train_loss < math.log(CLASSES)


def test_eq_7_mean_of_both_for_a_client_and_the_shared_one_for_strangers() -> None:
    plan = make_plan(Hyper())
    now = start(plan)
    own = {key: value + 0.3 * torch.randn_like(value) for key, value in now["classifier"].items()}
    saved = SavedModel(ModelHeader.of(plan), DualAdapt(Hyper()).models(state_of(now, own)))
    assert set(saved.models) == {SHARED, "b"} and saved.choose("never heard of") == SHARED
    x, net = torch.rand(4, 3, 16, 16), split_network(plan).eval()
    net.backbone.load_state_dict(now["extractor"])
    probabilities = []
    for weights in (now["classifier"], own):
        net.head.load_state_dict(weights)
        probabilities.append(net(x).softmax(1))
    assert torch.allclose(saved.network("b")(x).softmax(1), sum(probabilities) / 2, atol=1e-6)
    assert torch.allclose(saved.network()(x).softmax(1), probabilities[0], atol=1e-6)


# --- The client's half --------------------------------------------------------------------------------------------


def with_source(folder: Path, hyper: Hyper) -> dict[str, Any]:
    home = make_home(folder / "home", hyper)
    now = start(home.plan)
    return now | {"source": describe(home, **now, rng=RNG) if hyper.mixtures else None}


@pytest.mark.parametrize("share", [0.0, 0.25, 0.5])
def test_how_much_a_clients_own_classifier_counts_can_be_set(share: float) -> None:
    plan = make_plan(Hyper())
    now = start(plan)
    own = {key: value + 0.3 * torch.randn_like(value) for key, value in now["classifier"].items()}
    models = DualAdapt(Hyper(local_share=share)).models(state_of(now, own))
    net, plain, x = DualAdapt.network(plan).eval(), split_network(plan).eval(), torch.rand(4, 3, 16, 16)
    net.load_state_dict(dict(models["b"]))
    plain.backbone.load_state_dict(now["extractor"])
    probabilities = []
    for head in (now["classifier"], own):
        plain.head.load_state_dict(head)
        probabilities.append(plain(x).softmax(1))
    expected = (1 - share) * probabilities[0] + share * probabilities[1]
    assert torch.allclose(net(x).softmax(1), expected, atol=1e-6)


def test_a_client_adapts_without_any_source_data(tmp_path: Path) -> None:
    site = make_client(tmp_path, Hyper())
    sent = with_source(tmp_path, Hyper())
    reply = adapt.run(site, **sent, rng=RNG)
    assert not same(reply.classifier, sent["classifier"]) and set(reply.classifier) == set(sent["classifier"])
    mixed = Mixture(**reply.mixture).checked(sent["source"].axes.axes.shape[1])
    assert int(mixed.counts.sum()) == 36 and int(mixed.counts.min()) >= 2
    assert reply.dropped == 2 * CLASSES - len(mixed.weights)
    assert 0 <= reply.discrepancy <= 2 and 0 <= reply.trust <= 1
    # What leaves: the small classifier and the mixture, never the extractor.
    assert {field.name for field in dataclasses.fields(Adapted)} == {
        *("classifier", "statistics", "mixture", "dropped", "discrepancy", "disagreement", "trust")
    }


def test_a_client_remembers_its_own_data_in_batch_norm(tmp_path: Path) -> None:
    """By hand for the first layer: the mean and the variance of what its convolution makes of the client's pictures."""
    site = make_client(tmp_path, Hyper(mixtures=False), batch_size=36)
    sent = with_source(tmp_path, Hyper(mixtures=False))
    reply = adapt.run(site, **sent, rng=RNG)
    net = split_network(site.plan)
    net.backbone.load_state_dict(sent["extractor"])
    (batch,) = site.train.evenly(36)
    with torch.no_grad():
        maps = net.backbone.block1.conv((batch.x - net.mean) / net.std)
    assert torch.allclose(reply.statistics["block1.norm.running_mean"], maps.mean((0, 2, 3)), atol=1e-5)
    assert torch.allclose(reply.statistics["block1.norm.running_var"], maps.var((0, 2, 3)), rtol=1e-4)
    names = {f"block{number}.norm.{name}" for number in range(1, 5) for name in ("running_mean", "running_var")}
    assert set(reply.statistics) == names


def test_with_the_homes_statistics_none_are_sent(tmp_path: Path) -> None:
    hyper = Hyper(mixtures=False, statistics="home")
    assert adapt.run(make_client(tmp_path, hyper), **with_source(tmp_path, hyper), rng=RNG).statistics == {}


def test_a_client_is_served_with_its_own_statistics_and_a_stranger_with_the_homes() -> None:
    plan = make_plan(Hyper())
    now = start(plan)
    mean = now["extractor"]["block1.norm.running_mean"] + 1
    models = DualAdapt(Hyper()).models(state_of(now, now["classifier"], **{"block1.norm.running_mean": mean}))
    key = "backbone.block1.norm.running_mean"
    assert torch.equal(models["b"][key], mean) and torch.equal(models[SHARED][key], mean - 1)
    other = "backbone.block2.norm.running_mean"
    assert torch.equal(models["b"][other], models[SHARED][other])


def test_frozen_parts_get_no_gradient_and_stay_as_they_are(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    nets = []
    original = dualadapt._loaded
    monkeypatch.setattr(dualadapt, "_loaded", lambda *args: nets.append(original(*args)) or nets[-1])
    hyper = Hyper(mixtures=False, statistics="home")
    adapt.run(make_client(tmp_path, hyper), **(sent := with_source(tmp_path, hyper)), rng=RNG)
    (net,) = nets
    assert all(value.grad is None and not value.requires_grad for value in net.parameters())
    assert same(weights_of(net.backbone), sent["extractor"]) and same(weights_of(net.head), sent["classifier"])


def test_features_are_worked_out_once_a_sample_while_they_fit_into_memory() -> None:
    net = split_network(make_plan(Hyper())).eval()
    x, seen = torch.rand(6, 3, 16, 16), [0]
    net.backbone.register_forward_hook(lambda *call: seen.append(len(call[1][0])))
    index = torch.tensor([4, 0, 2, 5, 1, 3])
    with torch.no_grad():
        expected = net.features(x)
    for most, worked_out in ((2**20, 6), (1, 15)):
        features, seen[:] = FrozenFeatures(net, 6, most), []
        for places in ([0, 1, 2, 3], [4, 5, 2], [5, 0], [1, 1], [2, 4, 3, 0]):
            assert torch.allclose(features(x[places], index[places]), expected[places], atol=1e-5)
        assert sum(seen) == worked_out


def test_clients_descend_plainly_without_momentum(tmp_path: Path) -> None:
    """Two batches of Eq. (5), by hand; the run's momentum and schedule are for the home."""
    how = {"weight_decay": 0.01, "schedule": "step:1:0.1"}
    hyper = Hyper(mixtures=False, lambda_st=0.5, statistics="home")
    site = make_client(tmp_path, hyper, samples=24, round=3, **how)
    sent = with_source(tmp_path, Hyper(mixtures=False))
    net = split_network(site.plan).eval()
    net.backbone.load_state_dict(sent["extractor"])
    net.head.load_state_dict(sent["classifier"])
    local = copy.deepcopy(net.head)
    for batch in site.train.batches(12, RNG, 1):
        features = net.features(batch.x).detach()
        loss = client_loss(local(features), net.head(features).detach(), torch.ones(12), 0.5)
        gradients = torch.autograd.grad(loss, list(local.parameters()))
        with torch.no_grad():
            for value, gradient in zip(local.parameters(), gradients, strict=True):
                value -= 0.05 * (gradient + 0.01 * value)
    reply = adapt.run(site, **sent, rng=RNG)
    assert all(torch.allclose(reply.classifier[k], v, atol=1e-6) for k, v in local.state_dict().items())


def test_without_pseudo_labels_a_nudge_parts_the_classifiers(tmp_path: Path) -> None:
    """Where F_l = F_g the discrepancy has no gradient: without a nudge nothing would ever happen."""
    stuck = Hyper(mixtures=False, lambda_st=0.0)
    sent = with_source(tmp_path, stuck)
    assert same(adapt.run(make_client(tmp_path, stuck), **sent, rng=RNG).classifier, sent["classifier"])
    free = Hyper(mixtures=False, self_training=False)
    reply = adapt.run(make_client(tmp_path, free, local_epochs=20.0), **sent, rng=RNG)
    assert reply.discrepancy > 0 and not same(reply.classifier, sent["classifier"])


def test_an_independent_classifier_starts_at_random_weights_of_its_own(tmp_path: Path) -> None:
    """With a rate of almost 0 it is sent as it started: not as F_g, the same for the same names, else another."""
    started = {}
    for start_at in ("shared", "independent"):
        hyper = Hyper(mixtures=False, local_start=start_at)
        site, sent = make_client(tmp_path, hyper, lr=1e-12), with_source(tmp_path, Hyper(mixtures=False))
        started[start_at] = [adapt.run(site, **sent, rng=Rng.of(name)) for name in ("b", "b", "c")]
    shared, (one, again, other) = started["shared"], started["independent"]
    assert all(torch.allclose(shared[0].classifier[key], sent["classifier"][key], atol=1e-6) for key in one.classifier)
    assert shared[0].disagreement == 0 and shared[0].discrepancy < 1e-5
    assert same(one.classifier, again.classifier)
    for key in ("fc1.weight", "fc2.weight"):
        first, second, theirs = one.classifier[key], other.classifier[key], sent["classifier"][key]
        assert abs(float(torch.corrcoef(torch.stack([first.flatten(), theirs.flatten()]))[0, 1])) < 0.2
        assert not torch.allclose(first, second, atol=1e-3)
    assert float(one.classifier["fc1.weight"].std()) == pytest.approx(1 / math.sqrt(3 * 128), rel=0.05)


def test_disagreement_is_the_share_of_samples_with_different_classes(tmp_path: Path) -> None:
    """Of the last look at each: by hand for one batch at a rate of almost 0."""
    hyper = Hyper(mixtures=False, statistics="home", local_start="independent")
    site, sent = make_client(tmp_path, hyper, batch_size=36, lr=1e-12), with_source(tmp_path, hyper)
    reply = adapt.run(site, **sent, rng=RNG)
    net = split_network(site.plan).eval()
    net.backbone.load_state_dict(sent["extractor"])
    net.head.load_state_dict(sent["classifier"])
    (batch,) = site.train.evenly(36)
    with torch.no_grad():
        features = net.features(batch.x)
        theirs = net.head(features).argmax(1)
        net.head.load_state_dict(reply.classifier)
        by_hand = float((net.head(features).argmax(1) != theirs).float().mean())
    assert reply.disagreement == pytest.approx(by_hand) and by_hand > 0


def test_density_weights_reach_clients_and_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A rank within the batch has the mean 1/2 wherever a client is; density tells a distant one from the home."""
    trust = {}
    for weighting in ("rank", "density"):
        hyper = Hyper(weighting=weighting)
        site, sent = make_client(tmp_path, hyper, batch_size=36), with_source(tmp_path, hyper)
        near = sent["source"]
        far = dataclasses.replace(near, axes=dataclasses.replace(near.axes, centre=near.axes.centre + 3))
        trust[weighting] = [adapt.run(site, **sent | {"source": at}, rng=RNG).trust for at in (near, far)]
    assert trust["rank"] == pytest.approx([0.5, 0.5])
    assert trust["density"][1] < 0.5 * trust["density"][0]

    used = []
    monkeypatch.setattr(dualadapt, "typicality", lambda *args: used.append(args[4]) or typicality(*args))
    home = make_home(tmp_path, Hyper(weighting="density"))
    now = start(home.plan)
    optimise(home, **now, local={"b": now["classifier"]}, mixtures={"b": near.mixture}, axes=near.axes, rng=RNG)
    assert set(used) == {"density"}


def test_without_mixtures_none_is_fitted_or_sent(tmp_path: Path) -> None:
    hyper = Hyper(mixtures=False)
    reply = adapt.run(make_client(tmp_path, hyper), **with_source(tmp_path, hyper), rng=RNG)
    assert reply.mixture == {} and reply.dropped == 0 and reply.trust == 1


def test_no_component_leaves_that_the_policy_would_not_let_out(tmp_path: Path) -> None:
    reply = adapt.run(make_client(tmp_path, Hyper(), policy=10), **with_source(tmp_path, Hyper()), rng=RNG)
    assert int(reply.mixture["counts"].min()) >= 10 and len(reply.mixture["weights"]) <= 3
    assert reply.dropped == 6 - len(reply.mixture["weights"])
    Policy(min_samples=10).apply(reply, {}, bytes)
    with pytest.raises(SiteError, match="fewer than 40 samples"):
        Policy(min_samples=40).apply(reply, {}, bytes)


def test_a_client_without_data_is_an_error_at_that_client(tmp_path: Path) -> None:
    with pytest.raises(SiteError, match="client 'b' has no training data") as caught:
        adapt.run(make_client(tmp_path, Hyper(), samples=0), **with_source(tmp_path, Hyper()), rng=RNG)
    assert caught.value.code == "data-empty"


# --- The coordinator's half ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "damage",
    [
        lambda terms: terms | {"variances": -terms["variances"]},
        lambda terms: terms | {"means": terms["means"][:, :1]},
        lambda terms: {key: value for key, value in terms.items() if key != "levels"},
        lambda terms: terms | {"counts": terms["counts"].float()},
        lambda terms: terms | {"counts": -terms["counts"]},
        lambda terms: {key: torch.cat([value] * 9) for key, value in terms.items()},
        lambda terms: {},
    ],
    ids=[
        "negative variances",
        "other dimensions",
        "a field is missing",
        "counts that are no whole numbers",
        "negative counts",
        "more components than there may be",
        "nothing",
    ],
)
def test_a_damaged_mixture_is_refused(tmp_path: Path, damage: Any) -> None:
    sent = with_source(tmp_path, Hyper())
    reply = adapt.run(make_client(tmp_path, Hyper()), **sent, rng=RNG)
    gate = DualAdapt(Hyper())._expected(sent["extractor"], sent["source"], make_plan(Hyper()))["mixture"]
    gate.check(reply.mixture, {})
    with pytest.raises(Refused, match="mixture"):
        gate.check(damage(reply.mixture), {})


def test_missing_clients_keep_their_classifier_and_are_named() -> None:
    replies = Replies(adapt)
    replies.missing["b"] = "unreachable"
    fed = Federation(make_plan(Hyper(mixtures=False)), None, ())  # type: ignore[arg-type]
    DualAdapt(Hyper(mixtures=False))._tell(replies, fed)
    assert fed.counters == {"skipped.b.unreachable": 1}


@pytest.mark.parametrize(
    "key",
    [
        "lambda_st=-1",
        "alignment=-1",
        "pretrain_epochs=-1",
        "server_epochs=0",
        "components_per_class=0",
        "energy=0",
        "points=0",
        "local_share=2",
    ],
)
def test_keys_out_of_range_are_refused(key: str) -> None:
    name, value = key.split("=")
    with pytest.raises(InputError, match=f"dualadapt: .*{name}"):
        make_config({"method": "dualadapt", "dualadapt": {name: float(value) if "." in value else int(value)}})


# --- Runs ---------------------------------------------------------------------------------------------------------


@pytest.fixture
def data(tmp_path: Path) -> Path:
    root = tmp_path / "data"
    root.mkdir()
    for number, name in enumerate(TINTS):
        write_domain(root, name, seed=10 * number)
    return root


def fit(method: str, root: Path, hyper: dict[str, Any] | None = None, **keys: Any) -> fedshift.Run:
    common = {"home": "amber", "arch": "digits-copa", "rounds": 2, "batch_size": 8, "lr": 0.02, "workers": 0}
    own = {method: {"pretrain_epochs": 1.0} | (hyper or {})}
    return fedshift.fit(method, data_dir=root, **own, **({"policy": {"min_samples": 2}} | common | keys))


@pytest.mark.parametrize("few", [0, 1])
def test_bad_clients_are_skipped_or_cut_down_and_named(few: int, data: Path) -> None:
    write_domain(data, "blue", train=6)
    write_domain(data, "coral", train=few)
    run = fit("dualadapt", data)
    counters = run.results["counters"]
    assert counters["skipped.coral.site-policy"] == 2  # in both rounds
    assert counters["dropped.components.blue"] >= 2 * 3  # at most 3 of 6 components, in both rounds
    own = run.model().models
    assert set(own) == {SHARED, "blue", "dim"} and set(run.results["per_target"]) == {"blue", "coral", "dim"}


@pytest.mark.parametrize("method", ["dualadapt", "fed-oracle"])
def test_a_home_without_labels_is_named(method: str, data: Path) -> None:
    with np.load(data / "amber.npz") as file:
        np.savez(data / "amber.npz", images=file["train_images"])
    with pytest.raises(InputError, match="the home 'amber' has no labels"):
        fit(method, data)


@pytest.mark.parametrize(
    "hyper",
    [{"self_training": False, "mixtures": False}, {"mixtures": False}, {}, {"weigh_among": "fitted"}],
    ids=["MCD", "MCD and ST", "with mixtures", "weighed among the fitted"],
)
def test_rows_of_table_5_send_what_they_should(data: Path, hyper: dict[str, Any]) -> None:
    run = fit("dualadapt", data, hyper, rounds=1)
    lines = (run.path / "sites" / "dim" / "ledger.jsonl").read_text().splitlines()
    sizes = [line for line in lines if '"field": "mixture"' in line]
    assert len(sizes) == 1 and ('"values": 0' in sizes[0]) == (hyper.get("mixtures") is False)
    assert {row["site"] for row in run.metrics if row["name"] == "discrepancy"} == {"blue", "coral", "dim"}
    # Within a batch the mean of W_S is a half, whatever the client's data: it would say nothing.
    trusted = {row["site"] for row in run.metrics if row["name"] == "trust"}
    assert trusted == ({"blue", "coral", "dim"} if hyper.get("weigh_among") == "fitted" else set())


def test_fed_oracle_adapts_on_the_clients_own_pictures(data: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dualadapt, "mixup", lambda x: pytest.fail("fed-oracle does not need stand-ins"))
    run = fit("fed-oracle", data)
    assert run.results["counters"] == {}
    assert "Not to deploy" in (run.path / "MODEL_CARD.md").read_text()


@pytest.mark.parametrize(("method", "passes"), [("fed-oracle", 4), ("dualadapt", 2)])
def test_what_the_home_remembers_comes_from_its_turns_with_labels(
    method: str, passes: int, tmp_path: Path, data: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither clients' own pictures nor mixed-up ones move it."""
    seen: list[Tensor] = []
    original = dualadapt.discrepancy
    monkeypatch.setattr(dualadapt, "label_loss", lambda scores, y: scores.sum() * 0)
    monkeypatch.setattr(dualadapt, "discrepancy", lambda a, b: seen.append(a) or original(a, b))
    monkeypatch.setattr(dualadapt, "augmentation", lambda plan: None)
    found, trained = [], []
    optimise_, features = dualadapt.optimise, Network.features

    def optimise(*a: Any, **kw: Any) -> Any:
        trained.clear()
        found.append((kw, optimise_(*a, **kw)))
        return found[-1][1]

    def counted(net: Network, x: Tensor) -> Tensor:
        if net.training:
            trained.append(x)
        return features(net, x)

    monkeypatch.setattr(dualadapt, "optimise", optimise)
    monkeypatch.setattr(Network, "features", counted)
    fit(method, data, {"server_epochs": 0.1}, lr=1e-9, batch_size=64, norm="own")
    (kw, after), layer = found[-1], "block1.norm.num_batches_tracked"
    # One batch with labels; one of each of three clients, or of mixed-up pictures, which is not remembered.
    assert len(trained) == passes and seen
    assert int(after.extractor[layer] - kw["extractor"][layer]) == 1
    before, batches = kw["extractor"]["block1.norm.running_mean"], after.extractor["block1.norm.running_mean"]
    keys = {"server_epochs": 0.1, "alignment": 0.0}
    fit(method, data, keys, lr=1e-9, batch_size=64, norm="own", out=tmp_path / "labels alone")
    assert torch.allclose(found[-1][1].extractor["block1.norm.running_mean"], batches, atol=1e-6)
    assert not torch.allclose(before, batches, atol=1e-4)


def test_what_clients_sent_is_used_in_the_next_round(data: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []
    original = dualadapt.optimise
    monkeypatch.setattr(dualadapt, "optimise", lambda home, **kw: calls.append(kw) or original(home, **kw))
    fit("dualadapt", data, rounds=1)
    assert calls == []  # The first round is pre-training and the clients' first turn.
    fit("dualadapt", data, rounds=2, out=data.parent / "two")
    (call,) = calls
    assert set(call["local"]) == set(call["mixtures"]) == {"blue", "coral", "dim"}
    assert call["axes"].axes.shape[1] == call["mixtures"]["dim"].means.shape[1]


def test_without_alignment_the_home_learns_from_labels_alone(data: Path) -> None:
    run = fit("dualadapt", data, {"alignment": 0.0})
    assert [row["value"] for row in run.metrics if row["name"] == "align_loss"] == [0.0]
    assert set(run.model().models) == {SHARED, "blue", "coral", "dim"}


def test_dualadapt_has_no_copy_of_anybodys_data(data: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    homes = []
    original = dualadapt.optimise
    monkeypatch.setattr(dualadapt, "optimise", lambda home, **kw: homes.append(type(home)) or original(home, **kw))
    fit("dualadapt", data)
    assert homes == [Labelled]


def test_axes_are_the_homes_for_all(tmp_path: Path) -> None:
    sent = with_source(tmp_path, Hyper())
    axes: Axes = sent["source"].axes
    reply = adapt.run(make_client(tmp_path, Hyper()), **sent, rng=RNG)
    assert reply.mixture["means"].shape[1] == axes.axes.shape[1] == sent["source"].mixture.means.shape[1]
    products = axes.axes.T @ axes.axes
    assert torch.allclose(products, torch.eye(len(products)), atol=1e-5)
