"""The loss by which sites learn: whose it is, and that it ends with the step."""

from __future__ import annotations

import threading

import pytest
import torch

from fedshift.federation.labels import label_loss, learning_by
from fedshift.functional.losses import cross_entropy, symmetric_cross_entropy

SCORES, LABELS = torch.tensor([[2.0, 0.0, 1.0], [0.0, 1.0, 3.0]]), torch.tensor([0, 1])


def test_the_loss_is_the_one_that_was_chosen_inside_and_cross_entropy_outside() -> None:
    with learning_by("symmetric"):
        assert torch.equal(label_loss(SCORES, LABELS), symmetric_cross_entropy(SCORES, LABELS))
        smooth = symmetric_cross_entropy(SCORES, LABELS, smoothing=0.1)
        assert torch.equal(label_loss(SCORES, LABELS, smoothing=0.1), smooth)
    assert torch.equal(label_loss(SCORES, LABELS), cross_entropy(SCORES, LABELS))


def test_an_error_inside_leaves_nothing_behind() -> None:
    with pytest.raises(RuntimeError), learning_by("symmetric"):
        raise RuntimeError
    assert torch.equal(label_loss(SCORES, LABELS), cross_entropy(SCORES, LABELS))


def test_other_threads_keep_theirs() -> None:
    found: list[torch.Tensor] = []
    with learning_by("symmetric"):
        thread = threading.Thread(target=lambda: found.append(label_loss(SCORES, LABELS)))
        thread.start()
        thread.join()
    assert torch.equal(found[0], cross_entropy(SCORES, LABELS))
