from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from fedshift.data import DataSource, Domain, open_dataset
from fedshift.data.formats.tables import read_features
from fedshift.errors import InputError, SiteError
from fedshift.federation.policy import Policy
from fedshift.federation.site import require_nameable_classes


@pytest.fixture
def root(tmp_path: Path) -> Path:
    folder = tmp_path / "clinics"
    folder.mkdir()
    return folder


def write(root: Path, name: str, *lines: str) -> None:
    (root / name).write_text("\n".join(lines) + "\n")


def rows_of(domain: Domain) -> dict[tuple[float, ...], int]:
    return {
        tuple(split.inputs[i].tolist()): int(split.labels[i])
        for split in (domain.train, domain.val, domain.test)
        for i in range(len(split))
    }


def problem_of(root: Path, label_column: str | None = None) -> InputError:
    with pytest.raises(InputError) as error:
        open_dataset(DataSource(data_dir=root, label_column=label_column))
    return error.value


def test_numbers_missing_values_and_labels(root: Path) -> None:
    write(root, "a.csv", "age,bp,target", "63,1.5,no", "?,2,yes", ",NaN,yes", "40,-3e2,no")
    dataset = open_dataset(DataSource(data_dir=root))
    assert dataset.classes == ("no", "yes")
    assert dataset.input_shape == (2,)
    domain = dataset.load("a")
    assert domain.train.inputs.dtype == np.float32
    found = np.concatenate([split.inputs for split in (domain.train, domain.val, domain.test)])
    found = found[np.lexsort(np.nan_to_num(found, nan=-1).T)]
    expected = np.array([[40, -300], [np.nan, np.nan], [63, 1.5], [np.nan, 2]], dtype=np.float32)
    expected = expected[np.lexsort(np.nan_to_num(expected, nan=-1).T)]
    np.testing.assert_array_equal(found, expected)


def test_classes_are_agreed_over_all_tables_and_spellings_of_a_number_are_one(root: Path) -> None:
    write(root, "a.csv", "x,label", "1,0", "2,4", "3,0")
    write(root, "b.data", "x,label", "4,4.0", "5,02", "6,4")
    dataset = open_dataset(DataSource(data_dir=root))
    assert dataset.classes == ("0", "2", "4")
    assert dataset.domains == ("a", "b")
    assert rows_of(dataset.load("b")) == {(4.0,): 2, (5.0,): 1, (6.0,): 2}
    assert "a has no sample of '2'." in dataset.warnings


def test_columns_may_stand_in_another_order(root: Path) -> None:
    write(root, "a.csv", "x,y,label", "1,10,n", "2,20,p")
    write(root, "b.csv", "label;y;x", "n;30;3", "p;40;4")
    assert rows_of(open_dataset(DataSource(data_dir=root)).load("b")) == {(3.0, 30.0): 0, (4.0, 40.0): 1}


def test_label_column_by_name_and_the_default(root: Path) -> None:
    write(root, "a.csv", "class,x,Target", "1,5,0", "0,6,1")
    default = open_dataset(DataSource(data_dir=root)).load("a")
    assert rows_of(default) == {(1.0, 5.0): 0, (0.0, 6.0): 1}
    asked = open_dataset(DataSource(data_dir=root, label_column="class")).load("a")
    assert rows_of(asked) == {(5.0, 0.0): 1, (6.0, 1.0): 0}


def test_table_without_the_label_column_is_unlabelled(root: Path) -> None:
    write(root, "a.csv", "x,label", "1,n", "2,p")
    write(root, "b.csv", "x", *(str(i) for i in range(10)))
    domain = open_dataset(DataSource(data_dir=root)).load("b")
    assert domain.train.labels is None
    assert len(domain.train) + len(domain.val) + len(domain.test) == 10


def test_equal_rows_share_a_split_and_order_does_not_matter(root: Path) -> None:
    lines = [f"{i},{'np'[i % 2]}" for i in range(60)]
    write(root, "a.csv", "x,label", *lines, *lines)
    write(root, "b.csv", "x,label", *reversed(lines))
    dataset = open_dataset(DataSource(data_dir=root))
    a, b = dataset.load("a"), dataset.load("b")
    for one, other in ((a.train, b.train), (a.val, b.val), (a.test, b.test)):
        assert sorted(one.inputs[:, 0].tolist()) == sorted(other.inputs[:, 0].tolist() * 2)


