from __future__ import annotations

import numpy as np
import torch

from fedshift.data import batches
from fedshift.data.augment import build_pair_augment
from fedshift.data.batches import LabelledData, UnlabelledData
from fedshift.data.domain import Split
from fedshift.rng import Rng

CPU = torch.device("cpu")


def split(count: int) -> Split:
    """Image i is filled with the value i and has the label i."""
    images = np.arange(count, dtype=np.uint8)[:, None, None, None] * np.ones((1, 4, 5, 3), dtype=np.uint8)
    return Split(images, np.arange(count))


def test_an_epoch_is_every_sample_once_with_its_own_label() -> None:
    data = LabelledData(split(10), CPU)
    seen = list(data.batches(4, Rng.of(0)))
    assert [len(batch.y) for batch in seen] == [4, 4, 2]
    assert sorted(int(y) for batch in seen for y in batch.y) == list(range(10))
    for batch in seen:
        assert batch.x.shape[1:] == (3, 4, 5) and batch.x.dtype == torch.float32
        assert torch.allclose(batch.x[:, 0, 0, 0] * 255, batch.y.float())


def test_fractions_and_several_epochs() -> None:
    data = LabelledData(split(10), CPU)
    half = [int(y) for batch in data.batches(5, Rng.of(0), 0.5) for y in batch.y]
    assert len(half) == 5 == len(set(half))
    double = [int(y) for batch in data.batches(4, Rng.of(0), 2) for y in batch.y]
    assert sorted(double) == sorted([*range(10)] * 2)


def test_stretches_that_follow_each_other_cover_every_pass() -> None:
    data, rng = UnlabelledData(split(10), CPU), Rng.of(1)
    for epochs in (0.3, 0.25, 1.0, 1.5):
        rounds = [data.stretch(t * epochs, (t + 1) * epochs, rng) for t in range(20)]
        seen = torch.cat(rounds).tolist()
        assert len(seen) == 200 * epochs
        for start in range(0, len(seen), 10):
            assert sorted(seen[start : start + 10]) == list(range(10))
        assert seen[:10] != seen[10:20]
    labelled = LabelledData(split(10), CPU)
    parts = [[int(y) for b in labelled.stretch(t / 2, (t + 1) / 2, rng, 2, Rng.of(2)) for y in b.y] for t in range(2)]
    assert sorted(parts[0] + parts[1]) == list(range(10)) and len(parts[0]) == len(parts[1])


def test_a_stretch_has_two_samples_at_least() -> None:
    data, rng = UnlabelledData(split(10), CPU), Rng.of(1)
    rounds = [data.stretch(t / 100, (t + 1) / 100, rng) for t in range(100)]
    assert {len(part) for part in rounds} == {2} and set(torch.cat(rounds).tolist()) == set(range(10))
    assert UnlabelledData(split(1), CPU).stretch(0.0, 0.5, rng).tolist() == [0]


def test_batches_along_given_samples() -> None:
    batches = list(UnlabelledData(split(9), CPU).along(torch.tensor([8, 3, 3, 5, 1]), 2))
    assert [batch.index.tolist() for batch in batches] == [[8, 3], [3, 5, 1]]
    assert torch.allclose(batches[0].x[:, 0, 0, 0] * 255, torch.tensor([8.0, 3.0]))


def test_a_sample_that_would_be_alone_is_in_the_batch_before() -> None:
    assert [len(b.y) for b in LabelledData(split(9), CPU).batches(4, Rng.of(0))] == [4, 5]
    assert [len(b.y) for b in LabelledData(split(5), CPU).batches(4, Rng.of(0))] == [5]
    assert [len(b.y) for b in LabelledData(split(3), CPU).batches(1, Rng.of(0))] == [1, 1, 1]
    assert [len(b.y) for b in LabelledData(split(1), CPU).batches(4, Rng.of(0))] == [1]


def test_the_order_comes_from_the_names_alone() -> None:
    data = LabelledData(split(30), CPU)

    def order(rng: Rng) -> list[int]:
        return [int(y) for batch in data.batches(8, rng) for y in batch.y]

    assert order(Rng.of(1, "a")) == order(Rng.of(1, "a")) != order(Rng.of(1, "b"))


def test_an_unlabelled_batch_has_no_labels_to_misuse() -> None:
    batch = next(iter(UnlabelledData(split(5), CPU).batches(5, Rng.of(0))))
    assert not hasattr(batch, "y")
    assert torch.allclose(batch.x[:, 0, 0, 0] * 255, batch.index.float())


def test_large_data_is_read_from_its_map_and_gives_the_same_batches(monkeypatch) -> None:  # type: ignore[no-untyped-def]
    small = [b.x for b in LabelledData(split(20), CPU).batches(6, Rng.of(3))]
    monkeypatch.setattr(batches, "_IN_MEMORY_BYTES", 0)
    mapped = [b.x for b in LabelledData(split(20), CPU).batches(6, Rng.of(3))]
    assert all(torch.equal(a, b) for a, b in zip(small, mapped, strict=True))


def test_masks_move_with_their_images() -> None:
    rng = np.random.default_rng(0)
    masks = rng.integers(0, 3, (16, 8, 8)).astype(np.uint8)
    images = np.repeat(masks[..., None] * 40, 3, axis=3).astype(np.uint8)
    data = LabelledData(Split(images, masks), CPU)
    (batch,) = data.batches(16, Rng.of(0), augment=build_pair_augment(("flip", "crop")))
    assert torch.allclose(batch.x[:, 0] * 255, batch.y.float() * 40)
    original = torch.from_numpy(masks[batch.index.numpy()].astype(np.int64))
    assert not torch.equal(batch.y, original)


def test_table_rows_come_as_they_are_with_missing_values() -> None:
    rows = np.array([[1.0, np.nan], [2.0, 3.0]], dtype=np.float32)
    (batch,) = LabelledData(Split(rows, np.array([0, 1])), CPU).in_order(2)
    assert torch.equal(torch.isnan(batch.x), torch.tensor([[False, True], [False, False]]))


def test_batches_are_made_where_they_are_trained_on() -> None:
    """`meta` stands for an accelerator: what forgets to move something fails there, or gives the wrong device."""
    device = torch.device("meta")
    labelled, unlabelled = LabelledData(split(6), device), UnlabelledData(split(6), device)
    flip = build_pair_augment(["flip"])
    made = [
        *labelled.batches(3, Rng.of(0)),
        *labelled.batches(3, Rng.of(0), augment=lambda x, y, generator: (flip(x, x[:, 0], generator)[0], y)),
        *labelled.in_order(4),
        *unlabelled.batches(3, Rng.of(0)),
        *unlabelled.evenly(3),
    ]
    assert all(batch.x.device == device and batch.x.shape[1:] == (3, 4, 5) for batch in made)
    assert all(batch.y.device == device for batch in made[:6])
