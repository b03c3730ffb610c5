"""A network for table rows with missing values."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from fedshift.nn.network import Backbone, DenseBlock

LARGEST_DEVIATION = 10.0
"""Limit of standardised values: a column that hardly varies at one site may vary a lot at another."""


class Standardise(nn.Module):
    """Columns to mean 0 and variance 1 over the values that are present; missing values (NaN) become 0.

    Works as BatchNorm, `(B, D)` to `(B, D)`: by the batch's statistics in training, by running ones in evaluation, so
    that federated averaging of statistics applies to tables too. The first batch of a column sets its running values,
    because raw columns may be far from mean 0 and variance 1; later ones are averaged plainly until `momentum` is more.
    """

    running_mean: Tensor
    running_var: Tensor
    batches_seen: Tensor

    def __init__(self, columns: int, momentum: float = 0.1, eps: float = 1e-8) -> None:
        super().__init__()
        self.momentum = momentum
        self.eps = eps
        self.register_buffer("running_mean", torch.zeros(columns))
        self.register_buffer("running_var", torch.ones(columns))
        self.register_buffer("batches_seen", torch.zeros(columns, dtype=torch.long))

    def reset_running_stats(self) -> None:
        self.running_mean.zero_()
        self.running_var.fill_(1)
        self.batches_seen.zero_()

    def forward(self, x: Tensor) -> Tensor:
        present = ~x.isnan()
        x = torch.where(present, x, 0.0)
        mean, var = self.running_mean, self.running_var
        if self.training:
            mean, var = self._batch_statistics(x, present)
        scaled = ((x - mean) / torch.sqrt(var + self.eps)).clamp(-LARGEST_DEVIATION, LARGEST_DEVIATION)
        return scaled * present

    def _batch_statistics(self, x: Tensor, present: Tensor) -> tuple[Tensor, Tensor]:
        """Mean and variance per column over present values; also moves the running values towards them."""
        count = present.sum(0)
        mean = x.sum(0) / count.clamp(min=1)
        squares = ((x - mean) * present).square().sum(0)
        with torch.no_grad():
            # One value has no variance: such a column waits for a batch with two.
            usable = count >= 2
            self.batches_seen += usable
            weight = torch.clamp(1.0 / self.batches_seen.clamp(min=1), min=self.momentum) * usable
            weight = weight.to(self.running_mean.dtype)
            unbiased = squares / (count - 1).clamp(min=1)  # as BatchNorm: unbiased in the running value only
            self.running_mean.lerp_(mean.detach(), weight)
            self.running_var.lerp_(unbiased.detach(), weight)
        return mean, squares / count.clamp(min=1)


class TableNet(Backbone):
    """Rows `(B, D)` with NaN for missing to features `(B, 64)`."""

    out_features = 64
    stages = ("block1", "block2")
    taps = ("block1", "block2")

    def __init__(self, input_shape: tuple[int, ...]) -> None:
        super().__init__()
        (columns,) = input_shape
        self.standardise = Standardise(columns)
        self.block1 = DenseBlock(columns, self.out_features)
        self.block2 = DenseBlock(self.out_features, self.out_features)

    def forward(self, x: Tensor) -> Tensor:
        features: Tensor = self.block2(self.block1(self.standardise(x)))
        return features