@pytest.mark.parametrize(
    ("lines", "code", "says"),
    [
        (["x,y", "1,2"], "data-labels", "The columns are: x, y"),
        (
            ["x,colour,label", "1,red,0", "2,blue,1"],
            "data-unreadable",
            "column 'colour' holds text with 2 different values, such as 'red'",
        ),
        (["x,label", "1,0", "2,?"], "data-labels", "line 3: the label is missing"),
        (["x,label", "1,0.5", "2,1"], "data-labels", "a measurement, not a class"),
        (["x,label", "1,0", "2"], "data-unreadable", "line 3: 1 cells where the header has 2"),
        (["1,2", "3,4"], "data-layout", "no header"),
        (["x,x,label", "1,2,0"], "data-layout", "several columns called 'x'"),
        (["x,label"], "data-empty", "no rows"),
        ([""], "data-empty", "is empty"),
        (["x,label", "1e39,0", "2,1"], "data-unreadable", "'1e39', which is not a number"),
        (["x,label", "inf,0", "2,1"], "data-unreadable", "'inf', which is not a number"),
        (["x,label", "1,0", "2,0"], "data-classes", "1 class"),
    ],
)
def test_unusable_tables_say_where_and_why(root: Path, lines: list[str], code: str, says: str) -> None:
    write(root, "a.csv", *lines)
    error = problem_of(root)
    assert error.code == code
    assert says in error.message


def test_unknown_label_column_suggests_one(root: Path) -> None:
    write(root, "a.csv", "age,target", "1,0", "2,1")
    error = problem_of(root, "targt")
    assert error.code == "data-labels"
    assert "Did you mean 'target'" in error.message


def test_tables_must_have_the_same_columns(root: Path) -> None:
    write(root, "a.csv", "x,y,label", "1,2,0", "3,4,1")
    write(root, "b.csv", "x,z,label", "1,2,0", "3,4,1")
    error = problem_of(root)
    assert error.code == "data-layout"
    assert "y, z" in error.message


def test_binary_file_is_no_table(root: Path) -> None:
    (root / "a.csv").write_bytes(b"\xff\xfe\x00\x01" * 10)
    assert problem_of(root).code == "data-unreadable"


def test_check_reports_every_broken_table(root: Path) -> None:
    write(root, "a.csv", "x,label", "one,0", "2,1")
    write(root, "b.csv", "x,label", "1,0", "2,1")
    write(root, "c.csv", "x,label", "1,?", "2,1")


def test_categories_missing_codes_and_a_positive_class(root: Path) -> None:
    rows = [f"{40 + i},{'FM'[i % 2]},{1 + i % 3},{0 if i == 1 else 200},{i % 4},x{i}" for i in range(24)]
    write(root, "north.csv", "age,sex,pain,chol,grade,patient", *rows)
    write(root, "south.csv", "age,sex,pain,chol,grade,patient", *rows[:12], "80,,2.0,?,1,y", "81,X,9,100,0,y")
    (root / "columns.yaml").write_text(
        "label: grade\npositive: [2, 3]\nleave_out: [patient]\nmissing: {chol: [0]}\ncategories: {pain: [1, 2, 3]}\n"
    )
    dataset = open_dataset(DataSource(data_dir=root))
    assert dataset.classes == ("negative", "positive")
    assert dataset.columns == ("age", "sex=F", "sex=M", "pain=1", "pain=2", "pain=3", "chol")
    domain = dataset.load("south")
    found = {row[0]: row[1:] for split in (domain.train, domain.val, domain.test) for row in split.inputs.tolist()}
    assert found[40.0] == [1, 0, 1, 0, 0, 200]
    assert np.isnan(found[41.0][5]), "0 is not known"
    assert np.isnan(found[80.0][0]) and np.isnan(found[80.0][1]) and found[80.0][2:5] == [0, 1, 0]
    assert found[81.0] == [0, 0, 0, 0, 0, 100], "a value that is in no list is none of the categories"
    labels = rows_of(dataset.load("north"))
    assert {int(row[0]): label for row, label in labels.items() if not np.isnan(row[-1])}[43] == 1
    new = root / "new.csv"
    new.write_text("pain,sex,age,chol\n3,M,60,0\n")
    np.testing.assert_array_equal(read_features(new, dataset.columns), [[60, 0, 1, 0, 0, 1, np.nan]])


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("[1]", "must hold keys and values"),
        ("labels: x", "unknown key 'labels'"),
        ("categories: {sec: [F]}", "names a column 'sec', which no table has. Did you mean 'sex'"),
        ("categories: [sex]", "categories must hold a line per column"),
        ("positive: {a: 1}", "positive must be a value or a list"),
    ],
)
def test_a_wrong_column_file_says_what_is_wrong(root: Path, text: str, says: str) -> None:
    write(root, "a.csv", "age,sex,target", *["40,F,0", "50,M,1"] * 6)
    (root / "columns.yaml").write_text(text)
    assert says in problem_of(root).message


def test_text_columns_do_not_leave_a_real_site_unless_listed(root: Path) -> None:
    write(root, "north.csv", "age,sex,target", *["40,F,0", "50,M,1"] * 10)
    source = DataSource(data_dir=root)
    with pytest.raises(SiteError, match="column 'sex' holds text"):
        require_nameable_classes(source, Policy())
    (root / "columns.yaml").write_text("categories: {sex: [F, M]}")
    require_nameable_classes(source, Policy())
