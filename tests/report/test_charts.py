"""Geometry that a person can check: scales, ticks, label places, lines, shaded cells."""

from __future__ import annotations

import math

import pytest

from fedshift.report.charts import (
    BYTES,
    HEIGHT,
    PERCENT,
    PLAIN,
    WIDTH,
    Line,
    Scale,
    colour,
    line_chart,
    middle,
    padded,
    site_lines,
    spread,
    step_of,
    thin,
    tick_text,
    ticks,
    unbroken_stretches,
)
from fedshift.report.confusion import class_scores, confusion, shade, shares
from fedshift.report.run_page import per_round
from fedshift.report.text import byte_size, compact, duration, explain_counter, kind_meanings, percent, sentence_list


def test_a_scale_maps_its_ends_and_its_middle() -> None:
    down = Scale(10, 30, 200, 0)
    assert [down(10), down(15), down(30)] == [200, 150, 0]
    assert Scale(4, 4, 0, 1000)(4) == 500


@pytest.mark.parametrize(
    ("span", "count", "step"),
    [(1.0, 5, 0.2), (0.81, 5, 0.2), (37, 5, 10), (19, 5, 5), (3, 5, 1), (0.07, 5, 0.02), (0, 5, 1)],
)
def test_steps_are_one_two_or_five_times_a_power_of_ten(span: float, count: int, step: float) -> None:
    assert step_of(span, count) == pytest.approx(step)


def test_ticks_lie_inside_and_are_round() -> None:
    assert ticks(0.12, 0.93) == pytest.approx([0.2, 0.4, 0.6, 0.8])
    assert ticks(0, 1) == pytest.approx([0, 0.2, 0.4, 0.6, 0.8, 1.0])
    assert ticks(1, 20, 5, whole=True) == [5, 10, 15, 20]
    assert ticks(1, 3, 5, whole=True) == [1, 2, 3]
    assert ticks(7, 7, 5, whole=True) == [7]


def test_tick_texts_have_the_decimals_of_their_step() -> None:
    assert [tick_text(0.25, 0.05), tick_text(20, 10), tick_text(0, 0.5), tick_text(-1.5, 0.5)] == [
        "0.25",
        "20",
        "0",
        "-1.5",
    ]


def test_the_padded_range_ends_on_round_numbers_and_keeps_its_limits() -> None:
    assert padded([0.13, 0.91], 0, 1) == pytest.approx((0.0, 1.0))
    assert padded([0.62, 0.79], 0, 1) == pytest.approx((0.6, 0.8))
    assert padded([1.0, 1.0], 0, 1) == pytest.approx((0.9, 1.0))
    assert padded([]) == (0.0, 1.0)


def test_labels_are_moved_apart_in_their_order_and_stay_inside() -> None:
    assert spread([50, 52, 90], 10, 0, 100) == [50, 60, 90]
    assert spread([98, 99, 20], 10, 0, 100) == [90, 100, 20]
    assert spread([], 10, 0, 100) == []


def test_thinning_keeps_the_ends_and_every_spike() -> None:
    points = [(float(x), 0.5) for x in range(10_000)]
    points[4321] = (4321.0, 9.0)
    kept = thin(points, 400)
    assert len(kept) < 410 and {points[0], points[-1], points[4321]} <= set(kept)
    assert thin(points[:50], 400) == points[:50]


def test_a_missing_value_is_a_gap() -> None:
    assert unbroken_stretches([(1, 0.1), (2, None), (3, 0.3), (4, math.nan), (5, math.inf), (6, 0.6)]) == [
        [(1, 0.1)],
        [(3, 0.3)],
        [(6, 0.6)],
    ]


def test_a_line_is_mapped_to_its_places() -> None:
    chart = line_chart("t", [Line("a", [(1, 0.0), (2, 0.5), (5, 1.0)], "c1", chosen=2)], PERCENT)
    assert chart is not None
    [curve] = chart.curves
    assert curve.stretches == (f"0,{HEIGHT} 250,{HEIGHT / 2:g} {WIDTH},0",)
    assert curve.dots == f"M0 {HEIGHT}h0M250 {HEIGHT / 2:g}h0M{WIDTH} 0h0"
    assert curve.chosen is not None and (curve.chosen.x, curve.chosen.y) == (250, HEIGHT / 2)
    assert "round 2" in curve.chosen.text and "50.0" in curve.chosen.text
    assert [text for _, text in chart.y_ticks] == ["0", "20", "40", "60", "80", "100"]
    assert [(left, text) for left, text in chart.x_ticks] == [(0, "1"), (250, "2"), (500, "3"), (750, "4"), (1000, "5")]
    assert [(end.label, end.value, end.top) for end in chart.ends] == [("a", "100.0", 0)]


def test_a_gap_splits_a_line_and_no_values_make_no_chart() -> None:
    chart = line_chart("t", [Line("a", [(1, 1.0), (2, None), (3, 2.0), (4, 3.0)], "c1")], PLAIN)
    assert chart is not None and len(chart.curves[0].stretches) == 2
    assert line_chart("t", [Line("a", [(1, None), (2, math.nan)], "c1"), Line("b", [], "c2")], PLAIN) is None


