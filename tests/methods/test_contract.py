"""What every method must keep to. A new method is tested here without edits, because it is in the table."""

from __future__ import annotations

import functools
import importlib.util
import json
import sys
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from tinydata import CLASSES, TINTS, write_domain

from fedshift.errors import FedshiftError, SiteError
from fedshift.federation import codec
from fedshift.federation.engines import Engine, Failure
from fedshift.federation.handshake import introduce
from fedshift.federation.releases import kinds
from fedshift.federation.step import Request, Step
from fedshift.methods import METHODS, Entry
from fedshift.methods.calibration import sureness
from fedshift.methods.evaluation import score
from fedshift.methods.statistics import measure
from fedshift.runs import planning
from fedshift.runs.config import make_config
from fedshift.runs.directory import read_metrics
from fedshift.runs.execute import run
from fedshift.runs.progress import Silent

ROUNDS = 3
MARGIN = 0.2
"""How far above chance a method must be on a domain it was not given labels of."""


def _users_own() -> Entry:
    """The method of the example, as a user's script registers it; it leaves the table again until a test needs it."""
    file = Path(__file__).parent.parent.parent / "examples" / "fedprox.py"
    spec = importlib.util.spec_from_file_location("fedprox_example", file)
    assert spec is not None and spec.loader is not None
    module = sys.modules["fedprox_example"] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return METHODS._values.pop("fedprox")


ALWAYS = ("fedavg", "copa", "kd3a", "dualadapt", "fedprox")
"""`make test` has these; `make test-all` all methods and settings."""

OWN = _users_own()
TABLE = {**{name: METHODS[name] for name in METHODS.builtin}, "fedprox": OWN}


@pytest.fixture(autouse=True)
def _with_the_users_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(METHODS._values, "fedprox", OWN)


def cases(pairs: Iterable[tuple[str, str]], always: Sequence[str] = ALWAYS) -> pytest.MarkDecorator:
    """One test per method and setting. All tests of a method share one worker of xdist, where it is trained once."""
    marked = []
    for name, setting in pairs:
        is_fast = name in always and setting == TABLE[name].about.settings[0]
        marks = [pytest.mark.xdist_group(name), *([] if is_fast else [pytest.mark.slow])]
        marked.append(pytest.param(name, setting, id=f"{name}-{setting}", marks=marks))
    return pytest.mark.parametrize(("method", "setting"), marked)


every_setting = cases((name, setting) for name, entry in TABLE.items() for setting in entry.about.settings)
# Baselines that exist in several settings run the same steps in each: one is enough for what follows from the steps.
every_method = cases((name, entry.about.settings[0]) for name, entry in TABLE.items())


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
    "fedlooks": {"fedlooks": {"source_rounds": 0.67}},
}
"""Keys that cut a method's published schedule down to seconds."""

SHORT: dict[str, Any] = {"rounds": 1, "train_per_site": 24, "backbone_lr_factor": 1e-9}

ONE_BY_ONE = {"sequential"}
"""Methods that ask one site after another: the chain ends where a site is missing, and the run must say so."""


@functools.cache
def trained(method: str, setting: str, data: Path, out: Path, **overrides: Any) -> dict[str, Any]:
    return run(make_config(settings(method, setting, data, **overrides)), out) | {"folder": out}


