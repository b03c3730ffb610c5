from __future__ import annotations

import dataclasses
import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tinydata import CLASSES, shapes
from torch import Tensor

from fedshift.data.domain import DataSource, Domain, Split
from fedshift.errors import InputError
from fedshift.federation.plan import ModelSpec, Plan, Training
from fedshift.federation.site import Labelled, SiteSpec
from fedshift.methods import averaging, csac
from fedshift.methods.csac import Hyper, acquire, calibrate, shown_layers
from fedshift.methods.local import plain_network, weights_of
from fedshift.nn import taps as projections_module
from fedshift.nn.archs import build_network
from fedshift.nn.taps import FrozenMaps, Projections, resized
from fedshift.rng import Rng
from fedshift.runs.config import make_config
from fedshift.runs.execute import run

NAMES = tuple(map(str, range(CLASSES)))


def make_site(
    folder: Path, hyper: Hyper, *, samples: int = 12, arch: str = "digits-csac", round: int = 1, **training: Any
) -> Labelled:
    images, labels = shapes(samples, (1.0, 0.7, 0.2), 0.1, seed=0)
    split = Split(images, labels) if arch != "mlp" else Split(images[:, :4, 0, 0].astype(np.float32) / 255, labels)
    how: dict[str, Any] = {
        "rounds": 3,
        "batch_size": 6,
        "lr": 0.05,
        "lr_min": 0.0,
        "momentum": 0.5,
        "weight_decay": 0.0,
        "local_epochs": 1.0,
        "schedule": "constant",
        "precision": "float32",
        "augment": (),
    }
    shape = (3, 16, 16) if arch != "mlp" else (4,)
    plan = Plan(
        version="",
        method="csac",
        setting="generalize",
        sources=("a",),
        seed=0,
        threads=1,
        model=ModelSpec(arch, "classification", NAMES, shape),
        training=Training(**(how | training)),
        hyper=dataclasses.asdict(hyper),
    )
    spec = SiteSpec("a", "labelled", DataSource(), ("a",), folder)
    return Labelled(spec, plan, Domain("a", split, split, split), NAMES, round)


def start(site: Labelled) -> dict[str, Tensor]:
    spec = site.plan.model
    return weights_of(build_network(spec.arch, spec.input_shape, CLASSES, generator_seed=3))


def short(**keys: Any) -> Hyper:
    return Hyper(**({"acquisition_epochs": 1.0, "calibration_epochs": 1.0} | keys))


def same(a: Any, b: Any) -> bool:
    return set(a) == set(b) and all(torch.equal(a[key], b[key]) for key in a)


@pytest.mark.parametrize("smoothing", [0.1, 0.0])
def test_acquisition_minimises_the_smoothed_loss_by_hand(smoothing: float, tmp_path: Path) -> None:
    site = make_site(tmp_path, short(smoothing=smoothing), batch_size=12, lr=1e-9)
    model = start(site)
    trained = acquire.run(site, model=model, rng=Rng.of("x"))
    net = plain_network(site.plan)
    net.load_state_dict(model)
    (batch,) = site.train.in_order(12)
    with torch.no_grad():
        logs = net(batch.x).log_softmax(1)
    # Eq. (2): p = 1 - s + s/C for the true class, s/C for the others.
    total = 0.0
    for row, label in zip(logs, batch.y, strict=True):
        for number, log in enumerate(row):
            total -= ((1 - smoothing) * (number == int(label)) + smoothing / CLASSES) * float(log)
    assert trained.loss == pytest.approx(total / 12, rel=1e-5)


def test_the_site_keeps_what_it_acquired_and_calibration_never_touches_it(tmp_path: Path) -> None:
    site = make_site(tmp_path, short(), arch="digits-copa")
    fused = start(site)
    trained = acquire.run(site, model=fused, rng=Rng.of("x"))
    acquired = site.store.load("local")
    assert same(acquired, trained.model) and not same(acquired, fused)
    for round in range(1, 6):
        site.round = round
        fused = calibrate.run(site, model=fused, rng=Rng.of("y", round)).model
    assert same(site.store.load("local"), acquired)  # BatchNorm's statistics among them: it was in eval mode


def test_no_gradient_into_the_local_model() -> None:
    net = build_network("digits-copa", (3, 16, 16), CLASSES, 0)
    before = weights_of(net)
    local = FrozenMaps(net, ("block3", "block4"), (3, 16, 16), samples=4, remember=False)
    x = torch.rand(4, 3, 16, 16, requires_grad=True)
    maps = local(x, torch.arange(4))
    assert all(not layer.requires_grad for layer in maps)
    assert all(not p.requires_grad for p in net.parameters()) and not net.training
    assert same(weights_of(net), before)


