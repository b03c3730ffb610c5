"""The loss by which sites learn from their labels: the key `loss`, the same for every method.

A step computes it by `label_loss`, wherever it trains on a site's own labels. Which loss that is, the plan says;
whoever runs the step sets it (`learning_by`). What a method learns from anything else (pseudo labels at the target,
votes, alignment) has losses of its own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Literal

from torch import Tensor

from fedshift.functional.losses import cross_entropy, symmetric_cross_entropy

LabelLoss = Literal["cross-entropy", "symmetric"]

_LOSSES: dict[LabelLoss, Callable[..., Tensor]] = {
    "cross-entropy": cross_entropy,
    "symmetric": symmetric_cross_entropy,
}
_chosen: ContextVar[LabelLoss] = ContextVar("label_loss", default="cross-entropy")


def label_loss(scores: Tensor, labels: Tensor, *, smoothing: float = 0.0) -> Tensor:
    """The mean loss of `scores` for `labels` by the run's key `loss`; arguments as for `cross_entropy`."""
    return _LOSSES[_chosen.get()](scores, labels, smoothing=smoothing)


@contextmanager
def learning_by(loss: LabelLoss) -> Iterator[None]:
    """Inside, `label_loss` is this one, in this thread."""
    token = _chosen.set(loss)
    try:
        yield
    finally:
        _chosen.reset(token)
