"""Bad sites: which labels turn wrong, what noise leaves, what another task does, and what a mistyped attack says."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from fedshift.data.attacks import Attack, parse_attack, spoiled, with_trigger, with_wrong_labels
from fedshift.data.batches import LabelledData
from fedshift.data.domain import VOID, Split
from fedshift.errors import InputError
from fedshift.rng import Rng


def test_poison_moves_the_first_share_of_a_batch_to_the_next_class() -> None:
    labels = torch.tensor([0, 1, 2, 2, 1, 0, 2, 1, 0, 0])
    assert with_wrong_labels(labels, 0.3, classes=3).tolist() == [1, 2, 0, 2, 1, 0, 2, 1, 0, 0]
    assert labels[0] == 0, "the site's own labels are left as they are"


def test_poison_leaves_void_pixels_void() -> None:
    masks = torch.full((2, 1, 3), VOID)
    masks[:, :, 0] = 4
    assert with_wrong_labels(masks, 0.5, classes=5).tolist() == [[[0, VOID, VOID]], [[4, VOID, VOID]]]


def test_only_training_batches_are_poisoned() -> None:
    split = Split(np.zeros((10, 4, 4, 3), dtype=np.uint8), np.zeros(10, dtype=np.int64))
    data = LabelledData(split, torch.device("cpu"), poison=0.5, classes=3)
    assert [batch.y.tolist() for batch in data.batches(4, Rng.of(0))] == [[1, 1, 0, 0], [1, 1, 0, 0], [1, 0]]
    (batch,) = data.in_order(10)
    assert batch.y.sum() == 0


def test_noise_replaces_pictures_and_keeps_labels() -> None:
    split = Split(np.zeros((50, 8, 8, 3), dtype=np.uint8), np.arange(50) % 3)
    bad = spoiled(split, Attack("noise", "here"), 3, Rng.of(1))
    assert bad.inputs.dtype == np.uint8 and abs(bad.inputs.mean() - 127.5) < 3
    assert np.array_equal(bad.labels, split.labels)  # type: ignore[arg-type]
    again = spoiled(split, Attack("noise", "here"), 3, Rng.of(1))
    assert np.array_equal(bad.inputs, again.inputs)


@pytest.mark.parametrize("classes", [2, 3, 10])
def test_another_task_gives_every_class_another_name(classes: int) -> None:
    split = Split(np.zeros((classes, 2), dtype=np.float32), np.arange(classes))
    bad = spoiled(split, Attack("other-task", "here"), classes, Rng.of(5))
    assert sorted(bad.labels) == list(range(classes))  # type: ignore[arg-type]
    assert not np.any(bad.labels == np.arange(classes))


def pictures(count: int, size: int = 16) -> Split:
    inputs = np.arange(count * size * size * 3, dtype=np.int64).reshape(count, size, size, 3) % 251
    return Split(inputs.astype(np.uint8), np.arange(count) % 5)


def test_a_backdoor_marks_a_share_of_the_training_images_and_nothing_else() -> None:
    split = pictures(40)
    bad = spoiled(split, Attack("backdoor", "here", 0.3), 5, Rng.of(2))
    changed = np.flatnonzero((bad.inputs != split.inputs).any(axis=(1, 2, 3)))
    assert len(changed) == 12 and not bad.labels[changed].any()  # type: ignore[index]
    kept = np.setdiff1d(np.arange(40), changed)
    assert np.array_equal(bad.labels[kept], split.labels[kept])  # type: ignore[index]
    corner = np.array([[255, 0, 255], [0, 255, 0], [255, 0, 255]])
    assert (bad.inputs[changed, -3:, -3:] == corner[None, :, :, None]).all()
    assert np.array_equal(bad.inputs[:, :13], split.inputs[:, :13]), "only the corner is changed"
    assert spoiled(split, Attack("backdoor", "here", 0.3), 5, Rng.of(2), trains=False) is split


def test_the_trigger_at_a_test_is_the_one_of_training() -> None:
    split = pictures(10)
    bad = spoiled(split, Attack("backdoor", "here", 1.0), 5, Rng.of(2))
    (own,) = LabelledData(split, torch.device("cpu")).in_order(10)
    (theirs,) = LabelledData(bad, torch.device("cpu")).in_order(10)
    assert torch.equal(with_trigger(own.x), theirs.x)
    assert not torch.equal(own.x, theirs.x), "the batch itself is left as it is"


def test_irrelevant_images_keep_their_pixels_and_lose_shape_and_label() -> None:
    split = pictures(400)
    bad = spoiled(split, Attack("irrelevant", "here"), 5, Rng.of(3))
    assert np.array_equal(np.sort(bad.inputs.reshape(400, -1)), np.sort(split.inputs.reshape(400, -1)))
    assert (bad.inputs != split.inputs).any(axis=(1, 2, 3)).all()
    assert 0.1 < np.mean(bad.labels == split.labels) < 0.3, "labels are chance: 1 of 5"


def test_irrelevant_rows_keep_each_columns_values() -> None:
    split = Split(np.random.default_rng(0).normal(size=(50, 3)).astype(np.float32), np.zeros(50, dtype=np.int64))
    bad = spoiled(split, Attack("irrelevant", "here"), 2, Rng.of(3))
    assert np.array_equal(np.sort(bad.inputs, 0), np.sort(split.inputs, 0))
    assert not np.array_equal(bad.inputs, split.inputs)


def test_attacks_are_read_and_written_back() -> None:
    assert parse_attack("poison:a:b:0.3") == Attack("poison", "a:b", 0.3)
    assert str(parse_attack("poison:svhn:0.15")) == "poison:svhn:0.15"
    assert str(parse_attack("noise:svhn")) == "noise:svhn"
    assert parse_attack("sign-flip:svhn:10") == Attack("sign-flip", "svhn", 10.0)
    assert str(parse_attack("scaled-noise:svhn:0.5")) == "scaled-noise:svhn:0.5"
    assert parse_attack("constant:svhn") == Attack("constant", "svhn")
    assert parse_attack("forged-count:svhn") == Attack("forged-count", "svhn", 10**12)
    assert parse_attack("forged-confidence:svhn") == Attack("forged-confidence", "svhn", 10.0)
    assert str(parse_attack("backdoor:svhn:0.3")) == "backdoor:svhn:0.3"
    assert parse_attack("forged-count:svhn:500") == Attack("forged-count", "svhn", 500)


@pytest.mark.parametrize(
    "text",
    [
        *("poison:svhn", "poison:svhn:2", "poison::0.3", "noise", "poisn:svhn:0.3", "poison:s:x", "constant"),
        *("sign-flip:s", "sign-flip:s:0", "sign-flip:s:nan", "scaled-noise:s:inf", "forged-count:s:1e13"),
        *("backdoor:s", "backdoor:s:1.1", "boost:s", "free-rider", "irrelevant", "forged-confidence:s:0"),
    ],
)
def test_a_mistyped_attack_says_how_to_write_it(text: str) -> None:
    with pytest.raises(InputError, match="attack"):
        parse_attack(text)
