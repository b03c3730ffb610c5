"""What every method keeps to. A new one is tested here by being in the table: nothing in this file names one."""

from __future__ import annotations

import functools
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from tinydata import CLASSES, write_domain

from fedshift.errors import FedshiftError, SiteError
from fedshift.federation import codec
from fedshift.federation.engines import Engine, Failure
from fedshift.federation.handshake import introduce
from fedshift.federation.kinds import kinds
from fedshift.federation.step import Request, Step
from fedshift.methods import METHODS
from fedshift.methods.evaluation import score
from fedshift.runs import planning
from fedshift.runs.config import make_config
from fedshift.runs.execute import run
from fedshift.runs.progress import Silent

ROUNDS = 3
MARGIN = 0.2
"""How far above chance a method must be on a domain it was not given labels of."""

CASES = [(name, setting) for name, entry in METHODS.items() for setting in entry.about.settings]
every_setting = pytest.mark.parametrize(("method", "setting"), CASES, ids=[f"{m}-{s}" for m, s in CASES])
# Baselines that exist in several settings run the same steps in each: one is enough for what follows from the steps.
FIRST = [(name, entry.about.settings[0]) for name, entry in METHODS.items()]
every_method = pytest.mark.parametrize(("method", "setting"), FIRST, ids=[f"{m}-{s}" for m, s in FIRST])


def settings(method: str, setting: str, data: Path, **changes: Any) -> dict[str, Any]:
    roles = {"home": "amber"} if setting == "multi-adapt" else {"target": "dim"}
    common: dict[str, Any] = {
        "method": method,
        "setting": setting,
        "data_dir": data,
        "arch": "digits-copa",
        "rounds": ROUNDS,
        "batch_size": 8,
        "lr": 0.02,
        "workers": 0,
        "policy": {"min_samples": 2},
        **TINY.get(method, {}),
    }
    return common | roles | changes


TINY: dict[str, dict[str, Any]] = {
    "csac": {"csac": {"acquisition_epochs": 2, "calibration_epochs": 2}},
    "dualadapt": {"dualadapt": {"pretrain_epochs": 6}},
    "fed-oracle": {"fed-oracle": {"pretrain_epochs": 6}},
    "fed-mcd": {"fed-mcd": {"repeats": 1}},
    "cent-mcd": {"cent-mcd": {"repeats": 1}},
}
"""Keys that cut a method's published schedule down to seconds."""

ONE_BY_ONE = {"sequential"}
"""Methods that ask one site at a time: a chain ends where a site is missing, and has to say so."""


@functools.cache
def finished(method: str, setting: str, data: Path, out: Path) -> dict[str, Any]:
    return run(make_config(settings(method, setting, data)), out)


