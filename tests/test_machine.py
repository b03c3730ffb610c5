"""Freed memory is kept where the allocator allows it; slow arithmetic is told."""

from __future__ import annotations

import ctypes
import sys
from pathlib import Path

import pytest

from fedshift import machine
from fedshift.runs.config import make_config
from fedshift.runs.execute import run
from fedshift.runs.progress import Silent


def test_glibc_takes_every_setting() -> None:
    if not sys.platform.startswith("linux") or not hasattr(ctypes.CDLL(None), "gnu_get_libc_version"):
        pytest.skip("only glibc has these settings")
    assert machine.keep_freed_memory() is True


def test_another_libc_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    class Libc:
        def __init__(self, name: None) -> None: ...

    monkeypatch.setattr(ctypes, "CDLL", Libc)
    assert machine.keep_freed_memory.__wrapped__() is False


@pytest.mark.parametrize(("capability", "slow"), [("AVX2", True), ("AVX512", False), ("SVE256", False)])
def test_a_run_in_bfloat16_is_warned_of_a_processor_that_emulates_it(
    capability: str, slow: bool, tiny_data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("torch.backends.cpu.get_cpu_capability", lambda: capability)
    said: list[str] = []

    class Listening(Silent):
        def message(self, text: str) -> None:
            said.append(text)

    keys = {"method": "fedavg", "data_dir": tiny_data, "target": "dim", "rounds": 1, "workers": 0, "batch_size": 8}
    run(make_config({**keys, "precision": "bfloat16"}), tmp_path / "run", progress=Listening())
    assert any("bfloat16" in text and "float32" in text for text in said) == slow