def test_projections_are_learned_and_go_on_from_where_they_were(tmp_path: Path) -> None:
    site = make_site(tmp_path, short())
    model = start(site)
    acquire.run(site, model=model, rng=Rng.of("x"))
    calibrate.run(site, model=model, rng=Rng.of("y", 1))
    first = site.store.load("projections")
    assert set(first) == {
        f"{side}.{n}.{part}" for side in ("first", "second") for n in "01" for part in ("weight", "bias")
    }
    assert first["first.0.weight"].shape == (64, 32) and first["second.1.weight"].shape == (64, 64)
    # Without a learning rate nothing moves: another round has to find the same projections, whatever it would draw.
    still = make_site(tmp_path, short(), lr=1e-30, round=2)
    calibrate.run(still, model=model, rng=Rng.of("y", 2))
    assert same(still.store.load("projections"), first)
    site.round = 3
    calibrate.run(site, model=model, rng=Rng.of("y", 3))
    assert all(not torch.equal(value, first[key]) for key, value in site.store.load("projections").items())


@pytest.mark.parametrize("estimator", ["biased", "authors"])
def test_a_model_aligned_with_itself(estimator: str, tmp_path: Path) -> None:
    def loss(sharing: str) -> float:
        keys = {"pairs": "same-layer", "cross_entropy": False, "lambda_": 1.0, "estimator": estimator}
        hyper = short(projection_sharing=sharing, projection_learning="fixed", **keys)
        site = make_site(tmp_path / sharing, hyper, batch_size=12, lr=1e-30)
        own = acquire.run(site, model=start(site), rng=Rng.of("x")).model
        return calibrate.run(site, model=own, rng=Rng.of("y")).loss

    # Eq. (5) as printed: one projection for both. With one each, the same features look different.
    if estimator == "biased":
        assert abs(loss("shared")) < 1e-4
    else:  # Two layers, 12 images: see functional/mmd.py.
        assert 2 * -8 / 12 < loss("shared") < 2 * 2 / 11
    assert loss("separate") > loss("shared") + 0.5


@pytest.mark.parametrize("sharing", ["shared", "separate"])
def test_fixed_projections_stay_as_they_were_drawn(sharing: str, tmp_path: Path) -> None:
    kept = {}
    for learning in ("fixed", "learned"):
        hyper = short(projection_sharing=sharing, projection_learning=learning)
        site = make_site(tmp_path / learning, hyper)
        model = start(site)
        for round in (1, 2):
            site.round = round
            model = calibrate.run(site, model=model, rng=Rng.of("y", round)).model
            kept[learning, round] = site.store.load("projections")
    sides = {key.split(".")[0] for key in kept["fixed", 1]}
    assert sides == ({"first"} if sharing == "shared" else {"first", "second"})
    assert same(kept["fixed", 1], kept["fixed", 2])
    assert not same(kept["learned", 1], kept["learned", 2]) and not same(kept["learned", 1], kept["fixed", 1])
    still = make_site(tmp_path / "still", short(projection_sharing=sharing), lr=1e-30)
    calibrate.run(still, model=start(still), rng=Rng.of("y", 1))
    assert same(still.store.load("projections"), kept["fixed", 1])


def test_old_configurations_mean_what_they_meant() -> None:
    usual = Hyper()
    assert (usual.projection_sharing, usual.projection_learning) == ("separate", "learned")
    assert usual.estimator == "biased"
    assert make_config({"method": "csac", "csac": {"estimator": "biased"}}).chosen()["csac"] == {}
    for key in ("projection_sharing", "projection_learning", "estimator"):
        with pytest.raises(InputError, match=key):
            make_config({"method": "csac", "csac": {key: "other"}})


def test_calibration_without_alignment_is_what_fedavg_does(tmp_path: Path) -> None:
    site = make_site(tmp_path, short(lambda_=0.0), momentum=0.0)
    model = start(site)
    ours = calibrate.run(site, model=model, rng=Rng.of("y"))
    theirs = averaging.train.run(site, model=model, rng=Rng.of("y"))
    assert ours.loss == pytest.approx(theirs.loss, rel=1e-5)
    assert all(torch.allclose(ours.model[key], theirs.model[key], atol=1e-6) for key in model)
    assert site.store.load("projections") is None


