"""Users' own methods, networks, data and engines, with worker processes on."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.metadata import EntryPoint
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tinydata import CLASSES, TINTS, shapes
from torch import nn

import fedshift
from fedshift import cli, registry
from fedshift import extend as fs
from fedshift.errors import InputError
from fedshift.methods import METHODS
from fedshift.nn.archs import ARCHS
from fedshift.runs.config import make_config
from fedshift.runs.engines import connect_inprocess
from fedshift.runs.planning import prepare

ROOT = Path(__file__).parent.parent.parent
COMMON: dict[str, Any] = {"target": "dim", "rounds": 2, "batch_size": 8, "lr": 0.02, "policy": {"min_samples": 2}}


@pytest.fixture(autouse=True)
def _nothing_allowed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "_allowed", set())


def arrays(train: int = 48, seed: int = 0) -> dict[str, Any]:
    data = {}
    for number, (name, tint) in enumerate(TINTS.items()):
        data[name] = {
            "train": shapes(train, tint, 0.1, seed + number),
            "test": shapes(30, tint, 0.1, 50 + number),
        }
    return data


def small_net(classes: int) -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.AdaptiveAvgPool2d(4), nn.Flatten(), nn.Linear(128, classes)
    )


@dataclass(frozen=True)
class Keys:
    times: int = 1


@dataclass(frozen=True)
class Sent(fs.Release):
    model: fs.Weights
    samples: fs.Count


@fs.step
def train_often(site: fs.Labelled, model: fs.Weights, rng: fs.Rng) -> Sent:
    net = fs.with_weights(fs.plain_network(site.plan), model, site.device).train()
    for time in range(site.hyper(Keys).times):
        batches = site.train.batches(site.plan.training.batch_size, rng.child(str(time)))
        fs.train_batches(batches, lambda batch: fs.cross_entropy(net(batch.x), batch.y), fs.sgd(site, net))
    return Sent(fs.weights_of(net), len(site.train))


class Often:
    """FedAvg that goes over the data several times."""

    hyper_type = Keys
    steps = (train_often,)

    def round(self, state: Any, fed: fs.Federation) -> Any:
        replies = fed.ask(fed.labelled, train_often, model=state.model)
        return type(state)(fs.weighted_mean((sent.model, sent.samples) for _, sent in replies))


def test_own_method_own_net_own_arrays_with_workers_and_without(tmp_path: Path) -> None:
    runs = [
        fedshift.fit(
            Often,
            data=arrays(),
            net=small_net,
            workers=workers,
            often={"times": 2},
            out=tmp_path / str(workers),
            **COMMON,
        )
        for workers in (0, 2)
    ]
    assert runs[0].results["model_sha256"] == runs[1].results["model_sha256"]
    assert runs[0].results["accuracy"]["last"] > 1 / CLASSES + 0.2
    x, y = arrays()["dim"]["test"]
    assert runs[1].score(x, y) == pytest.approx(runs[1].results["accuracy"]["last"])
    assert runs[0].results["method"] == "often" and "test_own_code:small_net" in runs[0].results["arch"]


def test_an_object_brings_its_keys_and_settings_win(tmp_path: Path) -> None:
    fs.register_method(fs.About("often", ("generalize",), "of this test"))(Often)
    fedshift.fit(Often(Keys(times=3)), data=arrays(), net=small_net, workers=0, out=tmp_path / "a", **COMMON)
    assert "times: 3" in (tmp_path / "a" / "config.yaml").read_text()
    own = {"often": {"times": 4}}
    fedshift.fit(Often(Keys(times=3)), data=arrays(), net=small_net, workers=0, out=tmp_path / "b", **own, **COMMON)
    assert "times: 4" in (tmp_path / "b" / "config.yaml").read_text()
    with pytest.raises(InputError, match=r"unknown key often\.tmes.*times"):
        fedshift.fit(Often, data=arrays(), often={"tmes": 1}, **COMMON)


class Pictures(torch.utils.data.Dataset[Any]):
    def __init__(self, x: Any, y: Any) -> None:
        self.x, self.y = x, y

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, index: int) -> Any:
        return torch.from_numpy(self.x[index]).permute(2, 0, 1).float() / 255, int(self.y[index])


def test_torch_data_sets_train_the_model_that_their_arrays_train(tmp_path: Path) -> None:
    given = {name: {split: Pictures(*pair) for split, pair in parts.items()} for name, parts in arrays().items()}
    shas = {
        fedshift.fit("fedavg", data=data, net=small_net, workers=0, out=tmp_path / str(n), **COMMON).results[
            "model_sha256"
        ]
        for n, data in enumerate((arrays(), given))
    }
    assert len(shas) == 1


def test_a_run_on_arrays_resumes_with_the_same_arrays_only(tmp_path: Path) -> None:
    fedshift.fit("fedavg", data=arrays(), net=small_net, workers=0, out=tmp_path / "run", **COMMON)
    again = fedshift.fit("fedavg", data=arrays(), net=small_net, workers=0, out=tmp_path / "run", resume=True, **COMMON)
    assert again.results["rounds"] == 2
    with pytest.raises(InputError, match=r"another configuration \(dataset\)"):
        keys = {**COMMON, "workers": 0, "resume": True}
        fedshift.fit("fedavg", data=arrays(seed=9), net=small_net, out=tmp_path / "run", **keys)
    with pytest.raises(InputError, match="given in memory"):
        prepare(make_config({"dataset": "memory:0123", "target": "dim"}))


def test_a_module_is_the_start_of_every_run_and_stays_as_it_was(tmp_path: Path) -> None:
    torch.manual_seed(0)
    module = small_net(CLASSES)
    before = {key: value.clone() for key, value in module.state_dict().items()}
    keys = COMMON | {"rounds": 1, "lr": 1e-9}
    run = fedshift.fit("fedavg", data=arrays(), net=module, workers=2, out=tmp_path / "run", **keys)
    assert all(torch.equal(value, before[key]) for key, value in module.state_dict().items())
    trained = run.model().models[""]
    torch.testing.assert_close(trained["head.weight"], before["5.weight"])
    torch.testing.assert_close(trained["backbone.body.0.weight"], before["0.weight"])


def test_methods_that_need_a_backbone_and_a_head_take_an_own_net(tmp_path: Path) -> None:
    for method in ("kd3a", "copa-uda", "csac"):
        run = fedshift.fit(method, data=arrays(), net=small_net, workers=0, out=tmp_path / method, **COMMON)
        assert run.results["accuracy"]["last"] > 1 / CLASSES, method


def test_a_net_that_does_not_fit_says_how(tmp_path: Path) -> None:
    wrong = {
        r"must give scores of shape \(2, 3\)": nn.Sequential(nn.Flatten(), nn.Linear(768, 4)),
        "does not take inputs of shape": nn.Linear(5, 3),
        "no torch module": lambda classes: classes,
        "no module and makes none": 7,
    }
    for message, net in wrong.items():
        with pytest.raises(InputError, match=message):
            fedshift.fit("fedavg", data=arrays(), net=net, workers=0, **COMMON)  # type: ignore[arg-type]


def test_a_net_whose_last_layer_is_not_the_end_is_kept_whole() -> None:
    class Odd(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body = nn.Sequential(nn.Flatten(), nn.Linear(48, 3))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.body(x) * 2

    name = fs.register_net(Odd(), "odd")
    net = fs.build_network(name, (3, 4, 4), 3, 0)
    assert isinstance(net.head, nn.Identity) and net.backbone.out_features == 3
    x = torch.rand(2, 3, 4, 4)
    torch.testing.assert_close(net(x), ARCHS["odd"].whole((3, 4, 4), 3)(x))  # type: ignore[misc]


def offer(monkeypatch: pytest.MonkeyPatch, *points: EntryPoint) -> None:
    monkeypatch.setattr(registry, "entry_points", lambda group: [p for p in points if p.group == group])
    for table in (METHODS, ARCHS):
        monkeypatch.setattr(table, "_offered", None)


def test_an_installed_package_offers_a_method_and_a_net(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    offer(
        monkeypatch,
        EntryPoint("often", f"{__name__}:Often", "fedshift.methods"),
        EntryPoint("small", f"{__name__}:small_net", "fedshift.nets"),
    )
    run = fedshift.fit("often", data=arrays(), net="small", workers=0, out=tmp_path / "run", **COMMON)
    assert run.results["method"] == "often" and run.results["arch"] == "small"
    monkeypatch.setattr(registry, "_only_allowed", True)
    monkeypatch.setattr(METHODS, "_values", {})
    with pytest.raises(InputError, match="nobody here has allowed"):
        METHODS.find("often")


def test_code_named_by_a_file_is_not_run_unless_the_user_allows_it() -> None:
    for keys in ({"method": f"{__name__}:Often"}, {"method": "os:system"}):
        with pytest.raises(InputError, match="nobody here has allowed"):
            make_config(keys)
    with pytest.raises(InputError, match="nobody here has allowed"):
        fs.build_network("os:system", (3, 8, 8), 3, 0)
    fedshift.allow_import(__name__)
    assert make_config({"method": f"{__name__}:Often"}).method == "often"


def test_a_model_predicts_without_the_code_of_its_method(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    keys = COMMON | {"arch": "digits-csac", "rounds": 1}
    run = fedshift.fit(Often, data=arrays(), workers=0, out=tmp_path / "run", **keys)
    x = arrays()["dim"]["test"][0]
    expected = run.predict(x)
    METHODS._values.pop("often")
    np.testing.assert_array_equal(fedshift.Run(tmp_path / "run").predict(x), expected)
    own = fedshift.fit(
        "fedavg", data=arrays(), net=small_net, workers=0, out=tmp_path / "own", **(COMMON | {"rounds": 1})
    )
    ARCHS._values.pop(own.results["arch"])
    monkeypatch.setattr(registry, "_allowed", set())
    with pytest.raises(InputError, match="nobody here has allowed"):
        fedshift.Run(tmp_path / "own").predict(x)


@pytest.mark.slow
def test_workers_that_are_new_interpreters_import_the_module_of_a_method(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With several threads a fork is not safe."""
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    monkeypatch.syspath_prepend(str(ROOT))
    keys = COMMON | {"arch": "digits-csac", "threads": 2, "rounds": 1, "method": "examples.fedprox:FedProx"}
    data = tmp_path / "data"
    data.mkdir()
    for name, (x, y) in {name: parts["train"] for name, parts in arrays().items()}.items():
        np.savez(data / f"{name}.npz", images=x, labels=y)
    spawned = fedshift.fit(data_dir=data, workers=2, out=tmp_path / "runs" / "spawned", **keys)
    alone = fedshift.fit(data_dir=data, workers=0, out=tmp_path / "runs" / "alone", **keys)
    assert spawned.results["model_sha256"] == alone.results["model_sha256"]
    log = json.loads((tmp_path / "runs" / "spawned" / "results.json").read_text())
    assert log["method"] == "fedprox" and not log["counters"]


