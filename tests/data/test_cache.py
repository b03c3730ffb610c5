from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from fedshift.data import cache
from fedshift.data.cache import cache_root, cached_arrays, cached_entry
from fedshift.errors import InputError


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("FEDSHIFT_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache" / "arrays"


def never() -> dict[str, np.ndarray]:
    raise AssertionError("made again")


def test_arrays_come_back_equal_mapped_and_read_only() -> None:
    made = {"pixels": np.arange(24, dtype=np.uint8).reshape(2, 3, 4), "none": np.empty((0, 5), dtype=np.float32)}
    first = cached_arrays("key", lambda: made)
    again = cached_arrays("key", never)
    for arrays in (first, again):
        assert isinstance(arrays["pixels"], np.memmap)
        assert not arrays["pixels"].flags.writeable
        np.testing.assert_array_equal(arrays["pixels"], made["pixels"])
        assert arrays["none"].shape == (0, 5)
        assert arrays["none"].dtype == np.float32


def test_another_key_is_another_entry() -> None:
    cached_arrays("a", lambda: {"x": np.array([1])})
    assert cached_arrays("b", lambda: {"x": np.array([2])})["x"][0] == 2
    assert cached_arrays("a", never)["x"][0] == 1


def test_rows_written_in_blocks_make_one_array() -> None:
    blocks = [np.full((n, 2, 2), n, dtype=np.uint8) for n in (3, 1, 200)]

    def write(writer) -> None:
        with writer.rows("x", (2, 2), np.uint8) as append:
            for block in blocks:
                append(block)
        writer.notes["skipped"] = ["a"]

    entry = cached_entry("blocks", write)
    np.testing.assert_array_equal(entry.arrays["x"], np.concatenate(blocks))
    assert entry.notes == {"skipped": ["a"]}


def test_failing_to_make_leaves_nothing_behind(own_cache: Path) -> None:
    def fail() -> dict[str, np.ndarray]:
        raise RuntimeError("no")

    with pytest.raises(RuntimeError):
        cached_arrays("key", fail)
    assert list(own_cache.iterdir()) == []
    assert cached_arrays("key", lambda: {"x": np.array([7])})["x"][0] == 7


@pytest.mark.parametrize("victim", ["x.npy", "index.json"])
@pytest.mark.parametrize("damage", ["shorten", "remove"])
def test_damaged_entry_is_made_again(own_cache: Path, victim: str, damage: str) -> None:
    cached_arrays("key", lambda: {"x": np.arange(100)})
    (entry,) = own_cache.iterdir()
    file = entry / victim
    if damage == "shorten":
        file.write_bytes(file.read_bytes()[:20])
    else:
        file.unlink()
    np.testing.assert_array_equal(cached_arrays("key", lambda: {"x": np.arange(50)})["x"], np.arange(50))
    assert [path.name for path in own_cache.iterdir()] == [entry.name]


RACER = """
import sys, time
from pathlib import Path
import numpy as np
from fedshift.data.cache import cached_arrays

own, other = Path(sys.argv[1]), Path(sys.argv[2])

def make():
    # Both processes are past looking for the entry before either can have stored it.
    own.touch()
    while not other.exists():
        time.sleep(0.005)
    return {"x": np.full(200_000, int(sys.argv[3]))}

x = cached_arrays("race", make)["x"]
print(int(x.min()), int(x.max()), len(x))
"""


def test_two_processes_making_one_entry_end_with_the_same_whole_arrays(own_cache: Path, tmp_path: Path) -> None:
    flags = [tmp_path / "one", tmp_path / "two"]
    racers = [
        subprocess.Popen(
            [sys.executable, "-c", RACER, str(flags[i]), str(flags[1 - i]), str(i)],
            stdout=subprocess.PIPE,
            text=True,
        )
        for i in (0, 1)
    ]
    outputs = [racer.communicate(timeout=60)[0].split() for racer in racers]
    assert [racer.returncode for racer in racers] == [0, 0]
    assert outputs[0] == outputs[1]
    assert outputs[0] in (["0", "0", "200000"], ["1", "1", "200000"])
    assert len(list(own_cache.iterdir())) == 1


def test_an_entry_that_appears_after_the_first_look_is_kept(own_cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    clean = cache._remove_abandoned

    def meanwhile(root: Path) -> None:
        monkeypatch.setattr(cache, "_remove_abandoned", clean)
        cached_arrays("key", lambda: {"x": np.array([1])})  # Another process stores it just now.

    monkeypatch.setattr(cache, "_remove_abandoned", meanwhile)
    assert cached_arrays("key", lambda: {"x": np.array([2])})["x"][0] == 1
    assert len(list(own_cache.iterdir())) == 1


def test_an_entry_taken_away_at_once_is_made_again(own_cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    publish = cache._publish

    def taken(made: Path, final: Path) -> None:
        monkeypatch.setattr(cache, "_publish", publish)
        publish(made, final)
        cache._discard(final, final.parent)

    monkeypatch.setattr(cache, "_publish", taken)
    assert cached_arrays("key", lambda: {"x": np.array([3])})["x"][0] == 3


def test_leftovers_of_a_killed_process_go_after_a_day(own_cache: Path) -> None:
    old, fresh = own_cache / "making-old", own_cache / "making-fresh"
    for folder in (old, fresh):
        folder.mkdir(parents=True)
        (folder / "x.npy").touch()
    two_days_ago = time.time() - 2 * 24 * 3600
    for path in (old / "x.npy", old):
        os.utime(path, (two_days_ago, two_days_ago))
    cached_arrays("key", lambda: {"x": np.array([1])})
    assert not old.exists()
    assert fresh.exists()


def test_unwritable_cache_is_an_error_that_names_the_setting(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("FEDSHIFT_CACHE", str(tmp_path / "file"))
    with pytest.raises(InputError, match="FEDSHIFT_CACHE") as error:
        cached_arrays("key", lambda: {"x": np.array([1])})
    assert error.value.code == "disk"


def test_root_is_the_environments_or_the_users(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FEDSHIFT_CACHE", "/elsewhere")
    assert cache_root() == Path("/elsewhere")
    monkeypatch.delenv("FEDSHIFT_CACHE")
    assert cache_root() == Path.home() / ".cache" / "fedshift"


def test_too_many_open_files_is_reported_as_that() -> None:
    import resource

    cached_arrays("few handles", lambda: {"x": np.arange(3)})
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    opened: list[int] = []
    resource.setrlimit(resource.RLIMIT_NOFILE, (64, hard))
    try:
        with pytest.raises(OSError, match="Too many open files"):
            while True:
                opened.append(os.open(__file__, os.O_RDONLY))
        with pytest.raises(InputError, match=r"more than 64 files open .*ulimit -n") as caught:
            cached_arrays("few handles", lambda: {"x": np.arange(3)})
    finally:
        for number in opened:
            os.close(number)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert caught.value.code == "open-files"
