from __future__ import annotations

import os
import time
from pathlib import Path

import pytest
from datafiles import picture, save

from fedshift.data import fingerprints
from fedshift.data.fingerprints import content_digest, image_facts


@pytest.fixture
def looked_at(monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """The files whose bytes were read."""
    seen: list[Path] = []
    read = fingerprints.read_limited

    def spy(path: Path) -> bytes:
        seen.append(path)
        return read(path)

    monkeypatch.setattr(fingerprints, "read_limited", spy)
    return seen


def pass_time(monkeypatch: pytest.MonkeyPatch, seconds: float = 10) -> None:
    now = time.time_ns
    monkeypatch.setattr(fingerprints.time, "time_ns", lambda: now() + int(seconds * 1e9))


def test_unchanged_files_are_read_once(tmp_path: Path, looked_at: list[Path], monkeypatch: pytest.MonkeyPatch) -> None:
    paths = [save(tmp_path / "a" / f"{i}.png", picture(i, 4, 5)) for i in range(3)]
    pass_time(monkeypatch)
    first = image_facts(tmp_path / "a", paths)
    assert [fact.size for fact in first] == [(4, 5)] * 3
    assert len({fact.digest for fact in first}) == 3
    assert image_facts(tmp_path / "a", paths) == first
    assert sorted(looked_at) == paths


def test_file_changed_a_moment_ago_is_not_trusted(tmp_path: Path, looked_at: list[Path]) -> None:
    path = save(tmp_path / "a.png", picture(1))
    image_facts(tmp_path, [path])
    image_facts(tmp_path, [path])
    assert looked_at == [path, path]


def test_same_size_and_restored_time_do_not_hide_new_content(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "a.bin"
    path.write_bytes(b"one")
    pass_time(monkeypatch)
    before = content_digest(path)
    status = path.stat()
    path.write_bytes(b"two")
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))
    assert path.stat().st_mtime_ns == status.st_mtime_ns
    assert content_digest(path) != before


def test_unreadable_files_have_a_reason_and_are_no_exception(tmp_path: Path) -> None:
    broken = tmp_path / "broken.png"
    broken.write_bytes(b"not an image")
    facts = image_facts(tmp_path, [broken, tmp_path / "gone.png"])
    assert facts[0].problem == "it is not a JPEG or PNG image"
    assert facts[0].digest != ""
    assert facts[1].problem == "No such file or directory"
    assert facts[1].size is None


def test_scrambled_memory_is_ignored(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = save(tmp_path / "a" / "a.png", picture(1))
    pass_time(monkeypatch)
    first = image_facts(tmp_path / "a", [path])
    (memory,) = (tmp_path / "cache" / "facts").iterdir()
    memory.write_bytes(b"{")
    assert image_facts(tmp_path / "a", [path]) == first
