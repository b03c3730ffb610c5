"""Weights in and out: round trips, published names, refusals."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from fedshift.errors import InputError
from fedshift.nn import Network, build_network, convert_checkpoint, load_weights
from fedshift.nn import weights as weights_module


def resnet(classes: int, seed: int) -> Network:
    return build_network("resnet18", (3, 32, 32), classes, seed)


def published(network: Network, classifier: str) -> dict[str, torch.Tensor]:
    """The network under the names that torchvision would give it."""
    head = {f"{classifier}.{key}": value for key, value in network.head.state_dict().items()}
    return {**network.backbone.state_dict(), **head}


def same(one: torch.nn.Module, two: torch.nn.Module) -> bool:
    a, b = one.state_dict(), two.state_dict()
    return list(a) == list(b) and all(torch.equal(a[key], b[key]) for key in a)


def sha256(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


@pytest.mark.parametrize("name", ["digits-copa", "digits-dualadapt", "mlp", "segnet-small"])
def test_round_trip_is_exact(name: str, tmp_path: Path) -> None:
    shape = (6,) if name == "mlp" else (3, 32, 32)
    source, copy = build_network(name, shape, 5, 1), build_network(name, shape, 5, 2)
    save_file(source.state_dict(), tmp_path / "model.safetensors")
    report = load_weights(copy, tmp_path / "model.safetensors")
    assert same(source, copy)
    assert report.head_loaded
    assert report.tensors == len(source.state_dict())


@pytest.mark.parametrize("prefix", ["backbone.", ""])
def test_a_backbone_alone_leaves_the_head_as_it_was(prefix: str, tmp_path: Path) -> None:
    source, target, untouched = (build_network("digits-copa", (3, 32, 32), 5, seed) for seed in (1, 2, 2))
    save_file({prefix + k: v for k, v in source.backbone.state_dict().items()}, tmp_path / "b.safetensors")
    report = load_weights(target, tmp_path / "b.safetensors")
    assert same(target.backbone, source.backbone)
    assert same(target.head, untouched.head)
    assert not report.head_loaded
    assert report.note == "The backbone comes from b.safetensors; it has no head, so the head starts fresh."


def test_torchvision_names_load_with_their_classifier_where_it_fits(tmp_path: Path) -> None:
    source, target = resnet(7, 1), resnet(7, 2)
    save_file(published(source, "fc"), tmp_path / "r.safetensors")
    assert load_weights(target, tmp_path / "r.safetensors").head_loaded
    assert same(source, target)


def test_torchvision_names_load_without_a_classifier_for_other_classes(tmp_path: Path) -> None:
    source, target, untouched = resnet(1000, 1), resnet(7, 2), resnet(7, 2)
    save_file(published(source, "fc"), tmp_path / "r.safetensors")
    report = load_weights(target, tmp_path / "r.safetensors")
    assert same(target.backbone, source.backbone)
    assert same(target.head, untouched.head)
    assert not report.head_loaded
    assert "other classes" in report.note


def test_old_checkpoints_without_batch_counters_load(tmp_path: Path) -> None:
    source, target = resnet(7, 1), resnet(7, 2)
    old = {k: v for k, v in published(source, "fc").items() if not k.endswith("num_batches_tracked")}
    save_file(old, tmp_path / "old.safetensors")
    load_weights(target, tmp_path / "old.safetensors")
    assert same(source, target)


def test_segmentation_takes_a_classification_net_and_says_what_it_leaves_out(tmp_path: Path) -> None:
    source = build_network("mobilenet_v2", (3, 32, 32), 9, 1)
    target = build_network("deeplab_mobilenet_v2", (3, 32, 32), 9, 2)
    save_file(published(source, "classifier.1"), tmp_path / "m.safetensors")
    report = load_weights(target, tmp_path / "m.safetensors")
    own = target.backbone.state_dict()
    assert all(torch.equal(own[key], source.backbone.state_dict()[key]) for key in own)
    assert {key.rsplit(".", 1)[0] for key in report.ignored} == {"features.18.0", "features.18.1", "classifier.1"}
    assert not report.head_loaded


def broken(kind: str, tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    if kind == "missing":
        del tensors["layer1.0.conv1.weight"]
    elif kind == "unknown":
        tensors["layer9.weight"] = torch.zeros(1)
    else:
        tensors["conv1.weight"] = torch.zeros(64, 1, 7, 7)
    return tensors


@pytest.mark.parametrize(
    ("kind", "says"),
    [
        ("missing", "layer1.0.conv1.weight is missing"),
        ("unknown", "layer9.weight is not known"),
        ("shape", r"conv1.weight has shape \(64, 1, 7, 7\) instead of \(64, 3, 7, 7\)"),
    ],
)
def test_a_file_that_does_not_fit_names_the_key_and_changes_nothing(kind: str, says: str, tmp_path: Path) -> None:
    target, untouched = resnet(7, 2), resnet(7, 2)
    save_file(broken(kind, published(resnet(7, 1), "fc")), tmp_path / "x.safetensors")
    with pytest.raises(InputError, match=says) as caught:
        load_weights(target, tmp_path / "x.safetensors")
    assert caught.value.code == "weights-mismatch"
    assert "x.safetensors" in caught.value.message and "resnet18" in caught.value.message
    assert same(target, untouched)


def test_a_whole_net_with_a_stray_key_is_refused(tmp_path: Path) -> None:
    network = build_network("digits-copa", (3, 32, 32), 5, 1)
    save_file({**network.state_dict(), "extra": torch.zeros(1)}, tmp_path / "x.safetensors")
    with pytest.raises(InputError, match="extra is not known"):
        load_weights(network, tmp_path / "x.safetensors")


def test_many_complaints_are_counted_not_listed(tmp_path: Path) -> None:
    save_file({"a": torch.zeros(1)}, tmp_path / "x.safetensors")
    with pytest.raises(InputError, match=r"and \d+ more") as caught:
        load_weights(resnet(7, 1), tmp_path / "x.safetensors")
    assert len(caught.value.message) < 400 + len(str(tmp_path))


def test_a_missing_or_foreign_file_is_an_input_error(tmp_path: Path) -> None:
    network = build_network("digits-copa", (3, 32, 32), 5, 1)
    with pytest.raises(InputError, match="no weights file") as caught:
        load_weights(network, tmp_path / "none.safetensors")
    assert caught.value.code == "weights-missing"
    (tmp_path / "net.pth").write_bytes(b"not safetensors at all")
    with pytest.raises(InputError, match=r"weights convert net\.pth") as caught:
        load_weights(network, tmp_path / "net.pth")
    assert caught.value.code == "weights-mismatch"


@pytest.mark.parametrize("wrapper", [None, "state_dict", "model"])
@pytest.mark.parametrize("prefix", ["", "module."])
def test_conversion_unwraps_common_checkpoints(wrapper: str | None, prefix: str, tmp_path: Path) -> None:
    shared = torch.arange(6.0)
    state = {prefix + "a.weight": shared.reshape(2, 3).T, prefix + "b.weight": shared, prefix + "n": torch.tensor(3)}
    torch.save({wrapper: state, "epoch": 4} if wrapper else state, tmp_path / "c.pth")
    out = tmp_path / "made" / "c.safetensors"
    convert_checkpoint(tmp_path / "c.pth", sha256(tmp_path / "c.pth").upper(), out)
    got = load_file(out)
    assert set(got) == {"a.weight", "b.weight", "n"}
    assert torch.equal(got["a.weight"], shared.reshape(2, 3).T)
    assert got["n"].item() == 3
    assert [path.name for path in out.parent.iterdir()] == ["c.safetensors"]


def test_a_wrong_checksum_is_refused_before_the_file_is_opened(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.save({"a": torch.zeros(1)}, tmp_path / "c.pth")

    def never(*args: object, **kwargs: object) -> None:
        raise AssertionError("torch.load was reached")

    monkeypatch.setattr(weights_module.torch, "load", never)
    with pytest.raises(InputError, match="was not opened") as caught:
        convert_checkpoint(tmp_path / "c.pth", "0" * 64, tmp_path / "out.safetensors")
    assert caught.value.code == "data-checksum"
    assert not (tmp_path / "out.safetensors").exists()


class Hostile:
    """Unpickling it would create a file."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[object, tuple[str]]:
        return os.mkdir, (str(self.path),)


