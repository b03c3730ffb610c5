"""FedLooks against numbers worked out by hand, and against FedAvg where nothing of it is left."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from fedshift.data.batches import LabelledBatch, UnlabelledBatch
from fedshift.errors import InputError
from fedshift.functional.norms import standardised
from fedshift.methods.fedlooks.source import Hyper, looks_network, looks_of, loss_of_looks, source_rounds
from fedshift.methods.fedlooks.target import loss_of_labels
from fedshift.runs.config import make_config
from fedshift.runs.directory import read_metrics
from fedshift.runs.execute import run
from fedshift.runs.planning import prepare


def settings(data: Path, method: str = "fedlooks", **changes: Any) -> dict[str, Any]:
    values = {"method": method, "target": "dim", "data_dir": data, "arch": "digits-copa", "workers": 0, "batch_size": 8}
    return values | {"rounds": 3, "lr": 0.02, "policy": {"min_samples": 2}} | changes


class Recorded(nn.Module):
    """Scores that favour class 0 by log 3, whatever comes in; keeps what came in."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.tensor(math.log(3)))
        self.seen: list[Tensor] = []

    def forward(self, x: Tensor) -> Tensor:
        self.seen.append(x.detach().clone())
        return torch.stack([self.weight.expand(len(x)), torch.zeros(len(x))], dim=1)


def batch(labels: list[int]) -> LabelledBatch:
    x = torch.rand(len(labels), 3, 8, 8, generator=torch.Generator().manual_seed(0))
    return LabelledBatch(x, torch.tensor(labels), torch.arange(len(labels)))


def test_each_half_has_images_and_their_looks_and_the_loss_is_the_mean() -> None:
    """Probabilities are 3/4 and 1/4. Images 0 and 2 are of class 0, 1 of class 1: the mean is over three images."""
    net, seen = Recorded(), batch([0, 1, 0])
    loss = loss_of_looks(net, Hyper(smoothing=0.0), torch.Generator().manual_seed(1))(seen)
    assert loss.item() == pytest.approx((2 * math.log(4 / 3) + math.log(4)) / 3)
    first, second = net.seen
    assert torch.equal(first[:2], seen.x[[0, 2]]) and torch.equal(second[:1], seen.x[[1]])
    assert len(first) == 4 and len(second) == 2
    assert not torch.allclose(first[2:], first[:2], atol=0.05)


def test_labels_are_smoothed() -> None:
    """0.1 smoothing over two classes: 0.95 of class 0, 0.05 of class 1."""
    loss = loss_of_looks(Recorded(), Hyper(), torch.Generator())(batch([0, 0]))
    assert loss.item() == pytest.approx(0.95 * math.log(4 / 3) + 0.05 * math.log(4))


def test_with_replaced_a_share_of_the_images_are_looks_and_each_passes_once() -> None:
    """Of 400 images at a half 200 +- 40 change; the others stay as they are."""
    net, seen = Recorded(), batch([0] * 400)
    loss = loss_of_looks(net, Hyper(smoothing=0.0, replaced=0.5), torch.Generator().manual_seed(1))(seen)
    (passed,) = net.seen
    changed = (passed != seen.x).flatten(1).any(1)
    assert 160 < changed.sum() < 240 and len(passed) == 400
    assert loss.item() == pytest.approx(math.log(4 / 3))


def test_blended_looks_lie_between_the_image_and_its_look() -> None:
    """By a share from 0 to 1 that an image draws: over 400 of them its mean is 1/2 and its deviation 0.29."""
    x = batch([0] * 400).x
    looks = looks_of(x, Hyper(depth=1), torch.Generator().manual_seed(2))
    mixed = looks_of(x, Hyper(depth=1, blended=True), torch.Generator().manual_seed(2))
    shares = ((mixed - x) * (looks - x)).flatten(1).sum(1) / ((looks - x) ** 2).flatten(1).sum(1)
    assert torch.allclose(mixed, torch.lerp(x, looks, shares[:, None, None, None]), atol=1e-5)
    assert shares.mean().item() == pytest.approx(0.5, abs=0.05)
    assert shares.std().item() == pytest.approx(0.29, abs=0.03)


