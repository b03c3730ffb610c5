from __future__ import annotations

import torch
from torch import nn

from fedshift.nn.normalisation import STATISTICS, forgetting, freeze_norms, remembering, statistics_of


def make_net() -> nn.Sequential:
    net = nn.Sequential(nn.BatchNorm1d(2), nn.ReLU(), nn.BatchNorm1d(2)).eval()
    net[0].running_mean.fill_(7.0)
    return net


def test_remembering_keeps_the_plain_mean_over_batches_and_nothing_before() -> None:
    net = make_net()
    batches = [torch.tensor([[0.0, 2.0], [2.0, 6.0]]), torch.tensor([[4.0, 0.0], [8.0, 0.0]])]
    with torch.no_grad(), remembering(net):
        for batch in batches:
            net(batch)
    found = statistics_of(net)
    assert found["0.running_mean"].tolist() == [3.5, 2.0]  # of (1, 4) and (6, 0)
    assert found["0.running_var"].tolist() == [5.0, 4.0]  # of (2, 8) and (8, 0)
    assert set(found) == {"0.running_mean", "0.running_var", "2.running_mean", "2.running_var"}
    assert not net[0].training and net[0].momentum == 0.1


def test_what_is_remembered_is_used_afterwards() -> None:
    net = make_net()
    x = torch.randn(50, 2) * 3 + 5
    with torch.no_grad(), remembering(net):
        net(x)
    out = net[0](x)
    assert torch.allclose(out.mean(0), torch.zeros(2), atol=1e-5) and torch.allclose(
        out.var(0), torch.ones(2), atol=1e-3
    )


def test_forgetting_normalises_by_batches_but_remembers_nothing() -> None:
    net = make_net().train()
    before = statistics_of(net)
    x = torch.randn(20, 2) + 3
    with forgetting(net):
        out = net[0](x)
    assert torch.allclose(out.mean(0), torch.zeros(2), atol=1e-5)
    assert all(torch.equal(value, before[key]) for key, value in statistics_of(net).items())
    net(x)
    assert not torch.equal(statistics_of(net)["0.running_mean"], before["0.running_mean"])


def test_frozen_norms_normalise_by_what_they_remember_while_all_else_trains() -> None:
    net = nn.Sequential(nn.Conv2d(3, 2, 1), nn.BatchNorm2d(2), nn.Flatten(), nn.Linear(8, 4), nn.BatchNorm1d(4))
    net[1].running_mean.copy_(torch.tensor([1.0, -1.0]))
    net[1].running_var.copy_(torch.tensor([4.0, 9.0]))
    before = {key: value.clone() for key, value in net.state_dict().items()}
    freeze_norms(net)
    assert list(net.state_dict()) == list(before) and isinstance(net[1], nn.BatchNorm2d)
    net.train()
    x = torch.randn(5, 3, 2, 2)
    h = net[0](x)
    by_hand = (h - torch.tensor([1.0, -1.0]).view(1, 2, 1, 1)) / (
        torch.tensor([4.0, 9.0]).view(1, 2, 1, 1) + 1e-5
    ).sqrt()
    assert torch.allclose(net[1](h), by_hand, atol=1e-6)
    net(x).square().sum().backward()
    torch.optim.SGD(net.parameters(), lr=0.1).step()
    after = net.state_dict()
    kept = {key for key, value in after.items() if torch.equal(value, before[key])}
    assert kept == {f"{layer}.{name}" for layer in (1, 4) for name in (*STATISTICS, "num_batches_tracked")}