def test_a_hostile_pickle_is_refused_even_with_the_right_checksum(tmp_path: Path) -> None:
    trap = tmp_path / "sprung"
    torch.save({"a": Hostile(trap)}, tmp_path / "evil.pth")
    with pytest.raises(InputError, match="not a plain PyTorch state dict") as caught:
        convert_checkpoint(tmp_path / "evil.pth", sha256(tmp_path / "evil.pth"), tmp_path / "out.safetensors")
    assert caught.value.code == "weights-mismatch"
    assert not trap.exists()
    assert not (tmp_path / "out.safetensors").exists()


@pytest.mark.parametrize(
    ("content", "says"), [([1, 2], "holds no state dict"), ({"a": 1}, "'a', which is not a tensor")]
)
def test_a_checkpoint_of_something_else_is_refused(content: object, says: str, tmp_path: Path) -> None:
    torch.save(content, tmp_path / "c.pth")
    with pytest.raises(InputError, match=says):
        convert_checkpoint(tmp_path / "c.pth", sha256(tmp_path / "c.pth"), tmp_path / "out.safetensors")


def test_a_damaged_checkpoint_is_an_input_error(tmp_path: Path) -> None:
    torch.save({"a": torch.zeros(100)}, tmp_path / "c.pth")
    (tmp_path / "c.pth").write_bytes((tmp_path / "c.pth").read_bytes()[:200])
    with pytest.raises(InputError, match="not a plain PyTorch state dict"):
        convert_checkpoint(tmp_path / "c.pth", sha256(tmp_path / "c.pth"), tmp_path / "out.safetensors")


def test_a_path_that_cannot_be_written_is_an_input_error(tmp_path: Path) -> None:
    torch.save({"a": torch.zeros(1)}, tmp_path / "c.pth")
    with pytest.raises(InputError, match=r"c\.pth") as caught:
        convert_checkpoint(tmp_path / "c.pth", sha256(tmp_path / "c.pth"), tmp_path / "c.pth" / "out.safetensors")
    assert caught.value.code == "disk"
