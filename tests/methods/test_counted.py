"""Every counter of a method has a sentence for the report."""

from __future__ import annotations

import ast
from pathlib import Path

from fedshift import methods
from fedshift.methods import METHODS, explain
from fedshift.report.text import explain_counter

SENTENCES = {name: text for entry in METHODS.values() for name, text in entry.about.counters.items()}


def counted_names() -> set[str]:
    """The literal names in calls of `fed.count` in all methods."""
    names = set()
    for path in Path(methods.__file__).parent.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "count":
                names |= {a.value for a in node.args[:1] if isinstance(a, ast.Constant) and isinstance(a.value, str)}
    return names


def test_every_counter_has_a_sentence_and_every_sentence_is_used() -> None:
    assert counted_names() == set(SENTENCES)


def test_methods_that_share_a_counter_say_the_same_of_it() -> None:
    for entry in METHODS.values():
        for name, text in entry.about.counters.items():
            assert text == SENTENCES[name] == explain(name)


def test_names_with_a_site_in_them() -> None:
    assert explain("dropped.components.paris") == (
        "Components of the mixture of paris had too few samples and did not leave the client."
    )
    assert "north.wing" in str(explain("skipped.north.wing.data-empty"))
    assert explain("something-else") is None


def test_the_report_uses_them() -> None:
    assert explain_counter("kd3a.one-teacher") == SENTENCES["kd3a.one-teacher"]
    assert "check-data" in explain_counter("skipped.files")
