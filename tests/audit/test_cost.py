"""What `fedshift cost` counts, against numbers worked out by hand, real runs and the formulas of the papers."""

from __future__ import annotations

import dataclasses
import functools
import json
import math
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from fedshift import cli
from fedshift.audit.cost import Cost, cost, evaluated, network_parts, written
from fedshift.audit.counting import count_rounds, flop_counter, flops_per_sample, random_dataset
from fedshift.errors import InputError
from fedshift.methods import METHODS, find_about
from fedshift.methods.cost import Formula
from fedshift.runs.config import make_config
from fedshift.runs.execute import run

OVERHEAD = 64
"""Bytes by which two messages with the same tensors may differ: names of sites and the digits of losses and counts."""


def flops(layer: nn.Module, x: torch.Tensor) -> tuple[int, int]:
    """Forward, and backward."""
    with flop_counter() as counter:
        out = layer(x)
        forward = counter.get_total_flops()
        out.sum().backward()
    return forward, counter.get_total_flops() - forward


@pytest.mark.parametrize("groups", [1, 2, 8])
def test_a_convolution_costs_three_forward_passes_and_two_where_its_input_needs_no_gradient(groups: int) -> None:
    layer = nn.Conv2d(8, 16, 3, stride=2, padding=1, groups=groups)
    by_hand = 2 * (8 // groups) * 9 * 16 * 5 * 5 * 4  # multiply and add, taps, outputs, 5x5 positions, 4 samples
    assert flops(layer, torch.rand(4, 8, 10, 10, requires_grad=True)) == (by_hand, 2 * by_hand)
    assert flops(layer, torch.rand(4, 8, 10, 10)) == (by_hand, by_hand)


def test_a_transposed_convolution() -> None:
    layer = nn.ConvTranspose2d(8, 16, 2, stride=2)
    by_hand = 2 * 8 * 16 * 4 * 5 * 5
    assert flops(layer, torch.rand(1, 8, 5, 5, requires_grad=True)) == (by_hand, 2 * by_hand)


def test_fedavg_costs_what_its_layers_cost() -> None:
    """digits-copa: four 3x3 convolutions to 64 channels at 16, 8, 4 and 2 pixels, then 64 features to 3 classes."""
    convolutions = [2 * 9 * inputs * 64 * side**2 for inputs, side in ((3, 16), (64, 8), (64, 4), (64, 2))]
    head = 2 * 64 * 3
    found = counted("fedavg")
    assert found.network["G"].forward_flops == sum(convolutions) and found.network["F"].forward_flops == head
    assert found.network["G"].input_gradient_flops == convolutions[0]
    # The gradient of the images is not computed.
    assert found.round.flops_per_sample == 3 * sum(convolutions) + 3 * head - convolutions[0]
    weights = 3 * 9 * 64 + 3 * (64 * 9 * 64) + 4 * 64 + 64 * 3 + 3
    norms = 4 * 2 * 64
    assert found.network["G"].parameters + found.network["F"].parameters == weights + norms
    # Running means and variances travel too, and one counter a norm.
    assert found.round.upload.numbers == found.round.broadcast.numbers == weights + norms + 4 * (2 * 64 + 1)


@functools.cache
def counted(method: str, sites: int = 3, batch: int = 8) -> Cost:
    return cost(method, "digits-copa", 3, sites=sites, image_size=16, batch=batch)


RUNS: dict[str, dict[str, Any]] = {
    "fedavg": {},
    "copa": {},
    "csac": {"csac": {"acquisition_epochs": 1, "calibration_epochs": 1}},
}


@pytest.mark.parametrize(
    "method",
    [pytest.param(name, marks=() if name in RUNS or name == "dualadapt" else pytest.mark.slow) for name in METHODS],
)
def test_every_method_is_counted_and_agrees_with_its_formulas(method: str) -> None:
    found = counted(method, *((3, 8) if method in RUNS else (2, 4)))
    json.dumps(dataclasses.asdict(found), allow_nan=False)
    if found.round.times == 0:
        assert find_about(method).data == "target-copies" and found.home_flops > 0
        return
    numbers = (found.round, found.first_round, *found.steps.values())
    assert all(math.isfinite(row.flops_per_sample) and row.upload.bytes > 0 for row in numbers)
    assert found.round.flops_per_sample > found.network["G"].forward_flops
    assert found.round.upload.numbers > 0 and found.round.broadcast.numbers > 0
    assert [row for row in found.comparisons if not row.agrees] == []


@pytest.mark.parametrize(
    "method", [pytest.param(name, marks=pytest.mark.slow if name in ("csac", "copa") else ()) for name in RUNS]
)
def test_a_real_run_moves_the_bytes_that_were_counted(method: str, tiny_data: Path, tmp_path: Path) -> None:
    keys = {"arch": "digits-copa", "rounds": 2, "lr": 0.01, "train_per_site": 10, "workers": 0, "evaluate_every": 2}
    config = make_config({"method": method, "data_dir": tiny_data, "target": "dim", **keys, **RUNS[method]})
    results = run(config, tmp_path)
    found, sites, later = counted(method), 3, 1
    messages = sites * (found.first_round.times + later * found.round.times)
    for way, first, usual in (
        ("up", found.first_round.upload, found.round.upload),
        ("down", found.first_round.broadcast, found.round.broadcast),
    ):
        expected = sites * (first.bytes + later * usual.bytes)
        assert abs(results["bytes"][way] - expected) <= OVERHEAD * messages
        # In all, headers are 2 % of these small nets.
        assert expected == pytest.approx(4 * sites * (first.numbers + later * usual.numbers), rel=0.02)
    assert results["flops_client"] is None, "counted on request only"
    assert flops_per_sample(config) == found.round.flops_per_sample


def test_the_first_round_of_csac_has_acquisition_in_it() -> None:
    found = counted("csac")
    assert found.first_round.times == 2 and found.round.times == 1
    assert found.first_round.upload.numbers == 2 * found.round.upload.numbers
    assert list(found.steps) == ["csac.calibrate"]


def test_however_many_epochs_a_paper_asks_for_samples_are_passed_once() -> None:
    """CSAC's 30 epochs of acquisition: one pass is counted, and divided by its samples."""
    dataset = random_dataset("classification", ["a", "b"], ["one", "other"], (3, 16, 16), 6)
    trial = count_rounds(make_config({"method": "csac", "target": "other", "arch": "digits-copa"}), dataset, 4)
    assert [exchange.work.samples for exchange in trial.exchanges] == [6] * 3
    plain = count_rounds(make_config({"method": "fedavg", "target": "other", "arch": "digits-copa"}), dataset, 4)
    assert trial.of_round(1)[0].work == plain.of_round(1)[0].work


def test_random_data_of_every_kind() -> None:
    found = cost("fedavg", "mlp", 4, sites=2)
    assert found.input_shape == (16,) and found.comparisons[0].agrees
    found = cost("fedavg", "segnet-small", 5, sites=1, image_size=16, batch=2)
    assert found.comparisons[0].agrees and found.network["F"].numbers == 64 * 5 + 5
    with pytest.raises(InputError, match="does not do segmentation"):
        cost("copa", "segnet-small")


def test_the_pyramid_of_a_segmentation_net_belongs_to_its_extractor() -> None:
    parts = network_parts("deeplab_mobilenet_v2_half", (3, 64, 64), 13)
    assert parts["F"].parameters == 256 * 13 + 13
    assert parts["F"].forward_flops == 2 * 256 * 13 * 4 * 4  # output stride 16


@pytest.mark.parametrize(("method", "hidden"), [("fada", 256), ("fed-dann", 100)])
def test_a_discriminator_is_part_of_the_formula(method: str, hidden: int) -> None:
    found = counted(method, *((3, 8) if method in RUNS else (2, 4)))
    assert found.network["D"].forward_flops == 2 * (64 * hidden + hidden)
    [flops, *_] = found.comparisons
    assert "||D||" in flops.formula and flops.counted == flops.value


def formula_of(method: str) -> Formula:
    formula = find_about(method).cost
    assert formula is not None
    return formula


def test_formulas_as_they_are_written() -> None:
    assert written(formula_of("copa").flops or {}, "||") == "6||G|| + ||F|| + 2K||F|| - 2||dG||"
    assert written(formula_of("fed-mcd").upload or {}, "|") == "|G| + 2|F|"
    assert evaluated({"G": 3, "KF": 2, "dG": -1}, {"G": 10, "KF": 6, "dG": 4}) == 38


@pytest.mark.parametrize(
    ("method", "published", "up", "down"),
    [
        ("dualadapt", "||G|| + 3||F||", "|F| + |W|", "|G| + |F| + |W|"),
        ("fed-mcd", "4||G|| + 8||F||", "|G| + 2|F|", "|G| + 2|F|"),
        ("fed-dann", "4||G|| + 2||F|| + 4||D||", "|G| + |F|", "|G| + |F|"),
    ],
)
def test_formulas_of_the_paper(method: str, published: str, up: str, down: str) -> None:
    """Yao et al., sec. 4.2; |S|, BatchNorm statistics, is ours."""
    formula = formula_of(method)
    assert written(formula.published or {}, "||") == published
    assert written(formula.upload or {}, "|") == up and written(formula.broadcast or {}, "|") == down


def call(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, str]:
    """Exit code and all output of `fedshift cost WORDS`."""
    monkeypatch.setattr(sys, "argv", ["fedshift", "cost", *words])
    monkeypatch.setenv("COLUMNS", "200")
    code: Any = 0
    try:
        cli.main()
    except SystemExit as stop:
        code = stop.code or 0
    shown = capsys.readouterr()
    return code, shown.out + shown.err


def test_the_command(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    words = ("fedavg", "--classes", "3", "--image-size", "16", "--sites", "2", "--batch", "4")
    code, shown = call(monkeypatch, capsys, *words)
    found = counted("fedavg")
    assert code == 0 and f"{found.round.flops_per_sample:,.0f}" in shown and "3||G|| + 3||F|| - ||dG||" in shown
    code, shown = call(monkeypatch, capsys, *words, "--json")
    plain = json.loads(shown)
    assert plain["round"]["flops_per_sample"] == found.round.flops_per_sample and plain["sites"] == 2
    assert all(row["agrees"] for row in plain["comparisons"])


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (("fedavgg",), "Did you mean 'fedavg'"),
        (("fedavg", "--arch", "digits-cop"), "Did you mean 'digits-copa'"),
        (("fedavg", "--classes", "1"), "classes is 1"),
        (("fedavg", "--samples", "4"), "samples is 4"),
        (("fedavg", "--arch", "mlp", "--image-size", "32"), "table rows"),
        (("fedavg", "--image-size", "8"), "at least 16 pixels"),
    ],
)
def test_mistakes_are_named(
    words: tuple[str, ...], says: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    code, shown = call(monkeypatch, capsys, *words)
    assert code == 2 and says in shown
