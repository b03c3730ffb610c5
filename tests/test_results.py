"""The tables of the documentation are what the committed records say."""

from __future__ import annotations

import runpy
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PAGES = [
    page
    for page in sorted((ROOT / "docs").rglob("*.md"))
    if "<!-- table " in page.read_text() or "<!-- suite " in page.read_text()
]


@pytest.mark.parametrize("page", PAGES, ids=[page.name for page in PAGES])
def test_tables_are_those_of_the_records(page: Path) -> None:
    tools = runpy.run_path(str(ROOT / "results" / "tables.py"))
    text = page.read_text()
    assert tools["written"](text) == text, f"python results/tables.py write {page.relative_to(ROOT)}"


def test_there_are_tables_to_check() -> None:
    assert PAGES
