"""Files that tools outside of Python read: they parse, and what they call exists."""

from __future__ import annotations

import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import yaml

from fedshift import __version__
from fedshift.methods import METHODS, find_method

ROOT = Path(__file__).parents[2]
YAML_FILES = sorted(
    [*ROOT.glob(".github/**/*.yml"), ROOT / ".pre-commit-config.yaml", ROOT / "CITATION.cff"],
    key=lambda path: path.name,
)
WORKFLOWS = sorted(ROOT.glob(".github/workflows/*.yml"))


def load(path: Path) -> Any:
    return yaml.safe_load(path.read_text())


def make_targets() -> set[str]:
    return set(re.findall(r"^([a-z][a-z-]*):", (ROOT / "Makefile").read_text(), re.MULTILINE))


def commands(workflow: Path) -> list[str]:
    """Every line that a workflow runs."""
    jobs = load(workflow)["jobs"].values()
    blocks = [step["run"] for job in jobs for step in job["steps"] if "run" in step]
    return [line.strip() for block in blocks for line in block.splitlines()]


@pytest.mark.parametrize("path", YAML_FILES, ids=lambda path: path.name)
def test_it_is_yaml_with_keys(path: Path) -> None:
    assert isinstance(load(path), dict)


def test_workflows_call_make_targets_that_exist() -> None:
    called = [line.split()[1] for path in WORKFLOWS for line in commands(path) if line.startswith("make ")]
    assert set(called) >= {"lint", "test", "docs"}
    assert set(called) <= make_targets()


def test_ci_runs_every_supported_python() -> None:
    least = re.search(r'requires-python = ">=3\.(\d+)"', (ROOT / "pyproject.toml").read_text())
    assert least
    for job in load(ROOT / ".github/workflows/ci.yml")["jobs"].values():
        assert job["strategy"]["matrix"]["python"] == [f"3.{minor}" for minor in range(int(least[1]), 14)]


def test_workflows_need_no_secret() -> None:
    assert [path.name for path in WORKFLOWS if "secrets." in path.read_text()] == []


def test_hooks_are_local_and_their_tools_installed() -> None:
    repos = load(ROOT / ".pre-commit-config.yaml")["repos"]
    assert [repo["repo"] for repo in repos] == ["local"]
    hooks = repos[0]["hooks"]
    assert [hook["id"] for hook in hooks] == ["ruff-check", "ruff-format", "mypy", "architecture"]
    for hook in hooks:
        tool, *words = hook["entry"].split()
        assert hook["language"] == "system" and tool.startswith(".venv/bin/")
        assert shutil.which(Path(tool).name) or (ROOT / tool).exists(), tool
        for word in words:
            assert not word.startswith("tests/") or (ROOT / word).exists(), word


@pytest.mark.parametrize("path", sorted(ROOT.glob(".github/ISSUE_TEMPLATE/*.yml")), ids=lambda path: path.stem)
def test_an_issue_form_has_what_is_required_of_one(path: Path) -> None:
    form = load(path)
    assert form["name"] and form["description"]
    names = [field["id"] for field in form["body"]]
    assert len(names) == len(set(names))
    for field in form["body"]:
        assert field["type"] in ("input", "textarea", "dropdown", "checkboxes") and field["attributes"]["label"]


def test_the_citation_names_the_papers_as_the_code_does() -> None:
    citation = load(ROOT / "CITATION.cff")
    assert citation["version"] == __version__ and citation["authors"] == [{"name": "The fedshift contributors"}]
    papers = {paper["notes"]: paper for paper in citation["references"]}
    assert set(papers) == {"COPA", "CSAC", "KD3A", "DualAdapt"}
    for name, paper in papers.items():
        module = find_method(METHODS[name.lower()].about.name).__module__.replace(".", "/")
        told = " ".join((ROOT / "src" / f"{module}.py").read_text().split('"""')[1].split())
        assert paper["title"] in told and str(paper["year"]) in told
        people = [f"{person['given-names']} {person['family-names']}" for person in paper["authors"]]
        assert ", ".join(people) in told
