"""Tables against numbers worked out by hand: means, deviations, averages, paired intervals, and every format."""

from __future__ import annotations

import csv
import io
import json

import pytest

from fedshift.bench.publish import caption
from fedshift.bench.records import Record
from fedshift.bench.tables import as_json, comma_separated, latex, make_table, markdown, paired_difference, text


def record(row: str, column: str, seed: int, score: float) -> Record:
    return Record(
        job=f"{row}-{column}-{seed}",
        row=row,
        column=column,
        method=row,
        setting="generalize",
        dataset="digits",
        sources=[],
        target=column,
        home=None,
        seed=seed,
        scores={column: {"last": score, "source_val": score, "oracle": score}},
        rounds=[1],
        val={},
        test={column: [score]},
        notes={},
        settings={},
        bytes={},
        seconds=1.0,
        counters={},
        model_sha256="",
    )


SCORES = {
    ("fedavg", "a"): [0.50, 0.60],
    ("fedavg", "b"): [0.40, 0.40],
    ("copa", "a"): [0.70, 0.70],
    ("copa", "b"): [0.30],
    ("oracle", "a"): [0.90, 0.90],
    ("oracle", "b"): [0.90, 0.90],
}
RECORDS = [
    record(row, column, seed, score) for (row, column), scores in SCORES.items() for seed, score in enumerate(scores)
]


def last(record: Record) -> dict[str, float]:
    return {target: rules["last"] for target, rules in record.scores.items()}


TABLE = make_table(RECORDS, last, "last", "T", baseline="fedavg", theirs={"copa": {"a": 83.3}}, not_ranked=["oracle"])


def test_cells_are_means_and_deviations_over_seeds() -> None:
    cell = TABLE.cells["fedavg"]["a"]
    assert cell.mean == pytest.approx(0.55) and cell.spread == pytest.approx(0.0707, abs=1e-4)
    assert cell.text == "55.0 ± 7.1"
    assert TABLE.cells["copa"]["b"].text == "30.0", "one seed has no deviation"


def test_the_average_takes_complete_seeds_only() -> None:
    assert dict(TABLE.cells["fedavg"]["average"].by_seed) == pytest.approx({0: 0.45, 1: 0.50})
    assert dict(TABLE.cells["copa"]["average"].by_seed) == pytest.approx({0: 0.50}), "seed 1 lacks column b"


def test_rows_with_fewer_seeds_say_so_in_every_format() -> None:
    three = [record("a few", "x", 0, 0.5), *(record("all", "x", seed, 0.6) for seed in range(3))]
    table = make_table(three, last, "last", theirs={"cited": {"x": 50.0}})
    assert [table.label(row) for row in table.cells] == ["a few (1 of 3 seeds)", "all", "cited"]
    for render in (markdown, latex, text):
        assert "a few (1 of 3 seeds)" in render(table) and "all (" not in render(table)
    assert [row["seeds"] for row in json.loads(as_json(table))[0]["rows"]] == [[0], [0, 1, 2], []]
    assert [line["seed"] for line in csv.DictReader(io.StringIO(comma_separated(table)))] == ["0", "0", "1", "2", ""]
    assert "fewer seeds say so" in caption(table)
    complete = make_table(three[1:], last, "last")
    assert "fewer" not in caption(complete)
    assert TABLE.label("copa") == "copa (1 to 2 of 2 seeds)", "cells of one row may differ"


def test_the_best_of_those_that_compete_is_marked() -> None:
    best = {(row, column) for row, own in TABLE.cells.items() for column, cell in own.items() if cell.is_best}
    assert best == {("copa", "a"), ("fedavg", "b"), ("copa", "average")}


def test_paired_differences_have_a_student_interval() -> None:
    # +0.20, +0.10 on a, -0.10 on b: mean 0.0667, sd 0.1528, t(2, 97.5 %) = 4.3027, half width 0.3795.
    difference = TABLE.differences["copa"]
    assert difference.pairs == 3 and difference.mean == pytest.approx(0.2 / 3)
    assert difference.half_width == pytest.approx(4.30265 * 0.152753 / 3**0.5, rel=1e-4)
    assert paired_difference([0.1]).half_width is None


def test_markdown_marks_the_best_and_the_papers_own_numbers() -> None:
    lines = markdown(TABLE).splitlines()
    assert lines[0] == "|  | a | b | average | minus fedavg |"
    assert lines[3] == "| copa (1 to 2 of 2 seeds) | **70.0 ± 0.0** [83.3] | 30.0 | **50.0** | +6.7 ± 37.9 |"


def test_latex_escapes_and_csv_and_json_hold_every_seed() -> None:
    assert r"\textbf{70.0 $\pm$ 0.0} [83.3]" in latex(TABLE) and latex(TABLE).count(r"\\") == 4
    rows = list(csv.DictReader(io.StringIO(comma_separated(TABLE))))
    assert [row["score"] for row in rows if row["row"] == "fedavg" and row["column"] == "a"] == ["0.5", "0.6"]
    (told,) = json.loads(as_json(TABLE))
    assert told["rows"][1]["cells"]["a"]["theirs"] == 83.3 and told["seeds"] == [0, 1]
