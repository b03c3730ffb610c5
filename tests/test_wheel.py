"""The wheel has everything: `make wheel` also installs it into a new environment and runs the demo there."""

from __future__ import annotations

import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent


@pytest.mark.slow
def test_the_wheel_has_every_file_of_the_package_and_starts(tmp_path: Path) -> None:
    source = tmp_path / "source"
    for name in ("src", "pyproject.toml", "README.md", "LICENSE"):
        copy = shutil.copytree if (ROOT / name).is_dir() else shutil.copy
        source.mkdir(exist_ok=True)
        copy(ROOT / name, source / name)
    build = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation", "-w", str(tmp_path)]
    subprocess.run([*build, str(source)], check=True, capture_output=True)
    (wheel,) = tmp_path.glob("fedshift-*.whl")
    with zipfile.ZipFile(wheel) as found:
        packed = {name for name in found.namelist() if name.startswith("fedshift/")}
        found.extractall(tmp_path / "installed")
    package = ROOT / "src" / "fedshift"
    wanted = {
        path.relative_to(package.parent).as_posix()
        for path in package.rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }
    assert packed == wanted
    command = "import sys; sys.path.insert(0, sys.argv.pop(1)); from fedshift.cli import main; main()"
    words = [sys.executable, "-c", command, str(tmp_path / "installed"), "list", "methods"]
    shown = subprocess.run(words, check=True, capture_output=True, text=True, cwd=tmp_path).stdout
    assert "fedavg" in shown and "kd3a" in shown
