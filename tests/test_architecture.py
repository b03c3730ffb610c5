"""The tree is the architecture: imports point one way, and what is unsafe is nowhere."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import fedshift
from fedshift.errors import CATALOGUE

PACKAGE = Path(fedshift.__file__).parent
ROOT = PACKAGE.parent.parent

LAYERS = {
    "errors": 0,
    "_version": 0,
    "beats": 0,
    "files": 0,
    "localserver": 0,
    "machine": 0,
    "registry": 0,
    "rng": 0,
    "yamlfiles": 0,
    "functional": 1,
    "nn": 2,
    "data": 2,
    "federation": 3,
    "methods": 4,
    "runs": 5,
    "extend": 6,
    "handover": 6,
    "audit": 6,
    "deploy": 6,
    "bench": 7,
    "report": 8,
    "cli": 9,
    "__main__": 10,
}


def modules() -> Iterator[tuple[str, ast.Module]]:
    for path in sorted(PACKAGE.rglob("*.py")):
        yield path.relative_to(PACKAGE).as_posix(), ast.parse(path.read_text())


def imported(tree: ast.Module) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def test_imports_point_one_way() -> None:
    wrong = []
    for path, tree in modules():
        here = path.split("/")[0].removesuffix(".py")
        if here == "__init__":
            continue
        for name in imported(tree):
            parts = name.split(".")
            if parts[0] == "fedshift" and len(parts) > 1 and parts[1] in LAYERS:
                above = LAYERS[parts[1]] > LAYERS[here]
                beside = LAYERS[parts[1]] == LAYERS[here] and parts[1] != here and LAYERS[here] > 0
                if above or beside:
                    wrong.append(f"{path} imports {name}")
    assert wrong == []


def test_every_folder_has_a_place_in_the_order() -> None:
    assert {path.split("/")[0].removesuffix(".py") for path, _ in modules()} - {"__init__"} <= set(LAYERS)


def test_functional_needs_torch_and_numpy_only() -> None:
    allowed = {"torch", "numpy", "fedshift", "math", "collections", "dataclasses", "typing", "__future__", "itertools"}
    for path, tree in modules():
        if path.startswith("functional/"):
            assert {name.split(".")[0] for name in imported(tree)} <= allowed, path


def test_methods_never_import_an_engine() -> None:
    for path, tree in modules():
        if path.startswith("methods/"):
            assert not [name for name in imported(tree) if name.startswith("fedshift.federation.engines")], path


def test_nothing_unsafe_is_loaded_or_evaluated() -> None:
    found = []
    for path, tree in modules():
        for node in ast.walk(tree):
            if isinstance(node, ast.Import | ast.ImportFrom):
                names = [alias.name for alias in node.names] + [getattr(node, "module", "") or ""]
                found += [f"{path}: {name}" for name in names if name.split(".")[0] in ("pickle", "dill", "joblib")]
            if isinstance(node, ast.Call):
                called = ast.unparse(node.func)
                if called in ("eval", "exec", "torch.load", "yaml.load", "yaml.safe_load"):
                    found.append(f"{path}: {called}")
                if any(word.arg == "allow_pickle" and ast.unparse(word.value) != "False" for word in node.keywords):
                    found.append(f"{path}: allow_pickle")
    # The one place that turns a checkpoint with a known SHA-256 into safetensors.
    assert found == ["nn/weights.py: torch.load"]


def test_every_error_code_is_used_and_explained() -> None:
    text = "\n".join(path.read_text() for path in PACKAGE.rglob("*.py"))
    unused = [code for code in CATALOGUE if text.count(f'"{code}"') < 2]
    assert unused == []
    page = (ROOT / "docs" / "errors.md").read_text()
    assert [code for code in CATALOGUE if f"## {code}\n" not in page] == []
