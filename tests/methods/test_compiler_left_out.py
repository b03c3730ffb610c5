"""Importing torch's compiler takes longer than importing torch, and no training needs it."""

from __future__ import annotations

import subprocess
import sys

import torch

from fedshift.federation.step import counted_steps
from fedshift.methods.local import _Sgd

TRAIN = """
import sys, torch
from fedshift.federation.step import counted_steps
from fedshift.methods.local import _Sgd
weight = torch.nn.Parameter(torch.ones(1))
optimizer = _Sgd([weight], lr=0.5, momentum=0.9, fused=True)
optimizer.zero_grad(set_to_none=True)
weight.square().sum().backward()
with counted_steps() as steps:
    optimizer.step()
print(float(weight), steps[0], "torch._dynamo" in sys.modules)
"""


def test_a_step_of_sgd_is_counted_and_does_not_import_the_compiler() -> None:
    done = subprocess.run([sys.executable, "-c", TRAIN], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["0.0", "1", "False"]


def test_it_is_torchs_own_sgd() -> None:
    found = []
    for kind in (_Sgd, torch.optim.SGD):
        weight = torch.nn.Parameter(torch.linspace(-1, 1, 7))
        optimizer = kind([weight], lr=0.1, momentum=0.9, weight_decay=1e-3, fused=True)
        for _ in range(3):
            optimizer.zero_grad(set_to_none=True)
            weight.exp().sum().backward()
            optimizer.step()
        found.append(weight.detach().clone())
    assert torch.equal(*found)


def test_only_steps_inside_are_counted() -> None:
    """`policy.min_steps` goes by this number."""
    optimizers = []
    for kind in (_Sgd, _Sgd, torch.optim.SGD):
        weight = torch.nn.Parameter(torch.ones(1))
        weight.sum().backward()
        optimizers.append(kind([weight], lr=0.1))
    optimizers[0].step()
    with counted_steps() as steps:
        for optimizer in optimizers:
            optimizer.step()
            optimizer.step()
        assert steps == [6]
    optimizers[0].step()
    assert steps == [6]