def test_bytes_start_at_zero() -> None:
    chart = line_chart("t", [Line("up", [(1, 1_900_000), (2, 1_900_000)], "c1")], BYTES)
    assert chart is not None and chart.y_ticks[0] == (HEIGHT, "0 B")


def test_long_lines_keep_few_places_to_hover() -> None:
    chart = line_chart("t", [Line("a", [(x, x / 999) for x in range(1000)], "c1")], PLAIN)
    assert chart is not None
    assert len(chart.curves[0].tips) <= 60 and chart.curves[0].dots == ""
    assert "round 999" in chart.curves[0].tips[0].text


def test_more_sites_than_colours_become_faint_with_their_median() -> None:
    series = {f"s{k}": [(1, float(k)), (2, None if k == 0 else 2.0 * k)] for k in range(9)}
    lines = site_lines(series, {})
    assert [line.style for line in lines] == ["c0 faint"] * 9 + ["c8"]
    assert lines[-1].points == [(1, 4.0), (2, 9.0)]
    chart = line_chart("t", lines, PLAIN)
    assert chart is not None and [end.label for end in chart.ends] == ["median of 9"]
    few = site_lines({"a": [(1, 1.0)], "": [(1, 2.0)]}, {"a": "c3"})
    assert [(line.label, line.style) for line in few] == [("a", "c3"), ("", "c0")]


def test_the_middle_uses_the_lines_that_have_a_value() -> None:
    assert middle([[(1, 1.0), (2, 4.0)], [(1, 3.0)]], lambda values: sum(values) / len(values)) == [(1, 2.0), (2, 4.0)]


def test_colours_repeat_dotted() -> None:
    assert [colour(0), colour(7), colour(8)] == ["c1", "c8", "c1 dotted"]


def test_running_totals_become_rounds() -> None:
    assert per_round([(1, 10.0), (2, 25.0), (3, None), (4, 45.0)]) == [(1, 10.0), (2, 15.0), (4, 20.0)]


MATRIX = [[8, 2, 0], [1, 3, 0], [0, 0, 0]]


def test_cells_are_shaded_by_the_share_of_their_row() -> None:
    assert shares(MATRIX) == [[0.8, 0.2, 0.0], [0.25, 0.75, 0.0], [0.0, 0.0, 0.0]]
    found = confusion("photo", MATRIX, ["cat", "dog", "cow"], "classification")
    assert [[cell.shade for cell in row.cells] for row in found.rows] == shares(MATRIX)
    assert [cell.is_right for cell in found.rows[1].cells] == [False, True, False]
    assert [cell.text for cell in found.rows[0].cells] == ["8", "2", ""]
    assert found.mistakes == ("cat taken for dog: 2 (20.0 %)", "dog taken for cat: 1 (25.0 %)")
    assert shade(0.001) == 0.06 and shade(0) == 0


def test_class_scores_are_recall_or_intersection_over_union() -> None:
    assert class_scores(MATRIX, "classification") == [0.8, 0.75, None]
    assert class_scores(MATRIX, "segmentation") == [8 / 11, 3 / 6, None]


def test_many_classes_are_colour_alone() -> None:
    matrix = [[0] * 16 for _ in range(16)]
    for k in range(16):
        matrix[k][k] = 3
    matrix[2][5] = 1
    found = confusion("photo", matrix, [f"k{k}" for k in range(16)], "classification")
    assert found.rows == ()
    assert [(layer.is_right, layer.shade, layer.path.count("M")) for layer in found.layers] == [
        (False, 0.25, 1),
        (True, 0.75, 1),
        (True, 1.0, 15),
    ]
    assert found.layers[0].path == "M5 2h1v1h-1z"


def test_numbers_as_text() -> None:
    assert [percent(0.8123), percent(None), percent(math.nan)] == ["81.2", "–", "–"]
    assert [byte_size(n) for n in (0, 512, 1530, 99_900, 1_240_000, 2.5e9)] == [
        "0 B",
        "512 B",
        "1.5 kB",
        "100 kB",
        "1.2 MB",
        "2.5 GB",
    ]
    assert [duration(s) for s in (0.42, 41.2, 59.7, 192, 3840)] == [
        "0.4 s",
        "41 s",
        "1 min 00 s",
        "3 min 12 s",
        "1 h 04 min",
    ]
    assert [compact(n) for n in (9876, 12_345, 3_400_000)] == ["9876", "12k", "3.4M"]
    assert [sentence_list(n) for n in (["a"], ["a", "b"], ["a", "b", "c"])] == ["a", "a and b", "a, b and c"]
    assert sentence_list(list("abcdefgh")) == "a, b, c, d, e and 3 more"


def test_every_counter_of_the_federation_is_explained() -> None:
    assert "the shape of" in explain_counter("refused.shape")
    assert "deadline" in explain_counter("missing.late")
    assert "policy forbids" in explain_counter("failed.site-policy")
    assert "clipped" in explain_counter("clipped.updates")
    assert explain_counter("anything.else") == "Counted by the method itself."


def test_kinds_are_explained_by_the_declared_types() -> None:
    assert kind_meanings()["weights"].startswith("model parameters") and "facts" in kind_meanings()
