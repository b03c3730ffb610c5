"""Weights of sites as stacked columns: where each piece is, and which metrics are weights at all."""

from __future__ import annotations

from pathlib import Path

from runfiles import write_run

from fedshift.report.run_page import run_page
from fedshift.report.samples import DataView
from fedshift.report.stacked_bars import HEIGHT, are_shares, over_layers, over_rounds
from fedshift.runs.record import read_record

WEIGHTS = {"a": [(1, 0.25), (2, 0.5)], "b": [(1, 0.75), (2, 0.5)]}


def test_pieces_stand_on_each_other_and_fill_the_column() -> None:
    chart = over_rounds("w", WEIGHTS, {"a": "c1", "b": "c2"})
    first, second = chart.columns
    assert [(p.style, p.top, p.height) for p in first.parts] == [
        ("c1", 0, HEIGHT / 4),
        ("c2", HEIGHT / 4, HEIGHT * 3 / 4),
    ]
    assert [p.tip for p in second.parts] == ["a, round 2: 50.0 %", "b, round 2: 50.0 %"]
    assert first.left + first.width < second.left and second.left + second.width <= chart.width
    assert chart.ticks == ((250.0, "1"), (750.0, "2"))
    assert chart.last == (("a", "c1", "50.0"), ("b", "c2", "50.0"))


def test_of_very_many_rounds_some_are_drawn_the_last_among_them() -> None:
    series = {s: [(x, 0.5) for x in range(1, 1001)] for s in "ab"}
    chart = over_rounds("w", series, {})
    assert 40 <= len(chart.columns) <= 80 and chart.columns[-1].parts[0].tip == "a, round 1000: 50.0 %"
    assert len(chart.ticks) <= 6 and chart.ticks[-1][1] == "1000"


def test_one_column_per_layer() -> None:
    chart = over_layers(
        "round 1", {"conv": {"a": [(1, 0.2)], "b": [(1, 0.8)]}, "head": {"a": [(1, 1.0)], "b": [(1, 0.0)]}}, {}
    )
    assert [name for _, name in chart.ticks] == ["conv", "head"]
    assert [[p.height for p in column.parts] for column in chart.columns] == [[24.0, 96.0], [120.0, 0.0]]


def test_what_is_a_share_and_what_is_not() -> None:
    assert are_shares(WEIGHTS)
    assert not are_shares({"a": [(1, 1.0)]}), "one site alone has nothing to share"
    assert not are_shares({"a": [(1, 0.5)], "b": [(1, 0.9)]})
    assert not are_shares({"a": [(1, -0.5)], "b": [(1, 1.5)]})
    assert not are_shares({"a": [(1, None)], "b": [(1, 1.0)]})
    assert not are_shares({str(site): [(1, 0.1)] for site in range(10)}), "too many to tell apart by colour"


def test_weights_are_grouped_by_layer_and_phase(tmp_path: Path) -> None:
    notes = {"weight": 0.5, "fusion.conv": 0.5, "fusion.head": 0.5, "agreement": 0.5, "gap": 0.3}
    run = write_run(tmp_path / "a", "csac", notes=notes)
    detail = run_page(1, read_record(run), DataView())
    assert [(g.title, [c.title for c in g.charts]) for g in detail.weights] == [
        ("Weight of each site", [""]),
        ("Weight of each site by layer", ["conv", "head"]),
    ]
    assert [chart.title for chart in detail.weight_charts] == ["Agreement"]
    assert [chart.title for chart in detail.charts] == ["Score by domain", "Training loss", "Gap to the source"]


def test_a_phase_of_one_round_has_one_column_per_layer(tmp_path: Path) -> None:
    run = write_run(
        tmp_path / "a", "csac", curve=(0.5,), notes={"acquisition_fusion.conv": 0.5, "acquisition_fusion.head": 0.5}
    )
    [group] = run_page(1, read_record(run), DataView()).weights
    assert group.title == "Weight of each site by layer, acquisition"
    [chart] = group.charts
    assert chart.title == "round 1" and [name for _, name in chart.ticks] == ["conv", "head"]
