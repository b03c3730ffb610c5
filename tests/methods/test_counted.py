"""Whatever a method counts has words for the report."""

from __future__ import annotations

import ast
from pathlib import Path

from fedshift import methods
from fedshift.methods.counted import COUNTED, explain
from fedshift.report.words import explain_counter


def counted_names() -> set[str]:
    """The literal names in calls of `fed.count` in all methods."""
    names = set()
    for path in Path(methods.__file__).parent.glob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "count":
                names |= {a.value for a in node.args[:1] if isinstance(a, ast.Constant) and isinstance(a.value, str)}
    return names


def test_every_name_has_words_and_all_words_are_used() -> None:
    assert counted_names() == set(COUNTED)


def test_names_with_a_site_in_them() -> None:
    assert explain("dropped.components.paris") == (
        "Components of the mixture of paris had too few samples behind them and never left the client."
    )
    assert "north.wing" in str(explain("skipped.north.wing.data-empty"))
    assert explain("something-else") is None


def test_the_report_uses_them() -> None:
    assert explain_counter("kd3a.one-teacher") == COUNTED["kd3a.one-teacher"]
    assert "check-data" in explain_counter("skipped.files")