@pytest.fixture
def usual(method: str, setting: str, tiny_data: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """The undisturbed run that others are compared with, trained once per method and setting."""
    return trained(method, setting, tiny_data, tmp_path_factory.getbasetemp() / f"usual-{method}-{setting}")


@pytest.fixture
def short(method: str, setting: str, tiny_data: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """One round on a few images, in which the backbone learns next to nothing. Trained once per method."""
    return trained(method, setting, tiny_data, tmp_path_factory.getbasetemp() / f"short-{method}", **SHORT)


@every_setting
def test_learns(usual: dict[str, Any]) -> None:
    scores = [row["last"] for row in usual["per_target"].values()]
    assert np.mean(scores) > 1 / CLASSES + MARGIN
    assert all(0 <= score <= 1 for score in scores)


@every_method
def test_another_seed_gives_another_model(
    method: str, setting: str, tiny_data: Path, short: dict[str, Any], tmp_path: Path
) -> None:
    """That the same seed gives the same bytes is part of `test_no_disturbance_changes_a_byte`."""
    run(make_config(settings(method, setting, tiny_data, **SHORT, seed=1)), tmp_path / "other")
    one, other = (load_file(folder / "model.safetensors") for folder in (short["folder"], tmp_path / "other"))
    assert one.keys() == other.keys() and any(not torch.equal(one[key], other[key]) for key in one)


@every_method
def test_sites_learn_by_the_loss_that_the_run_asks_for(
    method: str, setting: str, tiny_data: Path, short: dict[str, Any], tmp_path: Path
) -> None:
    run(make_config(settings(method, setting, tiny_data, **SHORT, loss="symmetric")), tmp_path / "other")
    one, other = (load_file(folder / "model.safetensors") for folder in (short["folder"], tmp_path / "other"))
    assert any(not torch.equal(one[key], other[key]) for key in one)


@every_method
def test_the_backbone_learns_at_its_own_rate(method: str, setting: str, tiny_data: Path, short: dict[str, Any]) -> None:
    """With next to nothing of the rate it stays where it began, while the classifier learns."""
    config = make_config(settings(method, setting, tiny_data, **SHORT))
    first = planning.base_network(planning.prepare(config))[0]
    convolutions = {name: value for name, value in first.backbone.state_dict().items() if value.ndim > 1}
    compared, heads = set(), []
    for file in short["folder"].glob("model*.safetensors"):
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
    """An engine whose requests and outcomes a test can change."""

    def __init__(self, inner: Engine) -> None:
        self.inner = inner
        self.where_to_look = inner.where_to_look

    def call(self, requests: Sequence[Request], deadline: float | None) -> Iterator[tuple[str, bytes | Failure]]:
        yield from self.inner.call(requests, deadline)

    def close(self) -> None:
        self.inner.close()


def wrap_engine(monkeypatch: pytest.MonkeyPatch, wrapper: type[Wrapped]) -> None:
    original = planning.local_engine
    monkeypatch.setattr(planning, "local_engine", lambda *args: wrapper(original(*args)))


class Backwards(Wrapped):
    """Asks sites in reverse order, so that their answers arrive in reverse order too."""

    def call(self, requests: Sequence[Request], deadline: float | None) -> Iterator[tuple[str, bytes | Failure]]:
        yield from self.inner.call(list(reversed(requests)), deadline)


class StopAfter(Silent):
    """The user presses Ctrl-C when a round is done."""

    def __init__(self, round: int) -> None:
        self.last = round

    def round(self, round: int, val: Any, test: Any) -> None:
        if round == self.last:
            raise KeyboardInterrupt


WORKERS = "two worker processes"
ORDER = "sites named and asked in reverse order"
RESUMED = "stopped before the last round and resumed"
LABELS = "other labels at the targets"


def disturbances(method: str) -> tuple[str, ...]:
    """What must not change a byte of the model. A bound that learns from the targets' labels may depend on them."""
    learns_from_them = TABLE[method].about.data == "target-labels"
    return (WORKERS, ORDER, RESUMED) if learns_from_them else (WORKERS, ORDER, RESUMED, LABELS)


def disturbed_run(
    method: str, setting: str, data: Path, out: Path, disturbed_by: Sequence[str], **overrides: Any
) -> dict[str, Any]:
    if WORKERS in disturbed_by:
        overrides["workers"] = 2
    if ORDER in disturbed_by and setting == "multi-adapt":
        overrides["targets"] = ["dim", "coral", "blue"]
    elif ORDER in disturbed_by:
        overrides["sources"] = ["coral", "blue", "amber"]
    if LABELS in disturbed_by:
        data = with_other_labels(data, ("blue", "coral", "dim") if setting == "multi-adapt" else ("dim",), out / "data")
    config = make_config(settings(method, setting, data, **overrides))
    with pytest.MonkeyPatch.context() as patch:
        if ORDER in disturbed_by:
            wrap_engine(patch, Backwards)
        if RESUMED in disturbed_by:
            with pytest.raises(KeyboardInterrupt):
                run(config, out / "run", progress=StopAfter(ROUNDS - 1))
        return run(config, out / "run", resume=RESUMED in disturbed_by)


def with_other_labels(data: Path, targets: Sequence[str], root: Path) -> Path:
    root.mkdir(parents=True)
    for file in data.glob("*.npz"):
        with np.load(file) as arrays:
            parts = dict(arrays)
        if file.stem in targets:
            # Every label is another one, yet classes stay together: a tiny class decides who validates.
            parts |= {key: (parts[key] + 1) % CLASSES for key in parts if key.endswith("_labels")}
        np.savez(root / file.name, **parts)
    return root


def differences(usual: dict[str, Any], disturbed: dict[str, Any], disturbed_by: Sequence[str]) -> list[str]:
    """Which of the results differ that must not. Other test labels move rows of the confusion matrix, no prediction."""
    moved = 1 if LABELS in disturbed_by else 0
    expected = usual | {
        "confusion": {site: np.roll(rows, moved, axis=0).tolist() for site, rows in usual["confusion"].items()}
    }
    compared = ["model_sha256", "bytes", "counters", "source_val", "chosen_round", "confusion"]
    return [key for key in compared if disturbed[key] != expected[key]]


@cases([(name, entry.about.settings[0]) for name, entry in TABLE.items()], always=("fedavg",))
def test_no_disturbance_changes_a_byte_of_models_in_fewer_bytes(
    method: str, setting: str, tiny_data: Path, tmp_path: Path
) -> None:
    """What sites and coordinator remember of each other's models has to be the same everywhere, and after a resume."""
    keys = {"compress": "int4", "train_per_site": 24}
    undisturbed = run(make_config(settings(method, setting, tiny_data, **keys)), tmp_path / "usual")
    disturbed = disturbed_run(method, setting, tiny_data, tmp_path, (WORKERS, ORDER, RESUMED), **keys)
    assert differences(undisturbed, disturbed, ()) == []
    assert not [name for name in disturbed["counters"] if name.startswith(("failed.", "refused."))]


@every_setting
def test_no_disturbance_changes_a_byte(
    method: str, setting: str, tiny_data: Path, usual: dict[str, Any], tmp_path: Path
) -> None:
    """All at once first. Only where that differs is each tried alone, so that the message names the culprit."""
    together = disturbances(method)
    disturbed = disturbed_run(method, setting, tiny_data, tmp_path / "together", together)
    if found := differences(usual, disturbed, together):
        culprits = [f"{len(together)} disturbances at once change {found}"]
        for number, alone in enumerate(((), *((name,) for name in together))):
            again = disturbed_run(method, setting, tiny_data, tmp_path / str(number), alone)
            if found := differences(usual, again, alone):
                culprits.append(f"{alone[0] if alone else 'the same run again'}: {found}")
            if found and not alone:
                break  # Without the same bytes twice, the rest would say nothing.
        pytest.fail(f"{method} ({setting}): " + "; ".join(culprits))
    if LABELS in together:
        assert disturbed["per_target"] != usual["per_target"], (
            "the labels have to differ for this test to mean something"
        )
    else:
        assert disturbed["per_target"] == usual["per_target"]
    assert_scores_are_those_of_all_rounds(disturbed, tmp_path / "together" / "run")


def assert_scores_are_those_of_all_rounds(results: dict[str, Any], folder: Path) -> None:
    """The rounds before a run was stopped count when the best and the chosen one are looked for."""
    rows = [row for row in read_metrics(folder / "metrics.jsonl")[0] if row["phase"] == "test"]
    assert {row["round"] for row in rows} == set(range(1, ROUNDS + 1))
    for site, scores in results["per_target"].items():
        by_round = {row["round"]: row["value"] for row in rows if row["site"] == site}
        assert scores["last"] == pytest.approx(by_round[ROUNDS], abs=1e-6)
        assert scores["source_val"] == pytest.approx(by_round[results["chosen_round"]], abs=1e-6)
        assert scores["oracle"] == pytest.approx(max(by_round.values()), abs=1e-6)


@pytest.mark.parametrize("method", TABLE)
def test_a_count_is_one_of_samples(method: str) -> None:
    """What is said of the kind has to be true of every field; how many of anything else there are is a tally."""
    for step in TABLE[method].implementation.steps:
        assert {field for field, kind in kinds(step.release).items() if kind.name == "count"} <= {"samples"}


@every_setting
def test_only_declared_fields_leave_a_site(method: str, usual: dict[str, Any]) -> None:
    steps: list[Step[Any]] = [*TABLE[method].implementation.steps, score, sureness, introduce, measure]
    declared = {(step.name, field, kind.name) for step in steps for field, kind in kinds(step.release).items()}
    ledgers = list(usual["folder"].glob("sites/*/ledger.jsonl"))
    left = {
        (row["step"], row["field"], row["kind"])
        for ledger in ledgers
        for row in map(json.loads, ledger.read_text().splitlines())
        if row["event"] == "left"
    }
    assert ledgers and left <= declared


class OneSilentOneBroken(Wrapped):
    """From round 2 on, the first site asked to learn does not answer and the second one sends NaN."""

    disturbed = 0

    def call(self, requests: Sequence[Request], deadline: float | None) -> Iterator[tuple[str, bytes | Failure]]:
        learning = requests[0].round > 1 and requests[0].step not in (score.name, sureness.name)
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
    config = make_config(settings(method, setting, tiny_data, quorum=0.3, evaluate_every=ROUNDS))
    people = planning.prepare(config).roles
    learners = len(people.sources or people.targets)
    if learners < 3 or method in ONE_BY_ONE:
        # With too few sites left there is no quorum: the run must end with a message.
        if learners and (TABLE[method].about.data == "target-labels" or method in ONE_BY_ONE):
            with pytest.raises(SiteError, match="sites gave a usable answer"):
                run(config, tmp_path / "hurt")
        return
    OneSilentOneBroken.disturbed = 0
    results = run(config, tmp_path / "hurt")
    counters = results["counters"]
    if people.sources:
        assert counters["missing.unreachable"] == counters["refused.non-finite"] == OneSilentOneBroken.disturbed > 0
    assert np.mean([row["last"] for row in results["per_target"].values()]) > 1 / CLASSES


@pytest.fixture(scope="session")
def one_image_data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("one-image")
    for name in TINTS:
        write_domain(root, name, train=1 if name == "blue" else 33)
    return root


@every_method
def test_a_one_image_site_gets_a_clear_answer(method: str, setting: str, one_image_data: Path, tmp_path: Path) -> None:
    """Its own policy keeps it out. The others continue, or the run says that too few are left."""
    config = make_config(settings(method, setting, one_image_data, rounds=1))
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
    return all(row["step"] in (score.name, introduce.name, sureness.name) for row in rows)


FEW: dict[str, dict[str, Any]] = {
    "csac": {"acquisition_epochs": 1e-6, "calibration_epochs": 1e-6},
    "dualadapt": {"pretrain_epochs": 1},
    "fed-oracle": {"pretrain_epochs": 1},
    "feddg": {"bank": 2},
}
"""A method's own keys with which a site learns from one or two samples; for all, `local_epochs` and `batch_size`."""


@every_method
def test_nothing_leaves_that_few_samples_made(method: str, setting: str, tiny_data: Path, tmp_path: Path) -> None:
    """The site has enough of them: it is the coordinator that chooses how many a step uses."""
    keys = {"rounds": 1, "local_epochs": 1e-6, "batch_size": 2, "policy": {"min_samples": 10}}
    values = settings(method, setting, tiny_data, **keys)
    values[method] = {**values.get(method, {}), **FEW.get(method, {})}
    with suppress(SiteError):
        run(make_config({key: value for key, value in values.items() if value != {}}), tmp_path / "run")
    ledgers = list((tmp_path / "run" / "sites").glob("*/ledger.jsonl"))
    rows = [json.loads(line) for path in ledgers for line in path.read_text().splitlines()]
    others = (introduce.name, score.name, sureness.name)
    left = [row for row in rows if row["event"] == "left" and row["step"] not in others]
    assert ledgers and left == []


@pytest.fixture(scope="session")
def one_class_data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("one-class")
    for name in TINTS:
        write_domain(root, name, train=33)
    with np.load(root / "blue.npz") as file:
        parts = dict(file)
    for split in ("train", "test"):
        keep = parts[f"{split}_labels"] == 2
        parts |= {key: parts[key][keep] for key in (f"{split}_images", f"{split}_labels")}
    np.savez(root / "blue.npz", **parts)
    return root


@every_method
def test_a_one_class_site_keeps_labels_aligned(method: str, setting: str, one_class_data: Path, tmp_path: Path) -> None:
    """A site that has seen one class only still trains with the agreed class list."""
    results = run(make_config(settings(method, setting, one_class_data, rounds=2, evaluate_every=2)), tmp_path / "run")
    assert len(results["classes"]) == CLASSES
    assert all(np.isfinite(row["last"]) for row in results["per_target"].values())


@every_method
def test_honest_updates_are_used_to_the_last_bit(
    method: str, setting: str, tiny_data: Path, short: dict[str, Any], tmp_path: Path
) -> None:
    """By default, updates that are far longer than others count less: that may not happen to honest sites."""
    mean = run(make_config(settings(method, setting, tiny_data, **SHORT, aggregation="mean")), tmp_path / "mean")
    assert not [name for name in short["counters"] if name.startswith("robust.")]
    assert mean["model_sha256"] == short["model_sha256"]


RULES_FOR = {"any": ("aligned", "median", "trimmed", "krum"), "clipped": (), "own": ()}


@pytest.mark.slow
@every_method
def test_averages_by_every_rule_that_it_declares(method: str, setting: str, tiny_data: Path, tmp_path: Path) -> None:
    about = TABLE[method].about
    for rule in ("aligned", "median", "trimmed", "krum"):
        values = settings(method, setting, tiny_data, **SHORT, aggregation=rule, bad_sites=0)
        if rule not in RULES_FOR[about.aggregation]:
            with pytest.raises(FedshiftError, match=f"{method} combines models in its own way"):
                make_config(values)
            continue
        try:
            results = run(make_config(values), tmp_path / rule)
        except FedshiftError as error:
            assert rule == "krum" and "needs at least 3 sites, and 1 train in this run" in error.message
        else:
            assert "robust.unguarded" not in results["counters"]
            assert all(np.isfinite(row["last"]) for row in results["per_target"].values())
