"""Every example runs as it is and prints its table."""

from __future__ import annotations

import re
import runpy
import tempfile
from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient

EXAMPLES = Path(__file__).parents[2] / "examples"
SCRIPTS = sorted(EXAMPLES.glob("[a-z]*.py"))
NOTEBOOKS = sorted(EXAMPLES.glob("*.ipynb"))


@pytest.fixture(autouse=True)
def _temporary_folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What an example writes is removed with the test's own folder."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))


def percentages(text: str) -> list[float]:
    return [float(number) for number in re.findall(r"([\d.]+) ?%", text)]


@pytest.mark.slow
@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.stem)
def test_a_script_prints_a_table_with_a_good_row(script: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The last method, site or round of each table has learned something."""
    runpy.run_path(str(script), run_name="__main__")
    scores = percentages(capsys.readouterr().out)
    assert scores and max(scores) > 70


@pytest.mark.slow
@pytest.mark.parametrize("notebook", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_runs_from_top_to_bottom(notebook: Path, tmp_path: Path) -> None:
    cells = nbformat.read(notebook, as_version=4)
    NotebookClient(cells, timeout=240, kernel_name="python3", resources={"metadata": {"path": str(tmp_path)}}).execute()
    shown = [
        part.get("text", "") + "".join(part.get("data", {}).get("text/plain", ""))
        for cell in cells.cells
        for part in cell.get("outputs", [])
    ]
    assert max(percentages("\n".join(shown))) > 50


@pytest.mark.parametrize("notebook", NOTEBOOKS, ids=lambda path: path.stem)
def test_notebooks_are_stored_without_outputs(notebook: Path) -> None:
    cells = nbformat.read(notebook, as_version=4)
    nbformat.validate(cells)
    code = [cell for cell in cells.cells if cell.cell_type == "code"]
    assert code and not any(cell.outputs or cell.execution_count for cell in code)


def test_every_example_is_listed() -> None:
    listed = set(re.findall(r"\]\(([\w.]+)\)", (EXAMPLES / "README.md").read_text()))
    assert listed == {path.name for path in [*SCRIPTS, *NOTEBOOKS]}


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.stem)
def test_a_script_is_short_and_says_how_to_start_it(script: Path) -> None:
    text = script.read_text()
    assert len(text.splitlines()) <= 100
    assert f"python examples/{script.name}" in text.split('"""')[1]