def test_the_loss_is_cross_entropy_plus_lambda_times_alignment(tmp_path: Path) -> None:
    model = start(make_site(tmp_path / "x", short()))
    losses = {}
    for weight in (0.0, 1.0, 3.0):
        # One step of no length: the loss is that of the model that was sent.
        site = make_site(tmp_path / str(weight), short(lambda_=weight), batch_size=12, lr=1e-30)
        acquire.run(site, model=model, rng=Rng.of("x"))
        losses[weight] = calibrate.run(site, model=model, rng=Rng.of("y")).loss
    assert losses[1.0] > losses[0.0] + 0.01
    assert losses[3.0] - losses[0.0] == pytest.approx(3 * (losses[1.0] - losses[0.0]), rel=1e-4)


ROWS: dict[str, dict[str, Any]] = {
    "paper": {},
    "without alignment": {"lambda_": 0.0},
    "same-layer alignment": {"pairs": "same-layer"},
    "without position attention": {"attention": "channel"},
    "without channel attention": {"attention": "position"},
    "without attention": {"attention": "none"},
    "without cross-entropy": {"cross_entropy": False},
    "mse": {"discrepancy": "mse"},
    "authors' projection": {"channels": 32},
    "authors' estimator": {"estimator": "authors"},
    "shared projections": {"projection_sharing": "shared"},
    "fixed projections": {"projection_learning": "fixed"},
}


def test_every_row_of_table_5_trains_another_model(tmp_path: Path) -> None:
    model = start(make_site(tmp_path, short()))
    found: dict[str, Tensor] = {}
    for number, (row, keys) in enumerate(ROWS.items()):
        site = make_site(tmp_path / str(number), short(**keys))
        acquire.run(site, model=model, rng=Rng.of("x"))
        calibrated = calibrate.run(site, model=model, rng=Rng.of("y")).model
        found[row] = calibrated["backbone.conv1.conv.weight"]
        if row == "without cross-entropy":
            assert torch.equal(calibrated["head.weight"], model["head.weight"])  # only labels train the head
    values = list(found.values())
    assert all(not torch.equal(a, b) for n, a in enumerate(values) for b in values[:n])
    assert all(bool(torch.isfinite(value).all()) for value in values)


def test_a_site_that_missed_the_acquisition_makes_up_for_it(tmp_path: Path) -> None:
    site = make_site(tmp_path, short(), round=2)
    model = start(site)
    calibrate.run(site, model=model, rng=Rng.of("y"))
    own = site.store.load("local")
    assert own is not None and not same(own, model)
    site.round = 3
    calibrate.run(site, model=model, rng=Rng.of("y", 3))
    assert same(site.store.load("local"), own)
    site.store.rewind(1)  # A run that falls back to round 1 finds the site as it was then: without a model.
    assert site.store.load("local") is None


def test_an_epoch_is_a_pass_or_a_number_of_batches(tmp_path: Path) -> None:
    def batches(samples: int, epochs: float, per_epoch: int | None) -> list[int]:
        hyper = short(batches_per_epoch=per_epoch)
        site = make_site(tmp_path, hyper, samples=samples)
        return [len(batch.y) for batch in csac._batches(site, epochs, hyper, Rng.of("z"))]

    assert batches(12, 2, None) == [6, 6, 6, 6]
    assert batches(12, 2, 5) == [6] * 10
    assert batches(4, 2, 3) == [4] * 6  # fewer images than a batch
    assert batches(4, 0.5, 1) == [4]


def test_a_site_with_fewer_images_than_a_batch(tmp_path: Path) -> None:
    site = make_site(tmp_path, short(), samples=3, batch_size=64)
    model = start(site)
    acquire.run(site, model=model, rng=Rng.of("x"))
    trained = calibrate.run(site, model=model, rng=Rng.of("y"))
    assert math.isfinite(trained.loss) and all(bool(torch.isfinite(t).all()) for t in trained.model.values())


def test_table_rows_are_maps_of_one_position(tmp_path: Path) -> None:
    site = make_site(tmp_path, short(), arch="mlp")
    model = start(site)
    acquire.run(site, model=model, rng=Rng.of("x"))
    trained = calibrate.run(site, model=model, rng=Rng.of("y"))
    assert math.isfinite(trained.loss) and not same(trained.model, model)
    assert site.store.load("projections")["first.0.weight"].shape == (64, 64)