def test_an_aggregation_rule_is_a_registered_value(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fs.register_rule("first", lambda models: dict(next(iter(models))[0]))
    data, keys = arrays(), COMMON | {"rounds": 1, "workers": 0, "net": small_net}
    first = fedshift.fit("fedavg", data=data, aggregation="first", out=tmp_path / "first", **keys)
    only = fedshift.fit("fedavg", data=data, sources=["amber"], out=tmp_path / "only", **keys)
    assert all(torch.equal(value, only.model().models[""][key]) for key, value in first.model().models[""].items())
    with pytest.raises(InputError, match=r"no aggregation rule 'medium'.*median"):
        fedshift.fit("fedavg", data=data, aggregation="medium", **keys)
    with pytest.raises(InputError, match="csac combines models in its own way"):
        fedshift.fit("csac", data=data, aggregation="median", csac={"acquisition_epochs": 1}, **keys)


def test_the_command_line_takes_a_path_and_imports_modules(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "myprox.py").write_text((ROOT / "examples" / "fedprox.py").read_text())
    (tmp_path / "data").mkdir()
    for name, parts in arrays().items():
        np.savez(tmp_path / "data" / f"{name}.npz", images=parts["train"][0], labels=parts["train"][1])
    monkeypatch.chdir(tmp_path)

    def command(*words: str) -> int:
        monkeypatch.setattr(sys, "argv", ["fedshift", *words])
        with pytest.raises(SystemExit) as ended:
            cli.main()
        return int(ended.value.code or 0)

    keys = ["--data-dir", "data", "--target", "dim", "--arch", "digits-csac", "--rounds", "1", "--out", "run"]
    more = ["--set", "fedprox.mu=0.1", "--set", "workers=0", "--set", "policy.min_samples=2"]
    assert command("train", "--method", "myprox:FedProx", *keys, *more) == 0
    assert "mu: 0.1" in Path("run/config.yaml").read_text()
    METHODS._values.pop("fedprox")
    sys.modules.pop("myprox")
    assert command("privacy", "fedprox") == 2
    assert command("--import", "myprox", "privacy", "fedprox") == 0
    assert "myprox.train_near" in capsys.readouterr().out


def test_an_engine_is_a_registered_value(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    used = []

    @contextmanager
    def connect(config: Any, run: str, say: Any) -> Iterator[Any]:
        used.append(config.method)
        with connect_inprocess(config, run, say) as connection:
            yield connection

    fs.ENGINES.register("mine", fs.EngineKind(connect, is_local=True))
    fedshift.fit("fedavg", data=arrays(), net=small_net, engine="mine", workers=0, out=tmp_path / "run", **COMMON)
    assert used == ["fedavg"]
    with pytest.raises(InputError, match=r"no engine 'mina'.*mine"):
        fedshift.fit("fedavg", data=arrays(), net=small_net, engine="mina", **COMMON)


def test_a_class_that_is_no_method_says_what_is_missing() -> None:
    class Nothing:
        pass

    with pytest.raises(InputError, match=r"'nothing'.*needs a method `round"):
        fedshift.fit(Nothing, data=arrays(), **COMMON)


def test_a_method_may_not_ask_what_sites_elsewhere_would_refuse(tmp_path: Path) -> None:
    class Greedy(Often):
        def round(self, state: Any, fed: fs.Federation) -> Any:
            fed.ask(fed.labelled, train_often, model=state.model)
            return super().round(state, fed)

    with pytest.raises(InputError, match=r"round 1: the method asks site 'amber' .* twice, .*@step\(numbered_by="):
        fedshift.fit(Greedy, data=arrays(), out=tmp_path / "run", workers=0, **COMMON)
    with pytest.raises(TypeError, match="numbered_by names arguments"):

        @fs.step(numbered_by=("model",))
        def numbered_by_a_model(site: fs.Labelled, model: fs.Weights) -> Sent:
            raise AssertionError


def test_a_cell_of_a_notebook_can_be_run_again() -> None:
    source = (
        "from fedshift import extend as fs\nfrom dataclasses import dataclass\n"
        "@dataclass(frozen=True)\nclass Sent(fs.Release):\n    samples: fs.Count\n"
        "@fs.step\ndef look(site: fs.Labelled) -> Sent: return Sent(len(site.train))\n"
    )
    code = (
        f"cell = {source!r}\nfor _ in range(2): exec(cell)\n"
        "from fedshift.federation.step import STEPS\nprint(STEPS['__main__.look'] is look)"
    )
    told = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert told.stdout.strip() == "True"


def test_predict_takes_what_fit_takes_and_refuses_what_would_be_misread(tmp_path: Path) -> None:
    run = fedshift.fit("fedavg", data=arrays(), net=small_net, workers=0, out=tmp_path / "run", **COMMON)
    x = arrays()["dim"]["test"][0]
    expected = run.predict(x)
    nchw = x.transpose(0, 3, 1, 2)
    for same in (nchw, nchw.astype(np.float32) / 255, x.astype(np.float32) / 255, torch.from_numpy(x)):
        np.testing.assert_array_equal(run.predict(same), expected)
    assert run.predict(x[..., 0]).shape == expected.shape  # grey
    wrong = {
        r"outside of \[0, 1\]": nchw.astype(np.float32),
        "or NaN": np.full(nchw.shape, np.nan, np.float32),
        r"astype\(np.uint8\)": x.astype(np.int64),
        r"shape \(16, 16, 3\) given": x[0],
    }
    for message, inputs in wrong.items():
        with pytest.raises(InputError, match=message):
            run.predict(inputs)


def test_weights_that_are_not_there_leave_no_folder_behind(tmp_path: Path) -> None:
    keys = {**COMMON, "arch": "digits-csac", "weights": "imagenet"}
    with pytest.raises(
        InputError, match=r"no ImageNet weights for architecture 'digits-csac': use --arch .*efficientnet_lite0"
    ):
        fedshift.fit("fedavg", data=arrays(), out=tmp_path / "run", **keys)
    assert not (tmp_path / "run").exists()


def test_an_object_without_keys_and_a_path_with_a_suffix() -> None:
    fs.register_method(fs.About("often", ("generalize",), "of this test"))(Often)
    assert Often().hyper == Keys()  # type: ignore[attr-defined]
    fedshift.allow_import("mine.py")
    with pytest.raises(InputError, match=r"no module 'mine\.py' to import: write 'mine'"):
        METHODS.find("mine.py:Method")