def test_a_single_image_is_no_error() -> None:
    net = Recorded()
    assert math.isfinite(loss_of_looks(net, Hyper(), torch.Generator())(batch([1])).item())
    assert len(net.seen) == 1


def test_the_target_learns_confident_labels_only() -> None:
    """Of two images one is sure of class 0: half of its loss, log 4/3, is the mean."""
    net, x = Recorded(), batch([0, 0]).x
    hyper = Hyper(smoothing=0.0, information=0.0)
    loss_of = loss_of_labels(net, torch.tensor([0, 1]), torch.tensor([1.0, 0.0]), hyper, torch.Generator())  # type: ignore[arg-type]
    assert loss_of(UnlabelledBatch(x, torch.tensor([0, 1]))).item() == pytest.approx(math.log(4 / 3) / 2)
    # Batches come in any order: labels are found by the number of the sample.
    assert loss_of(UnlabelledBatch(x, torch.tensor([1, 1]))).item() == 0


def test_information_maximisation_is_added() -> None:
    """All predictions are (3/4, 1/4): their entropy and that of their mean are the same, so the sum is 0."""
    loss_of = loss_of_labels(Recorded(), torch.zeros(2).long(), torch.zeros(2), Hyper(), torch.Generator())  # type: ignore[arg-type]
    assert loss_of(UnlabelledBatch(batch([0, 0]).x, torch.arange(2))).item() == pytest.approx(0, abs=1e-6)


def test_images_are_normalised_by_themselves(tiny_data: Path) -> None:
    net = looks_network(prepare(make_config(settings(tiny_data))).plan).eval()
    x = torch.rand(2, 3, 16, 16, generator=torch.Generator().manual_seed(0))
    assert torch.allclose(net(0.2 + 0.5 * x), net(x), atol=1e-2)  # Another light changes next to nothing.
    assert torch.equal(net.features(x), net.backbone(standardised(x)))


def test_without_its_parts_it_is_fedavg(tiny_data: Path, tmp_path: Path) -> None:
    """In one batch of all images, whose order is the only difference."""
    own = {"by_image": False, "depth": 0, "smoothing": 0.0}
    run(make_config(settings(tiny_data, fedlooks=own, rounds=1, batch_size=500)), tmp_path / "looks")
    run(make_config(settings(tiny_data, "fedavg", rounds=1, batch_size=500)), tmp_path / "fedavg")
    one, other = (load_file(tmp_path / name / "model.safetensors") for name in ("looks", "fedavg"))
    worst = max(float((one[key] - other[key]).abs().max()) for key in one)
    assert worst < 1e-4


def test_the_target_goes_on_alone(tiny_data: Path, tmp_path: Path) -> None:
    values = settings(tiny_data, setting="adapt", fedlooks={"source_rounds": 0.67})
    results = run(make_config(values), tmp_path / "run")
    rows = read_metrics(tmp_path / "run" / "metrics.jsonl")[0]
    assert {row["round"] for row in rows if row["name"] == "train_loss"} == {1, 2}
    assert [row["round"] for row in rows if row["name"] == "adaptation_loss"] == [3]
    sent = {row["round"]: row["value"] for row in rows if row["name"] == "bytes_up"}
    assert sent[2] == sent[3] > sent[1] and results["bytes"]["up"] == sent[3]


@pytest.mark.parametrize(("rounds", "share", "first"), [(8, 0.67, 5), (2, 0.67, 1), (1, 0.67, 1), (8, 1.0, 8)])
def test_rounds_of_the_sources(rounds: int, share: float, first: int, tiny_data: Path) -> None:
    values = settings(tiny_data, setting="adapt", rounds=rounds, fedlooks={"source_rounds": share})
    assert source_rounds(prepare(make_config(values)).plan) == first


def test_table_rows_have_no_looks(tmp_path: Path) -> None:
    for name in ("north", "south", "west"):
        (tmp_path / f"{name}.csv").write_text("a,b,label\n" + "".join(f"{i},{i % 3},{i % 2}\n" for i in range(40)))
    values = {"method": "fedlooks", "data_dir": tmp_path, "target": "west", "label_column": "label", "rounds": 1}
    with pytest.raises(InputError, match="table rows have none: use fedavg"):
        run(make_config(values), tmp_path / "run")