def test_bfloat16_changes_the_alignment_little(tmp_path: Path) -> None:
    losses = []
    for precision in ("float32", "bfloat16"):
        site = make_site(tmp_path / precision, short(cross_entropy=False), batch_size=12, precision=precision, lr=1e-30)
        model = start(site)
        acquire.run(site, model=model, rng=Rng.of("x"))
        losses.append(calibrate.run(site, model=model, rng=Rng.of("y")).loss)
    assert losses[1] == pytest.approx(losses[0], rel=0.02)


def test_maps_are_averaged_to_the_last_layers_size_before_they_are_projected() -> None:
    x = torch.arange(16.0).reshape(1, 1, 4, 4)
    assert resized(x, (2, 2)).tolist() == [[[2.5], [4.5], [10.5], [12.5]]]
    assert resized(torch.tensor([[1.0, 2.0]]), (1, 1)).tolist() == [[[1.0, 2.0]]]
    # A linear layer on maps with the channels last is a 1x1 convolution, and it commutes with averaging.
    features, project = torch.rand(2, 3, 4, 4), Projections((3,), 5, shared=False).first[0]
    convolved = torch.nn.functional.conv2d(features, project.weight[:, :, None, None], project.bias)
    assert torch.allclose(project(resized(features, (2, 2))), resized(convolved, (2, 2)), atol=1e-6)


def test_the_frozen_model_is_asked_once_for_each_image(monkeypatch: pytest.MonkeyPatch) -> None:
    def local(remember: bool) -> tuple[FrozenMaps, list[int]]:
        net = build_network("digits-copa", (3, 16, 16), CLASSES, 0)
        frozen, asked = FrozenMaps(net, ("block3", "block4"), (3, 16, 16), samples=6, remember=remember), []
        net.backbone.register_forward_hook(lambda module, inputs, output: asked.append(len(output)))
        return frozen, asked

    x = torch.rand(6, 3, 16, 16)
    frozen, asked = local(True)
    first = [frozen(x[:4], torch.arange(4)), frozen(x[2:], torch.arange(2, 6))]
    again = frozen(x[[5, 0, 3]], torch.tensor([5, 0, 3]))
    assert asked == [4, 4]
    assert torch.equal(again[0][0], first[1][0][3]) and torch.equal(again[1][1], first[0][1][0])
    frozen, asked = local(False)
    for _ in range(2):
        frozen(x, torch.arange(6))
    assert asked == [6, 6]
    monkeypatch.setattr(projections_module, "_REMEMBERED_BYTES", 100)  # as if they did not fit into memory
    frozen, asked = local(True)
    for _ in range(2):
        frozen(x, torch.arange(6))
    assert asked == [6, 6]


