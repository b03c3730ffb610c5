"""The training loop that methods share."""

from __future__ import annotations

import threading
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fedshift.methods.local import _template, autocast, descend, plain_network, train_batches, weights_follow


def one_weight() -> tuple[nn.Linear, torch.optim.Optimizer]:
    """f(x) = 2 x, at a learning rate of 1/4."""
    net = nn.Linear(1, 1, bias=False)
    nn.init.constant_(net.weight, 2.0)
    return net, torch.optim.SGD(net.parameters(), lr=0.25)


def test_a_batch_is_one_step_and_the_mean_loss_comes_back() -> None:
    net, optimizer = one_weight()
    loss = train_batches([1.0, 3.0], lambda b: b * net.weight.sum(), optimizer)
    # 2 - 1/4 * 1 = 1.75, then 1.75 - 1/4 * 3 = 1; losses 1 * 2 and 3 * 1.75.
    assert net.weight.item() == 1.0 and loss == (2 + 5.25) / 2


def test_terms_of_a_loss_are_added_up_before_the_step() -> None:
    """The second is computed from the weights that the first was computed from, after its gradient was taken."""
    net, optimizer = one_weight()
    seen: list[float | None] = []

    def first(batch: float) -> Tensor:
        return batch * net.weight.sum()

    def second(batch: float) -> Tensor:
        seen.append(None if net.weight.grad is None else net.weight.grad.item())
        return net.weight.square().sum()

    loss = train_batches([1.0], (first, second), optimizer)
    assert seen == [1.0] and loss == 2 + 4
    assert net.weight.item() == 2 - 0.25 * (1 + 2 * 2)


def test_no_batches_are_a_loss_of_0() -> None:
    net, optimizer = one_weight()
    assert train_batches([], lambda _: net.weight.sum(), optimizer) == 0 and net.weight.item() == 2


def test_a_failure_names_its_batch() -> None:
    net, optimizer = one_weight()
    with pytest.raises(ZeroDivisionError) as caught:
        train_batches([1.0, 0.0], lambda b: net.weight.sum() / b if b else net.weight.sum() * (1 / b), optimizer)
    assert caught.value.__notes__ == ["in batch 1 of this step's training"]


def test_descending_forgets_earlier_gradients() -> None:
    net, optimizer = one_weight()
    net.weight.sum().backward()
    descend(3 * net.weight.sum(), optimizer)
    assert net.weight.item() == 2 - 0.25 * 3


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_autocast_is_for_the_device_that_is_trained_on(device: str) -> None:
    context = autocast(torch.device(device), "float32")
    assert context.device == device


def test_bfloat16_is_for_forward_passes_inside_and_float32_turns_it_off() -> None:
    net, x = nn.Linear(2, 2), torch.rand(1, 2)
    with autocast(x.device, "bfloat16"):
        assert net(x).dtype == torch.bfloat16
        with autocast(x.device, "float32"):
            assert net(x).dtype == torch.float32
    assert net(x).dtype == torch.float32


PLAN: Any = SimpleNamespace(
    model=SimpleNamespace(arch="digits-csac", input_shape=(3, 16, 16), classes=("a", "b"), freeze_norm=False)
)


def test_blank_networks_of_one_thread_leave_no_other_thread_without_first_weights() -> None:
    """The second thread begins while the first is inside, and ends after it."""
    inside, ended = threading.Event(), threading.Event()

    def second() -> None:
        with weights_follow():
            inside.set()
            ended.wait(10)

    with weights_follow():
        thread = threading.Thread(target=second)
        thread.start()
        inside.wait(10)
        assert not any(bool(weight.any()) for weight in plain_network(PLAN).parameters())
    ended.set()
    thread.join()
    assert any(bool(weight.any()) for weight in plain_network(PLAN).parameters())


def test_a_blank_network_has_its_constants_whoever_asks_first() -> None:
    _template.cache_clear()
    with torch.device("meta"), weights_follow():
        plain_network(PLAN)
    with weights_follow():
        assert plain_network(PLAN).mean.device.type == "cpu"
