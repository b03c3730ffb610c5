"""`probe_epochs`: the head is trained alone before round 1, by the sites, and nothing else changes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import Opener
from safetensors.torch import load_file, save_file

from fedshift.errors import InputError
from fedshift.functional.averaging import weighted_mean
from fedshift.functional.losses import cross_entropy
from fedshift.methods.averaging import Averaging
from fedshift.methods.copa.copa import Copa
from fedshift.methods.fedlooks.fedlooks import FedLooks
from fedshift.methods.local import weights_of
from fedshift.methods.probe import probe, with_probed_head
from fedshift.nn.archs import build_network
from fedshift.runs import planning
from fedshift.runs.config import make_config
from fedshift.runs.execute import run
from fedshift.runs.progress import Silent


def ready(data: Path, method: str = "fedavg", **changes: Any) -> planning.Prepared:
    values = {"method": method, "target": "dim", "data_dir": data, "arch": "digits-copa", "workers": 0, "lr": 0.01}
    return planning.prepare(make_config(values | {"rounds": 1, "policy": {"min_samples": 2}} | changes))


def everything(fed: Any, site: str) -> tuple[torch.Tensor, torch.Tensor]:
    split = fed.engine._hosts[site].domain.train
    images = torch.from_numpy(split.inputs.copy()).permute(0, 3, 1, 2)
    return images.float() / 255, torch.from_numpy(split.labels.copy())


@pytest.mark.parametrize("method", [Averaging, Copa])
def test_one_step_on_all_samples_is_the_mean_of_the_sites_gradient_steps(
    tiny_data: Path, open_method: Opener, method: Any
) -> None:
    prepared = ready(tiny_data, "copa" if method is Copa else "fedavg", probe_epochs=1, batch_size=1000)
    _, base, fed = open_method(method, prepared, round=0)
    before, heads = weights_of(base), []
    for site in fed.labelled:
        x, y = everything(fed, site)
        head = build_network("digits-copa", prepared.plan.model.input_shape, 3, 0).head
        head.load_state_dict(base.head.state_dict())
        with torch.no_grad():
            features = base.eval().features(x)
        cross_entropy(head(features), y).backward()
        step = {key: value.detach() - 0.01 * (value.grad + 5e-4 * value) for key, value in head.named_parameters()}
        heads.append((step, float(len(y))))
    with_probed_head(base, fed)
    expected, found = weighted_mean(heads), weights_of(base)
    assert not torch.equal(found["head.weight"], before["head.weight"])
    for key, value in found.items():
        wanted = expected[key.removeprefix("head.")] if key.startswith("head.") else before[key]
        assert torch.allclose(value, wanted, atol=1e-6), key


def test_images_are_normalised_as_the_method_does_it(tiny_data: Path, open_method: Opener) -> None:
    """FedLooks normalises every image by itself: contrast cannot change its features."""
    found = []
    for by_image in (True, False):
        prepared = ready(tiny_data, "fedlooks", probe_epochs=2, fedlooks={"by_image": by_image})
        _, base, fed = open_method(FedLooks, prepared, round=0)
        head = weights_of(base.head)
        sent = {"backbone": weights_of(base.backbone), "head": head}
        found.append(fed.ask(fed.labelled, probe, expect={"head": head}, **sent)[fed.labelled[0]].head["weight"])
    assert not torch.allclose(found[0], found[1], atol=1e-3)


class StopAfterTheFirst(Silent):
    def round(self, round: int, val: Any, test: Any) -> None:
        raise KeyboardInterrupt


def test_a_run_says_it_counts_the_bytes_and_goes_on_without_probing_again(tiny_data: Path, tmp_path: Path) -> None:
    keys = {"rounds": 2, "train_per_site": 16, "probe_epochs": 3}
    results = run(ready(tiny_data, **keys).config, tmp_path / "whole")
    plain = run(ready(tiny_data, **{**keys, "probe_epochs": 0}).config, tmp_path / "plain")
    down, up = (results["bytes"][way] - plain["bytes"][way] for way in ("down", "up"))
    size = (tmp_path / "plain" / "model.safetensors").stat().st_size
    assert 0.9 * 3 * size < down < 1.1 * 3 * size and 0 < up < 0.1 * down
    with pytest.raises(KeyboardInterrupt):
        run(ready(tiny_data, **keys).config, tmp_path / "again", progress=StopAfterTheFirst())
    run(ready(tiny_data, **keys).config, tmp_path / "again", resume=True)
    first, second = (load_file(tmp_path / name / "model.safetensors") for name in ("whole", "again"))
    assert all(torch.equal(first[key], second[key]) for key in first)


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"method": "single-site"}, "shares nothing"),
        ({"secure_aggregation": True}, "probe_epochs"),
        ({"policy": {"epsilon": 8.0, "clip_norm": 1.0, "noise": 4.0, "min_samples": 2}}, "probe_epochs"),
    ],
)
def test_where_it_cannot_be_it_is_refused_before_anything_is_begun(
    tiny_data: Path, changes: dict[str, Any], why: str
) -> None:
    with pytest.raises(InputError, match=why):
        ready(tiny_data, probe_epochs=2, **changes)


def test_masks_have_milder_looks_and_no_probe(tmp_path: Path) -> None:
    keys = {"method": "fedlooks", "dataset": "streets", "setting": "multi-adapt", "home": "riviera"}
    scratch = planning.prepare(make_config(keys))
    assert (scratch.config.hyper["depth"], scratch.config.hyper["blended"]) == (1, True)
    assert scratch.choices.startswith("masks: fedlooks.depth=1, fedlooks.blended=True")
    net = build_network("deeplab_mobilenet_v2", scratch.dataset.input_shape, len(scratch.dataset.classes), 0)
    save_file(net.state_dict(), tmp_path / "start.safetensors")
    given = {"arch": "deeplab_mobilenet_v2", "weights": str(tmp_path / "start.safetensors")}
    assert planning.prepare(make_config(keys | given)).config.probe_epochs == 0


def test_it_is_a_default_from_given_weights_unless_nothing_is_shared_or_a_budget_or_sums_forbid_it(
    tiny_data: Path, tmp_path: Path
) -> None:
    save_file(build_network("mobilenet_v2", (3, 32, 32), 3, 0).state_dict(), tmp_path / "start.safetensors")
    given = {"arch": "mobilenet_v2", "image_size": 32, "weights": str(tmp_path / "start.safetensors"), "lr": None}
    chosen = ready(tiny_data, "fedlooks", **given)
    assert (chosen.config.probe_epochs, chosen.config.lr, chosen.config.hyper["replaced"]) == (10, 0.002, 0.5)
    assert "probe_epochs=10" in chosen.choices and "fedlooks.blended=True" in chosen.choices
    for method, epochs in {"fedavg": 10, "copa": 10, "kd3a": 10, "csac": 10, "single-site": 0}.items():
        assert ready(tiny_data, method, **given).config.probe_epochs == epochs, method
    assert ready(tiny_data, "fedlooks").config.probe_epochs == 0
    assert ready(tiny_data, "fedavg", **given, probe_epochs=0).config.probe_epochs == 0
    assert ready(tiny_data, "fedlooks", **given, secure_aggregation=True).config.probe_epochs == 0
