"""Freed memory is kept where the allocator allows it, and nothing breaks where it does not."""

from __future__ import annotations

import ctypes
import sys

import pytest

from fedshift import memory


def test_glibc_takes_every_setting() -> None:
    if not sys.platform.startswith("linux") or not hasattr(ctypes.CDLL(None), "gnu_get_libc_version"):
        pytest.skip("only glibc has these settings")
    assert memory.keep_freed_memory() is True


def test_another_libc_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    class Libc:
        def __init__(self, name: None) -> None: ...

    monkeypatch.setattr(ctypes, "CDLL", Libc)
    assert memory.keep_freed_memory.__wrapped__() is False