@pytest.fixture
def usual(method: str, setting: str, tiny_data: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """The undisturbed run that the others are compared with, trained once a method and setting."""
    out = tmp_path_factory.getbasetemp() / f"usual-{method}-{setting}"
    return finished(method, setting, tiny_data, out) | {"folder": out}


@every_setting
def test_learns(usual: dict[str, Any]) -> None:
    scores = [row["last"] for row in usual["per_target"].values()]
    assert np.mean(scores) > 1 / CLASSES + MARGIN
    assert all(0 <= score <= 1 for score in scores)


@every_method
def test_same_seed_same_bytes_other_seed_other_bytes(
    method: str, setting: str, tiny_data: Path, usual: dict[str, Any], tmp_path: Path
) -> None:
    again = run(make_config(settings(method, setting, tiny_data)), tmp_path / "again")
    other = run(make_config(settings(method, setting, tiny_data, seed=1)), tmp_path / "other")
    assert again["model_sha256"] == usual["model_sha256"] != other["model_sha256"]


@every_method
def test_worker_processes_give_the_same_bytes(
    method: str, setting: str, tiny_data: Path, usual: dict[str, Any], tmp_path: Path
) -> None:
    parallel = run(make_config(settings(method, setting, tiny_data, workers=2)), tmp_path / "parallel")
    assert parallel["model_sha256"] == usual["model_sha256"]
    assert parallel["bytes"] == usual["bytes"]


@every_method
def test_the_backbone_learns_at_its_own_rate(method: str, setting: str, tiny_data: Path, tmp_path: Path) -> None:
    """With next to nothing of the rate it stays where it began, while the classifier learns."""
    config = make_config(settings(method, setting, tiny_data, rounds=1, backbone_lr_factor=1e-9))
    run(config, tmp_path / "run")
    first = planning.base_network(planning.prepare(config))[0]
    convolutions = {name: value for name, value in first.backbone.state_dict().items() if value.ndim > 1}
    compared, heads = set(), []
    for file in (tmp_path / "run").glob("model*.safetensors"):
        for key, value in load_file(file).items():
            name = key.rpartition("backbone.")[2]
            if name in convolutions:
                torch.testing.assert_close(value, convolutions[name], rtol=0, atol=1e-5)
                compared.add(name)
            elif value.shape == first.head.weight.shape:  # type: ignore[union-attr]
                heads.append(value)
    assert compared == set(convolutions)
    assert any(not torch.allclose(head, first.head.weight, atol=1e-4) for head in heads)  # type: ignore[arg-type]


class Wrapped:
    """An engine with a hand between it and the coordinator."""

    def __init__(self, inner: Engine) -> None:
        self.inner = inner
        self.where_to_look = inner.where_to_look

    def call(self, requests: Sequence[Request], deadline: float | None) -> Iterator[tuple[str, bytes | Failure]]:
        yield from self.inner.call(requests, deadline)

    def close(self) -> None:
        self.inner.close()


def wrap_engine(monkeypatch: pytest.MonkeyPatch, wrapper: type[Wrapped]) -> None:
    original = planning._engine
    monkeypatch.setattr(planning, "_engine", lambda *args: wrapper(original(*args)))


class Backwards(Wrapped):
    """Asks and answers in the opposite order."""

    def call(self, requests: Sequence[Request], deadline: float | None) -> Iterator[tuple[str, bytes | Failure]]:
        yield from reversed(list(self.inner.call(list(reversed(requests)), deadline)))


@every_method
def test_the_order_of_sites_changes_nothing(
    method: str,
    setting: str,
    tiny_data: Path,
    usual: dict[str, Any],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    wrap_engine(monkeypatch, Backwards)
    named = (
        {"targets": ["dim", "coral", "blue"]} if setting == "multi-adapt" else {"sources": ["coral", "blue", "amber"]}
    )
    turned = run(make_config(settings(method, setting, tiny_data, **named)), tmp_path / "turned")
    assert turned["model_sha256"] == usual["model_sha256"]


class StopAfter(Silent):
    """The user presses Ctrl-C when a round is done."""

    def __init__(self, round: int) -> None:
        self.last = round

    def round(self, round: int, val: Any, test: Any) -> None:
        if round == self.last:
            raise KeyboardInterrupt


@every_method
def test_a_resumed_run_ends_like_an_uninterrupted_one(
    method: str, setting: str, tiny_data: Path, usual: dict[str, Any], tmp_path: Path
) -> None:
    config = make_config(settings(method, setting, tiny_data))
    with pytest.raises(KeyboardInterrupt):
        run(config, tmp_path / "stopped", progress=StopAfter(ROUNDS - 1))
    resumed = run(config, tmp_path / "stopped", resume=True)
    assert resumed["model_sha256"] == usual["model_sha256"]
    assert resumed["per_target"] == usual["per_target"] and resumed["bytes"] == usual["bytes"]


@pytest.mark.parametrize("method", METHODS)
def test_a_count_is_one_of_samples(method: str) -> None:
    """What is said of the kind has to be true of every field; how many of anything else there are is a tally."""
    for step in METHODS[method].implementation.steps:
        assert {field for field, kind in kinds(step.release).items() if kind.name == "count"} <= {"samples"}


@every_method
def test_only_declared_fields_leave_a_site(method: str, usual: dict[str, Any]) -> None:
    steps: list[Step[Any]] = [*METHODS[method].implementation.steps, score, introduce]
    declared = {(step.name, field, kind.name) for step in steps for field, kind in kinds(step.release).items()}
    ledgers = list(usual["folder"].glob("sites/*/ledger.jsonl"))
    left = {
        (row["step"], row["field"], row["kind"])
        for ledger in ledgers
        for row in map(json.loads, ledger.read_text().splitlines())
    }
    assert ledgers and left <= declared


class OneSilentOneBroken(Wrapped):
    """From round 2 on, the first site asked to learn does not answer and the second one sends NaN."""

    disturbed = 0

    def call(self, requests: Sequence[Request], deadline: float | None) -> Iterator[tuple[str, bytes | Failure]]:
        learning = requests[0].round > 1 and requests[0].step != score.name
        OneSilentOneBroken.disturbed += learning
        for number, (site, outcome) in enumerate(self.inner.call(requests, deadline)):
            if learning and number == 0:
                yield site, Failure("unreachable")
            elif learning and number == 1 and isinstance(outcome, bytes):
                yield site, codec.pack(_with_nan(codec.unpack(outcome)))
            else:
                yield site, outcome


def _with_nan(tree: Any) -> Any:
    if isinstance(tree, torch.Tensor) and tree.is_floating_point():
        return torch.full_like(tree, torch.nan)
    if isinstance(tree, dict):
        return {key: _with_nan(value) for key, value in tree.items()}
    return [_with_nan(value) for value in tree] if isinstance(tree, list) else tree


@every_method
def test_survives_one_missing_and_one_nan_site(
    method: str, setting: str, tiny_data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    wrap_engine(monkeypatch, OneSilentOneBroken)
    config = make_config(settings(method, setting, tiny_data, quorum=0.3))
    people = planning.prepare(config).roles
    learners = len(people.sources or people.targets)
    if learners < 3 or method in ONE_BY_ONE:
        # With too few sites left there is no quorum: that has to be said, not survived.
        if learners and (METHODS[method].about.data == "target-labels" or method in ONE_BY_ONE):
            with pytest.raises(SiteError, match="sites gave a usable answer"):
                run(config, tmp_path / "hurt")
        return
    OneSilentOneBroken.disturbed = 0
    results = run(config, tmp_path / "hurt")
    counters = results["counters"]
    if people.sources:
        assert counters["missing.unreachable"] == counters["refused.non-finite"] == OneSilentOneBroken.disturbed > 0
    assert np.mean([row["last"] for row in results["per_target"].values()]) > 1 / CLASSES


@every_method
def test_a_one_image_site_gets_a_clear_answer(method: str, setting: str, tmp_path: Path) -> None:
    """Its own policy keeps it out; the others go on, or the run says that too few are left."""
    root = tmp_path / "data"
    root.mkdir()
    for name in ("amber", "blue", "coral", "dim"):
        write_domain(root, name, train=1 if name == "blue" else 66)
    config = make_config(settings(method, setting, root, rounds=1, policy={"min_samples": 2}))
    try:
        results = run(config, tmp_path / "run")
    except FedshiftError as error:
        assert "blue" in error.message or "pooled" in error.message
    else:
        took_part = "blue" in results["sources"] or setting == "multi-adapt"
        assert (
            not took_part or results["counters"].get("failed.site-policy", 0) or _blue_was_not_asked(tmp_path / "run")
        )


def _blue_was_not_asked(folder: Path) -> bool:
    ledger = folder / "sites" / "blue" / "ledger.jsonl"
    rows = [json.loads(line) for line in ledger.read_text().splitlines()] if ledger.exists() else []
    return all(row["step"] in (score.name, introduce.name) for row in rows)


@every_setting
def test_labels_of_the_targets_change_no_byte_of_the_model(
    method: str, setting: str, tiny_data: Path, usual: dict[str, Any], tmp_path: Path
) -> None:
    """Unless the method is a bound that says it learns from them."""
    if METHODS[method].about.data == "target-labels":
        pytest.skip("learns from the labels of the targets and says so")
    targets = ("dim",) if setting != "multi-adapt" else ("blue", "coral", "dim")
    root = tmp_path / "data"
    root.mkdir()
    for file in tiny_data.glob("*.npz"):
        with np.load(file) as arrays:
            parts = dict(arrays)
        if file.stem in targets:
            # Every label is another one, yet classes stay together: a tiny class decides who validates.
            parts |= {key: (parts[key] + 1) % CLASSES for key in parts if key.endswith("_labels")}
        np.savez(root / file.name, **parts)
    other = run(make_config(settings(method, setting, root)), tmp_path / "run")
    assert other["model_sha256"] == usual["model_sha256"]
    assert other["per_target"] != usual["per_target"], "the labels have to differ for this test to mean something"


@every_method
def test_a_one_class_site_keeps_labels_aligned(method: str, setting: str, tmp_path: Path) -> None:
    """A site that has seen one class only still trains with the agreed class list."""
    root = tmp_path / "data"
    root.mkdir()
    for name in ("amber", "blue", "coral", "dim"):
        write_domain(root, name)
    with np.load(root / "blue.npz") as file:
        parts = dict(file)
    for split in ("train", "test"):
        keep = parts[f"{split}_labels"] == 2
        parts[f"{split}_images"], parts[f"{split}_labels"] = (
            parts[f"{split}_images"][keep],
            parts[f"{split}_labels"][keep],
        )
    np.savez(root / "blue.npz", **parts)
    results = run(make_config(settings(method, setting, root, rounds=2)), tmp_path / "run")
    assert len(results["classes"]) == CLASSES
    assert all(np.isfinite(row["last"]) for row in results["per_target"].values())