def test_images_that_change_are_never_remembered(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    remembered = []

    class Watched(FrozenMaps):
        def __init__(self, *arguments: Any, remember: bool, **keys: Any) -> None:
            remembered.append(remember)
            super().__init__(*arguments, remember=remember, **keys)

    monkeypatch.setattr(csac, "FrozenMaps", Watched)
    for number, augment in enumerate([(), ("flip",)]):
        site = make_site(tmp_path / str(number), short(), augment=augment)
        calibrate.run(site, model=start(site), rng=Rng.of("y"))
    assert remembered == [True, False]


def test_a_stage_stands_in_metrics_by_its_last_convolution() -> None:
    def shown(arch: str, side: int) -> dict[str, str]:
        return shown_layers(ModelSpec(arch, "classification", NAMES, (3, side, side)))

    assert shown("resnet18", 64) == {
        "layer1": "backbone.layer1.1.conv2.weight",
        "layer2": "backbone.layer2.1.conv2.weight",
        "layer3": "backbone.layer3.1.conv2.weight",
        "layer4": "backbone.layer4.1.conv2.weight",
        "head": "head.weight",
    }
    assert shown("digits-csac", 28)["conv1"] == "backbone.conv1.conv.weight"


def settings(data: Path, **changes: Any) -> dict[str, Any]:
    quick = {"acquisition_epochs": 1, "calibration_epochs": 1} | changes.pop("csac", {})
    common = {"method": "csac", "data_dir": data, "target": "dim", "arch": "digits-csac", "rounds": 2, "workers": 0}
    return {**common, "train_per_site": 24, "batch_size": 12, "lr": 0.02, "csac": quick, **changes}


def test_a_run_notes_fusion_weights_by_site_and_stage(tiny_data: Path, tmp_path: Path) -> None:
    run(make_config(settings(tiny_data)), tmp_path / "run")
    rows = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    for round, name in ((1, "acquisition_fusion.conv2"), (1, "fusion.conv2"), (2, "fusion.head")):
        weights = {row["site"]: row["value"] for row in rows if row["round"] == round and row["name"] == name}
        assert set(weights) == {"amber", "blue", "coral"} and sum(weights.values()) == pytest.approx(1)
    assert not [row for row in rows if row["round"] == 2 and row["name"].startswith("acquisition")]


@pytest.mark.parametrize(
    "keys", [{"fusion": "similarity"}, {"fusion": "average"}, {"distance": "l1"}, {"distance": "cosine"}]
)
def test_rows_of_table_4_fuse_another_model(keys: dict[str, str], tiny_data: Path, tmp_path: Path) -> None:
    usual = run(make_config(settings(tiny_data, rounds=1)), tmp_path / "usual")
    other = run(make_config(settings(tiny_data, rounds=1, csac=keys)), tmp_path / "other")
    assert usual["model_sha256"] != other["model_sha256"]


def test_the_threads_of_the_process_change_no_byte(tiny_data: Path, tmp_path: Path) -> None:
    """Without OMP_NUM_THREADS torch has as many as there are cores, and distances between models are sums over them."""
    alone = run(make_config(settings(tiny_data, rounds=1)), tmp_path / "alone")
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    try:
        shared = run(make_config(settings(tiny_data, rounds=1)), tmp_path / "shared")
        assert torch.get_num_threads() == 3
    finally:
        torch.set_num_threads(before)
    assert shared["model_sha256"] == alone["model_sha256"]
    metrics = [(tmp_path / name / "metrics.jsonl").read_text().splitlines() for name in ("alone", "shared")]
    alone_rows, shared_rows = ([line for line in lines if "seconds" not in line] for lines in metrics)
    assert alone_rows == shared_rows
    assert json.loads((tmp_path / "shared" / "env.json").read_text())["threads"] == 1


def test_one_source_alone_runs_and_says_so(tiny_data: Path, tmp_path: Path) -> None:
    results = run(make_config(settings(tiny_data, sources=("blue",))), tmp_path / "run")
    assert results["counters"]["fusion.one-site"] == 3  # after acquisition, and after each of two calibrations


def test_a_layer_that_the_network_lacks_is_an_error_before_training(tiny_data: Path, tmp_path: Path) -> None:
    config = make_config(settings(tiny_data, csac={"layers": ["layer4"]}))
    with pytest.raises(InputError, match="no stage 'layer4'; it can be tapped at conv1, conv2, fc1"):
        run(config, tmp_path / "run")
    assert not list((tmp_path / "run").glob("sites/*/state/*"))


def test_chosen_layers_are_aligned(tmp_path: Path) -> None:
    site = make_site(tmp_path, short(layers=("conv1", "conv2", "fc1")))
    calibrate.run(site, model=start(site), rng=Rng.of("y"))
    learned = site.store.load("projections")
    assert learned["first.0.weight"].shape == (128, 32) and learned["second.2.weight"].shape == (128, 128)


@pytest.mark.parametrize(
    ("keys", "words"),
    [
        ({"lambda": -1}, "lambda must not be negative"),
        ({"lambda": 0, "cross_entropy": False}, "nothing to learn"),
        ({"acquisition_epochs": 0}, "must be above 0"),
        ({"batches_per_epoch": 0}, "batches_per_epoch"),
        ({"smoothing": 1.0}, "smoothing"),
        ({"layers": ["conv1", "conv1"]}, "twice"),
        ({"channels": 0}, "channels"),
        ({"fusion": "sum"}, "divergence"),
        ({"attention": "all"}, "position"),
        ({"lambada": 1}, "Did you mean 'lambda'"),
    ],
)
def test_values_out_of_range_are_clear_errors(keys: dict[str, Any], words: str, tmp_path: Path) -> None:
    with pytest.raises(InputError, match=words):
        make_config({"method": "csac", "csac": keys})


def test_the_papers_values_are_the_defaults() -> None:
    config = make_config({"method": "csac"})
    hyper = Hyper(**config.hyper)
    assert (hyper.lambda_, hyper.acquisition_epochs, hyper.calibration_epochs, hyper.smoothing) == (0.6, 30, 10, 0.1)
    assert csac.CSAC.defaults["lr"] == 0.01 and csac.CSAC.defaults["momentum"] == 0.5
