from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from fedshift.data.splits import (
    TEST,
    TRAIN,
    VAL,
    choose_splits,
    complete_splits,
    find_lists,
    hold_out,
    positions,
    read_list,
)


def names(count: int, label: str = "dog") -> list[str]:
    return [f"{label}/{i}.jpg" for i in range(count)]


def test_places_are_the_same_on_every_machine_and_for_ever() -> None:
    np.testing.assert_allclose(positions(["dog/1.jpg", "dog/2.jpg"]), [0.9883411153823043, 0.81603134], rtol=1e-7)


def test_two_spellings_of_an_accent_are_one_name() -> None:
    composed, decomposed = positions(["caf\u00e9.png", "cafe\u0301.png"])
    assert composed == decomposed


def test_names_that_are_not_unicode_have_a_place() -> None:
    (place,) = positions([b"\xff\xfe.png".decode("utf-8", "surrogateescape")])
    assert 0 <= place < 1


def test_a_name_alone_decides() -> None:
    chosen = choose_splits(names(10_000), ["dog"] * 10_000)
    place = positions(names(10_000))
    np.testing.assert_array_equal(chosen, np.where(place < 0.8, TRAIN, np.where(place < 0.9, VAL, TEST)))
    assert np.bincount(chosen).tolist() == [8011, 989, 1000]


def test_adding_files_moves_none() -> None:
    few = choose_splits(names(300), ["dog"] * 300)
    more = choose_splits(names(3000), ["dog"] * 3000)
    np.testing.assert_array_equal(more[:300], few)


@pytest.mark.parametrize("seed", range(40))
def test_tiny_classes_train_first_then_test_then_validate(seed: int) -> None:
    for count, least in ((1, {TRAIN}), (2, {TRAIN, TEST}), (3, {TRAIN, VAL, TEST}), (6, {TRAIN, VAL, TEST})):
        tiny = names(count, f"class{seed}")
        chosen = choose_splits(tiny, ["x"] * count)
        assert set(chosen.tolist()) == least
        # Still in the order of positions: the sample that had to move is the nearest neighbour.
        order = np.argsort(positions(tiny))
        assert (np.diff(chosen[order]) >= 0).all()


def test_classes_do_not_influence_one_another() -> None:
    both = names(50, "dog") + names(2, "cat")
    together = choose_splits(both, ["dog"] * 50 + ["cat"] * 2)
    np.testing.assert_array_equal(together[:50], choose_splits(both[:50], ["dog"] * 50))
    np.testing.assert_array_equal(together[50:], choose_splits(both[50:], ["cat"] * 2))


def test_equal_names_stay_together_even_where_a_tiny_class_needs_one_moved() -> None:
    for seed in range(40):
        twice = names(4, f"c{seed}") * 2
        for chosen in (choose_splits(twice, ["x"] * 8), hold_out(twice, ["x"] * 8)):
            np.testing.assert_array_equal(chosen[:4], chosen[4:])
    assert choose_splits(["same"] * 5, ["x"] * 5).tolist() == [TRAIN] * 5


def test_hold_out_takes_a_tenth_but_never_the_only_one() -> None:
    held = hold_out(names(10_000), ["dog"] * 10_000)
    np.testing.assert_array_equal(held, positions(names(10_000)) >= 0.9)
    for seed in range(40):
        assert not hold_out(names(1, f"c{seed}"), ["x"]).any()
        assert hold_out(names(3, f"c{seed}"), ["x"] * 3).sum() in (1, 2)


def test_nothing_given_is_chosen_by_hash() -> None:
    chosen = complete_splits(names(100), ["dog"] * 100, [None] * 100)
    assert [("train", "val", "test")[i] for i in choose_splits(names(100), ["dog"] * 100)] == chosen


def test_given_train_and_test_leave_test_alone_and_validate_on_a_tenth_of_train() -> None:
    given = ["train"] * 200 + ["test"] * 20 + [None] * 5
    chosen = complete_splits(names(225), ["dog"] * 225, given)
    assert chosen[200:220] == ["test"] * 20
    assert chosen[220:] == [None] * 5
    assert [split == "val" for split in chosen[:200]] == hold_out(names(200), ["dog"] * 200).tolist()


def test_given_train_and_val_test_on_val() -> None:
    chosen = complete_splits(names(220), ["dog"] * 220, ["train"] * 200 + ["val"] * 20)
    assert chosen[200:] == ["test"] * 20
    assert {"train", "val"} == set(chosen[:200])


def test_all_three_given_are_kept() -> None:
    given = ["train", "val", "test", None]
    assert complete_splits(names(4), ["dog"] * 4, given) == given


def test_list_lines_in_every_form_that_data_sets_use(tmp_path: Path) -> None:
    known = {"dog/a.jpg": 0, "dog/b 2.jpg": 1, "cat/c.jpg": 2, "cat/d 7": 3}
    path = tmp_path / "art_train.txt"
    path.write_text(
        "art/dog/a.jpg\n"
        "# a remark\n"
        "\n"
        "dog/b 2.jpg 4\n"
        "somewhere\\else\\art\\cat\\c.jpg 12\n"
        "./art/cat/d 7\n"
        "../../../etc/passwd\n"
        "dog/none.jpg 3\n"
    )
    samples, unknown = read_list(path, known, depth=2)
    assert samples == [0, 1, 2, 3]
    assert unknown == ["../../../etc/passwd", "dog/none.jpg 3"]


def test_lists_are_found_under_the_names_public_sets_give_them(tmp_path: Path) -> None:
    assert find_lists([tmp_path / "nowhere", tmp_path], ["art"], Path.is_file) == {}
    for name in ("art_train_kfold.txt", "art_crossval_kfold.txt", "photo_test.txt"):
        (tmp_path / name).touch()
    assert find_lists([tmp_path / "nowhere", tmp_path], ["art"], Path.is_file) == {
        tmp_path / "art_train_kfold.txt": "train",
        tmp_path / "art_crossval_kfold.txt": "val",
    }
