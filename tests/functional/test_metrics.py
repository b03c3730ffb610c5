from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fedshift.functional.metrics import accuracy, confusion_matrix, mean_iou, per_class_accuracy

# Truth in rows. Class 3 is neither in the truth nor predicted; class 2 is predicted but never true.
CONFUSION = torch.tensor([[3, 1, 0, 0], [0, 2, 2, 0], [0, 0, 0, 0], [0, 0, 0, 0]])


def test_confusion_matrix_by_hand() -> None:
    labels = torch.tensor([0, 0, 0, 0, 1, 1, 1, 1])
    predicted = torch.tensor([0, 0, 0, 1, 1, 1, 2, 2])
    confusion = confusion_matrix(predicted, labels, classes=4)
    assert confusion.dtype == torch.int64
    assert torch.equal(confusion, CONFUSION)


def test_void_pixels_do_not_count_whatever_was_predicted() -> None:
    labels = torch.tensor([[[0, 255], [1, 255]]], dtype=torch.uint8)
    predicted = torch.tensor([[[0, 0], [0, 1]]])
    assert confusion_matrix(predicted, labels, classes=2).tolist() == [[1, 0], [1, 0]]


def test_class_255_counts_when_there_are_more_classes() -> None:
    confusion = confusion_matrix(torch.tensor([255]), torch.tensor([255]), classes=345)
    assert int(confusion[255, 255]) == int(confusion.sum()) == 1


def test_uint8_masks_do_not_wrap_around() -> None:
    # 30 * 40 + 20 does not fit into uint8.
    mask = torch.full((1, 2, 2), 30, dtype=torch.uint8)
    guess = torch.full((1, 2, 2), 20, dtype=torch.uint8)
    assert int(confusion_matrix(guess, mask, classes=40)[30, 20]) == 4


def test_ids_out_of_range_are_refused() -> None:
    with pytest.raises(ValueError, match=r"a label is outside 0\.\.2: 0\.\.3"):
        confusion_matrix(torch.tensor([0, 1]), torch.tensor([0, 3]), classes=3)
    with pytest.raises(ValueError, match=r"a prediction is outside 0\.\.2: -1\.\.0"):
        confusion_matrix(torch.tensor([0, -1]), torch.tensor([0, 2]), classes=3)


def test_other_shape_is_refused() -> None:
    with pytest.raises(ValueError, match="differ in shape"):
        confusion_matrix(torch.zeros(4, dtype=torch.int64), torch.zeros(2, 2, dtype=torch.int64), classes=3)


def test_accuracy_by_hand() -> None:
    assert accuracy(CONFUSION) == 5 / 8


def test_per_class_accuracy_by_hand() -> None:
    shares = per_class_accuracy(CONFUSION)
    assert shares[:2].tolist() == [0.75, 0.5]
    assert shares[2:].isnan().all()


def test_mean_iou_leaves_out_classes_that_appear_nowhere() -> None:
    # IoU: 3/4, 2/5, 0/2 and class 3 does not appear.
    assert mean_iou(CONFUSION) == pytest.approx((3 / 4 + 2 / 5 + 0) / 3, abs=1e-12)


def test_scores_of_nothing_are_nan() -> None:
    empty = confusion_matrix(torch.zeros(2, dtype=torch.int64), torch.full((2,), 255), classes=3)
    assert empty.tolist() == [[0] * 3] * 3
    assert math.isnan(accuracy(empty))
    assert math.isnan(mean_iou(empty))


pairs = st.lists(st.tuples(st.sampled_from([0, 1, 2, 255]), st.integers(0, 2)), max_size=40)


@settings(deadline=None)
@given(samples=pairs, cut=st.integers(0, 40))
def test_matrix_equals_counting_one_by_one_and_adds_up_over_batches(samples: list[tuple[int, int]], cut: int) -> None:
    expected = [[0] * 3 for _ in range(3)]
    for label, guess in samples:
        if label != 255:
            expected[label][guess] += 1
    labels = torch.tensor([label for label, _ in samples], dtype=torch.int64)
    guesses = torch.tensor([guess for _, guess in samples], dtype=torch.int64)
    assert confusion_matrix(guesses, labels, 3).tolist() == expected
    halves = confusion_matrix(guesses[:cut], labels[:cut], 3) + confusion_matrix(guesses[cut:], labels[cut:], 3)
    assert halves.tolist() == expected
