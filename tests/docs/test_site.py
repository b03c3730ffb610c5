"""The documentation builds without a warning, its reference is complete, and every link and path leads somewhere."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from dataclasses import fields
from functools import cache
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path

import pytest

import fedshift
from fedshift import extend, functional
from fedshift.federation.policy import Policy
from fedshift.runs.config import RunConfig

ROOT = Path(__file__).parents[2]
PAGES = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md"), *ROOT.glob("examples/*.md")])
FENCE = re.compile(r"^```.*?^```", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"\[[^\]]*\]\(([^)\s]+)\)")
PATH = re.compile(r"`((?:src|tests|docs|benchmarks|examples|results)/[\w./-]+)`")


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("site")
    words = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(out)]
    built = subprocess.run(words, cwd=ROOT, capture_output=True, text=True)
    assert built.returncode == 0, built.stderr
    return out


def headings(page: Path) -> set[str]:
    return set(re.findall(r'<h[1-6] id="([^"]+)"', page.read_text()))


@pytest.mark.slow
def test_the_reference_has_all_public_names(site: Path) -> None:
    shown = headings(site / "reference/fedshift/index.html")
    assert {f"fedshift.{name}" for name in fedshift.__all__ if not name.startswith("_")} <= shown
    assert {f"fedshift.extend.{name}" for name in extend.__all__} <= headings(site / "reference/extend/index.html")


def test_the_reference_has_every_module_of_functional(site: Path) -> None:
    folder = Path(functional.__path__[0])
    modules = {f"fedshift.functional.{path.stem}" for path in folder.glob("[a-z]*.py")}
    assert modules <= headings(site / "reference/functional/index.html")


def anchor(heading: str) -> str:
    plain = re.sub(r"[^\w\s-]", "", heading.lower()).strip()
    return re.sub(r"[\s-]+", "-", plain)


@cache
def anchors(page: Path) -> set[str]:
    return {anchor(text) for text in re.findall(r"^#+ (.+)$", FENCE.sub("", page.read_text()), re.MULTILINE)}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_links_lead_somewhere(page: Path) -> None:
    text = FENCE.sub("", page.read_text())
    broken = []
    for link in LINK.findall(text):
        if re.match(r"[a-z]+:", link):
            continue
        path, _, part = link.partition("#")
        there = (page.parent / path).resolve() if path else page
        if not there.exists() or (part and there.suffix == ".md" and part not in anchors(there)):
            broken.append(link)
    assert broken == []


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_named_files_exist(page: Path) -> None:
    assert [path for path in PATH.findall(page.read_text()) if not (ROOT / path).exists()] == []


def test_named_modules_exist() -> None:
    """`fedshift.package.module` and `fedshift.package.module.name` in any page can be imported."""
    groups = [f"fedshift.{group}" for group in ("methods", "nets", "datasets", "rules", "engines")]
    missing = []
    for page in PAGES:
        for name in re.findall(r"`(?:python -m )?(fedshift(?:\.\w+)+)[(`\s]", page.read_text()):
            if name in groups or name.endswith(".yaml"):
                continue
            here = fedshift
            for part in name.split(".")[1:]:
                try:
                    here = getattr(here, part)
                except AttributeError:
                    try:
                        here = __import__(f"{here.__name__}.{part}", fromlist=["_"])
                    except ImportError:
                        missing.append(f"{page.relative_to(ROOT)}: {name}")
                        break
    assert missing == []


def test_every_configuration_key_is_explained() -> None:
    page = (ROOT / "docs/configuration.md").read_text()
    keys = [name for name in RunConfig.model_fields if name not in ("hyper", "given")]
    assert [key for key in keys if f"`{key}`" not in page] == []
    assert [field.name for field in fields(Policy) if f"`policy.{field.name}`" not in page] == []


@pytest.mark.parametrize(
    "script", sorted([*ROOT.glob("benchmarks/*.py"), *ROOT.glob("results/*.py")]), ids=lambda path: path.name
)
def test_scripts_import_what_exists(script: Path) -> None:
    """Scripts that take minutes are not run by tests. A name that moved is found all the same."""
    wanted = [
        (node.module, alias.name)
        for node in ast.walk(ast.parse(script.read_text()))
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("fedshift")
        for alias in node.names
    ]
    for module, name in wanted:
        assert hasattr(import_module(module), name) or find_spec(f"{module}.{name}"), f"{module}.{name}"
